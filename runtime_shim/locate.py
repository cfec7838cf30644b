"""Where the real runtime is, and how to become it; for the paths on which every millisecond counts.

Only os and sys are imported at the top. The launcher (launcher/lookup.h) follows the same rules, and a test
runs both on the same trees.
"""

from __future__ import annotations

import os
import stat
import sys

from runtime_shim.errors import RuntimeFailed, SettingsError, reason

TYPE_CHECKING = False  # not typing's, whose import takes longer than all of this module
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = [
    "LAUNCHER_VARIABLE",
    "RUNC_ROOTS",
    "SYSTEM_DIRECTORIES",
    "become",
    "environment",
    "find",
    "setting",
    "take_launcher",
]

LAUNCHER_VARIABLE = "GPUSNAP_LAUNCHER"
"""Set by the launcher for us alone: the path of the launcher's file."""

SETTINGS_FILE = "/etc/gpusnap/gpusnap.toml"
"""The same file as settings.SETTINGS_FILE, which imports more than a pass-through may cost."""

SYSTEM_DIRECTORIES = (
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/sbin",
    "/bin",
    "/usr/libexec",
    "/usr/lib/cri-o-runc/sbin",
    "/run/current-system/sw/bin",
)
"""Searched after PATH, of which Podman and containerd may give little: Podman's own places for crun and runc
(containers-common, pkg/config/default.go) and libexec."""

RUNC_ROOTS = ("/run/containerd/runc", "/run/crio-gpusnap")
"""Values of --root, or directories above it, with which runc is looked for before crun, because crun restores
less under CRI: of containerd's shim, which adds its namespace (containerd, RuncRoot of
cmd/containerd-shim-runc-v2), and of CRI-O with the handler that `gpusnap install` writes."""

# Each with the file by which it knows a container: --root, then the container's ID, then this.
# (crun src/libcrun/status.c, get_state_directory_status_file; runc libcontainer/factory_linux.go.)
_STATES = {"crun": "status", "runc": "state.json"}
_own_files = [os.path.abspath(sys.argv[0])] if sys.argv and sys.argv[0] else []


def take_launcher() -> None:
    """Remember the launcher that started us, and take its name out of our environment."""
    launcher = os.environ.pop(LAUNCHER_VARIABLE, "")
    if launcher:
        _own_files.append(launcher)


def setting(path: str | None = None) -> str:
    """The setting `runtime`, "" without one. Of the other settings a pass-through needs none, right or wrong.

    Read from SETTINGS_FILE unless another is given. Raises SettingsError.
    """
    path = path or SETTINGS_FILE
    try:
        with open(path, "rb") as file:
            import tomllib

            document = tomllib.load(file)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise SettingsError(f"the settings file {path} is not TOML: {error}") from error
    value = document.get("runtime", "")
    if not isinstance(value, str) or "\0" in value or ("/" in value and not value.startswith("/")):
        raise SettingsError(f"runtime in {path} is {value!r}; it must be a runtime's name or absolute path")
    return value


def find(name_or_path: str | None = None, *, root: str = "", words: Sequence[str] = ()) -> str:
    """The path of the real runtime, as given or by name on PATH and in SYSTEM_DIRECTORIES; never ourselves.

    `root` is the value of --root, "" without it; `words` are the command and what follows it, among which is
    the container's ID. A container stays with the one of crun and runc that created it, whatever is given,
    since neither reads the other's state. Without a name the first of `_preferred`. Relative directories on
    PATH are passed over: this runs as root. Raises SettingsError where the one that was asked for is not
    there, RuntimeFailed where there is none at all.
    """
    names = _preferred(root, words)
    created = _creator(root, words, names)
    if created and name_or_path:
        # Another runtime, such as a wrapper of one of the two, knows its own.
        if os.path.basename(name_or_path) in _STATES and os.path.basename(name_or_path) != created:
            name_or_path = _search(created) or name_or_path
    elif created:
        names = (created, *(each for each in names if each != created))
    if name_or_path and name_or_path.startswith("/"):
        return _checked(name_or_path)
    for name in (name_or_path,) if name_or_path else names:
        if path := _search(name):
            return path
    searched = "on PATH and in " + ", ".join(SYSTEM_DIRECTORIES)
    if name_or_path:
        raise SettingsError(
            f"the real runtime {name_or_path} is neither {searched}",
            hint=f"install it, or set runtime in {SETTINGS_FILE}",
        )
    raise RuntimeFailed(
        f"there is no real runtime: neither crun nor runc is {searched}",
        hint=f"install one of them, or set runtime in {SETTINGS_FILE}",
        exit_code=127,
    )


def _preferred(root: str, words: Sequence[str]) -> tuple[str, ...]:
    """The names of crun and runc, in the order in which they are looked for without the setting `runtime`.

    runc is first below RUNC_ROOTS, and for `features` without a root, which only containerd, CRI-O and Docker
    ask.
    """
    runc = any(root == each or root.startswith(f"{each}/") for each in RUNC_ROOTS)
    return ("runc", "crun") if runc or (not root and words[:1] == ["features"]) else ("crun", "runc")


def _creator(root: str, words: Sequence[str], names: Sequence[str]) -> str:
    """Which of `names` has created a container whose ID is among the words; "" where none has."""
    for word in words if root else ():
        if word in ("", ".", "..") or word.startswith("-") or "/" in word:
            continue
        for name in names:
            if os.path.exists(f"{root}/{word}/{_STATES[name]}"):
                return name
    return ""


def _search(name: str) -> str:
    """The path of a runtime by its name; "" where it is nowhere."""
    on_path = (place for place in os.environ.get("PATH", "").split(":") if place.startswith("/"))
    paths = (f"{place}/{name}" for place in (*on_path, *SYSTEM_DIRECTORIES))
    return next((path for path in paths if _is_program(path) and not _is_own(path)), "")


def _checked(path: str) -> str:
    if not _is_program(path):
        raise SettingsError(
            f"the real runtime {path} is not a program that can be run",
            hint=f"install it, or set runtime in {SETTINGS_FILE}",
        )
    if _is_own(path):
        raise SettingsError(
            f"the real runtime {path} is gpusnap-runtime itself",
            hint=f"set runtime in {SETTINGS_FILE} to crun or runc",
        )
    return path


def _is_program(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK)
    except (OSError, ValueError):
        return False


def _is_own(path: str) -> bool:
    """Whether it is our file or a copy: two copies, each taking the other for the real one, would never
    end."""
    found = os.stat(path)
    for own in _own_files:
        try:
            ours = os.stat(own)
        except OSError:
            continue
        if os.path.samestat(found, ours) or (
            found.st_size == ours.st_size and _content(path) == _content(own)
        ):
            return True
    return False


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def environment() -> dict[str, str]:
    """The environment as our caller gave it, for the real runtime.

    Not os.environ: in the C locale Python adds LC_CTYPE to it (PEP 538), which would reach OCI hooks.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [entry.partition("=") for entry in os.fsdecode(file.read()).split("\0")]
    except OSError:
        return dict(os.environ)
    return {name: value for name, equals, value in pairs if equals and name != LAUNCHER_VARIABLE}


def become(path: str, args: list[str]) -> NoReturn:
    """Become the real runtime. Raises RuntimeFailed where it cannot be started."""
    # The C module under `signal`, whose enums take a millisecond. Python ignores these two from its start on;
    # the real runtime and everything below it would inherit that.
    import _signal  # type: ignore[import-not-found]

    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execve(path, [path, *args], environment())
    except OSError as error:
        raise RuntimeFailed(
            f"the real runtime {path} cannot be started: {reason(error)}",
            hint=f"set runtime in {SETTINGS_FILE} to one that runs here",
            exit_code=127,
        ) from error
