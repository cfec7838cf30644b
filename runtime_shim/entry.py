"""The console script gpusnap-runtime: sorts out whose command it is.

Podman, containerd and CRI-O run it for every command of a container's life. checkpoint and restore are ours,
and --version is answered by both; all else goes to the real runtime by exec, before anything heavy is
imported. The launcher (launcher/launcher.c) does the same in C, by the same rules, and starts this where it
is not certain.
"""

from __future__ import annotations

import os
import sys

from runtime_shim import locate
from runtime_shim._version import __version__
from runtime_shim.errors import GpusnapError, RuntimeFailed, reason, unforeseen
from runtime_shim.words import FALSE, HELP

__all__ = ["GLOBAL_FLAGS", "GLOBAL_VALUES", "OURS", "PASS", "VERSION", "classify", "main"]

# The same lists as in launcher.c, and as options.GLOBAL, which imports more than a pass-through may cost.
GLOBAL_VALUES = ("root", "log", "log-format", "log-level", "cgroup-manager", "rootless", "criu")
GLOBAL_FLAGS = ("debug", "systemd-cgroup")

_VERSION_OPTIONS = ("version", "v", "V")
_OUR_COMMANDS = ("checkpoint", "restore")
# What may follow an option that we do not know, to tell its value from the command: all commands of crun and
# runc.
_COMMANDS = frozenset(
    (
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
)

PASS, VERSION, OURS = "pass", "version", "ours"


def classify(args: list[str]) -> tuple[str, int]:
    """PASS, VERSION or OURS for a command line, and where its command stands: len(args) without one.

    `args` is the line without the program's name. Global options come first; one or two dashes; `--opt value`
    and `--opt=value`. A line that ends too early is the real runtime's to complain of.
    """
    version, at = False, 0
    while at < len(args):
        word = args[at]
        at += 1
        if word == "--" or word == "-" or not word.startswith("-"):
            at -= word != "--"
            break
        name, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
        off = bool(equals) and value in FALSE
        if name in HELP and not off:
            return PASS, len(args)
        version = version or (name in _VERSION_OPTIONS and not off)
        if not equals and _takes_next(name, args[at : at + 1]):
            at += 1
    if version:
        return VERSION, min(at, len(args))
    if at >= len(args):
        return PASS, len(args)
    return (OURS if args[at] in _OUR_COMMANDS else PASS), at


def _takes_next(name: str, following: list[str]) -> bool:
    if name in GLOBAL_VALUES:
        return True
    if name in GLOBAL_FLAGS or name in _VERSION_OPTIONS or name in HELP or not following:
        return False
    return not following[0].startswith("-") and following[0] not in _COMMANDS


def _version(real: str, args: list[str]) -> int:
    """The real runtime's version, whose lines Podman and containerd read, then ours."""
    try:
        pid = os.posix_spawn(real, [real, *args], locate.environment())
    except OSError as error:
        raise RuntimeFailed(
            f"the real runtime {real} cannot be started: {reason(error)}", exit_code=127
        ) from error
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        return code if code > 0 else 128 - code
    print(f"gpusnap-runtime version {__version__}", flush=True)
    return 0


def _answer(args: list[str]) -> int:
    whose, at = classify(args)
    if whose == OURS:
        from runtime_shim.argv import probe

        line = probe(args, at)
        if line is None:
            from runtime_shim.shim import main as checkpoint_or_restore

            return checkpoint_or_restore(args)
        args = line
    real = locate.find(locate.setting(), root=_given(args, at).get("root", ""), words=args[at:])
    return _version(real, args) if whose == VERSION else locate.become(real, args)


def _given(args: list[str], command: int) -> dict[str, str]:
    """The values of the global options of a line whose command stands at `command`; the last one counts."""
    found: dict[str, str] = {}
    at = 0
    while at < command and args[at] != "--":
        name, equals, value = args[at].removeprefix("-").removeprefix("-").partition("=")
        at += 1
        if not equals and _takes_next(name, args[at : at + 1]):
            value = "".join(args[at : at + 1])
            at += 1
        if name in GLOBAL_VALUES:
            found[name] = value
    return found


def _log_options(args: list[str]) -> dict[str, str]:
    """--log and --log-format of a line that may be wrong otherwise, for log.report()."""
    given = _given(args, classify(args)[1])
    return {name.replace("-", "_"): given[name] for name in ("log", "log-format") if name in given}


def main() -> int:
    """Run the command line in sys.argv; the exit code, where this does not become the real runtime."""
    locate.take_launcher()
    args = sys.argv[1:]
    try:
        return _answer(args)
    except GpusnapError as error:
        from runtime_shim.log import report

        report(error, **_log_options(args))
        return getattr(error, "exit_code", 1)
    except Exception as error:
        # Such as a package that is missing: engines show what is in --log, and no traceback.
        from runtime_shim.log import report

        report(unforeseen(error), **_log_options(args))
        return 1


if __name__ == "__main__":
    sys.exit(main())
