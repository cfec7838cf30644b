"""The mounts of a container, shown at a path to one thread of ours and to the children it starts.

As mount(2) cannot reach into another mount namespace, the calls are open_tree and move_mount (Linux 5.2). A
thread may leave its process' namespace alone once it has a filesystem context of its own (unshare(2),
CLONE_FS; setns(2)).
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["show_mounts"]

# include/uapi/linux/sched.h, fcntl.h, mount.h; the numbers of system calls from 424 on are those of every
# architecture (include/uapi/asm-generic/unistd.h).
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT = 428, 429

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def show_mounts(pid: int, path: str) -> None:
    """Show what process `pid` sees from its root at `path`; only the calling thread and its children see it.

    To be called in a thread that ends afterwards. Raises OSError, and the thread is of no use then.
    """
    own = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        theirs = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.unshare(_CLONE_FS), "unshare")
            _check(_libc.setns(theirs, _CLONE_NEWNS), "setns")
        finally:
            os.close(theirs)
        flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
        tree = _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, b"/", flags), "open_tree")
        try:
            _check(_libc.setns(own, _CLONE_NEWNS), "setns")
            _check(_libc.unshare(_CLONE_NEWNS), "unshare")
            _check(_libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "mount")
            place = os.fsencode(path)
            flags = _MOVE_MOUNT_F_EMPTY_PATH
            _check(_libc.syscall(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, place, flags), "move_mount")
        finally:
            os.close(tree)
    finally:
        os.close(own)
