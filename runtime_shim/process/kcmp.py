"""Whether two processes share a kernel object, such as an open file or their memory (kcmp(2))."""

from __future__ import annotations

import ctypes
import errno

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process.ptrace.arch import this_machine

FILE, VM, FILES = 0, 1, 2
"""KCMP_* of linux/kcmp.h: an open file, all memory, all descriptors."""
EQUAL = 0
"""The result of `compare` if both are the same."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int, *(ctypes.c_ulong,) * 3]
_libc.syscall.restype = ctypes.c_long


def compare(pid: int, other: int, kind: int, number: int = 0, other_number: int = 0) -> int:
    """Return EQUAL if both have the same, else 1 to 3; minus the errno if the kernel does not say it.

    For FILE, the numbers are descriptors.
    """
    try:
        call = this_machine().calls["kcmp"]
    except GpusnapError:
        return -errno.ENOSYS  # on such a machine, its files could not be replaced either
    found: int = _libc.syscall(call, pid, other, kind, number, other_number)
    return found if found >= 0 else -ctypes.get_errno()
