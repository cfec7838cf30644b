"""Named volumes in the records of a checkpoint: the entry that replaces the tar of each.

In Podman's archive a volume is `volumes/NAME.tar` (libpod, exportCheckpoint). In the records of an artifact
it is replaced by `volumes/NAME.tar.chunks`: JSON, {"content": digest of the tar, "table": its table of
chunks}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from gpusnap.checkpoints.volumes.tar_chunks import LARGEST
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import ChunkError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.chunks.table import Table, from_json, to_json
from gpusnap.oci.tar.archive import Entry
from gpusnap.runtime_shim.errors import ImageError

# Bytes of JSON: a row of a chunk takes about 160, and its BLAKE3 70.
LARGEST_TABLE = 256 << 20

# libpod, define.NameRegex.
_TAR = compile_later(r"volumes/([a-zA-Z0-9][a-zA-Z0-9_.-]*)\.tar")
_CHUNKS = ".chunks"


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
