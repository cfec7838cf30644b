"""The signal masks of threads that gpusnap holds, in a file that remains if gpusnap is killed.

A held thread has its signals blocked (tracee.py), and a tracer that is killed by SIGKILL does not restore its
mask: the thread would get no signal for the rest of its life, not even the SIGTERM of `podman stop`. So each
mask is written to a file before the signals are blocked, and removed when the thread has it again.

The file has slots of 32 bytes, none on two pages, each written by one pwrite(2), which takes a few
microseconds. The first one names gpusnap's PID namespace. The file is on tmpfs: the threads end with the
host. If it cannot be written, because tmpfs is full, the thread is still held: the journal needs the same
space, and reports that.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.runtime_shim.base.errors import GpusnapError, OtherNamespace

# Process and thread (0: the slot is free), start time of the thread, its mask. In the first slot: 0, 0, the
# inode of the PID namespace.
_SLOT = struct.Struct("=IIQQ8x")
_FREE = bytes(_SLOT.size)
# How often gpusnap tries to free a slot: a slot that stays looks as if a thread were held.
_TRIES = 2
# The largest number of slots that are read from a file.
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Mask:
    """The recorded mask of a thread."""

    pid: int
    tid: int
    start: int
    """Clock ticks after boot at which the thread began."""
    blocked: int
    """The blocked signals, the lowest bit being signal 1."""
    slot: int
    """The number of its slot in the file."""

    @property
    def is_there(self) -> bool:
        """Whether that thread still exists, and is no zombie. Raises OSError if this is not known."""
        try:
            stat = _stat(self.pid, self.tid)
            return int(stat[19]) == self.start and stat[0] not in (b"Z", b"X")
        except (FileNotFoundError, ProcessLookupError):
            return False


@dataclass(slots=True)
class _File:
    """A file of masks while it is kept open."""

    path: str
    descriptor: int = -1
    free: list[int] = field(default_factory=list)
    size: int = 0
    """The number of its slots."""
    ours: bool = True
    """Whether only this process has slots in it."""

    def open(self) -> None:
        """Open it before its first slot is written. Raises OSError."""
        if self.descriptor < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.path, flags, 0o600)
            try:
                # Slots that another gpusnap left stay before the new ones.
                self.size = -(-os.fstat(descriptor).st_size // _SLOT.size)
                self.ours = not self.size
                if self.ours:
                    _write(descriptor, 0, _SLOT.pack(0, 0, _read_namespace(), 0))
                    self.size = 1
            except BaseException:
                os.close(descriptor)
                raise
            self.descriptor = descriptor  # last, so that no slot is written after an incomplete first one

    def close(self) -> None:
        """Close it, and remove it unless a living thread does not have its mask again. Raises OSError."""
        opened = self.descriptor >= 0
        if opened:
            descriptor, self.descriptor = self.descriptor, -1  # a note that is dropped later finds none
            with suppress(OSError):
                os.close(descriptor)
        with suppress(FileNotFoundError):
            none_waits = opened and self.ours and len(self.free) == self.size - 1
            if none_waits or not any(mask.is_there for mask in read(self.path)):
                os.unlink(self.path)


_lock = threading.Lock()
_files: list[_File] = []


@contextmanager
def keep_masks(path: str) -> Iterator[None]:
    """Record the masks of held threads in a file while the block runs."""
    file = _File(path)
    with _lock:
        _files.append(file)
    try:
        yield
    finally:
        with _lock, suppress(OSError, GpusnapError):
            _files.remove(file)
            file.close()


class Note:
    """A slot of a file."""

    def __init__(self, file: _File, number: int) -> None:
        self._file, self._number = file, number

    def drop(self) -> None:
        """Free the slot: the thread has its mask again, or has ended."""
        with _lock:
            for _ in range(_TRIES):
                with suppress(OSError):
                    if self._file.descriptor >= 0:
                        _write(self._file.descriptor, self._number, _FREE)
                        self._file.free.append(self._number)
                    return


def note_mask(pid: int, tid: int, blocked: int) -> Note | None:
    """Record the mask of a thread. None if no file is kept, or it cannot be written."""
    with _lock:
        if not _files:
            return None
        file = _files[-1]
        try:
            file.open()
            number = file.free.pop() if file.free else file.size
            file.size = max(file.size, number + 1)
            _write(file.descriptor, number, _SLOT.pack(pid, tid, _start(pid, tid), blocked))
        except OSError:
            return None
        return Note(file, number)


def read(path: str) -> tuple[Mask, ...]:
    """Read the masks that a killed gpusnap left in a file.

    Raises OSError if it cannot be read, GpusnapError if its PIDs are of another PID namespace.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            data = file.read(_MOST * _SLOT.size)
    except FileNotFoundError:
        return ()
    whole = len(data) - len(data) % _SLOT.size
    slots = [*enumerate(_SLOT.iter_unpack(data[:whole]))]
    if slots and slots[0][1][2] not in (0, _read_namespace()):
        raise OtherNamespace(path)
    return tuple(Mask(pid, tid, start, blocked, at) for at, (pid, tid, start, blocked) in slots if tid)


def clear(path: str, masks: Iterable[Mask]) -> None:
    """Remove masks from a file that `read` has read; `keep_masks` removes the file. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for mask in masks:
            _write(descriptor, mask.slot, _FREE)
    finally:
        os.close(descriptor)


def _write(descriptor: int, number: int, slot: bytes) -> None:
    """Write a slot. Raises OSError, also if there is only space for a part of it."""
    if os.pwrite(descriptor, slot, number * _SLOT.size) < _SLOT.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_namespace() -> int:
    """Return gpusnap's PID namespace; like proc.own_pid_namespace, which this package may not import."""
    return os.stat("/proc/self/ns/pid").st_ino


def _start(pid: int, tid: int) -> int:
    """Return when a thread began, in clock ticks after boot. Raises OSError."""
    return int(_stat(pid, tid)[19])


def _stat(pid: int, tid: int) -> list[bytes]:
    """Return the fields of proc_pid_stat(5) from the third one, the state. Raises OSError."""
    with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
