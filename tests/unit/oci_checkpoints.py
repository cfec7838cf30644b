"""Small checkpoints for the tests of oci: artifacts of a few blobs, in a layout or committed to a store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from oci_regions import save

from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.artifact import Artifact, chunk_layers
from gpusnap.oci.chunks.table import MEDIA_TYPES, Table
from gpusnap.oci.chunks.verify import verify
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store

__all__ = [
    "begin",
    "blob_path",
    "blobs_of",
    "commit",
    "end",
    "index",
    "names",
    "put",
    "save_to",
    "stagings",
    "whole",
]


def put(layout: Layout, *contents: bytes, note: str = "", kind: str = MEDIA_TYPES["zstd"]) -> Descriptor:
    """Write a checkpoint of these chunks; its manifest."""
    chunks = tuple(layout.add_blob(each, media_type=kind) for each in contents)
    return artifact.write(layout, Artifact(chunks=chunks, annotations={"note": note} if note else {}))


def commit(store: Store, *contents: bytes, names: tuple[str, ...] = (), note: str = "") -> Descriptor:
    """The same, as part of a store."""
    with store.stage() as staging:
        root = put(staging.layout, *contents, note=note)
        staging.commit(root, names=names)
    return root


def blob_path(layout: Layout, digest: str) -> Path:
    """The file of a blob."""
    return Path(layout.path, "blobs/sha256", digest.removeprefix("sha256:"))


def names(layout: Layout) -> set[str]:
    """What files there are among the blobs, unfinished ones too."""
    return {each.name for each in Path(layout.path, "blobs/sha256").iterdir()}


def whole(store: Store) -> dict[str, str]:
    """Digest of every name; all that the index names is right."""
    found = {}
    for entry in store.entries():
        assert verify(store.layout, entry.descriptor, threads=1) == ()
        found[entry.name or entry.descriptor.digest] = entry.descriptor.digest
    return found


def stagings(store: Store) -> list[str]:
    """Names of all stagings, dead ones too."""
    return sorted(os.listdir(Path(store.path, "staging")))


def index(store: Store) -> dict[str, Any]:
    """The index as JSON."""
    found: dict[str, Any] = json.loads(Path(store.path, "index.json").read_bytes())
    return found


def save_to(staging: Staging, *regions: bytes) -> tuple[Descriptor, tuple[Table, ...]]:
    """Write a checkpoint of regions; its manifest, and their chunks."""
    tables = save(staging.layout, *map(bytearray, regions))
    layers = chunk_layers((str(at), table) for at, table in enumerate(tables))
    return artifact.write(staging.layout, Artifact(chunks=layers)), tables


def blobs_of(store: Store, root: Descriptor) -> list[Descriptor]:
    """All that a checkpoint consists of."""
    found = artifact.read(root, store.read)
    return [*found.blobs(), *found.documents]


def begin(work: Callable[[], object]) -> int:
    """Do something in another process; its pid."""
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(Exception):
            work()
            status = 0
        os._exit(status)
    return child


def end(child: int) -> int:
    """The exit status of a process, when it is done."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
