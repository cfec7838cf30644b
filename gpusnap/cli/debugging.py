"""`gpusnap --debug`: shows programs that are run, steps as they begin, and where errors come from."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import traceback
from collections.abc import Iterable

_STARTING = ("subprocess.Popen", "os.exec", "os.posix_spawn")
_on = threading.Event()


def begin() -> None:
    """Show the command line of every program that this process starts from now on (sys.addaudithook)."""
    from gpusnap.runtime_shim.base.transaction import announce

    if not _on.is_set():
        sys.addaudithook(_hear)
        announce(lambda step: print(f"gpusnap: step {step}", file=sys.stderr, flush=True))
    _on.set()


def show(error: BaseException) -> None:
    """Print the traceback of an error, if it was asked for."""
    if _on.is_set():
        traceback.print_exception(error)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event not in _STARTING:
        return
    words = arguments[1]  # behind the program's path
    line = [words] if isinstance(words, str | bytes) else words
    if isinstance(line, Iterable):
        shown = shlex.join(os.fsdecode(word) for word in line if isinstance(word, str | bytes | os.PathLike))
        print(f"gpusnap: debug: run {shown}", file=sys.stderr, flush=True)
