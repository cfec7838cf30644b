"""Reads the blobs of a layout into regions of memory, in many threads.

A `Reader` starts at once, before the regions exist. Its workers open blobs, check them and decompress them
into slots: memory for one chunk each, as many as the ceiling allows. Once the regions exist, `deliver` has
the same workers write the slots out and read the rest. If the regions are in this process's memory from the
start, chunks are read and decompressed straight into them, and there are no slots.

Tables and blobs may come from anybody. A blob is read only if its size is the one in the table, and zstd
never writes more than the size of the chunk. The digest of a chunk is checked before a region gets it: BLAKE3
if the table has it and this host can compute it, else SHA-256. The digest of the blob is computed only after
a failure, to say whether the blob or the table is wrong. A region in our own memory gets the bytes before the
check, and must not be used before all of it is read and checked. `verify_later` leaves the digests of such
regions to `verify`, which may run beside other work; without it, `on_placed` is called for each chunk that is
checked.

Regions of one group are read one after the other, and groups in parallel, so that the processes that use them
progress at the same rate. A caller that waits for a chunk moves it to the head of the queue by `hurry`. A
reading may begin `after` another one, whose chunks are needed first."""

from __future__ import annotations

import io
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import zstandard

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import BlobError, Cancelled, CeilingError, ChunkError, binary_size, reason
from gpusnap.oci.base.files import ask_for
from gpusnap.oci.base.threads import Crew, SharedIterator
from gpusnap.oci.chunks import planes
from gpusnap.oci.chunks.blake3_digests import compute_blake3
from gpusnap.oci.chunks.buffers import Memory, Target
from gpusnap.oci.chunks.table import CHUNK_SIZE, LARGE_CHUNK, Chunk, Table, make_table
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import OCTETS, Descriptor

# Bytes of a blob that are asked for ahead when its reading begins: more than most have.
_FIRST_READ_AHEAD = 8 << 20
# Bytes of a blob that are read at once by a reader with patience: each of these reads is progress.
_PIECE = 1 << 20
# How often an idle worker checks whether it was cancelled, in seconds.
_POLL = 0.05
# … and whether the reading before it has started its last chunk.
_POLL_AFTER = 0.005


def read(
    tables: Sequence[Table],
    layout: Blobs,
    targets: Sequence[Target],
    *,
    threads: int,
    ceiling: int,
    patience: float | None = None,
    interrupt: Callable[[], object] = lambda: None,
) -> None:
    """Fill the targets, one for each table, in order. Parameters and errors are those of Reader.

    `interrupt`: as for `Reader.wait`.
    """
    with Reader(
        tables, layout, threads=threads, ceiling=ceiling, targets=targets, patience=patience
    ) as reading:
        reading.wait(interrupt)


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk of the table `at`, and its place among all chunks."""

    at: int
    chunk: Chunk
    number: int


class _ReadQueue:
    """The chunks that no worker has started to read. Not thread-safe."""

    def __init__(self, tables: Sequence[Table], groups: Sequence[int]) -> None:
        self._parts: list[_Part] = []
        self._first: list[int] = []
        """By table, the number of its first chunk."""
        before: dict[int, int] = {}
        behind: list[tuple[int, int]] = []
        for at, (table, group) in enumerate(zip(tables, groups, strict=True)):
            self._first.append(len(self._parts))
            for chunk in table.chunks:
                behind.append((before.get(group, 0) + chunk.offset, len(self._parts)))
                self._parts.append(_Part(at, chunk, len(self._parts)))
            before[group] = before.get(group, 0) + table.size
        self._first.append(len(self._parts))
        self._line = deque(number for _, number in sorted(behind))
        self._urgent: deque[int] = deque()
        self._taken = bytearray(len(self._parts))

    def __len__(self) -> int:
        return len(self._parts)

    def next(self) -> _Part | None:
        """Return the next one to read; None at the end."""
        for line in (self._urgent, self._line):
            while line and self._taken[line[0]]:
                line.popleft()
            if line:
                return self._parts[line[0]]
        return None

    def take(self, part: _Part) -> None:
        """Mark it as started."""
        self._taken[part.number] = True

    def hurry(self, at: int, offset: int, count: int) -> None:
        """Move the chunk of a table at an offset, and some after it, to the head."""
        begin, end = self._first[at], self._first[at + 1]
        number = bisect_right(self._parts, offset, begin, end, key=lambda part: part.chunk.offset)
        begin = max(begin, number - 1)
        self._urgent.extendleft(reversed(range(begin, min(begin + count, end))))


class EarlierReader(Protocol):
    """A reading whose chunks are needed first: a `Reader`, or another process that reads."""

    @property
    def has_started_all(self) -> bool:
        """As Reader.has_started_all."""


class Reader:
    """Regions that are read back. A context manager, or ended by `close`; it starts when it is created.

    threads: how many at most. ceiling: bytes that slots and workers may use together; fewer workers run if
    that is not enough for all. targets: the regions, one for each table, in order, if they exist. Bytes that
    are in no chunk are not written: the targets contain zeros there. verify_later: leave the check of the
    content of targets in this process's memory to `verify`. groups: the group of each table, in order; see
    above. prepare: called by a worker, with the index of the table and the chunk, before a chunk is written
    into this process's memory; an error that it raises ends the reading. on_placed: called by a worker, with
    the index of the table and the chunk, once that is in its target. reads: entered while a blob is read, to
    limit how many are read at once. turns: entered by a worker for each chunk whose blob is open, to limit
    how many work at once. after: begin when that reading has started its last chunk, or has ended. progress:
    called by a worker after each chunk, with the bytes of plain content read so far, and in all. patience:
    seconds for which the blobs may deliver no byte; then `wait` raises Stalled. A worker that is left behind
    in a read writes nothing into a target by `write` afterwards.

    Raises ChunkError for invalid tables, and CeilingError. `deliver` and `wait` raise what ended it:
    BlobError, ChunkError, LayoutError, Cancelled, and whatever a target raises.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        layout: Blobs,
        *,
        threads: int,
        ceiling: int,
        targets: Sequence[Target] | None = None,
        verify_later: bool = False,
        groups: Sequence[int] = (),
        prepare: Callable[[int, Chunk], None] | None = None,
        on_placed: Callable[[int, Chunk], None] | None = None,
        reads: AbstractContextManager[object] | None = None,
        turns: AbstractContextManager[object] | None = None,
        after: EarlierReader | None = None,
        progress: Callable[[int, int], None] | None = None,
        patience: float | None = None,
    ) -> None:
        self._tables = [make_table(table.size, table.chunks) for table in tables]
        self._layout = layout
        self._targets = self._check_targets(targets) if targets is not None else None
        self._verify_later, self._unverified = verify_later, deque[_Part]()
        self._threads = threads
        self._crew, self._patience = Crew(patience=patience), patience
        self._reads: AbstractContextManager[object] = reads or nullcontext()
        self._turns: AbstractContextManager[object] = turns or nullcontext()
        self._after, self._looking = after, threading.Lock()
        self._large_chunk_lock = threading.Lock()
        self._changed = threading.Condition()
        self._unread = _ReadQueue(self._tables, groups or [0] * len(self._tables))
        self._left = len(self._unread)
        """The number of chunks that are not in their targets."""
        self._prepare, self._on_placed, self._report = prepare, on_placed, progress
        self._bytes = 0
        """Bytes of plain content that were read."""
        self._staged: deque[tuple[_Part, Memory]] = deque()
        self._free: list[Memory] = []
        chunks = [chunk for table in self._tables for chunk in table.chunks]
        self._whole = sum(chunk.size for chunk in chunks)
        self._slot_size = max((chunk.size for chunk in chunks), default=min(CHUNK_SIZE, max(ceiling, 1)))
        self._packed_size = max((chunk.stored for chunk in chunks if chunk.encoding != "plain"), default=0)
        halves = (chunk.size // 2 for chunk in chunks if chunk.encoding == "planes")
        self._plane_size = max(halves, default=0)
        self._workers, self._slots_left = self._compute_shares(threads, ceiling, len(chunks))
        self._crew.start(self._workers, self._work)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise the error that ended the reading, if any; for a caller that has not called `deliver` yet."""
        error = self._crew.failed()
        if error is not None:
            raise error

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are in their targets."""
        return not self._left

    @property
    def has_started_all(self) -> bool:
        """Whether a worker has started the last chunk, or none ever will."""
        with self._changed:
            return self._unread.next() is None or self._crew.is_over

    def hurry(self, at: int, offset: int) -> None:
        """Read that place of a table, and what follows it, next: somebody waits for it."""
        with self._changed:
            self._unread.hurry(at, offset, self._workers)

    def deliver(self, targets: Sequence[Target]) -> None:
        """Fill the targets, one for each table, in order; return when all are filled. To be called once."""
        targets = self._check_targets(targets)
        with self._changed:
            self._targets = targets
            self._changed.notify_all()
        self.wait()

    def wait(self, interrupt: Callable[[], object] = lambda: None) -> None:
        """Return when all targets are filled, if they were given before.

        `interrupt`: with a patience, called from time to time; what it raises ends the reading.
        """
        self._crew.join(interrupt)
        if self._left:
            raise Cancelled("the read was cancelled before all chunks were read")

    def verify(self, *, threads: int = 0) -> None:
        """After `wait`: check what `verify_later` has left, in `threads` threads, those of the reading for 0.

        Raises BlobError, ChunkError, Cancelled.
        """
        unverified = SharedIterator(list(self._unverified))
        self._crew = Crew()

        def work() -> None:
            for part in unverified:
                self._crew.check()
                view, chunk = self._find_place(part), part.chunk
                assert view is not None
                if not _has_content(chunk, view):
                    self._layout.check_blob(Descriptor(OCTETS, chunk.blob, chunk.stored))
                    raise _wrong_content(chunk)

        self._crew.start(min(threads or self._threads, len(self._unverified)), work)
        self._crew.join()

    def close(self) -> None:
        """End the workers at any point, and release the memory."""
        self._crew.stop()
        for memory in [*self._free, *(memory for _, memory in self._staged)]:
            memory.free()
        self._free.clear()
        self._staged.clear()

    # Private

    def _check_targets(self, targets: Sequence[Target]) -> Sequence[Target]:
        if len(targets) != len(self._tables):
            raise ChunkError(f"{len(self._tables)} regions were read for {len(targets)} targets")
        for at, (table, target) in enumerate(zip(self._tables, targets, strict=True)):
            if table.size != target.size:
                raise ChunkError(f"region {at} of {table.size} bytes does not fit a target of {target.size}")
        return targets

    def _compute_shares(self, threads: int, ceiling: int, parts: int) -> tuple[int, int]:
        """Return how many workers, and how many slots, the ceiling allows."""
        direct = all(target.view(0, 0) is not None for target in self._targets or ())
        slot = 0 if self._targets is not None and direct else self._slot_size
        beside = self._packed_size + self._plane_size
        need = slot + beside
        if ceiling < need:
            allowed, needed = binary_size(ceiling), binary_size(need)
            raise CeilingError(
                f"{allowed} of memory is not enough for the largest chunk, which needs {needed}"
            )
        if parts == 0:
            return 0, 0
        workers = max(1, min(threads, parts, ceiling // need if need else parts))
        return workers, min(parts, (ceiling - workers * beside) // slot) if slot else 0

    def _work(self) -> None:
        packed = Memory(self._packed_size)
        plane = Memory(self._plane_size) if self._plane_size else None
        # A window larger than a chunk is none of ours, and a large one is `_large_chunk_lock`'s.
        window = max(min(self._slot_size, LARGE_CHUNK), 1 << 10)
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        try:
            self._await_begun()
            while self._step(packed, plane, decompressor):
                continue
        finally:
            packed.free()
            if plane is not None:
                plane.free()

    def _await_begun(self) -> None:
        """Return when the reading before this one has started its last chunk, or has ended.

        One worker checks, and the others wait for it, because each check takes the interpreter from other
        threads.
        """
        with self._looking:
            while self._after is not None and not self._after.has_started_all:
                self._crew.check()
                time.sleep(_POLL_AFTER)
            self._after = None

    def _step(self, packed: Memory, plane: Memory | None, decompressor: zstandard.ZstdDecompressor) -> bool:
        """Bring the next chunk one step further; False if there is none."""
        step = self._next()
        if step is None:
            return False
        part, place, ready = step
        if not ready:
            into = place.view if isinstance(place, Memory) else place
            verify_later = self._verify_later and not isinstance(place, Memory)
            large = part.chunk.encoding != "plain" and part.chunk.size > LARGE_CHUNK
            with (
                self._layout.open_blob(part.chunk.blob, part.chunk.stored) as file,  # may come from far
                self._turns,
                self._large_chunk_lock if large else nullcontext(),
            ):
                self._crew.check()
                if self._prepare is not None and not isinstance(place, Memory):
                    self._prepare(part.at, part.chunk)
                # One for it alone, as each keeps the memory of its largest window.
                unpack = zstandard.ZstdDecompressor(max_window_size=part.chunk.size) if large else None
                _fetch(
                    file,
                    part.chunk,
                    into,
                    packed.view,
                    plane.view if plane is not None else packed.view,
                    unpack or decompressor,
                    reads=self._reads,
                    verify_later=verify_later,
                    arrived=self._crew.note_progress if self._patience is not None else None,
                )
                del unpack
            if verify_later:
                self._unverified.append(part)
            self._count_bytes(part.chunk.size)
        if isinstance(place, Memory):
            self._hand_over(part, place)
        else:
            self._note_done(part)
        return True

    def _next(self) -> tuple[_Part, Memory | memoryview, bool] | None:
        """Return the next part, its slot or place in a target, and whether it was read; None at the end."""
        with self._changed:
            while True:
                self._crew.check()
                if self._targets is not None and self._staged:
                    return *self._staged.popleft(), True
                part = self._unread.next()
                if part is not None and (place := self._find_place(part) or self._get_slot()) is not None:
                    self._unread.take(part)
                    return part, place, False
                if self._targets is not None and part is None:
                    self._changed.notify_all()
                    return None
                self._changed.wait(_POLL)

    def _find_place(self, part: _Part) -> memoryview | None:
        """Return the place of a chunk in a target that is this process's memory."""
        chunk = part.chunk
        return self._targets[part.at].view(chunk.offset, chunk.size) if self._targets is not None else None

    def _get_slot(self) -> Memory | None:
        if self._free:
            return self._free.pop()
        if self._slots_left == 0:
            return None
        self._slots_left -= 1
        return Memory(self._slot_size)

    def _hand_over(self, part: _Part, memory: Memory) -> None:
        """Write a part to its target, or stage it until there is one."""
        with self._changed:
            targets = self._targets
            if targets is None:
                self._staged.append((part, memory))
                return
        self._crew.check()
        targets[part.at].write(part.chunk.offset, memory.view[: part.chunk.size])
        with self._changed:
            self._free.append(memory)
        self._note_done(part)

    def _count_bytes(self, size: int) -> None:
        with self._changed:
            self._bytes += size
            done = self._bytes
        if self._report is not None:
            self._report(done, self._whole)

    def _note_done(self, part: _Part) -> None:
        if self._on_placed is not None:
            self._on_placed(part.at, part.chunk)
        with self._changed:
            self._left -= 1
            self._changed.notify_all()


def _fetch(
    file: io.FileIO,
    chunk: Chunk,
    plain: memoryview,
    packed: memoryview,
    plane: memoryview,
    decompressor: zstandard.ZstdDecompressor,
    *,
    reads: AbstractContextManager[object],
    verify_later: bool,
    arrived: Callable[[], object] | None = None,
) -> None:
    """Read a chunk's bytes into `plain`, and check them, or only the size. Raises BlobError, ChunkError.

    `arrived`: called after each piece of the blob.
    """
    into = plain[: chunk.size]
    blob = into if chunk.encoding == "plain" else packed[: chunk.stored]
    with reads:
        # Without this, the kernel's read-ahead starts small for each file.
        ask_for(file, 0, min(chunk.stored, _FIRST_READ_AHEAD))
        done = 0
        while done < blob.nbytes:
            try:
                count = file.readinto(blob[done:] if arrived is None else blob[done : done + _PIECE])
            except OSError as error:
                raise BlobError(f"the blob {chunk.blob} cannot be read: {reason(error)}") from error
            if not count:
                raise BlobError(f"the blob {chunk.blob} ends at {done} of {chunk.stored} bytes")
            done += count
            if arrived is not None:
                arrived()
    if chunk.encoding == "plain":
        if not verify_later and not _has_content(chunk, blob):
            _check_blob(chunk, blob)
            raise _wrong_content(chunk)
        return
    try:
        if chunk.encoding == "planes":
            planes.decode(blob, into, plane, decompressor)
            count = chunk.size
        else:
            # The memory limits the output, whatever size the frame says.
            with decompressor.stream_reader(blob, closefd=False) as reader:
                count = reader.readinto(into)
    except (zstandard.ZstdError, ChunkError) as error:
        _check_blob(chunk, blob)
        raise ChunkError(
            f"the blob {chunk.blob} of the chunk at {chunk.offset} is not valid {chunk.encoding}: {error}"
        ) from error
    if count != chunk.size or (not verify_later and not _has_content(chunk, into)):
        _check_blob(chunk, blob)
        raise _wrong_content(chunk)


def _has_content(chunk: Chunk, plain: memoryview) -> bool:
    """Whether these are the plain bytes of a chunk: by BLAKE3 if its table and this host have it."""
    found = compute_blake3(plain) if chunk.blake3 else ""
    return found == chunk.blake3 if found else digest_of(plain) == chunk.plain


def _check_blob(chunk: Chunk, blob: memoryview) -> None:
    """Raise BlobError if that is not the whole blob of a chunk."""
    if digest_of(blob) != chunk.blob:
        raise BlobError(f"the blob {chunk.blob} does not match its digest")


def _wrong_content(chunk: Chunk) -> ChunkError:
    """The error if the blob of a chunk is right, but does not contain the chunk."""
    return ChunkError(f"the blob {chunk.blob} does not contain the chunk at {chunk.offset}, {chunk.plain}")
