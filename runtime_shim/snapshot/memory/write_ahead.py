"""Writes chunks of memory while the driver still fills it, so that the disk does not wait for the driver.

The driver does not report its progress, so this guesses: the driver fills a region from its beginning, and
the memory before a page that is not zero is probably complete. A wrong guess costs one unused blob: each
chunk is copied, and named by the digest of that copy (see gpusnap.oci.chunks.writer). When the driver is
done, the whole region is read and hashed. Chunks with the digest of one that was written ahead are not
written again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress

from gpusnap.oci.chunks import writer as writing
from gpusnap.oci.chunks.buffers import is_zero
from gpusnap.oci.chunks.encoding import ReadSpeed
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory.tmpfs import Area
from gpusnap.runtime_shim.records.manifest import ChunkTotals
from gpusnap.runtime_shim.settings import Memory

# The driver copies in a thread of its own, and hashing on all cores would slow it down; on half of them it
# does not (docs/benchmarks.md, "A checkpoint beside its disk").
_SHARE = 0.5
_MOST = 16
# How many bytes ahead are searched for a page that is not zero.
_AHEAD = 1 << 30
_LOOK = 0.005  # seconds
_PAGE = 4096


class EarlyWriter:
    """Writes parts of regions ahead of time. It raises no errors: what it does not write is written later."""

    def __init__(
        self,
        layout: Layout,
        settings: Memory,
        known: Known | None,
        speed: ReadSpeed | None = None,
    ) -> None:
        """`speed`: as for gpusnap.oci.chunks.writer.write."""
        self._layout, self._settings, self._known = layout, settings, known
        self._speed = speed
        self._new: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._chunks: dict[str, Chunk] = {}
        self._written: set[tuple[str, int]] = set()

    def begin(self, area: Area) -> None:
        """Watch a new region, which contains only zeros so far."""
        cores = (self._settings.threads or copies.cores()) * _SHARE
        # Each further region gets a smaller share of the cores, because the number of regions is unknown.
        share = max(1, min(_MOST, int(cores / (len(self._threads) + 1))))
        thread = threading.Thread(target=self._watch, args=(area, share), name="gpusnap-early")
        with suppress(RuntimeError):  # the system permits no more threads
            thread.start()
            self._threads.append(thread)

    def end(self) -> dict[str, Chunk]:
        """Stop, as the driver is done. Return the chunks written so far, by the digest of their plain bytes.

        May be called twice.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        return self._chunks

    def _watch(self, area: Area, threads: int) -> None:
        size, level = self._settings.chunk_size, self._settings.level
        # A full disk, no memory, no thread, a closed area: the writing at the end reports what is wrong.
        with suppress(Exception):
            (table,) = writing.write(
                [area],
                self._layout,
                threads=threads,
                ceiling=threads * writing.worker_memory(size, level),
                chunk_size=size,
                level=level,
                speed=self._speed,
                known=self._known,
                trust=False,
                on_written=self._new.add,
                pieces=self._filled(area, size),
            )
            with self._lock:
                self._chunks |= {chunk.plain: chunk for chunk in table.chunks}
                self._written |= {(area.path, chunk.offset) for chunk in table.chunks}

    def list_new(self) -> dict[str, Chunk]:
        """As `end`, without chunks that were only linked: nobody has read those."""
        return {plain: chunk for plain, chunk in self.end().items() if chunk.blob in self._new}

    def is_written(self, area: Area, offset: int) -> bool:
        """Whether that chunk was written ahead once, so that it probably only has to be read again."""
        return (area.path, offset) in self._written

    def count_chunks(self, tables: Iterable[Table]) -> ChunkTotals:
        """Count the chunks in these tables that were written ahead: bytes of new blobs, and bytes linked."""
        used = {c.blob: c for table in tables for c in table.chunks if c.plain in self._chunks}
        new = sum(chunk.stored for blob, chunk in used.items() if blob in self._new)
        linked = sum(chunk.size for blob, chunk in used.items() if blob not in self._new)
        return ChunkTotals(new, linked)

    def _filled(self, area: Area, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield the chunks before the last one that is not all zeros, as the driver proceeds."""
        at = 0
        while not self._stop.is_set():
            for offset in range(at, _reach(area, at, size), size):
                if self._stop.is_set():
                    return
                yield 0, offset, size
                at = offset + size
            self._stop.wait(_LOOK)


def _reach(area: Area, at: int, size: int) -> int:
    """Guess how far the driver is: the last offset within _AHEAD of a chunk whose first page is not zero."""
    last = min(area.size - _PAGE, at + _AHEAD)
    for offset in range(last - last % size, at, -size):
        if not is_zero(area.view(offset, _PAGE)):
            return offset
    return at
