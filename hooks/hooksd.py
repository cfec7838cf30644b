"""The files with which Podman runs the hooks: oci-hooks(5), version 1.0.0, one for each stage.

A file belongs to gpusnap if it is, byte for byte, what `files` makes of the program and the choices in it. If
somebody changed it, it belongs to them. Each file is written in one step.

hooks.d has no condition for "has a GPU": Podman sets no annotation for --device, and `hasBindMounts` counts
the volumes of the user, not CDI's mounts (libpod, setupOCIHooks). So the hooks run for every container and
check it themselves, or, with `annotated`, only for one with an annotation io.gpusnap or io.gpusnap.*.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from typing import Any

from gpusnap.hooks.documents import HookError, parse, read_file
from gpusnap.hooks.main import STAGES
from gpusnap.oci.base.files import replace_below
from gpusnap.runtime_shim.base.errors import advise, reason

PROGRAM = "gpusnap-hook"
SHARED_DIRECTORIES = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
"""Also read by CRI-O, Buildah and `podman build`, which reject a file with the stage precreate
(containers/common, pkg/hooks: its caller says which stages beyond OCI's it supports; Buildah supports
none)."""

TIMEOUT = 10
"""Seconds; the hooks give up by themselves after main.SECONDS."""
ANNOTATION = r"^io\.gpusnap(\.|$)"

_NAMES = {
    "precreate": "gpusnap-precreate.json",
    "createRuntime": "gpusnap-create-runtime.json",
    "poststop": "gpusnap-poststop.json",
}
_LIMIT = 1 << 16

Change = tuple[str, str]
"""(action, path): written, replaced, unchanged, removed."""


def files(
    program: str, *, stages: Iterable[str] = STAGES, annotated: bool = False, criu_config: str = ""
) -> dict[str, bytes]:
    """Return the files by name. `program` and `criu_config` are absolute paths."""
    when: dict[str, Any] = {"annotations": {ANNOTATION: ".*"}} if annotated else {"always": True}
    made = {}
    for stage in STAGES:
        if stage not in stages:
            continue
        args = [PROGRAM, stage]
        if stage == "precreate" and criu_config:
            args += ["--criu-config", criu_config]
        hook = {"path": program, "args": args, "timeout": TIMEOUT}
        document = {"version": "1.0.0", "hook": hook, "when": when, "stages": [stage]}
        made[_NAMES[stage]] = json.dumps(document, indent=1).encode() + b"\n"
    return made


def find_program() -> str:
    """Return the absolute path of the installed gpusnap-hook. Raises HookError if there is none."""
    beside = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else ""
    places = [place for place in (beside, sysconfig.get_path("scripts")) if place]
    for place in places:
        path = os.path.join(place, PROGRAM)
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK):
                return path
    raise HookError(
        f"the program {PROGRAM} is not in {' or '.join(dict.fromkeys(places))}",
        hint="install gpusnap with pip, pipx or your distribution's package, which bring it",
        code="GPS-002",
    )


def install(directory: str, made: Mapping[str, bytes], *, force: bool = False) -> list[Change]:
    """Write the files into `directory`, which is created if it is missing.

    Raises HookError, before anything is changed, if a file of that name does not belong to gpusnap and
    `force` is not given, and if the directory cannot be written.
    """
    plan = []
    for name, data in made.items():
        path = os.path.join(directory, name)
        before = _content(path)
        if before is not None and not force and not _is_ours(name, before):
            raise HookError(
                f"{path} already exists, and differs from what gpusnap would write",
                hint="inspect it, and give --force to replace it",
            )
        plan.append((path, before, data))
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)
        return [_put(path, before, data) for path, before, data in plan]
    except OSError as error:
        raise HookError(
            f"the hooks cannot be written into {directory}: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-005",
        ) from error


def remove(directory: str, *, dry_run: bool = False) -> tuple[list[Change], list[str]]:
    """Remove gpusnap's files; return what was done, and paths of other files with these names, which stay.

    `dry_run`: only return it. Raises HookError.
    """
    done, left = [], []
    for name in _NAMES.values():
        path = os.path.join(directory, name)
        content = _content(path)
        if content is None:
            continue
        if not _is_ours(name, content):
            left.append(path)
            continue
        try:
            if not dry_run:
                os.unlink(path)
        except OSError as error:
            raise HookError(
                f"{path} cannot be removed: {reason(error)}",
                hint=advise(error) or "run it as root",
                code="GPS-005",
            ) from error
        done.append(("removed", path))
    return done, left


def _content(path: str) -> bytes | None:
    """Return the content of a file; None if there is none, and "" if it cannot be read as a file."""
    if not os.path.lexists(path):
        return None
    try:
        return read_file(path, _LIMIT)
    except (FileNotFoundError, HookError):
        return b""


def _is_ours(name: str, data: bytes) -> bool:
    """Whether `files` makes this of the choices in it."""
    try:
        document = parse(data, "choices")
        hook, (stage,) = document["hook"], document["stages"]
        options = hook["args"][2:]
        again = files(
            hook["path"],
            stages=(stage,),
            annotated="annotations" in document["when"],
            criu_config=options[1] if options else "",
        )
    except (HookError, ValueError, KeyError, TypeError, IndexError):
        return False
    return again.get(name) == data and os.path.basename(hook["path"]) == PROGRAM


def _put(path: str, before: bytes | None, data: bytes) -> Change:
    if before == data:
        return "unchanged", path
    replace_below(*os.path.split(path), data, mode=0o644)
    return "written" if before is None else "replaced", path
