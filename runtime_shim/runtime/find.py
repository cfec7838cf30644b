"""Finds the real runtime, and becomes it; for the paths on which every millisecond counts.

Only os, stat and sys are imported at the top. The launcher (settings.h, choice.h and lookup.h in launcher/)
follows the same rules, and a test runs both on the same trees.

A command goes to the runtime that made its container, unless the settings name another program than crun and
runc; else to the settings' one; else to the first one of `list_preferred`. If one cannot be started, the next
is tried. An error in the settings never keeps a command from a real runtime: `start` reports the error, and
continues.
"""

from __future__ import annotations

import os
import stat
import sys

from gpusnap.runtime_shim.base.errors import NotStarted, RuntimeFailed, SettingsError, raise_as, reason

TYPE_CHECKING = False  # not from typing, whose import takes longer than all of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn, TypeVar

    Started = TypeVar("Started")

LAUNCHER_VARIABLE = "GPUSNAP_LAUNCHER"
"""Set by the launcher for this process only: the path of the launcher's file."""

SETTINGS_FILE = "/etc/gpusnap/gpusnap.toml"
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
"""Searched after PATH, which may be short under Podman and containerd: Podman's own places for crun and runc
(containers-common, pkg/config/default.go) and libexec."""

NAMES = ("crun", "runc")
"""The real runtimes, the preferred one first, except under CRI; see `list_preferred`."""

RUNC_ROOTS = ("/run/containerd/runc", "/run/crio-gpusnap")
"""Values of --root, or directories above it, with which runc is tried before crun, because crun restores less
under CRI: that of containerd's shim, which adds its namespace (containerd, RuncRoot of
cmd/containerd-shim-runc-v2), and that of CRI-O with the handler that `gpusnap install` writes."""

STATE_FILES = ("status", "state.json")
"""The state file of each of them in a container's directory, in their order: crun, src/libcrun/status.c;
runc, libcontainer/factory_linux.go."""

BEGINNINGS = ("create", "run")
"""The commands that create a container, which has no runtime yet."""

SETTINGS_SIZE = 65536
"""How much of the settings file a pass-through reads."""

RUN = "/run"
SYSTEM_LOG = "/dev/log"

_HINT = "correct it, then check it with gpusnap settings"
_PATH_MAX = 4096  # linux/limits.h, with the final NUL
_own_files = [os.path.abspath(sys.argv[0])] if sys.argv and sys.argv[0] else []
_launchers: list[str] = []


def take_launcher() -> None:
    """Remember the launcher that started this process, and remove its name from the environment."""
    path = os.environ.pop(LAUNCHER_VARIABLE, "")
    if path:
        _own_files.append(path)
        _launchers.append(path)


def launcher() -> str:
    """Return the path of the launcher that started this process; "" without one."""
    return _launchers[-1] if _launchers else ""


def setting(path: str | None = None) -> str:
    """Return the setting `runtime`, "" if not set. A pass-through needs no other setting, right or wrong.

    Read from SETTINGS_FILE unless another is given. Raises SettingsError.
    """
    path = path or SETTINGS_FILE
    data = content(path, SETTINGS_SIZE)
    return "" if data is None else parse_setting(data, path)


def content(path: str, most: int) -> bytes | None:
    """Return the first bytes of the settings file; None if there is none. Raises SettingsError."""
    try:
        # If it is a FIFO, do not wait until somebody opens the other end.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SettingsError(f"the settings file {path} is not a regular file", hint=_HINT)
            return file.read(most)
    except FileNotFoundError:
        return None
    except OSError as error:
        said = f"the settings file {path} cannot be read: {reason(error)}"
        raise SettingsError(said, hint=_HINT) from error


def parse_setting(data: bytes, path: str) -> str:
    """Return the setting `runtime` from a settings file's bytes, as the launcher reads it; "" if not set.

    It is the value of the first line `runtime = NAME` before the first [table], quoted or not, so that no
    mistake elsewhere in the file can keep a command from the real runtime. Raises SettingsError.
    """
    for whole in data[:SETTINGS_SIZE].partition(b"\0")[0].split(b"\n"):
        line = whole.lstrip(b" \t")
        if line.startswith(b"["):
            break
        value = _parse_value(line)
        if value is not None:
            return _check_name(value, path)
    return ""


def _parse_value(line: bytes) -> bytes | None:
    """Return the value of a line `runtime = VALUE`; None for another line."""
    quote = line[:1] if line[:1] in (b'"', b"'") else b""
    word = quote + b"runtime" + quote
    if not line.startswith(word):
        return None
    rest = line[len(word) :].lstrip(b" \t")
    if not rest.startswith(b"="):
        return None
    value = rest[1:].lstrip(b" \t")
    quote = value[:1] if value[:1] in (b'"', b"'") else b""
    if quote:
        return value.lstrip(quote).partition(quote)[0]
    for end in (b" ", b"\t", b"#", b"\r"):
        value = value.partition(end)[0]
    return value


def _check_name(value: bytes, path: str) -> str:
    bad = any(byte < 0x20 or byte in b"\\\x7f" for byte in value) or len(value) >= _PATH_MAX
    if bad or (b"/" in value and not value.startswith(b"/")):
        raise SettingsError(
            f"runtime in {path} is {os.fsdecode(value)[:80]!r}; it must be a runtime's name or absolute path",
            hint=_HINT,
        )
    return os.fsdecode(value)


def find_creator(words: Sequence[str], root: str | None = None) -> str:
    """Return the name of the runtime that made the container with an ID among the words; "" if not known.

    `root`: the value of --root. crun and runc do not know each other's containers. So, whatever the settings
    say now, a container's own runtime must stop and remove it.
    """
    for word in words:
        if word in ("", ".", "..") or word.startswith("-") or "/" in word:
            continue
        states = zip(NAMES, STATE_FILES, strict=True)
        known = [name for name, file in states if _knows_container(name, file, word, root)]
        if known:
            return known[0] if len(known) == 1 else ""
    return ""


def _knows_container(name: str, file: str, word: str, root: str | None) -> bool:
    """Whether a runtime knows the container, in --root or in its default root."""
    if root is None:
        private = os.environ.get("XDG_RUNTIME_DIR", "")
        roots = [f"{RUN}/{name}", *([f"{private}/{name}"] if private.startswith("/") else [])]
    else:
        roots = [root]
    for each in roots:
        try:
            if stat.S_ISREG(os.stat(f"{each}/{word}/{file}").st_mode):
                return True
        except (OSError, ValueError):
            continue
    return False


def list_preferred(root: str | None = None, command: str = "") -> tuple[str, ...]:
    """Return the names of crun and runc, in the order in which they are tried if nothing else decides.

    runc is first with a --root below RUNC_ROOTS, and for `features` without one, which only containerd, CRI-O
    and Docker ask.
    """
    if root is None:
        runc = command == "features"
    else:
        runc = any(root == each or root.startswith(f"{each}/") for each in RUNC_ROOTS)
    return NAMES[::-1] if runc else NAMES


def find_all(named: str, made_by: str, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the paths of the real runtimes to try, in order, and whether each replaces the `named` one.

    `named`: the setting `runtime`. `made_by`: the container's runtime, from `find_creator`. `names`: from
    `list_preferred`. If the named one is neither crun nor runc, such as a wrapper, it comes first: it may
    have made the container with one of them.
    """
    kind = os.path.basename(named)
    stays = not named or (kind in NAMES and kind != made_by)
    instead = False
    for name in dict.fromkeys((made_by if stays else named, named, made_by, *names)):
        if name:
            yield from ((path, instead) for path in _paths(name))
        instead = instead or (name == named != "")


def _paths(name_or_path: str) -> Iterator[str]:
    if name_or_path.startswith("/"):
        places = [name_or_path]
    else:
        on_path = (place for place in os.environ.get("PATH", "").split(":") if place.startswith("/"))
        places = [f"{place}/{name_or_path}" for place in (*on_path, *SYSTEM_DIRECTORIES)]
    return (path for path in places if _is_usable(path))


def start(args: list[str], at: int, root: str | None, by: Callable[[str, list[str]], Started]) -> Started:
    """Start the real runtime for a line whose command is at `at`, whatever is wrong with gpusnap.

    `by`: `become`, or another function that starts the program at a path; if it raises NotStarted, the next
    one is tried. Returns what it returns. Raises RuntimeFailed if there is none, NotStarted if none starts.
    """
    named = made_by = wrong = ""
    command, words = "".join(args[at : at + 1]), args[at + 1 :]
    try:
        made_by = "" if command in BEGINNINGS else find_creator(words, root)
        named = setting()
    except SettingsError as error:
        wrong = str(error)
    except Exception as error:  # of any kind: the container must not suffer from it
        wrong = f"{type(error).__name__}: {error}"
    failed: NotStarted | None = None
    warned = False
    for path, instead in find_all(named, made_by, list_preferred(root, command)):
        if instead:
            wrong = f"the real runtime that {SETTINGS_FILE} names ({named}) cannot be started"
        if wrong and not warned:
            _warn(f"{wrong}; {path} runs in its place: see gpusnap settings", command)
            warned = True
        try:
            return by(path, args)
        except NotStarted as error:
            failed = failed or error
    raise failed or make_missing_error()


def _warn(text: str, command: str) -> None:
    """Print it on stderr if that is a terminal, else in the system log, like the launcher; see tell.h."""
    line = "gpusnap-runtime: " + " ".join(text.split())
    try:
        if os.isatty(2):
            os.write(2, os.fsencode(line + "\n"))
        elif command in BEGINNINGS:
            import socket

            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                log.sendto(b"<28>" + os.fsencode(line), flags, SYSTEM_LOG)  # LOG_DAEMON | LOG_WARNING
    except OSError:
        return  # nobody reads it


def find(name_or_path: str | None = None, *, root: str | None = None) -> str:
    """Return the path of the real runtime, as given or on PATH and in SYSTEM_DIRECTORIES; never gpusnap.

    Without a name, the first of `list_preferred` with that --root. Relative directories on PATH are skipped,
    because this runs as root. Raises SettingsError if the requested one does not exist, RuntimeFailed if
    there is none at all.
    """
    if name_or_path and name_or_path.startswith("/"):
        return _check_program(name_or_path)
    names = (name_or_path,) if name_or_path else list_preferred(root)
    for name in names:
        for path in _paths(name):
            return path
    if name_or_path:
        raise SettingsError(
            f"the real runtime {name_or_path} is neither in PATH nor in {_describe_searched()}",
            hint=f"install it, or set runtime in {SETTINGS_FILE}",
            code="GPS-114",
        )
    raise make_missing_error()


def _describe_searched() -> str:
    return ", ".join(SYSTEM_DIRECTORIES)


def make_missing_error() -> RuntimeFailed:
    """The error if neither crun nor runc exists."""
    return RuntimeFailed(
        f"there is no real runtime: neither crun nor runc is in PATH or in {_describe_searched()}",
        hint=f"install one of them, or set runtime in {SETTINGS_FILE}",
        exit_code=127,
        code="GPS-114",
    )


def _check_program(path: str) -> str:
    if not _is_program(path):
        raise SettingsError(
            f"the real runtime {path} is not an executable program",
            hint=f"install it, or set runtime in {SETTINGS_FILE}",
            code="GPS-114",
        )
    with raise_as(SettingsError, f"the real runtime {path} cannot be read", hint="try again", code="GPS-114"):
        own = _is_own(path)
    if own:
        raise SettingsError(
            f"the real runtime {path} is gpusnap-runtime itself",
            hint=f"set runtime in {SETTINGS_FILE} to crun or runc",
            code="GPS-114",
        )
    return path


def _is_usable(path: str) -> bool:
    """Whether it is a program other than gpusnap; one that cannot be read cannot be run either."""
    try:
        return _is_program(path) and not _is_own(path)
    except OSError:
        return False


def _is_program(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK)
    except (OSError, ValueError):
        return False


def _is_own(path: str) -> bool:
    """Whether it is gpusnap's file or a copy: two copies would call each other forever.

    Raises OSError.
    """
    found = os.stat(path)
    for own in _own_files:
        try:
            ours = os.stat(own)
        except OSError:
            continue
        if os.path.samestat(found, ours) or (found.st_size == ours.st_size and _bytes(path) == _bytes(own)):
            return True
    return False


def _bytes(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def environment() -> dict[str, str]:
    """Return the environment as given by the caller, for the real runtime.

    Not os.environ: in the C locale Python adds LC_CTYPE to it (PEP 538), which would reach OCI hooks.
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = [entry.partition("=") for entry in os.fsdecode(file.read()).split("\0")]
    except OSError:
        return dict(os.environ)
    return {name: value for name, equals, value in pairs if equals and name != LAUNCHER_VARIABLE}


def become(path: str, args: list[str]) -> NoReturn:
    """Become the real runtime. Raises NotStarted."""
    # The C module of `signal`, whose enums take a millisecond. Python ignores these two signals from its
    # start on; the real runtime and everything below it would inherit that.
    import _signal  # type: ignore[import-not-found]

    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    with raise_as(
        NotStarted,
        f"the real runtime {path} cannot be started",
        hint=f"set runtime in {SETTINGS_FILE} to one that runs here",
        code="GPS-114",
    ):
        os.execve(path, [path, *args], environment())
