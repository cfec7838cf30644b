"""Figures about the contents of checkpoints, and what two of them share, from their manifests alone.

Bytes of memory are uncompressed bytes, zeros included; bytes of blobs are bytes on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.records.manifest import GpuProcess, GpuRecord, Manifest

# Steps of a checkpoint's timeline, see gpusnap.runtime_shim.snapshot: the first of these stops the processes,
# and after the last they run again, or have ended.
_STOPS = ("lock", "dump")
_RUNS = ("resume", "dump")
# The container runs on, or stays suspended.
_KEEPS = {"resume", "adopt"}


@dataclass(frozen=True, slots=True)
class Part:
    """A part that is in chunks: a region of a process's memory, or an image of CRIU's."""

    process: int | None
    """The PID in the container; None for an image."""
    name: str
    """The address of the region in hexadecimal, or the name of the image."""
    table: Table


@dataclass(frozen=True, slots=True)
class Statistics:
    """The chunks of one checkpoint, all parts together."""

    size: int
    """Bytes of memory."""
    zero: int
    """Of these, bytes that are in no chunk."""
    repeated: int
    """Of these, bytes of chunks whose content occurred before in the same checkpoint."""
    chunks: int
    """Number of uses of chunks."""
    blobs: int
    plain: int
    """Number of blobs that are stored uncompressed."""
    zstd: int
    planes: int
    stored: int
    """Bytes of the blobs."""
    ratio: float
    """Bytes of memory for each byte of a blob; 0 if there is no blob."""


@dataclass(frozen=True, slots=True)
class SharedChunks:
    """The chunks that a checkpoint shares with another one."""

    digest: str
    """Digest of the other one."""
    names: tuple[str, ...]
    size: int
    """Bytes of blobs."""
    share: float
    """As a part of this checkpoint's bytes, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Span:
    """Memory of A and of B, compared offset by offset; bytes."""

    same: int = 0
    changed: int = 0
    only_a: int = 0
    only_b: int = 0

    def __add__(self, other: Span) -> Span:
        return Span(
            self.same + other.same,
            self.changed + other.changed,
            self.only_a + other.only_a,
            self.only_b + other.only_b,
        )


@dataclass(frozen=True, slots=True)
class PartComparison:
    """One part of A, of B, or of both."""

    process: int | None
    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class New:
    """The blobs of B that A does not have: the additional cost of B on disk and in a push."""

    blobs: int
    size: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two manifests; a checkpoint without one has no chunks, GPUs or GPU processes."""

    total: Span
    parts: tuple[PartComparison, ...]
    new: New
    processes_same: int
    processes_changed: tuple[tuple[GpuProcess, GpuProcess], ...]
    processes_only_a: tuple[GpuProcess, ...]
    processes_only_b: tuple[GpuProcess, ...]
    gpus_both: tuple[tuple[GpuRecord, GpuRecord], ...]
    gpus_only_a: tuple[GpuRecord, ...]
    gpus_only_b: tuple[GpuRecord, ...]


def parts(record: Manifest | None) -> tuple[Part, ...]:
    """Return all parts that are in chunks: regions by process, then images."""
    if record is None:
        return ()
    regions = [Part(p.pid, f"{r.start:x}", r.table) for p in record.processes for r in p.regions]
    return (*regions, *(Part(None, each.name, each.table) for each in record.files))


def count_zeros(table: Table) -> int:
    """Return how many bytes of a table are in no chunk."""
    return table.size - sum(chunk.size for chunk in table.chunks)


def statistics(record: Manifest | None) -> Statistics:
    """Return the figures of a checkpoint's chunks."""
    found = parts(record)
    seen: set[str] = set()
    blobs: dict[str, Chunk] = {}
    repeated = uses = 0
    for chunk in (chunk for part in found for chunk in part.table.chunks):
        uses += 1
        repeated += chunk.size if chunk.plain in seen else 0
        seen.add(chunk.plain)
        blobs.setdefault(chunk.blob, chunk)
    plain = sum(chunk.encoding == "plain" for chunk in blobs.values())
    size, stored = sum(part.table.size for part in found), sum(chunk.stored for chunk in blobs.values())
    return Statistics(
        size=size,
        zero=sum(count_zeros(part.table) for part in found),
        repeated=repeated,
        chunks=uses,
        blobs=len(blobs),
        plain=plain,
        zstd=sum(chunk.encoding == "zstd" for chunk in blobs.values()),
        planes=sum(chunk.encoding == "planes" for chunk in blobs.values()),
        stored=stored,
        ratio=round(size / stored, 3) if stored else 0.0,
    )


def find_shared(
    own: Mapping[str, int], others: Iterable[tuple[str, tuple[str, ...], Mapping[str, int]]]
) -> tuple[SharedChunks, ...]:
    """Return what a checkpoint shares with others, the largest first; others that share nothing are omitted.

    own: its blobs by digest, with their bytes. others: digest, names and blobs of each.
    """
    whole = sum(own.values()) or 1
    found = []
    for digest, names, blobs in others:
        size = sum(own[blob] for blob in own.keys() & blobs.keys())
        if size:
            found.append(SharedChunks(digest, names, size, round(size / whole, 6)))
    return tuple(sorted(found, key=lambda each: (-each.size, each.digest)))


def compare_tables(a: Table, b: Table) -> Span:
    """Compare two tables offset by offset."""
    same = changed = at = 0
    end = min(a.size, b.size)
    ours, theirs = _stretches(a), _stretches(b)
    end_a = end_b = 0
    key_a: object = None
    key_b: object = None
    while at < end:
        if at >= end_a:
            end_a, key_a = next(ours)
        if at >= end_b:
            end_b, key_b = next(theirs)
        step = min(end_a, end_b, end) - at
        if key_a == key_b:
            same += step
        else:
            changed += step
        at += step
    return Span(same, changed, a.size - end, b.size - end)


def compare(a: Manifest | None, b: Manifest | None) -> Comparison:
    """Compare two manifests."""
    compared = tuple(_compare_parts(a, b))
    processes_a, processes_b = _processes(a), _processes(b)
    both = [(processes_a[pid], processes_b[pid]) for pid in processes_a if pid in processes_b]
    different = tuple((x, y) for x, y in both if (x.name, x.command) != (y.name, y.command))
    gpus_a, gpus_b = _gpus(a), _gpus(b)
    return Comparison(
        total=sum((each.span for each in compared), Span()),
        parts=compared,
        new=_find_new(a, b),
        processes_same=len(both) - len(different),
        processes_changed=different,
        processes_only_a=tuple(p for pid, p in processes_a.items() if pid not in processes_b),
        processes_only_b=tuple(p for pid, p in processes_b.items() if pid not in processes_a),
        gpus_both=tuple((gpu, gpus_b[uuid]) for uuid, gpu in gpus_a.items() if uuid in gpus_b),
        gpus_only_a=tuple(gpu for uuid, gpu in gpus_a.items() if uuid not in gpus_b),
        gpus_only_b=tuple(gpu for uuid, gpu in gpus_b.items() if uuid not in gpus_a),
    )


def _compare_parts(a: Manifest | None, b: Manifest | None) -> Iterator[PartComparison]:
    ours = {(part.process, part.name): part.table for part in parts(a)}
    theirs = {(part.process, part.name): part.table for part in parts(b)}
    for process, name in sorted(ours.keys() | theirs.keys(), key=_order):
        table_a, table_b = ours.get((process, name)), theirs.get((process, name))
        if table_a is not None and table_b is not None:
            span = compare_tables(table_a, table_b)
        else:
            span = Span(only_a=table_a.size if table_a else 0, only_b=table_b.size if table_b else 0)
        yield PartComparison(process, name, span)


def _order(part: tuple[int | None, str]) -> tuple[bool, int, int, str]:
    """Sort regions by process and address, then images by name."""
    process, name = part
    return process is None, process or 0, int(name, 16) if process is not None else 0, name


def _stretches(table: Table) -> Iterator[tuple[int, object]]:
    """Yield the end of each stretch of a table, and a value that identifies its content; None for zeros."""
    at = 0
    for chunk in table.chunks:
        if chunk.offset > at:
            yield chunk.offset, None
        at = chunk.offset + chunk.size
        yield at, (chunk.offset, chunk.size, chunk.plain)
    if at < table.size:
        yield table.size, None


def _find_new(a: Manifest | None, b: Manifest | None) -> New:
    had = {chunk.blob for part in parts(a) for chunk in part.table.chunks}
    new = {chunk.blob: chunk.stored for part in parts(b) for chunk in part.table.chunks}
    sizes = [size for blob, size in new.items() if blob not in had]
    return New(len(sizes), sum(sizes))


def _processes(record: Manifest | None) -> dict[int, GpuProcess]:
    return {each.pid: each for each in record.processes} if record else {}


def _gpus(record: Manifest | None) -> dict[str, GpuRecord]:
    return {each.uuid: each for each in record.gpus} if record else {}


def measure_stopped(timing: Sequence[Step]) -> float | None:
    """Return seconds from the first step that stops the processes until they run again, or have ended."""
    starts = [step.start for step in timing if step.name in _STOPS]
    ends = [step.start + step.seconds for step in timing if step.name in _RUNS]
    return round(max(ends) - min(starts), 3) if starts and ends else None


def ended_container(timing: Sequence[Step]) -> bool:
    """Return whether the dump ended the container."""
    names = {step.name for step in timing}
    return "dump" in names and not names & _KEEPS
