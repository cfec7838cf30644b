"""Sources and targets of a region's bytes, and the buffers between them.

All code that touches every byte runs in C while other threads run: ctypes releases the interpreter around
memcmp and memmove, Python's os module around read(2) and write(2), hashlib from 2 KiB on, zstandard in its
readers.
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

    It is always copied, and never read in place: another process may have the same memory mapped, and change
    it between two reads.
    """

    @property
    def size(self) -> int:
        """Bytes."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`, which is writable, from `offset` on; raise an error if that fails.

        Other threads should run meanwhile.
        """


class Target(Protocol):
    """A region to fill. Several threads write different parts of it at once."""

    @property
    def size(self) -> int:
        """Bytes."""

    def view(self, offset: int, size: int) -> memoryview | None:
        """Return gpusnap's own memory of that part, zeros so far; None if `write` must be used."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`; raise an error if that fails. `data` is memory with an address."""


class Memory:
    """Private memory with pages of its own: `view`, and `free` to release the pages at once.

    The mapping itself ends with its last view. An exception in progress may hold one for long, so the pages
    can be released before.
    """

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel without huge pages refuses; small pages work as well.
        with suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._mapping)[:size]

    def free(self) -> None:
        """Release the pages; then they read as zeros."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


class Buffer:
    """A region in this process's memory, to read from or to fill: a bytearray, an mmap, a view of one.

    Raises TypeError for read-only memory, because ctypes would not return its address.
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
        """Return a view of a part."""
        return self._view[offset : offset + size]

    def read(self, offset: int, into: memoryview) -> None:
        """Copy from the region."""
        _copy(into, self._view[offset : offset + into.nbytes])

    def write(self, offset: int, data: memoryview) -> None:
        """Copy to the region."""
        _copy(self._view[offset : offset + data.nbytes], data)


class File:
    """A region in a file: the first `size` bytes of an open descriptor, which the caller owns."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    def view(self, offset: int, size: int) -> None:
        """Return None: it is not memory. As a Target it is written to."""

    def read(self, offset: int, into: memoryview) -> None:
        """Read from the file. Raises OciError if it ends too early, OSError."""
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
    """Whether all bytes of writable memory are zero; stops at the first one that is not."""
    head = view[:_HEAD]
    if head != bytes(len(head)):
        return False
    if view.nbytes <= _HEAD:
        return True
    # Each byte equals the one 64 before it, and the first 64 are zero.
    with address_of(view) as start:
        return bool(_libc.memcmp(start, start + _HEAD, view.nbytes - _HEAD) == 0)


def _copy(into: memoryview, data: memoryview) -> None:
    if into.nbytes != data.nbytes:
        raise OciError(
            f"{data.nbytes} bytes do not fit into the remaining {into.nbytes} bytes of a region",
            code="GPS-601",
        )
    if data.nbytes:
        with address_of(into) as there, address_of(data) as here:
            ctypes.memmove(there, here, data.nbytes)


@contextmanager
def address_of(view: memoryview) -> Iterator[int]:
    """Yield the address of writable memory, which stays there for the block."""
    held = ctypes.c_char.from_buffer(view)
    yield ctypes.addressof(held)
