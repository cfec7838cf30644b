"""Where `gpusnap` starts and ends.

Ctrl-C while its modules are imported ends it at once, without a traceback. At its end, when all else that
Python does has been done, it does not wait for Python to take apart some hundred modules, 30 ms of computing.
"""

from __future__ import annotations

# The C module under `signal`, whose enums take a millisecond.
import _signal  # type: ignore[import-not-found]
import atexit
import os
import sys

_codes: list[int] = []


def main() -> int:
    """As gpusnap.cli.main.main."""
    before = _signal.getsignal(_signal.SIGINT)
    if before != _signal.SIG_IGN:  # as under nohup
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    atexit.register(_end)  # the first is the last to be called
    from gpusnap.runtime_shim import garbage

    garbage.look_seldom()
    from gpusnap.cli.main import main as run

    _signal.signal(_signal.SIGINT, before)
    code = run()
    _codes.append(code)
    return code


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
