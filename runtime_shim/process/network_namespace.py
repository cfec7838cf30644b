"""Network namespaces, joined by one thread of gpusnap; its other threads stay where they are (setns(2))."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

from gpusnap.runtime_shim.threads import start

_CLONE_NEWNET = 0x40000000  # linux/sched.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]


def run_joined(path: str, work: Callable[[], None]) -> None:
    """Run `work` in a thread that has joined the namespace with this path; raise what it raises.

    Raises OSError if it cannot be joined, and GpusnapError if no thread can be started.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            space = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _libc.setns(space, _CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), f"setns {path}")
            finally:
                os.close(space)
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="gpusnap-network")
    start(thread)
    thread.join()
    if failed:
        raise failed[0]
