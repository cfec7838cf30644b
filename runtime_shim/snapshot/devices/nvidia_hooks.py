"""Runs NVIDIA's createContainer hooks again after a restore onto other driver libraries.

Neither crun nor runc runs createContainer hooks when it restores. Two of NVIDIA's depend on the libraries:
`create-symlinks` makes links beside them and `update-ldcache` runs ldconfig for them. The hooks find the
container's root by its bundle (config.json, root.path), and expect its mounts below that path, as they are
before the runtime enters the root (nvidia-container-toolkit, internal/oci/state.go). On the host nothing is
mounted there, and ldconfig would find empty files instead of the libraries. So a thread of gpusnap copies the
container's mounts, and shows them at the root's path in a mount namespace that only the hooks see.

The configuration may come with an archive from elsewhere. It only determines which of the two hooks is wanted
and with which paths inside the container. The program is this host's, and other arguments are not passed on.
No hook fails a restore: errors are notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process.mount_namespace import show_mounts
from gpusnap.runtime_shim.runtime.child_process import Child
from gpusnap.runtime_shim.runtime.container import Container

_HOOKS = ("update-ldcache", "create-symlinks")
"""The hooks that may run again; they only write into the container's root."""

_PLACES = (
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/usr/local/nvidia/toolkit",
    "/opt/nvidia/toolkit",
    "/run/current-system/sw/bin",
)
"""Where NVIDIA's packages, its GPU operator and NixOS install the programs."""
_OWNERS = (0,)
"""The users who may own the programs: root."""

# A program of NVIDIA with the words before the hook's name.
_PROGRAMS = {"nvidia-cdi-hook": (), "nvidia-ctk": ("hook",)}
_TIMEOUT, _LONGEST = 10, 60
_SAID = 400
_MANY = 1024
# Options for the verbosity of the program; others might tell it what to load or to run.
_ENVIRONMENT = compile_later(r"NVIDIA_(?:CTK_DEBUG|CDI_DEBUG|CDI_QUIET)=(?:true|false|[01])")
# No blank, and nothing with a special meaning in ld.so.conf(5).
_PATH = compile_later(r"[\w./+:@,-]{1,1024}", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Hook:
    name: str
    program: str
    """The program's name in the configuration: nvidia-cdi-hook or nvidia-ctk."""
    words: tuple[str, ...]
    environment: dict[str, str]
    timeout: float


class _Unfit(Exception):
    """A hook that is not run again; the message says why."""


def rerun(config: dict[str, Any], container: Container, allowed: Sequence[str] = _HOOKS) -> None:
    """Run those of the createContainer hooks of `config` again whose names are in `allowed` and in _HOOKS.

    `container` has been restored. Raises nothing: log.note reports errors.
    """
    wanted = [*_hooks(config, allowed)]
    if not wanted:
        return
    # In a thread of its own, because `show_mounts` changes the namespace of the thread.
    thread = threading.Thread(target=_run_all, args=(config, container, wanted), name="hooks")
    thread.start()
    thread.join()


def _run_all(config: dict[str, Any], container: Container, hooks: Sequence[_Hook]) -> None:
    try:
        show_mounts(container.pid, _root(config, container.bundle))
    except (OSError, _Unfit) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        note(
            "NVIDIA's hooks were not run again, because the container's root cannot be passed to them: "
            f"{said}",
            code="GPS-410",
        )
        return
    for hook in hooks:
        try:
            _run(hook, container, _find(hook.program))
        except _Unfit as error:
            note(f"NVIDIA's hook {hook.name} was not run again: {error}", code="GPS-410")


def _root(config: dict[str, Any], bundle: str) -> str:
    root = config.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise _Unfit("config.json has no root")
    path = os.path.realpath(os.path.join(bundle, path))
    if path == "/" or not os.path.isdir(path):
        raise _Unfit(f"{path} is not a container's root")
    return path


def _hooks(config: dict[str, Any], allowed: Sequence[str]) -> Iterator[_Hook]:
    """Yield the hooks to run, in order; a wanted one with unsupported options is a note."""
    stages = config.get("hooks")
    entries = stages.get("createContainer") if isinstance(stages, dict) else None
    for entry in (entries if isinstance(entries, list) else [])[:_MANY]:
        try:
            hook = _hook(entry, allowed)
            if hook is not None:
                yield hook
        except _Unfit as error:
            note(f"a hook of the container was not run again: {error}", code="GPS-410")


def _hook(entry: Any, allowed: Sequence[str]) -> _Hook | None:
    """Parse a hook of the configuration; None for one that is not wanted again."""
    path = entry.get("path") if isinstance(entry, dict) else None
    words = entry.get("args") if isinstance(entry, dict) else None
    if not isinstance(path, str) or not isinstance(words, list):
        return None
    program = os.path.basename(path)
    if program not in _PROGRAMS or not all(isinstance(word, str) for word in words):
        return None
    rest = list(words[1:])
    while rest and rest[0] in (*_PROGRAMS, "hook"):  # a specification may repeat the program's name
        rest.pop(0)
    if not rest or rest[0] not in allowed or rest[0] not in _HOOKS:
        return None
    return _Hook(
        rest[0],
        program,
        tuple(_check_options(rest[0], rest[1:])),
        _environment(entry.get("env")),
        _seconds(entry.get("timeout")),
    )


def _check_options(name: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the options of a hook, as in its manual. Raises _Unfit for any other word."""
    option = "--link" if name == "create-symlinks" else "--folder"
    left = list(words)
    if len(left) > _MANY:
        raise _Unfit(f"{name} has {len(left)} words")
    while left:
        word, equals, value = left.pop(0).partition("=")
        if word != option or not (equals or left):
            raise _Unfit(f"{name} has {word[:80]!r}, but only {option} is known")
        value = value if equals else left.pop(0)
        target, colons, path = value.partition("::") if option == "--link" else ("x", "::", value)
        if not colons or "::" in path or not _is_inside(path) or not _PATH.fullmatch(target):
            raise _Unfit(f"{name} has {option} {value[:80]!r}, which is not a path in the container")
        yield from (option, value)


def _is_inside(path: str) -> bool:
    """Whether it is an absolute path without "..", which the target of a link may contain."""
    return path.startswith("/") and _PATH.fullmatch(path) is not None and ".." not in path.split("/")


def _environment(entries: Any) -> dict[str, str]:
    given = [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
    known = (entry.partition("=") for entry in given if _ENVIRONMENT.fullmatch(entry))
    return {name: value for name, _, value in known}


def _seconds(timeout: Any) -> float:
    """Return the hook's own timeout, within limits, because it comes with the archive too."""
    if isinstance(timeout, int) and not isinstance(timeout, bool) and timeout > 0:
        return float(min(timeout, _LONGEST))
    return _TIMEOUT


def _find(program: str) -> tuple[str, tuple[str, ...]]:
    """Return NVIDIA's program on this host with the words before the hook's name; or the other program."""
    distrusted = ""
    for name in sorted(_PROGRAMS, key=lambda each: each != program):
        for place in _PLACES:
            path = os.path.realpath(os.path.join(place, name))
            if os.path.basename(path) in _PROGRAMS and _is_trusted(path):
                return path, _PROGRAMS[os.path.basename(path)]
            if os.path.exists(path):
                distrusted = path
    if distrusted:
        raise _Unfit(f"{distrusted} can be modified by users other than root")
    raise _Unfit(f"this host has no {program} in {', '.join(_PLACES)}")


def _is_trusted(path: str) -> bool:
    """Whether only its trusted owners can change a program, or replace it by another.

    `path` has no symbolic links. In a directory with the sticky bit, others cannot move files that are not
    theirs.
    """
    try:
        if not os.access(path, os.X_OK) or not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        while True:
            found = os.lstat(path)
            sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            writers = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid else 0)
            if found.st_uid not in _OWNERS or (found.st_mode & writers and not sticky):
                return False
            if path == "/":
                return True
            path = os.path.dirname(path)
    except OSError:
        return False


def _run(hook: _Hook, container: Container, found: tuple[str, tuple[str, ...]]) -> None:
    """Run a hook to its end. Raises _Unfit if it cannot be started; a failure is a note."""
    path, before = found
    state = {
        "ociVersion": "1.0.2",
        "id": container.id,
        "status": "created",
        "pid": container.pid,
        "bundle": container.bundle,
        "annotations": container.annotations,
    }
    try:
        process = Child(
            [os.path.basename(path), *before, hook.name, *hook.words],
            executable=path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=container.bundle,
            env=hook.environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise _Unfit(f"{path} cannot be started: {reason(error)}") from error
    with process:
        try:
            out, _ = process.communicate(json.dumps(state).encode(), timeout=hook.timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            note(
                f"NVIDIA's hook {hook.name} did not end within {hook.timeout:g} s and was killed",
                code="GPS-410",
            )
            return
    said = " ".join(out.decode("utf-8", "backslashreplace").split())[:_SAID]
    if process.returncode:
        note(
            f"NVIDIA's hook {hook.name} failed with exit code {process.returncode}: {said or 'no message'}",
            code="GPS-410",
        )
    elif said:
        note(f"NVIDIA's hook {hook.name} printed: {said}")


def _kill(process: Child) -> None:
    """Kill a hook and what it started, which is in a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.end()
