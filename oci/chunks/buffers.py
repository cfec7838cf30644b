"""Where the bytes of a region come from and go to, and the memory in which they stop on the way.

All that touches every byte happens in C while other threads run: ctypes lets them run around memcmp and
memmove, Python's os module around read(2) and write(2), hashlib from 2 KiB on, zstandard in its readers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from gpusnap.oci.base.errors import OciError

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.restype = ctypes.c_int
_HEAD = 64


class Source(Protocol):
    """A region to read. Several threads read different parts of it at once.

    It is always copied, and never looked at in place: somebody else may have the same memory mapped, and
    change it between one look and the next.
    """

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Copy all of `into`, which is writable, from `offset` on; raise where that fails.

        Other threads should run meanwhile.
        """
        ...


class Target(Protocol):
    """A region to fill. Several threads write different parts of it at once."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def view(self, offset: int, size: int) -> memoryview | None:
        """Memory of ours that is a part of the region, zeros so far; None where `write` has to be used."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Put all of `data` at `offset`; raise where that fails. `data` is of memory that has an address."""
        ...


class Memory:
    """Private memory of its own pages: `view`, and `free` to give the pages back at once.

    The mapping itself goes with its last view. An exception on its way may hold one for long, which is why
    the pages can go before it.
    """

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel without huge pages refuses; small pages do as well.
        with suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._mapping)[:size]

    def free(self) -> None:
        """Give the pages back; what was in them reads as zeros."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


class Buffer:
    """A region in this process's memory, to read from or to fill: a bytearray, an mmap, a view of one.

    Raises TypeError for memory that cannot be written to: ctypes would not tell its address.
    """

    def __init__(self, memory: bytearray | memoryview | mmap.mmap) -> None:
        self._view = memoryview(memory).cast("B")
        if self._view.readonly:
            raise TypeError("a Buffer requires writable memory")

    @property
    def size(self) -> int:
        """Bytes."""
        return self._view.nbytes

    def view(self, offset: int, size: int) -> memoryview:
        """A part of it."""
        return self._view[offset : offset + size]

    def read(self, offset: int, into: memoryview) -> None:
        """Copy from the region."""
        _copy(into, self._view[offset : offset + into.nbytes])

    def write(self, offset: int, data: memoryview) -> None:
        """Copy to the region."""
        _copy(self._view[offset : offset + data.nbytes], data)


class File:
    """A region in a file: the first `size` bytes of an open descriptor, which stays its caller's."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    def view(self, offset: int, size: int) -> None:
        """It is no memory of ours: as a Target it is written to."""

    def read(self, offset: int, into: memoryview) -> None:
        """Read from the file. Raises OciError where it ends too early, OSError."""
        done = 0
        while done < into.nbytes:
            count = os.preadv(self._descriptor, [into[done:]], offset + done)
            if count == 0:
                raise OciError(
                    f"the file of a region ends at {offset + done} instead of {self._size}", code="GPS-601"
                )
            done += count

    def write(self, offset: int, data: memoryview) -> None:
        """Write to the file. Raises OSError."""
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._descriptor, data[done:], offset + done)


def is_zero(view: memoryview) -> bool:
    """Whether all bytes of writable memory are zero; stops at the first that is not."""
    head = view[:_HEAD]
    if head != bytes(len(head)):
        return False
    if view.nbytes <= _HEAD:
        return True
    # Each byte equals the one 64 before it, and the first 64 are zero.
    with _address(view) as start:
        return bool(_libc.memcmp(start, start + _HEAD, view.nbytes - _HEAD) == 0)


def _copy(into: memoryview, data: memoryview) -> None:
    if into.nbytes != data.nbytes:
        raise OciError(
            f"{data.nbytes} bytes do not fit into the remaining {into.nbytes} bytes of a region",
            code="GPS-601",
        )
    if data.nbytes:
        with _address(into) as there, _address(data) as here:
            ctypes.memmove(there, here, data.nbytes)


@contextmanager
def _address(view: memoryview) -> Iterator[int]:
    held = ctypes.c_char.from_buffer(view)
    yield ctypes.addressof(held)
