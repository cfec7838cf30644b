"""Archives whose files of gpusnap's have other names, as containerd's CRI plugin makes them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from gpusnap.checkpoints.formats.entries import entries, read_member

FILES = {
    "checkpoint/gpusnap%2Fblobs%2Fsha256%2F00ff": b"chunk",
    "checkpoint/gpusnap%2Fmanifest.json": b"{}",
    "checkpoint/inventory.img": b"criu",
    "config.dump": b"[]",
    "gpusnap%2Findex.json": b"of a tar of images alone",
    "checkpoint/gpusnap%2F..%2F..%2Fetc": b"nobody's",
}
NAMES = [
    "checkpoint/gpusnap/blobs/sha256/00ff",
    "checkpoint/gpusnap/manifest.json",
    "checkpoint/inventory.img",
    "config.dump",
    "gpusnap/index.json",
    "checkpoint/gpusnap%2F..%2F..%2Fetc",
]


@pytest.fixture
def archive(tmp_path: Path) -> str:
    path = tmp_path / "checkpoint.tar"
    with tarfile.open(path, "w") as out:
        for name, data in FILES.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return str(path)


def test_names(archive: str) -> None:
    """Entries and their headers have the names that they stand for, in the archive's order."""
    found = [
        (each.name, each.info.name, each.content.read() if each.content else None)
        for each in entries(archive)
    ]
    assert found == [(name, name, data) for name, data in zip(NAMES, FILES.values(), strict=True)]


def test_a_member(archive: str) -> None:
    """A file is found under the name that it stands for, and under no other."""
    assert read_member(archive, "checkpoint/gpusnap/manifest.json", limit=10) == b"{}"
    assert read_member(archive, "checkpoint/gpusnap%2Fmanifest.json", limit=10) is None
