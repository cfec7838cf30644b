"""Where `gpusnap` starts and ends.

Ctrl-C before the command begins ends gpusnap at once, without a traceback. At the end, when Python has
done everything else, gpusnap does not wait for it to take apart some hundred modules, which takes 30 ms. A
signal that comes when the command is done changes neither its output nor its exit code.
"""

from __future__ import annotations

# The C module under `signal`, whose enums take a millisecond.
import _signal  # type: ignore[import-not-found]
import atexit
import os
import sys

_codes: list[int] = []

# The same as in gpusnap.cli.exit_codes, which may be missing.
_FAILED = 1


def main() -> int:
    """Do the same as gpusnap.cli.main.main."""
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:  # as under nohup
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    atexit.register(_end)  # the first is the last to be called
    from gpusnap.runtime_shim.base import garbage
    from gpusnap.runtime_shim.base.errors import make_unforeseen

    garbage.look_seldom()
    try:
        from gpusnap.cli.main import main as run
        from gpusnap.runtime_shim.base.stop_signals import STOPPING
    except Exception as error:  # gpusnap is being upgraded, or a file of its own cannot be read
        print(f"gpusnap: {make_unforeseen(error).sentence()}", file=sys.stderr)
        return _FAILED
    code = run()
    _codes.append(code)
    for number in STOPPING:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _ignore_once)
    return code


def _ignore_once(number: int, _frame: object) -> None:
    """Ignore a signal after the command, but not a second one: whoever reads the output may be slow."""
    _signal.signal(number, _signal.SIG_DFL)


def _end() -> None:
    """End the process with what main returned; threads have been waited for."""
    if not _codes:
        return  # Python has an error to tell
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # nobody reads it, or there is none
    os._exit(_codes[-1])
