"""Mount namespaces, joined and changed by one thread of gpusnap; its other threads stay where they are.

A thread may leave its process's namespace alone once it has a file system context of its own (unshare(2),
CLONE_FS; setns(2)). It cannot share one again, so such a thread ends with its work. mount(2) cannot reach
into another namespace; open_tree(2) and move_mount(2) can carry a mount there, since Linux 5.2.

Every failure is an OSError with the call and the path in its `filename`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.process import proc

# asm-generic/unistd.h; the numbers from 424 on are those of every architecture.
_OPEN_TREE, _MOVE_MOUNT = 428, 429
# linux/mount.h
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_F_EMPTY_PATH, _T_EMPTY_PATH = 0x04, 0x40
_MS_REC, _MS_PRIVATE, _MS_SLAVE = 1 << 14, 1 << 18, 1 << 19
# linux/fcntl.h, linux/sched.h, linux/fs.h
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_RECURSIVE = -100, 0x100, 0x8000
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_void_p
]  # fmt: skip
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.setfsuid.argtypes = [ctypes.c_uint]
_libc.setfsgid.argtypes = [ctypes.c_uint]
# syscall(2) by number, each with its own types. Older C libraries have no functions for these calls.
_open_tree, _move_mount = _libc["syscall"], _libc["syscall"]
_open_tree.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
_move_mount.argtypes = [
    ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
]  # fmt: skip
_open_tree.restype = _move_mount.restype = ctypes.c_long


def is_lasting() -> bool:
    """Return whether mounts of this process stay when it ends: its namespace is apparently the host's.

    It is not in a systemd unit with PrivateTmp=, ProtectSystem= and the like.
    """
    init, ours = proc.namespace(1, "mnt"), proc.namespace(os.getpid(), "mnt")
    if init:
        return init == ours
    # It is not permitted to check. A namespace made by systemd receives mounts, and propagates none.
    tags = next((m.tags for m in reversed(proc.mounts("self")) if m.destination in ("/run", "/")), ())
    return any(tag.startswith("shared:") for tag in tags) or not any(t.startswith("master:") for t in tags)


def run_joined(space: int, path: str, work: Callable[[], None]) -> None:
    """Run `work` in a thread that has joined an open mount namespace; raise what it raises."""

    def run() -> None:
        _join(space, path)
        work()

    threads.run_apart(run, name="gpusnap-inside")


def show_mounts(pid: int, path: str) -> None:
    """Show what process `pid` sees from its root at `path`, to the calling thread and its children only.

    Call it in a thread that ends afterwards. Raises OSError; the thread cannot be used then.
    """
    places = "/proc/thread-self/ns/mnt", f"/proc/{pid}/ns/mnt"
    with ExitStack() as stack:
        spaces = []
        for place in places:
            spaces.append(os.open(place, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, spaces[-1])
        own, theirs = spaces
        _join(theirs, places[1])
        tree = open_tree("/", recursive=True)
        stack.callback(os.close, tree)
        _join(own, places[0])
        # A copy of the namespace, from which no mount reaches the one that it was copied from.
        _check("unshare", "CLONE_NEWNS", _libc.unshare(_CLONE_NEWNS))
        _check("mount", "/", _libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None))
        move_mount(tree, path)


def _join(space: int, path: str) -> None:
    """Make this thread join an open mount namespace; that one's root becomes its root and directory."""
    # setns(2) refuses a thread that shares its root and working directory with others.
    _check("unshare", "CLONE_FS", _libc.unshare(_CLONE_FS))
    _check("setns", path, _libc.setns(space, _CLONE_NEWNS))


def open_tree(path: str, *, recursive: bool = False) -> int:
    """Return a copy of the mount at `path` as a descriptor. It is not mounted yet. No last link is followed.

    With `recursive`, mounts below it are copied too.
    """
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_SYMLINK_NOFOLLOW
    flags |= _AT_RECURSIVE if recursive else 0
    return _check("open_tree", path, _open_tree(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags))


def move_mount(tree: int, path: str, *, onto: int | None = None) -> None:
    """Mount a tree of `open_tree` at `path`, or on the open file `onto`, which errors call `path`."""
    place, name, flags = _AT_FDCWD, os.fsencode(path), _F_EMPTY_PATH
    if onto is not None:
        place, name, flags = onto, b"", _F_EMPTY_PATH | _T_EMPTY_PATH
    _check("move_mount", path, _move_mount(_MOVE_MOUNT, tree, b"", place, name, flags))


def detach(folder: int, name: str, path: str) -> None:
    """Unmount `name` in an open directory, which becomes this thread's; errors call it `path`."""
    os.fchdir(folder)
    _check("umount2", path, _libc.umount2(os.fsencode(name), _MNT_DETACH | _UMOUNT_NOFOLLOW))


def make_private(folder: int, name: str, path: str) -> None:
    """Take the mount `name` in an open directory, which becomes this thread's, out of its peer group."""
    os.fchdir(folder)
    _check("mount", path, _libc.mount(None, os.fsencode(name), None, _MS_PRIVATE, None))


@contextmanager
def in_the_name_of(uid: int, gid: int) -> Iterator[None]:
    """Make this thread access files as this user and group (setfsuid(2)), which report no failure."""
    before = _libc.setfsgid(gid), _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(before[1])
        _libc.setfsgid(before[0])


def _check(call: str, path: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"{call} {path}")
    return result
