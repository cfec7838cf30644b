"""The console script gpusnap-runtime: determines who handles a command.

Podman, containerd and CRI-O run it for every command of a container's life. gpusnap handles checkpoint and
restore, and both answer --version. Everything else goes to the real runtime by exec, before anything heavy is
imported. The launcher (launcher/launcher.c) does the same in C, by the same rules. It starts this program for
checkpoint and restore, or if no real runtime can be started, so that this reports the reason.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C module under `signal`, whose enums take a millisecond
import os
import sys

from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import (
    ContainerError,
    GpusnapError,
    NotStarted,
    RuntimeFailed,
    make_unforeseen,
    raise_as,
    reason,
)
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.command_line_words import FALSE, HELP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# The same lists as in launcher/line.h and options.GLOBAL, whose import takes longer than a pass-through may
# take.
GLOBAL_VALUES = ("root", "log", "log-format", "log-level", "cgroup-manager", "rootless", "criu")
GLOBAL_FLAGS = ("debug", "systemd-cgroup")

VERSION_OPTIONS = ("version", "v", "V")
OUR_COMMANDS = ("checkpoint", "restore")
WATCHED_COMMANDS = ("delete", "kill", "pause", "resume")
"""Commands that mean something else for a suspended container, or in a restore: see shim/suspended.py."""
WATCH = "/run/gpusnap/suspended"
"""Exists while a container is suspended."""
JOURNAL = "/run/gpusnap/journal"
"""The same as in snapshot/records/journal.py."""
_ON_THE_WAY = (b'"stage": "suspending"', b'"stage": "undone"', b'"stage": "resumed"')
"""Stages in which gpusnap itself makes the engine do it; the first one only for a pause."""
_NOTED = {"delete": (".restore", ".thawed"), "kill": (), "pause": (), "resume": (".thawed",)}
"""The endings of files in the journal for which gpusnap must handle a command."""
# Words that may follow an unknown option, to distinguish its value from the command: all commands of crun and
# runc.
COMMANDS = (
    "checkpoint",
    "create",
    "delete",
    "events",
    "exec",
    "features",
    "h",
    "help",
    "init",
    "kill",
    "list",
    "mounts",
    "pause",
    "ps",
    "restore",
    "resume",
    "run",
    "spec",
    "start",
    "state",
    "update",
)

CHECK = ("checkpoint", "--gpusnap-check")
"""The question of `gpusnap doctor` whether all modules can be imported. No runtime has such an option."""

PASS, VERSION, OURS, WATCHED = "pass", "version", "ours", "watched"


def read(args: list[str]) -> tuple[str, int, dict[str, str]]:
    """Return PASS, VERSION, OURS or WATCHED for a command line; the index of its command; its global options.

    `args` is the line without the program's name; without a command, the index is len(args). Global options
    come first, by name, the last of each counts; one or two dashes; `--opt value` and `--opt=value`. The real
    runtime reports a line that ends too early.
    """
    version, at = False, 0
    values: dict[str, str] = {}
    while at < len(args):
        word = args[at]
        at += 1
        if word == "--" or word == "-" or not word.startswith("-"):
            at -= word != "--"
            break
        name, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
        off = bool(equals) and value in FALSE
        if name in HELP and not off:
            return PASS, len(args), values
        version = version or (name in VERSION_OPTIONS and not off)
        if not equals and _takes_next(name, args[at : at + 1]):
            equals, value = "=", "".join(args[at : at + 1])
            at += 1
        if equals:
            values[name] = value
    if version:
        return VERSION, min(at, len(args)), values
    if at >= len(args):
        return PASS, len(args), values
    whose = OURS if args[at] in OUR_COMMANDS else WATCHED if args[at] in WATCHED_COMMANDS else PASS
    return whose, at, values


def _takes_next(name: str, following: list[str]) -> bool:
    if name in GLOBAL_VALUES:
        return True
    if name in GLOBAL_FLAGS or name in VERSION_OPTIONS or name in HELP or not following:
        return False
    return not following[0].startswith("-") and following[0] not in COMMANDS


def _version(args: list[str], at: int, root: str | None) -> int:
    """Print the real runtime's version, whose lines Podman and containerd read, then gpusnap's."""
    real, pid = locate.start(args, at, root, _spawn)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -_signal.SIGPIPE:
        return 0  # as with `--version | head -1`: the reader has ended
    if code:
        return code if code > 0 else 128 - code
    try:
        os.write(1, f"gpusnap-runtime version {__version__}\n".encode())
    except BrokenPipeError:
        pass
    except OSError as error:
        raise RuntimeFailed(
            f"gpusnap's version cannot be printed after that of {real}: {reason(error)}"
        ) from error
    return 0


def _run_watched(args: list[str], at: int, root: str | None) -> int | None:
    """Return the exit code of a command that means something else for this container; None if it does not."""
    ended: list[int] = []

    def run() -> int:
        _, pid = locate.start(args, at, root, _spawn)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended.append(code if code >= 0 else 128 - code)
        return ended[0]

    try:
        from gpusnap.runtime_shim.shim.suspended import answer

        return answer(args[at], args[at + 1 :], root, run)
    except ContainerError:
        raise
    except Exception:
        if _would_run_half(args[at], args[at + 1 :]):
            raise
        # The next sweep frees what is kept of a suspended container.
        return ended[0] if ended else None


def _spawn(path: str, args: list[str]) -> tuple[str, int]:
    """Start a real runtime; return its path and its PID. Raises NotStarted."""
    with raise_as(NotStarted, f"the real runtime {path} cannot be started", code="GPS-114"):
        # Python ignores these two signals from its start on, see locate.become.
        heeded = (_signal.SIGPIPE, _signal.SIGXFSZ)
        return path, os.posix_spawn(path, [path, *args], locate.environment(), setsigdef=heeded)


def _answer(args: list[str]) -> int:
    if args == list(CHECK):
        from gpusnap.runtime_shim.shim.parts import report_modules

        return report_modules()
    whose, at, values = read(args)
    if whose == VERSION:
        return _version(args, at, values.get("root"))
    if whose == OURS:
        from gpusnap.runtime_shim.runtime.command_line import probe

        line = probe(args, at)
        if line is None:
            from gpusnap.runtime_shim.base import garbage

            garbage.look_seldom()
            from gpusnap.runtime_shim.shim.dispatch import main as checkpoint_or_restore

            _end(checkpoint_or_restore(args))
        args, at = line, len(line)
    if whose == WATCHED and _is_watched(args[at], args[at + 1 :]):
        code = _run_watched(args, at, values.get("root"))
        if code is not None:
            return code
    return locate.start(args, at, values.get("root"), locate.become)


def _is_watched(command: str, words: list[str]) -> bool:
    """Whether gpusnap must handle a command that pauses, resumes, kills or deletes a container.

    It need not if the container is not suspended, or if gpusnap itself makes the engine pause or resume it.
    There is a file for each suspended one (snapshot/records/suspensions.py); parsing it as JSON would take
    longer than the command. The journal has the others (snapshot/records/journal.py).
    """
    container = _find_container(words)
    try:
        if any(name.endswith(_NOTED[command]) for name in _list_files(JOURNAL, container)):
            return True
    except OSError:
        return True
    return _is_suspended(command, container)


def _would_run_half(command: str, words: list[str]) -> bool:
    """Whether the real runtime would let a suspended container run, without its GPU memory.

    It may not if gpusnap cannot handle the command: its record was written by another version, or a module
    is missing.
    """
    container = _find_container(words)
    return command == "resume" and _is_suspended(command, container)


def _find_container(words: list[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def _is_suspended(command: str, container: str) -> bool:
    """Whether a container is suspended, and gpusnap itself does not make the engine pause or resume it."""
    try:
        names = _list_files(WATCH, container)
    except OSError:
        return True
    passed = _ON_THE_WAY[command == "resume" :]
    for name in names:
        try:
            with open(os.path.join(WATCH, name), "rb") as file:
                content = file.read()
        except FileNotFoundError:
            continue  # gone since: there may be one of another root
        except OSError:
            return True
        if command in ("delete", "kill") or not any(stage in content for stage in passed):
            return True
    return False


def _list_files(folder: str, container: str) -> list[str]:
    """Return the names of files of a container. Raises OSError."""
    try:
        return [name for name in os.listdir(folder) if name.partition("@")[0] == container]
    except FileNotFoundError:
        return []


def _end(code: int) -> NoReturn:
    """End at once. If Python's own exit were killed after a success, the engine would see a failure."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # nobody reads it, or there is none
    os._exit(code)


def _log_options(args: list[str]) -> dict[str, str]:
    """Return --log and --log-format of a line that may be wrong otherwise, for log.report()."""
    values = read(args)[2]
    return {name.replace("-", "_"): values[name] for name in ("log", "log-format") if name in values}


def main() -> int:
    """Run the command line in sys.argv; return the exit code, unless this becomes the real runtime."""
    locate.take_launcher()
    args = sys.argv[1:]
    try:
        return _answer(args)
    except GpusnapError as error:
        _report(error, args)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:  # Ctrl-C before anything is begun, such as during an import
        from gpusnap.runtime_shim.base.stop_signals import make_interrupted

        _report(make_interrupted(), args)
        return 130
    except Exception as error:
        # For example a missing package: engines show the content of --log, and no traceback.
        _report(make_unforeseen(error), args)
        return 1


def _report(error: GpusnapError, args: list[str]) -> None:
    """Tell the caller, on stderr alone if the module for the log cannot be loaded either."""
    # A directory that the import system could not read once, it takes to have no modules from then on.
    sys.path_importer_cache.clear()
    try:
        from gpusnap.runtime_shim.base.log import report
    except Exception:
        from contextlib import suppress  # Python's own, and not in the way of a pass-through

        with suppress(OSError):
            os.write(2, f"gpusnap: {error.sentence()}\n".encode("utf-8", "backslashreplace"))
        return
    report(error, **_log_options(args))


if __name__ == "__main__":
    sys.exit(main())
