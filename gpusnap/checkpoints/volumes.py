"""Named volumes in a checkpoint: the tar of each, in chunks, so that its unchanged parts are stored once.

In Podman's archive a volume is `volumes/NAME.tar` (libpod, exportCheckpoint). In the records of an artifact
it is replaced by `volumes/NAME.tar.chunks`: JSON, {"content": digest of the tar, "table": its table of
chunks}.

The tar is cut at the boundaries of files: a large file has chunks of its own, and small ones are combined,
with a cut after names that are selected by their own hash. So a new file, or one that grows, moves no cut
between others. Readers do not depend on where the cuts are.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import ChunkError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.chunks import reader, writer
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import CHUNK_SIZE, Chunk, Table, from_json, make_table, to_json
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.digests import PREFIX
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import Entry
from gpusnap.oci.tar.compression import Readable
from gpusnap.oci.tar.headers import BLOCK
from gpusnap.runtime_shim.base.errors import ImageError

# Bytes of JSON: a row of a chunk takes about 160, and its BLAKE3 70.
LARGEST_TABLE = 256 << 20

# libpod, define.NameRegex.
_TAR = compile_later(r"volumes/([a-zA-Z0-9][a-zA-Z0-9_.-]*)\.tar")
_CHUNKS = ".chunks"

# Limits on memory, in addition to that of the threads; the first is also the largest chunk that is read.
LARGEST = 64 << 20
_CEILING = 256 << 20
_PIECE = 1 << 20
# A file of at least this size has chunks of its own.
_LARGE = 1 << 20
# Combined files: no cut before this size, one after one name in so many, and always one at this size.
_LEAST, _ONE_OF, _MOST = 256 << 10, 16, 4 << 20
# Types of entries that are no files, and have content.
_WITH_CONTENT = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
# A pax record of a file that is too large for the field of a header; or such a text in an extended attribute,
# which moves a cut.
_PAX_SIZE = compile_later(rb"(?:^|\n)\d+ size=(\d{1,19})\n")


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume's tar in chunks."""

    name: str
    content: str
    """The digest of the whole tar."""
    table: Table

    @property
    def label(self) -> str:
        """Return its name among the chunks of an artifact."""
        return label(self.name)

    def encode(self) -> bytes:
        """Return its entry in the records."""
        return json.dumps({"content": self.content, "table": to_json(self.table)}).encode() + b"\n"


def name_of(entry: str) -> str:
    """Return the volume whose tar an entry of an archive is; "" for any other entry."""
    found = _TAR.fullmatch(entry)
    return found[1] if found else ""


def name_in_chunks(entry: str) -> str:
    """Return the volume that an entry of the records replaces; "" for any other entry."""
    return name_of(entry.removesuffix(_CHUNKS)) if entry.endswith(_CHUNKS) else ""


def label(name: str) -> str:
    """Return the name of an archive's entry for the tar of a volume."""
    return f"volumes/{name}.tar"


def entry_of(name: str) -> str:
    """Return the name of a volume's entry in the records."""
    return label(name) + _CHUNKS


def summary(data: bytes) -> tuple[int, str] | None:
    """Return size and digest of a volume's tar, by its entry in the records; None if that is broken."""
    try:
        document = parse_json(data)
        return int(document["table"]["size"]), str(document["content"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def decode(name: str, data: bytes, layers: Mapping[str, int], where: str) -> Volume:
    """Decode a volume's entry in the records; layers: digest and size of the chunks of the artifact.

    Raises ImageError if it is invalid, or names chunks that the artifact does not have.
    """
    try:
        document = parse_json(data)
        found = Volume(name, str(document["content"]), from_json(document["table"]))
        for chunk in found.table.chunks:
            if layers.get(chunk.blob) != chunk.stored:
                raise ChunkError(f"the chunk {chunk.blob} is not a layer of the checkpoint")
            if chunk.size > LARGEST:
                raise ChunkError(f"the chunk {chunk.blob} of {chunk.size} bytes is too large")
    except (ValueError, KeyError, TypeError, RecursionError, ChunkError) as error:
        raise ImageError(
            f"the volume {name} in {where} is damaged: {error}",
            hint="use another copy of the checkpoint, or restore with --ignore-volumes",
            code="GPS-604",
        ) from error
    return found


def chunks(found: Iterable[Entry], layers: Mapping[str, int], where: str) -> Iterator[str]:
    """Yield the blobs of all volumes in some records. Raises like `decode`."""
    for entry in found:
        if (name := name_in_chunks(entry.name)) and entry.content is not None:
            for chunk in decode(name, entry.content.read(LARGEST_TABLE), layers, where).table.chunks:
                yield chunk.blob


def write(tar: Readable, layout: Layout, *, threads: int, known: Known | None = None) -> tuple[Table, str]:
    """Write a tar as chunks; return their table, and the digest of the tar. Raises like writing chunks."""
    hashed = hashlib.sha256()
    chunks: list[Chunk] = []
    at = 0
    for batch in _batches(cut(tar)):
        sources = [Buffer(piece) for piece in batch]
        tables = writer.write(sources, layout, threads=threads, ceiling=_CEILING, known=known)
        for piece, table in zip(batch, tables, strict=True):
            hashed.update(piece)
            chunks += [replace(chunk, offset=at) for chunk in table.chunks]
            at += len(piece)
    return make_table(at, chunks), PREFIX + hashed.hexdigest()


def pieces(table: Table, blobs: Blobs, *, threads: int) -> Iterator[bytes]:
    """Yield the tar again, each chunk checked. Raises BlobError, ChunkError."""
    at = 0
    for batch in _batch_chunks(table.chunks):
        memory = [bytearray(chunk.size) for chunk in batch]
        parts = [Table(chunk.size, (replace(chunk, offset=0),)) for chunk in batch]
        reader.read(parts, blobs, [Buffer(each) for each in memory], threads=threads, ceiling=_CEILING)
        for chunk, content in zip(batch, memory, strict=True):
            yield from _zeros(chunk.offset - at)
            yield bytes(content)
            at = chunk.offset + chunk.size
    yield from _zeros(table.size - at)


def cut(tar: Readable) -> Iterator[bytearray]:
    """Cut a tar into pieces of up to CHUNK_SIZE. Data that is no tar is cut as well."""
    group = bytearray()
    longer = 0
    while block := _read(tar, BLOCK):
        group += block
        try:
            info = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            if len(block) == BLOCK and not any(block):  # two of these end a tar
                continue
            yield group
            group = bytearray()
            while piece := _read(tar, CHUNK_SIZE):
                yield piece
            break
        size = longer or (info.size if info.isreg() or info.type in _WITH_CONTENT else 0)
        longer = 0
        left = -(-size // BLOCK) * BLOCK
        if left >= _LARGE:
            yield group
            group = bytearray()
            while left and (piece := _read(tar, min(left, CHUNK_SIZE))):
                yield piece
                left -= len(piece)
            continue
        content = _read(tar, left)
        group += content
        if info.type == tarfile.XHDTYPE and (found := _PAX_SIZE.search(content)):
            longer = int(found[1])
            continue
        chosen = len(group) >= _LEAST and zlib.crc32(info.name.encode(errors="replace")) % _ONE_OF == 0
        if chosen or len(group) >= _MOST:
            yield group
            group = bytearray()
    if group:
        yield group


def _read(tar: Readable, size: int) -> bytearray:
    """Return `size` bytes, fewer only at the end."""
    found = bytearray()
    while len(found) < size and (piece := tar.read(min(size - len(found), _PIECE))):
        found += piece
    return found


def _batches(found: Iterator[bytearray]) -> Iterator[list[bytearray]]:
    batch: list[bytearray] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece)
        if size >= LARGEST - CHUNK_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _batch_chunks(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if batch and size + chunk.size > LARGEST:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += chunk.size
    if batch:
        yield batch


def _zeros(count: int) -> Iterator[bytes]:
    while count:
        yield bytes(min(count, _PIECE))
        count -= min(count, _PIECE)
