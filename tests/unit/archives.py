"""Archives of checkpoints, small ones made by hand, for the tests of who reads and writes them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import zstandard
from criu_images import INVENTORY
from oci_regions import save, text

from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import Writer
from gpusnap.runtime_shim.records import manifest_json
from gpusnap.runtime_shim.records.manifest import GpuProcess, GpuRecord, HostRecord, Manifest, RegionRecord

__all__ = ["COMPRESS", "CONFIG_DUMP", "CREATED", "GPU", "listed", "record", "regions", "written"]

CREATED = "2026-02-03T04:05:06Z"
GPU = "GPU-11111111-2222-3333-4444-000000000000"
CONFIG_DUMP: Mapping[str, object] = {
    "id": "ab" * 32,
    "name": "serving\x1b[31m",
    "rootfsImageName": "localhost/base:latest",
    "rootfsImageID": "cd" * 32,
    "RawImageName": "base",
    "runtime": "gpusnap-runtime",
}


def _two_frames(data: bytes) -> bytes:
    half = len(data) // 2
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    return compressor.compress(data[:half]) + compressor.compress(data[half:])


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    "zstd, no checksum": zstandard.ZstdCompressor(write_checksum=False).compress,
    "zstd, two frames": _two_frames,
    "gzip": gzip.compress,
}


def record(tables: tuple[Table, ...], *, pages: str = "chunks") -> Manifest:
    """A manifest of one process with these regions."""
    found = tuple(RegionRecord(at << 32, table) for at, table in enumerate(tables, 1))
    return Manifest(
        created=CREATED,
        container="ab" * 32,
        host=HostRecord("x86_64", "6.12.0", "nvidia", "560.35.03", "12.6", "4.1", "crun", "1.21"),
        gpus=(GpuRecord(GPU, 0, 0, "Soft H100", "9.0", 2 << 30, 1 << 20),),
        processes=(GpuProcess(1, "serve", ("serve",), ((GPU, 1 << 20),), found),),
        pages=pages,
    )


def regions(layout: Layout, *, salt: int = 0) -> tuple[Table, ...]:
    """Two regions in chunks, some of which are the same, or zero. Another `salt` changes their end."""
    one = bytearray(text(6000) + bytes(8192) + text(4096, 1 + salt))
    return save(layout, one, bytearray(one[:6000] + text(5000, 2 + salt)))


def written(
    path: Path,
    layout: Layout | None,
    document: Manifest | None,
    *,
    more: Mapping[str, bytes] | None = None,
    without: str = "",
) -> str:
    """An archive as Podman writes it, of a checkpoint whose chunks are in `layout`."""
    files: dict[str, bytes] = {
        "checkpoint/inventory.img": INVENTORY,
        "checkpoint/pages-1.img": text(300_000, 3),
        "config.dump": json.dumps(CONFIG_DUMP).encode(),
        "spec.dump": b'{"annotations": {"io.container.manager": "libpod"}}',
        "rootfs-diff.tar": text(50_000, 4),
    }
    if layout is not None:
        for blob in sorted(Path(layout.path, "blobs", "sha256").iterdir()):
            files[f"checkpoint/gpusnap/blobs/sha256/{blob.name}"] = blob.read_bytes()
        files["checkpoint/gpusnap/oci-layout"] = b"{}"
        files["checkpoint/gpusnap/index.json"] = b"{}"
    if document is not None:
        files["checkpoint/gpusnap/manifest.json"] = manifest_json.encode(document)
    files |= more or {}
    files.pop(without, None)
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    with Writer(path) as writer:
        for name in sorted([*files, *folders]):
            info = tarfile.TarInfo(name)
            info.mtime, info.mode = 1_700_000_000, 0o600
            if name in files:
                info.size = len(files[name])
            else:
                info.type, info.mode = tarfile.DIRTYPE, 0o700
            writer.add(info, io.BytesIO(files.get(name, b"")))
    return str(path)


def listed(path: str) -> dict[str, bytes]:
    """Name and content of every file of an archive, plain or zstd, as tarfile finds them."""
    data = Path(path).read_bytes()
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = ((each.name, tar.extractfile(each)) for each in tar)
        return {name: content.read() for name, content in found if content is not None}
