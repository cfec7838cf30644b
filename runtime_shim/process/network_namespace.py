"""Network namespaces, joined by one thread of gpusnap; its other threads stay where they are (setns(2))."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from gpusnap.runtime_shim.base import threads

_CLONE_NEWNET = 0x40000000  # linux/sched.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]


def run_joined(path: str, work: Callable[[], None]) -> None:
    """Run `work` in a thread that has joined the namespace with this path; raise what it raises.

    Raises OSError if it cannot be joined, and GpusnapError if no thread can be started.
    """

    def run() -> None:
        space = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.setns(space, _CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), f"setns {path}")
        finally:
            os.close(space)
        work()

    threads.run_apart(run, name="gpusnap-network")
