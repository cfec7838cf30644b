"""Stores with checkpoints in them, made as gpusnap makes them, but of made-up manifests and random memory."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import zstandard
from fakes import a_manifest
from oci_regions import save

from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.documents import Descriptor, empty_descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.records import manifest_json
from gpusnap.runtime_shim.records.artifact import label_tables
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest, RegionRecord

__all__ = ["CHUNK", "START", "blob_path", "damage", "keep", "noise", "packed", "tar_of", "with_memory"]

CHUNK = 4096
START = 0x7F0000000000

ANNOTATIONS = {
    "org.opencontainers.image.created": "2026-01-02T03:04:05Z",
    "org.criu.checkpoint.container.name": "w",
    "io.gpusnap.container.id": "c0ffee" * 10 + "beef",
    "io.gpusnap.driver": "nvidia 560.35.03",
    "io.gpusnap.gpus": "1 NVIDIA H100 80GB HBM3",
    "io.gpusnap.memory": str(3 << 20),
    "io.gpusnap.processes": "1",
}


def noise(chunks: int, seed: int) -> bytearray:
    """Memory that no chunk of another seed has."""
    return bytearray(random.Random(seed).randbytes(chunks * CHUNK))


def with_memory(
    layout: Layout,
    *regions: bytearray,
    images: Mapping[str, bytearray] | None = None,
    record: Manifest | None = None,
    chunk_size: int = CHUNK,
) -> Manifest:
    """A manifest of one process that has these regions, whose chunks are written to a layout."""
    record = record or a_manifest()
    tables = save(layout, *regions, *(images or {}).values(), chunk_size=chunk_size)
    placed = tuple(RegionRecord(START + (at << 24), table) for at, table in enumerate(tables[: len(regions)]))
    files = tuple(
        FileRecord(name, table) for name, table in zip(images or {}, tables[len(regions) :], strict=True)
    )
    processes = (replace(record.processes[0], regions=placed), *record.processes[1:])
    return replace(record, processes=processes, files=files, pages="store")


def tar_of(files: Mapping[str, bytes | str | None]) -> bytes:
    """A tar of files; a text is where a link leads to, None a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def packed(files: Mapping[str, bytes | str | None]) -> bytes:
    """The same, compressed."""
    return zstandard.ZstdCompressor().compress(tar_of(files))


def keep(
    store: Store,
    *regions: bytearray,
    names: Sequence[str] = (),
    images: Mapping[str, bytearray] | None = None,
    records: Mapping[str, bytes | str | None] | None = None,
    rootfs: Mapping[str, bytes | str | None] | None = None,
    record: Manifest | None = None,
    gpu: bool = True,
    annotations: Mapping[str, str] = ANNOTATIONS,
) -> Descriptor:
    """Have a checkpoint in a store. `records`: None for its pages only. Without `gpu` it has no manifest."""
    with store.create().stage() as staging:
        layout = staging.layout
        config, tables = empty_descriptor(), []
        if gpu:
            made = with_memory(layout, *regions, images=images, record=record)
            config = layout.add_blob(manifest_json.encode(made), media_type=artifact.CONFIG)
            tables = label_tables(made)
        parts = Artifact(
            config,
            layout.add_blob(packed(records), media_type=artifact.RECORDS) if records is not None else None,
            layout.add_blob(packed(rootfs), media_type=artifact.ROOTFS) if rootfs is not None else None,
            artifact.chunk_layers(tables),
            annotations,
        )
        root = artifact.write(layout, parts)
        only: list[Table] = [table for _, table in tables]
        staging.commit(root, names=names, tables=only)
    return root


def blob_path(store: Store, digest: str) -> Path:
    """The file of a blob."""
    return Path(store.path, "blobs", "sha256", digest.partition(":")[2])


def damage(path: Path) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
