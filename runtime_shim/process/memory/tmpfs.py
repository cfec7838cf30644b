"""Regions in files of gpusnap's own tmpfs, which replace a process's own memory.

    /run/gpusnap/stage.lock         locked (flock) while the tmpfs is mounted or unmounted
    /run/gpusnap/stage/             the tmpfs, 0700, in huge pages; mounted when first needed, and unmounted
        <key>/                      by the last user; see gpusnap.runtime_shim.runtime.container_key
            <name>                  the memory of one region
        (without a name)            files of an `Unnamed`; their owner holds a shared lock (flock) on stage/

If a driver copies GPU memory into such a file instead of private memory, nothing must be copied out of the
process, and the file can be mapped into a process instead of copying it in. The memory survives a gpusnap
that is killed (but not a mount namespace that ends with it: mount_namespace.is_lasting), and never exists
twice. Nothing is written to a disk: a tmpfs is in RAM, and gone after a reboot, as are the processes. Its
mount option noswap keeps it out of swap (Linux 6.4 and later; see `can_be_swapped`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from gpusnap.oci.base.files import is_folder
from gpusnap.runtime_shim.process.memory import copy as copies

FOLDER = "/run/gpusnap/stage"
# Seconds to wait for another gpusnap that mounts or unmounts it, and between two tries.
_PATIENCE, _PAUSE = 30.0, 0.005
_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_SLICE = 16 << 20  # bytes that one thread populates at a time
# asm-generic/mman-common.h
_HUGEPAGE, _POPULATE_WRITE = 14, 23
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8  # linux/mount.h, MS_*
_MNT_DETACH = 2  # linux/fs.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p
]  # fmt: skip
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Area:
    """The memory of one region, `size` bytes, in a file from `lead` on: a Source and a Target.

    `lead` makes offset and address agree within a huge page. Every method raises OSError.
    """

    def __init__(
        self, path: str, address: int, size: int, *, new: bool = False, unnamed: bool = False
    ) -> None:
        """`path`: the file; for an `unnamed`, new file the path of its directory (open(2), O_TMPFILE)."""
        self.path, self.address, self.size = path, address, size
        self.lead = address % copies.HUGE
        flags = os.O_CREAT | os.O_EXCL if new else os.O_TMPFILE if unnamed else 0
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            if new or unnamed:
                os.ftruncate(self.descriptor, self.lead + size)
            self._mapping = mmap.mmap(self.descriptor, self.lead + size)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter
            os.close(self.descriptor)
            raise error if isinstance(error, OSError) else OSError(errno.EIO, str(error), path) from error
        # A child that must be left behind (base/question_process.py) would keep the tmpfs and all its memory.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)

    def view(self, offset: int, size: int) -> memoryview:
        """Return a view of a part of the memory."""
        return memoryview(self._mapping)[self.lead + offset : self.lead + offset + size]

    def read(self, offset: int, into: memoryview) -> None:
        """Copy from the region, while other threads run."""
        kind = ctypes.c_char * into.nbytes
        here, there = kind.from_buffer(into), kind.from_buffer(self._mapping, self.lead + offset)
        ctypes.memmove(here, there, into.nbytes)  # a slice assignment would keep the interpreter's lock

    def write(self, offset: int, data: memoryview) -> None:
        """Copy to the region."""
        self.view(offset, data.nbytes)[:] = data

    def populate(self, offset: int = 0, size: int | None = None, *, threads: int = 0) -> None:
        """Make the kernel allocate pages for a part, by default for all of it.

        `threads`: 0 for one per core. Raises OSError if there is no memory for that, ENOSPC if the tmpfs is
        full; a kernel before 5.14 does nothing.
        """
        held = (ctypes.c_char * len(self._mapping)).from_buffer(self._mapping)
        try:
            begin = end = ctypes.addressof(held)
            end += len(self._mapping)
            if size is not None:
                begin += self.lead + offset
                end = begin + size
                begin -= begin % mmap.PAGESIZE
            slices = range(begin, end, _SLICE)
            copies.run_jobs(
                [partial(_populate, at, min(_SLICE, end - at), self.path) for at in slices], threads
            )
        finally:
            del held

    def close(self) -> None:
        """Close the file, which stays; views that still exist keep its memory mapped."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            with suppress(OSError):  # it is closed in any case (close(2)), and its memory is in RAM
                os.close(descriptor)
        with suppress(BufferError):
            self._mapping.close()

    def discard(self) -> None:
        """Close the file, and remove it."""
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class Stage:
    """The directory of one container. It is made, and the tmpfs mounted, with the first area."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._made = self._ready = False

    def area(self, name: str, address: int, size: int) -> Area:
        """Create a region of zeros, for a region at this address in a process. Raises OSError."""
        path = self._path(name)
        try:
            return Area(path, address, size, new=True)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise

    def name_unnamed(self, descriptor: int, name: str) -> str:
        """Give a file of an `Unnamed` a name in the directory; return its path. Raises OSError."""
        path = self._path(name)
        # With a descriptor of a directory, which such a path does not need, os.link follows links (link(2)).
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
        return path

    def _path(self, name: str) -> str:
        """Return the path of a new file, and remove an old one."""
        folder = _folder(self._key)
        if not self._ready:
            self._made = True  # whether or not this succeeds, `remove` must check
            with _hold_lock():
                _mount()
                os.makedirs(folder, mode=0o700, exist_ok=True)
            self._ready = True
        path = os.path.join(folder, name)
        with suppress(FileNotFoundError):  # left by a killed gpusnap
            os.unlink(path)
        return path

    def remove(self) -> None:
        """Remove everything of the container; memory that a process has mapped stays until it unmaps it."""
        if self._made:
            remove(self._key)
            self._made = self._ready = False


class Unnamed:
    """Files without a name: they are freed when the last process closes them, or is killed.

    Until `remove`, the tmpfs stays mounted, so that such a file can get a name in it (`Stage.name_unnamed`).
    """

    def __init__(self) -> None:
        self._folder = -1

    def area(self, _name: str, address: int, size: int) -> Area:
        """As Stage.area. Raises OSError."""
        if self._folder < 0:
            with _hold_lock():
                _mount()
                self._folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return Area(FOLDER, address, size, unnamed=True)

    def remove(self) -> None:
        """Unmount the tmpfs if nothing else is in it. Raises OSError."""
        if self._folder >= 0:
            folder, self._folder = self._folder, -1
            os.close(folder)
            unmount_if_empty()


def unmount_if_empty() -> None:
    """Unmount the tmpfs if nothing is in it. Raises OSError."""
    if is_folder(FOLDER):
        with _hold_lock():
            _unmount_unused()


def remove(key: str) -> None:
    """Remove the files of a container, and the tmpfs if nothing else is in it. Raises OSError."""
    folder = _folder(key)
    if not is_folder(FOLDER):
        return
    with _hold_lock():
        with suppress(FileNotFoundError):
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
        _unmount_unused()


def leave(key: str) -> None:
    """Remove a container's directory if it is empty, and the tmpfs likewise. Raises OSError."""
    folder = _folder(key)
    if not is_folder(FOLDER):
        return
    with _hold_lock():
        with suppress(OSError):
            os.rmdir(folder)
        _unmount_unused()


def _unmount_unused() -> None:
    if _is_mounted() and not os.listdir(FOLDER) and not _has_unnamed():
        # Memory that a process still has mapped stays until it unmaps it.
        _libc.umount2(FOLDER.encode(), _MNT_DETACH)


def _has_unnamed() -> bool:
    """Whether a process has files without a name there."""
    folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return not _try_lock(folder)
    finally:
        os.close(folder)


def device() -> str:
    """Return the device of the tmpfs in proc_pid_maps(5), major:minor in hexadecimal; empty if not mounted.

    Raises OSError.
    """
    try:
        found = os.stat(FOLDER).st_dev
    except FileNotFoundError:
        return ""
    return f"{os.major(found):02x}:{os.minor(found):02x}"


def containers() -> list[str]:
    """Return the keys of the containers that have files here. Raises OSError."""
    return sorted(os.listdir(FOLDER)) if _is_mounted() else []


def sizes(key: str) -> dict[str, int]:
    """Return the bytes of RAM of each file of a container, by path. Raises OSError."""
    try:
        with os.scandir(_folder(key)) as found:
            return {each.path: each.stat(follow_symlinks=False).st_blocks * 512 for each in found}
    except FileNotFoundError:
        return {}


def can_be_swapped() -> bool:
    """Whether this host has swap, and its kernel cannot keep the tmpfs out of it. Raises OSError."""
    with open("/proc/swaps", encoding="utf-8", errors="replace") as file:
        if len(file.readlines()) < 2:  # a heading, and a line for each swap area
            return False
    with _hold_lock():
        _mount()
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            return not any(line.split()[4] == FOLDER and "noswap" in line for line in file)


def _folder(key: str) -> str:
    if not key or "/" in key or key.startswith("."):
        raise OSError(errno.EINVAL, "it is not a valid directory name", key)
    return os.path.join(FOLDER, key)


@contextmanager
def _hold_lock() -> Iterator[None]:
    """Keep others from mounting or unmounting while the block runs. Raises OSError (also TimeoutError)."""
    path = f"{FOLDER}.lock"
    try:
        lock = os.open(path, _LOCK, 0o600)
    except FileNotFoundError:  # the first user
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        lock = os.open(path, _LOCK, 0o600)
    deadline = time.monotonic() + _PATIENCE
    try:
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
            time.sleep(_PAUSE)
        yield
    finally:
        with suppress(OSError):  # it is closed in any case
            os.close(lock)


def _try_lock(lock: int) -> bool:
    """Lock it, unless another process has it: flock(2) has no deadline."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_mounted() -> bool:
    """Whether the tmpfs is mounted. Raises OSError if the kernel does not say so.

    os.path.ismount would return False then, and a second tmpfs would hide the files in the first one.
    """
    try:
        there = os.lstat(FOLDER)
    except FileNotFoundError:
        return False
    return there.st_dev != os.lstat(os.path.dirname(FOLDER)).st_dev


def _mount() -> None:
    """Mount the tmpfs unless it is mounted. It works without huge pages and, on older kernels, with swap."""
    with suppress(FileExistsError):
        os.mkdir(FOLDER, 0o700)
    if _is_mounted():
        return
    # Other code checks for space: no limit, instead of half of the RAM.
    for options in (b",noswap,huge=always", b",noswap", b",huge=always", b""):
        flags = _NOSUID | _NODEV | _NOEXEC
        if _libc.mount(b"gpusnap", FOLDER.encode(), b"tmpfs", flags, b"size=100%,mode=0700" + options) == 0:
            return
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), FOLDER)


def _populate(address: int, size: int, path: str) -> None:
    if _libc.madvise(address, size, _POPULATE_WRITE) < 0:
        number = ctypes.get_errno()
        if number == errno.EFAULT:  # a writer there would get SIGBUS
            number = errno.ENOSPC
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number), path)
