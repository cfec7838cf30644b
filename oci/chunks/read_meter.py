"""Measures the read rate of a disk while blobs are read from it.

A `ReadMeter` knows which blob each thread has open, and checks it when it is opened: only a blob of which
neither end is in the kernel's page cache counts. The rate is the bytes of these blobs, divided by the time in
which at least one of them was being read. Other work of the threads, such as decoding, does not count.

If the page cache would evict other files for the blobs, the meter removes each blob from it after it was read
(posix_fadvise(2), POSIX_FADV_DONTNEED), unless it was in it before. Reads with O_DIRECT would have the same
effect. They are not used, because they are faster on some disks and slower on others (bench/disk_reads.py).
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType

_libc = ctypes.CDLL(None)

# Fewer bytes are not significant: a disk starts slowly, and has a cache of its own.
_LEAST = 256 << 20


class _Of(threading.local):
    """The read of one thread."""

    file: io.FileIO | None = None
    """A blob that comes from the disk."""
    size = 0


class ReadMeter:
    """A meter for any number of threads."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cached: Callable[[io.FileIO, int], bool] | None = None,
        *,
        drop: bool = False,
    ) -> None:
        """`clock`: in seconds. `cached`: replaces `in_page_cache`.

        `drop`: remove blobs from the page cache that were not in it before.
        """
        self._clock, self._cached, self._drop = clock, cached or in_page_cache, drop
        self._own = _Of()
        self._lock = threading.Lock()
        self._reading, self._since = 0, 0.0
        self._bytes, self._seconds = 0, 0.0

    @property
    def rate(self) -> float | None:
        """Bytes per second; None if too little was read from the disk."""
        with self._lock:
            return self._bytes / self._seconds if self._bytes >= _LEAST and self._seconds > 0 else None

    def note_opened(self, file: io.FileIO, size: int) -> None:
        """Record that the calling thread will read all `size` bytes of this file. None was read ahead yet."""
        self._own.size = size
        self._own.file = file if size > 0 and not self._cached(file, size) else None

    def around(self, reads: AbstractContextManager[object] | None = None) -> AbstractContextManager[None]:
        """Return a context for `reads` of gpusnap.oci.chunks.reader.Reader, around the given one."""
        return _Reads(self, reads or nullcontext())

    def begin(self) -> None:
        """Record that the calling thread begins to read."""
        if self._own.file is not None:
            with self._lock:
                if not self._reading:
                    self._since = self._clock()
                self._reading += 1

    def end(self, *, whole: bool) -> None:
        """Record that it has ended; `whole`: with everything that it was to read."""
        file, self._own.file = self._own.file, None
        if file is None:
            return
        with self._lock:
            self._reading -= 1
            if not self._reading:
                self._seconds += self._clock() - self._since
            self._bytes += self._own.size if whole else 0
        if self._drop:
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Reads(AbstractContextManager[None]):
    """The context for all threads at once."""

    def __init__(self, meter: ReadMeter, reads: AbstractContextManager[object]) -> None:
        self._meter, self._reads = meter, reads

    def __enter__(self) -> None:
        self._reads.__enter__()
        self._meter.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.end(whole=kind is None)
        self._reads.__exit__(kind, error, trace)


def in_page_cache(file: io.FileIO, size: int) -> bool:
    """Whether the first or the last byte of a file is in the page cache; True if that is not known.

    mincore(2) has nothing read. preadv2(2) with RWF_NOWAIT begins to read what is not there, and finds it if
    the disk is quick, or the calling thread slow (linux, mm/filemap.c, filemap_get_pages).
    """
    offsets = (size - 1, 0) if size > mmap.PAGESIZE else (0,)
    return any(_is_cached_at(file, offset, size) for offset in offsets)


def _is_cached_at(file: io.FileIO, offset: int, size: int) -> bool:
    start = offset - offset % mmap.PAGESIZE
    length = min(size - start, mmap.PAGESIZE)
    resident = ctypes.c_ubyte()
    try:
        with mmap.mmap(
            file.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start
        ) as page:
            first = ctypes.c_char.from_buffer(page)
            address = ctypes.c_void_p(ctypes.addressof(first))
            del first  # it would keep the mapping
            result = _libc.mincore(address, ctypes.c_size_t(length), ctypes.byref(resident))
    except (OSError, ValueError):
        return True
    return result != 0 or bool(resident.value & 1)
