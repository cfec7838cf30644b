"""The digests of CRIU's images: of the dump, and of what a restore reads."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import a_manifest

from gpusnap.checkpoints.formats.criu_images import Images
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.runtime_shim.base.errors import ImageError, ManifestError
from gpusnap.runtime_shim.records import manifest_json
from gpusnap.runtime_shim.records.manifest import ImageRecord
from gpusnap.runtime_shim.runtime.criu.images.digests import Comparison, take

CONTENT = os.urandom((1 << 20) + 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "checkpoint"
    top.mkdir()
    (top / "pages-1.img").write_bytes(CONTENT)
    (top / "tmpfs-dev-7.tar.gz.img").write_bytes(b"tar")
    (top / "pages-2.img").write_bytes(b"in chunks")
    (top / "dump.log").write_text("log")
    (top / "gpusnap").mkdir()
    return top


def compare(folder: Path, records: tuple[ImageRecord, ...]) -> None:
    with contextlib.closing(Comparison(str(folder), records)) as compared:
        compared.result()


def test_taken(folder: Path) -> None:
    """Of every image but those that are elsewhere; they are what a restore finds."""
    taken = take(str(folder), but=["pages-2.img"])
    assert [each.name for each in taken] == ["pages-1.img", "tmpfs-dev-7.tar.gz.img"]
    assert taken[0].size == len(CONTENT)
    assert taken[0].digest == f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    compare(folder, taken)


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.write_bytes(CONTENT[:99] + bytes([CONTENT[99] ^ 1]) + CONTENT[100:]), "another"),
        (lambda path: path.write_bytes(CONTENT + b"\0"), "its digest differs"),
        (lambda path: path.unlink(), "cannot be read: it does not exist"),
        (a_fifo, "cannot be read"),
    ],
    ids=["a bit", "longer", "missing", "a FIFO"],
)
def test_another_one(folder: Path, change: Callable[[Path], object], said: str) -> None:
    """It is named, and nothing is waited for."""
    taken = take(str(folder))
    change(folder / "pages-1.img")
    with pytest.raises(ImageError) as caught:
        compare(folder, taken)
    assert "CRIU's image pages-1.img in " in str(caught.value)
    assert said in str(caught.value)


def test_in_the_manifest(folder: Path) -> None:
    """They are written and read; a manifest without any is one of an earlier version."""
    record = replace(a_manifest(), images=take(str(folder)))
    assert manifest_json.decode(manifest_json.encode(record), "here").images == record.images
    assert b'"images"' not in manifest_json.encode(a_manifest())


@pytest.mark.parametrize("name", ["../pages-1.img", "a/b.img", "pages-1", ".img\n"])
def test_names(name: str) -> None:
    """A name that leads elsewhere is refused with the manifest."""
    record = replace(a_manifest(), images=(ImageRecord(name, 1, f"sha256:{'0' * 64}"),))
    with pytest.raises(ManifestError):
        manifest_json.encode(record)


def _other_end(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_in_an_archive(folder: Path) -> None:
    """Verify says the same of them, whether they come before the manifest or after it."""
    (folder / "inventory.img").write_bytes(b"\x19\x43\x56\x54\x16\x31\x31\x58")
    taken = take(str(folder))

    def fault(change: Callable[[bytes], bytes], leave_out: str = "") -> str:
        stream, images = io.BytesIO(), Images("here")
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for each in taken:
                if each.name != leave_out:
                    data = (folder / each.name).read_bytes()
                    data = change(data) if each.name == "pages-1.img" else data
                    info = tarfile.TarInfo(f"checkpoint/{each.name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        stream.seek(0)
        for entry in entries(stream, where="here"):
            images.add(entry)
        return images.fault(replace(a_manifest(), images=taken))

    assert fault(lambda data: data) == ""
    assert "pages-1.img in here has changed since the dump" in fault(
        lambda data: data[:-1] + bytes([data[-1] ^ 1])
    )
    assert "tmpfs-dev-7.tar.gz.img in here" in fault(lambda data: data, "tmpfs-dev-7.tar.gz.img")
