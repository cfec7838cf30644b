"""The signal masks of threads that we hold, in a file that stays when we are killed.

A held thread has its signals blocked (tracee.py), and a tracer that is ended by SIGKILL does not put its mask
back: the thread would get no signal for the rest of its life, not even the SIGTERM of `podman stop`. So each
mask is written to a file before the signals are blocked, and taken out when the thread has it again.

The file has slots of 24 bytes, each written by one pwrite(2), which takes a few microseconds. It is on tmpfs:
the threads end with the host. Where it cannot be written, because tmpfs is full, the thread is held all the
same: the journal needs the same room, and says so.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

# Process and thread (0: the slot is free), start time of the thread, its mask.
_SLOT = struct.Struct("=IIQQ")
_FREE = bytes(_SLOT.size)
# As many slots as are read of a file.
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of a thread as it was noted."""

    pid: int
    tid: int
    start: int
    """Clock ticks after boot at which the thread began."""
    blocked: int
    """The blocked signals, the lowest bit being signal 1."""
    slot: int
    """Where it is in the file."""

    @property
    def there(self) -> bool:
        """Whether that thread is still there."""
        try:
            return _start(self.pid, self.tid) == self.start
        except OSError:
            return False


@dataclass
class _File:
    """A file of masks while it is kept."""

    path: str
    descriptor: int = -1
    free: list[int] = field(default_factory=list)
    size: int = 0
    """Slots in it."""

    def open(self) -> None:
        """Open it before its first slot is written. Raises OSError."""
        if self.descriptor < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self.descriptor = os.open(self.path, flags, 0o600)
            # What another gpusnap left stays before ours.
            self.size = -(-os.fstat(self.descriptor).st_size // _SLOT.size)

    def close(self) -> None:
        """Close it, and remove it unless a thread has not got its mask back. Raises OSError."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        with suppress(FileNotFoundError):
            if not read(self.path):
                os.unlink(self.path)


_lock = threading.Lock()
_files: list[_File] = []


@contextmanager
def kept(path: str) -> Iterator[None]:
    """Have the masks of held threads in a file while the block runs."""
    with _lock:
        _files.append(_File(path))
    try:
        yield
    finally:
        with _lock, suppress(OSError):
            _files.pop().close()


class Note:
    """A slot of a file."""

    def __init__(self, file: _File, number: int) -> None:
        self._file, self._number = file, number

    def drop(self) -> None:
        """The thread has its mask again, or has ended."""
        with _lock, suppress(OSError):
            os.pwrite(self._file.descriptor, _FREE, self._number * _SLOT.size)
            self._file.free.append(self._number)


def note(pid: int, tid: int, blocked: int) -> Note | None:
    """Write down the mask of a thread. None where no file is kept, or it cannot be written."""
    with _lock:
        if not _files:
            return None
        file = _files[-1]
        try:
            file.open()
            number = file.free.pop() if file.free else file.size
            file.size = max(file.size, number + 1)
            slot = _SLOT.pack(pid, tid, _start(pid, tid), blocked)
            os.pwrite(file.descriptor, slot, number * _SLOT.size)
        except OSError:
            return None
        return Note(file, number)


def read(path: str) -> tuple[Mask, ...]:
    """The masks that a killed gpusnap left in a file. Raises OSError where it cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            data = file.read(_MOST * _SLOT.size)
    except FileNotFoundError:
        return ()
    whole = len(data) - len(data) % _SLOT.size
    slots = enumerate(_SLOT.iter_unpack(data[:whole]))
    return tuple(Mask(pid, tid, start, blocked, at) for at, (pid, tid, start, blocked) in slots if tid)


def clear(path: str, masks: Iterable[Mask]) -> None:
    """Take masks out of a file that `read` has read; `kept` removes it. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for mask in masks:
            os.pwrite(descriptor, _FREE, mask.slot * _SLOT.size)
    finally:
        os.close(descriptor)


def _start(pid: int, tid: int) -> int:
    """When a thread began, in clock ticks after boot (proc_pid_stat(5), field 22). Raises OSError."""
    with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
