"""Writes regions of memory to blobs of a layout, in many threads.

Each worker takes the next chunk of any region and does all steps itself. It copies the chunk into its private
memory, skips it if it is zero, hashes it, looks for it among the known chunks, chooses an encoding, encodes
it, hashes it again, and writes it. No data is passed from thread to thread, so only the workers' own buffers
use memory.

The copy ensures that the digest is right. A region may be a file that a process of the container still has
mapped. If a chunk were hashed and written from there, it could change in between, and the store would contain
it under a wrong digest. Later checkpoints link chunks by digest without reading them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import zstandard

from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import CeilingError, ChunkError, LayoutError, binary_size
from gpusnap.oci.base.threads import Crew, SharedIterator
from gpusnap.oci.chunks import encoding, planes
from gpusnap.oci.chunks.blake3_digests import compute_blake3
from gpusnap.oci.chunks.buffers import Memory, Source, is_zero
from gpusnap.oci.chunks.encoding import WORTH, EncodingChooser, ReadSpeed
from gpusnap.oci.chunks.index import Known, Place
from gpusnap.oci.chunks.table import (
    CHUNK_SIZE,
    LARGEST_CHUNK,
    MEDIA_TYPES,
    Chunk,
    Encoding,
    Progress,
    Table,
    make_table,
)
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout

LEVEL = 1
HIGHEST_LEVEL = 19
PAGE = 4096


def worker_memory(chunk_size: int, level: int) -> int:
    """Return the bytes that one worker needs: for its chunk, and for a compressed copy and zstd, if any."""
    if level == 0:
        return chunk_size
    parameters = zstandard.ZstdCompressionParameters.from_level(level, source_size=chunk_size)
    # Memory of the stream beside its context: a window and at most two blocks of 128 KiB; then the chooser.
    streams = (1 << parameters.window_log) + (2 << 17) + (1 << 19) + encoding.MEMORY
    contexts = int(parameters.estimated_compression_context_size()) + planes.COMPRESSOR_MEMORY
    return 2 * chunk_size + chunk_size // 2 + contexts + streams


def write(
    sources: Sequence[Source],
    layout: Layout,
    *,
    threads: int,
    ceiling: int,
    chunk_size: int = CHUNK_SIZE,
    level: int = LEVEL,
    speed: ReadSpeed | None = None,
    known: Known | None = None,
    trust: bool = True,
    written_before: Mapping[str, Chunk] = MappingProxyType({}),
    pieces: Iterable[tuple[int, int, int]] | None = None,
    on_written: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Table, ...]:
    """Write the regions as blobs; return one table for each, in order.

    chunk_size: bytes, a multiple of 4096. level: zstd's, 1 to 19; 0 never compresses.
    ceiling: bytes of memory for all workers together; if it is too low for `threads` workers, fewer run.
    speed: of the disk and the host that will read the chunks; without it each chunk is stored in its smallest
    encoding.
    known: chunks found there are linked, not compressed and written.
    trust: accept a blob that the layout has if its name and size are right; else it is written again.
    written_before: chunks that the layout already has, by the digest of their plain bytes; not checked.
    pieces: the chunks to write, as (index of the source, offset, size), in this order; by default all of
    them. In the table, the others count as zeros.
    on_written: called with the digest of each new blob, by the worker that wrote it.
    progress: called after each chunk, by a worker, one call at a time.
    The layout is not durable before `Layout.commit`.

    Raises ChunkError, CeilingError, DiskFull, DiskError, LayoutError, and whatever a source or `progress`
    raises: the first error ends all workers. Blobs that are complete by then stay.
    """
    if not PAGE <= chunk_size <= LARGEST_CHUNK or chunk_size % PAGE:
        raise ChunkError(
            f"a chunk size of {chunk_size} bytes is not a multiple of {PAGE} up to {LARGEST_CHUNK}",
            code="GPS-111",
        )
    if not 0 <= level <= HIGHEST_LEVEL:
        raise ChunkError(f"zstd level {level} is not between 0 and {HIGHEST_LEVEL}", code="GPS-111")
    for source in sources:
        make_table(source.size, ())
    need = worker_memory(chunk_size, level)
    if ceiling < need:
        raise CeilingError(
            f"{binary_size(ceiling)} of memory is not enough for one chunk of {binary_size(chunk_size)}, "
            f"which needs {binary_size(need)}"
        )
    count = sum(-(-source.size // chunk_size) for source in sources)
    crew = Crew()
    writing = _Writer(sources, layout, chunk_size, level, speed, known, trust, on_written, progress, crew)
    writing.begin(written_before, pieces)
    crew.start(max(1, min(threads, ceiling // need, count)), writing.work)
    crew.join()
    return writing.tables()


def cut(sources: Sequence[Source], chunk_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield all chunks of the regions, each as (index of the source, offset, size)."""
    for at, source in enumerate(sources):
        for offset in range(0, source.size, chunk_size):
            yield at, offset, min(chunk_size, source.size - offset)


@dataclass(frozen=True, slots=True)
class _StoredChunk:
    """A blob that contains a chunk."""

    blob: str
    stored: int
    encoding: Encoding
    blake3: str = ""
    """The BLAKE3 digest of the chunk; empty if it is not known."""


class _Tools:
    """The buffers and compressors of one worker, which it uses again for each chunk."""

    def __init__(self, chunk_size: int, level: int, speed: ReadSpeed | None) -> None:
        self.plain = Memory(chunk_size)
        self.packed = Memory(chunk_size if level else 0)
        self.top = Memory(chunk_size // 2 if level else 0)
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._planes = planes.make_compressor()
        self._chooser = EncodingChooser(speed) if level else None

    def free(self) -> None:
        """Free the memory, even if something still refers to it."""
        for memory in (self.plain, self.packed, self.top):
            memory.free()
        if self._chooser is not None:
            self._chooser.free()

    def pack(self, plain: memoryview) -> tuple[memoryview, Encoding] | None:
        """Encode the chunk in this worker's memory; return it and its encoding, or None to store it plain."""
        size = plain.nbytes
        width = self._chooser.choose(plain) if self._chooser is not None else None
        if width is None:
            return None
        packed = self.packed.view[: int(size * WORTH)]
        if width:
            count = planes.encode(plain, width, packed, self.top.view, self._planes)
            return (packed[:count], "planes") if count else None
        # A reader fills the existing buffer; compress() would allocate a new one each time.
        with self._compressor.stream_reader(plain, size=size, closefd=False) as reader:
            count = reader.readinto(packed)
            # If the buffer is completely full, the data may have been cut off.
            return (packed[:count], "zstd") if count < packed.nbytes else None


class _Writer:
    """The state that the workers of one call of `write` share."""

    def __init__(
        self,
        sources: Sequence[Source],
        layout: Layout,
        chunk_size: int,
        level: int,
        speed: ReadSpeed | None,
        known: Known | None,
        trust: bool,
        on_written: Callable[[str], None] | None,
        progress: Callable[[Progress], None] | None,
        crew: Crew,
    ) -> None:
        self._sources = sources
        self._layout = layout
        self._chunk_size = chunk_size
        self._level = level
        self._speed = speed
        self._known = known
        self._trust = trust
        self._on_written = on_written
        self._report = progress
        self._crew = crew
        self._lock = threading.Lock()
        self._pieces: SharedIterator[tuple[int, int, int]]
        self._written_before: frozenset[str] = frozenset()
        # SHA-256 of their plain bytes, by their BLAKE3 digest, which takes a fifth of the time to compute.
        self._digests: dict[str, str] = {}
        self._chunks: list[list[Chunk]] = [[] for _ in sources]
        # Chunks found before in this call: regions may contain the same bytes twice.
        self._written_chunks: dict[str, _StoredChunk] = {}
        self._progress = Progress(sum(source.size for source in sources))

    def begin(
        self, written_before: Mapping[str, Chunk], pieces: Iterable[tuple[int, int, int]] | None
    ) -> None:
        """Set the chunks to write, and those that are already written."""
        self._pieces = SharedIterator(cut(self._sources, self._chunk_size) if pieces is None else pieces)
        self._written_before = frozenset(written_before)
        self._digests = {chunk.blake3: plain for plain, chunk in written_before.items() if chunk.blake3}
        for plain, chunk in written_before.items():
            self._written_chunks[plain] = _StoredChunk(chunk.blob, chunk.stored, chunk.encoding, chunk.blake3)

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of what was written, one for each source."""
        found = zip(self._sources, self._chunks, strict=True)
        in_order = [(source.size, sorted(chunks, key=lambda chunk: chunk.offset)) for source, chunks in found]
        return tuple(make_table(size, chunks) for size, chunks in in_order)

    def work(self) -> None:
        """Write chunks until none is left, in one worker."""
        tools = _Tools(self._chunk_size, self._level, self._speed)
        try:
            for at, offset, size in self._pieces:
                self._crew.check()
                view = tools.plain.view[:size]
                self._sources[at].read(offset, view)
                self._crew.check()
                self._write_chunk(at, offset, view, tools)
        finally:
            tools.free()

    def _write_chunk(self, at: int, offset: int, view: memoryview, tools: _Tools) -> None:
        size = view.nbytes
        if is_zero(view):
            self._add_progress(size, zero=size)
            return
        blake3 = compute_blake3(view)
        plain = self._digests.get(blake3) or digest_of(view)
        stored = self._written_chunks.get(plain) or self._link_known(plain, size)
        known, written = size, 0
        if stored is None:
            self._crew.check()
            stored, written = self._write_blob(view, plain, tools)
            known = 0
        elif plain in self._written_before:
            known = 0  # its writer has counted it
        blake3 = stored.blake3 or blake3
        self._written_chunks.setdefault(plain, replace(stored, blake3=blake3))
        chunk = Chunk(offset, size, plain, stored.blob, stored.stored, stored.encoding, blake3)
        self._chunks[at].append(chunk)
        self._add_progress(size, known=known, written=written)

    def _link_known(self, plain: str, size: int) -> _StoredChunk | None:
        """Link a chunk of an earlier checkpoint into this layout; return None if that is not possible."""
        place = self._known.find(plain) if self._known is not None else None
        if place is None or not _can_hold(place, plain, size):
            return None
        try:
            blob = Descriptor(MEDIA_TYPES[place.encoding], place.blob, place.stored)
            if self._layout.link_durable([blob], Layout(place.layout)):
                return None
        except LayoutError:
            return None
        return _StoredChunk(place.blob, place.stored, place.encoding)

    def _write_blob(self, view: memoryview, plain: str, tools: _Tools) -> tuple[_StoredChunk, int]:
        """Write a chunk as a blob; return it, and its size, or 0 if the layout already had it."""
        packed = tools.pack(view) if self._level else None
        self._crew.check()
        encoding: Encoding = "plain"
        data, digest = view, plain
        if packed is not None:
            data, encoding = packed
            digest = digest_of(data)
        size = data.nbytes
        written = 0 if self._trust and self._layout.has_blob(digest, size) else size
        self._layout.add_blob(data, media_type=MEDIA_TYPES[encoding], digest=digest, anew=not self._trust)
        if written and self._on_written is not None:
            self._on_written(digest)
        return _StoredChunk(digest, size, encoding), written

    def _add_progress(self, size: int, *, zero: int = 0, known: int = 0, written: int = 0) -> None:
        with self._lock:
            now = self._progress
            self._progress = Progress(
                now.total, now.done + size, now.zero + zero, now.known + known, now.written + written
            )
            if self._report is not None:
                self._report(self._progress)


def _can_hold(place: Place, plain: str, size: int) -> bool:
    """Whether a known blob can be that of a chunk: an index with wrong values can still be well-formed."""
    if place.encoding == "plain":
        return place.blob == plain and place.stored == size
    return 0 < place.stored <= size
