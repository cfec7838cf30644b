"""Plain files in a directory that others can write to: reads follow no links, writes are atomic.

gpusnap opens all files in such directories with this module: images, the engine's directory into which it
unpacked an archive, layouts. A link is not followed but replaced, and a FIFO or a device is never waited for.
For a path from the user, such as an archive, there is `open_named`, which follows links.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

UNFINISHED = ".new-"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: otherwise the open of a FIFO would wait for a writer.
_AT_ONCE = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_UNNAMED = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
_NOREPLACE = 1  # linux/fs.h, RENAME_NOREPLACE
# rename(2): the file system does not know the flag; the kernel does not know the call.
_UNKNOWN = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
# open(2), O_TMPFILE: the file system has no such files, or the kernel does not know of them.
_ALL_NAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS}
_PIECE = 1 << 30

# Types of files that can be read forever, or that would be waited for.
_NO_FILES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NULL = os.makedev(1, 3)  # Documentation/admin-guide/devices.txt

NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of stat(2) and open(2): nothing exists there, or can."""


def exists(path: str, *, follow: bool = True) -> bool:
    """Whether something exists there; with `follow`, at the target of a link.

    Raises OSError if the kernel does not say it (EIO, ENOMEM, EACCES), for which os.path.exists returns
    False.
    """
    return _mode(path, follow=follow) is not None


def is_folder(path: str) -> bool:
    """Whether a directory exists there, or a link to one. Raises OSError as `exists` does."""
    mode = _mode(path, follow=True)
    return mode is not None and stat.S_ISDIR(mode)


def list_names(folder: str) -> list[str]:
    """Return the names in a directory; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def no_file(status: os.stat_result) -> str:
    """Return the type, such as "a FIFO", if it is neither a file nor a directory; "" for those.

    /dev/null counts as an empty file.
    """
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL:
        return ""
    return _NO_FILES.get(stat.S_IFMT(status.st_mode), "")


def open_named(path: str) -> io.BufferedReader:
    """Open the file at a path that a user names, for reading; links are followed, nothing is waited for.

    Raises OSError, also for a FIFO, a socket or a device, which is not opened.
    """
    _check_file(os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_file(os.fstat(descriptor))  # it may be another file now
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_folder(*names: str) -> int:
    """Open the directory `names`, each within the one before; none of their last parts may be a link.

    Raises OSError; its `filename` is the directory concerned.
    """
    descriptor = os.open(names[0], _FOLDER)
    for at, name in enumerate(names[1:], 2):
        try:
            inner = os.open(name, _FOLDER, dir_fd=descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.path.join(*names[:at])) from error
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


@contextmanager
def open_nested_folder(*names: str) -> Iterator[int]:
    """Like `open_folder`, for the `with` block. Raises OSError."""
    folder = open_folder(*names)
    try:
        yield folder
    finally:
        os.close(folder)


def open_regular(name: str, folder: int) -> tuple[io.FileIO, int]:
    """Open the plain file `name` of a directory; return it and its size. Raises OSError, ValueError."""
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        return io.FileIO(descriptor, "rb"), status.st_size
    except BaseException:
        os.close(descriptor)
        raise


def ask_for(file: io.FileIO, start: int, size: int) -> None:
    """Ask the kernel to read a part of a file into its page cache; nothing depends on it.

    Piece by piece, because one request is limited to the device's read-ahead or its largest request, which
    may be 128 KiB and 1.25 MiB (linux, mm/readahead.c, force_page_cache_ra).
    """
    with suppress(OSError):
        for at in range(start, start + size, _AT_ONCE):
            part = min(_AT_ONCE, start + size - at)
            os.posix_fadvise(file.fileno(), at, part, os.POSIX_FADV_WILLNEED)


def read_regular(name: str, folder: int, *, limit: int) -> bytes:
    """Read a small file. Raises as open_regular does, and ValueError for more than `limit` bytes."""
    file, size = open_regular(name, folder)
    with file:
        if size > limit:
            raise ValueError(f"it has {size} bytes, but at most {limit} are allowed")
        pieces = []
        while limit >= 0 and (piece := file.read(limit + 1)):
            pieces.append(piece)
            limit -= len(piece)
        if limit < 0:
            raise ValueError("it grows while it is being read")
        return b"".join(pieces)


@contextmanager
def new_file(folder: int) -> Iterator[tuple[int, str]]:
    """Yield a new file in a directory: its descriptor and temporary name. It is removed unless renamed."""
    name = UNFINISHED + os.urandom(8).hex()
    descriptor = os.open(name, _NEW, 0o600, dir_fd=folder)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


@contextmanager
def create_unnamed_file(folder: int) -> Iterator[tuple[int, Callable[[str], None]]]:
    """Yield a new file in a directory: its descriptor, and a function that gives it an unused name there.

    Without a name, nothing of it remains, even if the writer is killed (open(2), O_TMPFILE). If the file
    system has no such files, it is one of `new_file`. The function raises FileExistsError, OSError.
    """
    try:
        descriptor = os.open(".", _UNNAMED, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in _ALL_NAMED:
            raise
        with new_file(folder) as (descriptor, unfinished):
            yield descriptor, partial(name_new, unfinished, folder=folder)
        return
    try:
        yield descriptor, partial(_name_unnamed, descriptor, folder=folder)
    finally:
        os.close(descriptor)


def _name_unnamed(descriptor: int, name: str, folder: int) -> None:
    try:
        os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_LINKS | {errno.ENOENT}:
            raise
        # Such files, and no links or no /proc: a copy is what is left.
        with new_file(folder) as (copy, unfinished):
            done = 0
            while sent := os.sendfile(copy, descriptor, done, _PIECE):
                done += sent
            os.fsync(copy)
            name_new(unfinished, name, folder)


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`: one write(2) takes at most 2 GiB, and less if a disk becomes full."""
    with memoryview(data) as view, view.cast("B") as rest:
        done = 0
        while done < len(rest):
            with rest[done:] as left:
                done += os.write(descriptor, left)


def name_new(unfinished: str, name: str, folder: int) -> None:
    """Rename a file within a directory to an unused name. Raises FileExistsError, OSError.

    Uses renameat2(2) with RENAME_NOREPLACE. If the file system lacks that, as NFS does, it uses link(2) and
    unlink(2). If it lacks both, as some in user space do, an empty file first reserves the name.
    """
    try:
        _rename_new(unfinished, name, folder)
        return
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    try:
        os.link(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(name, _NEW, 0o600, dir_fd=folder))
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    else:
        os.unlink(unfinished, dir_fd=folder)


def _rename_new(unfinished: str, name: str, folder: int) -> None:
    import ctypes  # not at the top: a check whether something exists does not need it

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:  # a C library before glibc 2.28
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), name)
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if call(folder, os.fsencode(unfinished), folder, os.fsencode(name), _NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def replace(name: str, data: bytes, folder: int, *, sync: bool = True, mode: int = 0o600) -> None:
    """Write a file with that content and mode; replace a file, or a link, of that name.

    It is synced, unless `sync` is false. Raises OSError.
    """
    with new_file(folder) as (descriptor, unfinished):
        if mode != 0o600:  # as it was made; not every file system permits another one
            os.fchmod(descriptor, mode)
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    if sync:
        os.fsync(folder)


def open_below(top: str, name: str) -> tuple[io.FileIO, int]:
    """Open the plain file `name`, which may contain slashes, below a directory; return it and its size.

    The caller names `top`, and it may be a link; no link below it is followed. Raises OSError, and ValueError
    if the file is not a plain one.
    """
    with _parent(top, name) as (folder, last):
        return open_regular(last, folder)


def read_below(top: str, name: str, *, limit: int) -> bytes:
    """Read a small file below a directory. Raises as open_below does, and ValueError beyond `limit`."""
    with _parent(top, name) as (folder, last):
        return read_regular(last, folder, limit=limit)


def replace_below(top: str, name: str, data: bytes, *, sync: bool = True, mode: int = 0o600) -> None:
    """Like `replace`, for a file below a directory. Raises OSError."""
    with _parent(top, name) as (folder, last):
        replace(last, data, folder, sync=sync, mode=mode)


def sync_folder(path: str) -> None:
    """Sync the names in a directory to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(path: str, *, mode: int = 0o777) -> None:
    """Make a directory with its missing parents, unless it exists; sync each one's name to disk.

    `mode`: of the directory itself. Raises OSError.
    """
    parent = os.path.dirname(os.path.abspath(path))
    if not is_folder(parent):
        make_folders(parent)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not is_folder(path):
            raise
        return
    with suppress(PermissionError):  # a directory that its users cannot list
        sync_folder(parent)


@contextmanager
def _parent(top: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the directory of a file, and the file's own name."""
    *folders, last = name.split("/")
    folder = os.open(top or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in folders:
            inner = os.open(each, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder, last
    finally:
        os.close(folder)


def _check_file(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if kind := no_file(status):
        raise OSError(f"it is {kind}, not a file")


def _mode(path: str, *, follow: bool) -> int | None:
    """Return the mode of the file at a path; None if there is none."""
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except OSError as error:
        if error.errno in NOTHING_THERE:
            return None
        raise
