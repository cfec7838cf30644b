"""Linux system calls that Python 3.11's standard library lacks, by ctypes.

Each failure is an OSError that names the call and its object.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal

# <linux/sched.h>
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
# <linux/mount.h>
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2
MOUNT_ATTR_RDONLY = 0x1
AT_FDCWD = -100  # <fcntl.h>
AT_RECURSIVE = 0x8000
# x86-64 numbers, <asm/unistd_64.h>; glibc 2.36 wraps neither in every build
SYS_PIVOT_ROOT = 155
SYS_MOUNT_SETATTR = 442
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p,
]  # fmt: skip
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.syscall.restype = ctypes.c_long


class _MountAttr(ctypes.Structure):
    """struct mount_attr of <linux/mount.h>."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    words = [source.encode(), target.encode(), kind.encode() or None]
    result = _libc.mount(*words, flags, data.encode() or None)
    _check(result, f"mount {kind or 'bind'} {source} on {target} ({data or hex(flags)})")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Bind `source` and what is mounted below it on `target`."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        # mount_setattr, because MS_REMOUNT|MS_RDONLY would leave the mounts below writable.
        attr = _MountAttr(attr_set=MOUNT_ATTR_RDONLY)
        where = (AT_FDCWD, target.encode(), AT_RECURSIVE)
        result = _libc.syscall(SYS_MOUNT_SETATTR, *where, ctypes.byref(attr), ctypes.sizeof(attr))
        _check(result, f"mount_setattr read-only {target}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    """setns(2)."""
    _check(_libc.setns(fd, kind), f"setns {kind:#x}")


def pivot_root(new_root: str) -> None:
    """Make `new_root`, a mount point, the root, and drop the old one: pivot_root(2), last of its notes."""
    os.chdir(new_root)
    _check(_libc.syscall(SYS_PIVOT_ROOT, b".", b"."), f"pivot_root {new_root}")
    _check(_libc.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def die_with_parent(parent_alive: int) -> None:
    """Have the kernel kill this process when its parent dies.

    `parent_alive` is the reading end of a pipe whose writing end only the parent holds: a parent that died
    before the call would never trigger the signal, and across PID namespaces getppid() cannot tell.
    """
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl PR_SET_PDEATHSIG")
    if select.select([parent_alive], [], [], 0)[0]:
        os._exit(1)
