"""Tables of chunks: the parts of a region of memory, and the blobs with their bytes.

A region is cut at multiples of the chunk size. Each chunk is one blob, plain, zstd-compressed, or in planes
(planes.py), and has two digests: that of its plain bytes, by which an unchanged chunk is recognized, and that
of its blob. A chunk of zeros has no entry: everything between the entries of a table is zero.

In JSON a table is {"size": bytes, "digest": "sha256", "chunks": [row, …]}, a row either
[offset, size, plain hex] for a plain blob, [offset, size, plain hex, stored, blob hex] for a zstd one, or the
same with "planes" at its end. A member "blake3" beside the chunks may have the BLAKE3 of the plain bytes of
each row, in hex, or null: readers that can compute it use it for the check, because it is faster. Older
readers ignore such a member; they would refuse a longer row. A table may come from anybody: every number in
it is checked here before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import ChunkError, DigestError
from gpusnap.oci.chunks.blake3_digests import is_blake3
from gpusnap.oci.layout.digests import PREFIX, get_hex
from gpusnap.oci.layout.documents import Descriptor

Encoding: TypeAlias = Literal["plain", "zstd", "planes"]

MIB = 1 << 20
# Measured with bench/chunks.py and bench/store.py: larger ones save no time, and store more again if a change
# is in many places; smaller ones need more files.
CHUNK_SIZE = 8 * MIB
# A whole chunk is in memory, in every worker.
LARGEST_CHUNK = 1 << 30
# zstd may use as much memory for a window as a chunk has, for a blob of some KiB, and a table may say so for
# any number of blobs: of chunks larger than this, one is decompressed at a time.
LARGE_CHUNK = 64 << 20
# In one region: 8 TiB in chunks of 8 MiB.
MOST_CHUNKS = 1 << 20
# x86-64's and aarch64's user address space.
LARGEST_REGION = 1 << 47

MEDIA_TYPES: Mapping[Encoding, str] = {
    "plain": "application/vnd.gpusnap.chunk.v1",
    "zstd": "application/vnd.gpusnap.chunk.v1+zstd",
    "planes": "application/vnd.gpusnap.chunk.v1+planes",
}
# The types of a row's members.
_PLAIN = (int, int, str)
_ZSTD = (*_PLAIN, int, str)
_PLANES = (*_ZSTD, str)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a region that is not all zeros; `stored` is the size of its blob."""

    offset: int
    size: int
    plain: str
    blob: str
    stored: int
    encoding: Encoding
    blake3: str = ""
    """BLAKE3 of the plain bytes, in hex; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class Table:
    """A region of `size` bytes as its chunks, in order. `make_table` and `from_json` make checked ones."""

    size: int
    chunks: tuple[Chunk, ...]

    @property
    def stored(self) -> int:
        """The bytes of all blobs, each counted as often as it is used."""
        return sum(chunk.stored for chunk in self.chunks)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield offset and size of each run of zeros."""
        at = 0
        for chunk in self.chunks:
            if chunk.offset > at:
                yield at, chunk.offset - at
            at = chunk.offset + chunk.size
        if at < self.size:
            yield at, self.size - at


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a reading or a writing is, in bytes of plain content; `written` is in bytes of new blobs."""

    total: int
    done: int = 0
    zero: int = 0
    known: int = 0
    written: int = 0


def make_table(size: int, chunks: Sequence[Chunk]) -> Table:
    """Return a table whose every number was checked. Raises ChunkError, which names the chunk."""
    if not 0 <= size <= LARGEST_REGION:
        raise ChunkError(f"a region cannot have {size} bytes")
    if len(chunks) > MOST_CHUNKS:
        raise ChunkError(f"a region of {len(chunks)} chunks exceeds the limit of {MOST_CHUNKS}")
    end = 0
    for at, chunk in enumerate(chunks):
        fault = _fault(chunk, end, size)
        if fault:
            raise ChunkError(f"chunk {at} at {chunk.offset} {fault}")
        end = chunk.offset + chunk.size
    return Table(size, tuple(chunks))


def to_json(table: Table) -> dict[str, object]:
    """The table as JSON, see above."""
    found: dict[str, object] = {
        "size": table.size,
        "digest": "sha256",
        "chunks": [_row(chunk) for chunk in table.chunks],
    }
    if any(chunk.blake3 for chunk in table.chunks):
        found["blake3"] = [chunk.blake3 or None for chunk in table.chunks]
    return found


def from_json(value: object) -> Table:
    """Parse and check a table. Raises ChunkError."""
    if not isinstance(value, dict) or value.get("digest") != "sha256":
        raise ChunkError("a table of chunks must be a JSON object with sha256 digests")
    size, rows = value.get("size"), value.get("chunks")
    if type(size) is not int or not isinstance(rows, list) or len(rows) > MOST_CHUNKS:
        raise ChunkError(f"a table of chunks needs a size, and a list of at most {MOST_CHUNKS} chunks")
    hashes = value.get("blake3", [None] * len(rows))
    if not isinstance(hashes, list) or len(hashes) != len(rows):
        raise ChunkError(f"a table of {len(rows)} chunks does not have as many BLAKE3 digests")
    pairs = enumerate(zip(rows, hashes, strict=True))
    return make_table(size, [_chunk(at, row, blake3) for at, (row, blake3) in pairs])


def descriptors(tables: Sequence[Table]) -> tuple[Descriptor, ...]:
    """Return the blobs of some tables as layers of a manifest, each once, in the order of their first use."""
    found: dict[str, Descriptor] = {}
    for table in tables:
        for chunk in table.chunks:
            found.setdefault(chunk.blob, Descriptor(MEDIA_TYPES[chunk.encoding], chunk.blob, chunk.stored))
    return tuple(found.values())


def _fault(chunk: Chunk, begin: int, end: int) -> str:
    """Return what is wrong with a chunk that must be between `begin` and `end`."""
    if chunk.offset < begin:
        return "begins before the previous one ends"
    if not 0 < chunk.size <= LARGEST_CHUNK:
        return f"has a size of {chunk.size} bytes"
    if chunk.offset + chunk.size > end:
        return f"extends beyond the end of its region of {end} bytes"
    # A chunk that would become larger is stored plain.
    if not 0 < chunk.stored <= chunk.size:
        return f"of {chunk.size} bytes has a blob of {chunk.stored} bytes"
    try:
        get_hex(chunk.plain)
        get_hex(chunk.blob)
    except DigestError as error:
        return f"has an invalid digest: {error}"
    if chunk.blake3 and not is_blake3(chunk.blake3):
        return f"has a BLAKE3 digest that is none: {chunk.blake3[:80]!r}"
    if chunk.encoding == "plain":
        same = chunk.plain == chunk.blob and chunk.stored == chunk.size
        return "" if same else "is stored plain, but its blob has another size or digest"
    return "" if chunk.encoding in MEDIA_TYPES else f"has the unknown encoding {str(chunk.encoding)[:40]!r}"


def _row(chunk: Chunk) -> list[object]:
    row: list[object] = [chunk.offset, chunk.size, get_hex(chunk.plain)]
    if chunk.encoding == "plain":
        return row
    named = ["planes"] if chunk.encoding == "planes" else []
    return [*row, chunk.stored, get_hex(chunk.blob), *named]


def _chunk(at: int, row: object, blake3: object) -> Chunk:
    if blake3 is not None and not (isinstance(blake3, str) and blake3):
        raise ChunkError(f"chunk {at} has a BLAKE3 digest that is none: {str(blake3)[:80]!r}")
    fast = blake3 or ""
    if isinstance(row, list):
        # Exact types, because True and False are integers to Python. A model has thousands of chunks, and
        # `match` takes twice as long.
        types = tuple(map(type, row))
        if types == _PLAIN:
            offset, size, plain = row
            return Chunk(offset, size, PREFIX + plain, PREFIX + plain, size, "plain", fast)
        if types == _ZSTD:
            offset, size, plain, stored, blob = row
            return Chunk(offset, size, PREFIX + plain, PREFIX + blob, stored, "zstd", fast)
        if types == _PLANES and row[-1] == "planes":
            offset, size, plain, stored, blob, _ = row
            return Chunk(offset, size, PREFIX + plain, PREFIX + blob, stored, "planes", fast)
    raise ChunkError(f"chunk {at} has an invalid format")
