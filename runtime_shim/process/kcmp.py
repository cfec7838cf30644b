"""Whether two processes have something of the kernel's in common: an open file, their memory (kcmp(2))."""

from __future__ import annotations

import ctypes
import errno

from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.process.ptrace.arch import this_machine

FILE, VM, FILES = 0, 1, 2
"""KCMP_* of linux/kcmp.h: an open file, all memory, all descriptors."""
EQUAL = 0
"""What `compare` gives where the two are the same."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int, *(ctypes.c_ulong,) * 3]
_libc.syscall.restype = ctypes.c_long


def compare(pid: int, other: int, kind: int, number: int = 0, other_number: int = 0) -> int:
    """EQUAL where both have the same, else 1 to 3; minus its errno where the kernel does not tell.

    The numbers are descriptors, for FILE.
    """
    try:
        call = this_machine().calls["kcmp"]
    except GpusnapError:
        return -errno.ENOSYS  # nor could its files be replaced on such a machine
    found: int = _libc.syscall(call, pid, other, kind, number, other_number)
    return found if found >= 0 else -ctypes.get_errno()
