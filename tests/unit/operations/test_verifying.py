"""Checking archives, and directories of images, against their digests; stores are in test_commands_store."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CHUNK, START, damage, noise, tar_of, with_memory
from criu_images import INVENTORY
from fakes import a_manifest
from kept_checkpoints import an_archive, keep, keep_pages

from gpusnap.base.user_errors import Damaged
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints.formats import criu_images as records
from gpusnap.checkpoints.locator import InStore
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.operations import verify as verifying
from gpusnap.operations.verify import verify_one
from gpusnap.operations.verify_files import describe_unchecked
from gpusnap.runtime_shim.base.errors import GpusnapError, ManifestError
from gpusnap.runtime_shim.records import manifest_file, manifest_json
from gpusnap.runtime_shim.records.manifest import ImageRecord
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.settings import Store as StoreSettings


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """An unpacked archive of a checkpoint with three chunks."""
    inner = tmp_path / "images" / "checkpoint" / "gpusnap"
    layout = Layout(inner).create()
    record = replace(with_memory(layout, noise(2, 1), noise(1, 2)), pages="chunks")
    (inner / "manifest.json").write_bytes(manifest_json.encode(record))
    (inner.parent / "inventory.img").write_bytes(INVENTORY)
    return tmp_path / "images"


def chunks(folder: Path) -> list[Path]:
    """The blobs there."""
    return sorted(folder.glob("**/blobs/sha256/*"))


def packed(folder: Path) -> Path:
    """The archive of it."""
    files = {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    path = folder.with_suffix(".tar")
    path.write_bytes(tar_of({"config.dump": b"{}", **files}))
    return path


@pytest.mark.parametrize("archive", [True, False])
def test_all_right(images: Path, archive: bool) -> None:
    """Every chunk is read; that the rest has no digests is said."""
    found = verify_one(str(packed(images) if archive else images))
    assert (found.blobs, found.size, found.damaged, found.read) == (3, 3 * CHUNK, (), True)
    assert found.note == describe_unchecked(None)


@pytest.mark.parametrize("name", ["config.dump", "spec.dump"])
@pytest.mark.parametrize("text", [b'{"a": 1', b"{}{}", b"[]", b"", b'{"a": 1, "a": 2}'])
def test_records_of_podman(images: Path, name: str, text: bytes) -> None:
    """They have no digests; that they are JSON can be seen all the same."""
    (images / name).write_bytes(text)
    (found,) = verify_one(str(packed(images))).damaged
    assert found.belongs_to == ("Podman's records",)
    assert found.what.startswith((f"{name} is not JSON", f"{name} is not a JSON object"))


def test_a_note_on_digests(images: Path) -> None:
    """CRIU's images have digests in manifests of today; the engine's files never."""
    record = manifest_file.read(str(images / "checkpoint"))
    assert describe_unchecked(record).startswith("CRIU's images and the engine's files have no digests")
    digests = (ImageRecord("inventory.img", len(INVENTORY), f"sha256:{'0' * 64}"),)
    assert describe_unchecked(replace(record, images=digests)).startswith(
        "the engine's files have no digests"
    )


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("kind", ["flipped", "cut short", "longer", "gone"])
def test_damage(images: Path, archive: bool, kind: str) -> None:
    """The chunk, what is wrong with it, and which region it is of."""
    hit = chunks(images)[0]
    if kind == "flipped":
        damage(hit)
    elif kind == "gone":
        hit.unlink()
    else:
        hit.write_bytes(hit.read_bytes()[:-1] if kind == "cut short" else hit.read_bytes() + b"x")
    (found,) = verify_one(str(packed(images) if archive else images)).damaged
    assert found.digest == f"sha256:{hit.name}"
    # noise(1, 2), the second region.
    assert found.belongs_to == (f"the region {START + (1 << 24):x} of process 1 (sleep), at 0 B",)
    words = {
        "flipped": "does not match its digest",
        "cut short": f"{CHUNK - 1}",
        "longer": f"{CHUNK + 1}",
        "gone": "missing",
    }
    assert words[kind] in found.what


def test_an_archive_that_is_cut_short(images: Path) -> None:
    """It is named itself, even where it ends between two entries."""
    path = packed(images)
    content = path.read_bytes()
    end = -(-len(content.rstrip(b"\0")) // 512) * 512
    for size in (end + 1023, end + 512, end, end - 1, len(content) // 2 - 7, 512):
        path.write_bytes(content[:size])
        (found,) = verify_one(str(path)).damaged
        assert found.belongs_to == ("the archive itself",)
        assert found.what.startswith("is not a checkpoint archive, or is cut short: ")


@pytest.mark.parametrize("name", ["rootfs-diff.tar", "devshm-checkpoint.tar", "volumes/weights.tar"])
def test_files_that_podman_has_cut_off(images: Path, name: str) -> None:
    """A file became shorter while Podman read it, and Podman wrote no more."""
    with io.BytesIO() as written, tarfile.open(fileobj=written, mode="w") as tar:
        for number in range(3):
            info = tarfile.TarInfo(f"file{number}")
            info.type = (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.REGTYPE)[number]
            info.size = 5000 if number == 2 else 0
            tar.addfile(info, io.BytesIO(bytes(info.size)))
        tar.close()
        content = written.getvalue()
    path = images / name
    path.parent.mkdir(exist_ok=True)
    for whole in (content, content[:7680], b"", gzip.compress(content)):
        path.write_bytes(whole)
        assert verify_one(str(packed(images))).damaged == ()
    for size in (512, 1600, 5000, 6656, 7168):  # 6656: where the entries end
        path.write_bytes(content[:size])
        (found,) = verify_one(str(packed(images))).damaged
        assert found.belongs_to == ("the container's files",)
        assert found.what == f"{name} is cut short, so files of the container are missing"


@pytest.mark.parametrize("size", [12, 512, 5000])
def test_a_file_that_is_no_archive(tmp_path: Path, size: int) -> None:
    """Nothing is damaged: nobody shall remove it."""
    path = tmp_path / "passwd"
    path.write_bytes(b"root:x:0:0:\n" * (size // 12 + 1))
    with pytest.raises(GpusnapError, match=f"^{path} is not a checkpoint archive$") as raised:
        verify_one(str(path))
    assert not isinstance(raised.value, Damaged)
    assert (raised.value.hint, raised.value.code) == ("check the path", "GPS-605")


def test_an_archive_with_a_broken_header(images: Path) -> None:
    """Its first one is still known as that of an archive."""
    path = packed(images)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    (found,) = verify_one(str(path)).damaged
    assert found.what == "is not a checkpoint archive, or is cut short: one of its headers is invalid"


def test_a_blob_that_no_table_names(images: Path) -> None:
    """It is checked all the same: the layout in an archive has its own manifest."""
    stray = images / "checkpoint/gpusnap/blobs/sha256" / ("0" * 64)
    stray.write_bytes(b"{}")
    (found,) = verify_one(str(packed(images))).damaged
    assert found.digest == f"sha256:{'0' * 64}"


def test_without_chunks(tmp_path: Path) -> None:
    """What has no digests is no fault, as long as the archive is whole."""
    path = tmp_path / "w.tar"
    path.write_bytes(
        tar_of(
            {
                "config.dump": b"{}",
                "checkpoint/inventory.img": INVENTORY,
                "checkpoint/gpusnap/manifest.json": manifest_json.encode(a_manifest()),
            }
        )
    )
    assert verify_one(str(path)).damaged == ()
    path.write_bytes(tar_of({"config.dump": b"{}", "checkpoint/gpusnap/manifest.json": b"{"}))
    with pytest.raises(ManifestError, match="cut short or not JSON"):
        verify_one(str(path))


def test_chunks_in_the_store(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive whose chunks are in this host's store: they are looked for there."""
    mine = Settings(store=StoreSettings(path=str(tmp_path / "store")))
    monkeypatch.setattr("gpusnap.runtime_shim.settings.load", lambda: mine)
    store = Store(tmp_path / "store").create()
    inner = images / "checkpoint/gpusnap"
    record = replace(manifest_file.read(str(images / "checkpoint")), pages="store")
    (inner / "manifest.json").write_bytes(manifest_json.encode(record))
    for each in chunks(images):
        shutil.move(each, Path(store.path, "blobs/sha256"))
    for path in (images, packed(images)):
        assert verify_one(str(path)).damaged == ()
    chunks(Path(store.path))[1].unlink()
    for path in (images, packed(images)):
        (found,) = verify_one(str(path)).damaged
        assert found.what == "missing"


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("encoding", ["zstd", "planes"])
def test_a_manifest_that_lies(images: Path, pack: bool, encoding: str) -> None:
    """A compressed chunk that does not hold what the manifest says is damage, though its blob is right."""
    inner = images / "checkpoint/gpusnap"
    content, size = bytearray(b"text" * CHUNK), CHUNK
    if encoding == "planes":  # numbers of two bytes, of which the second says little
        content, size = bytearray(os.urandom(1 << 20)), 1 << 20
        content[1::2] = bytes(byte & 1 for byte in content[1::2])
    memory = with_memory(Layout(inner), content, noise(1, 2), chunk_size=size)
    record = replace(memory, pages="chunks")
    chunk = record.processes[0].regions[0].table.chunks[0]
    assert chunk.encoding == encoding
    (inner / "manifest.json").write_bytes(manifest_json.encode(record))
    assert verify_one(str(packed(images) if pack else images)).damaged == ()
    fake = "ab" * 32
    (inner / "manifest.json").write_text(
        manifest_json.encode(record).decode().replace(chunk.plain.removeprefix("sha256:"), fake)
    )
    (found,) = verify_one(str(packed(images) if pack else images)).damaged
    assert found.digest == chunk.blob
    assert found.what == f"does not contain the expected chunk sha256:{fake} of {chunk.size} bytes"


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("encoding", ["plain", "zstd", "planes"])
def test_a_manifest_with_a_wrong_blake3(images: Path, pack: bool, encoding: str) -> None:
    """A restore may go by it alone, so it is damage, though SHA-256 is right."""
    inner = images / "checkpoint/gpusnap"
    size = 1 << 20
    content = bytearray(b"text" * (size // 4)) if encoding == "zstd" else bytearray(os.urandom(size))
    if encoding == "planes":
        content[1::2] = bytes(byte & 1 for byte in content[1::2])
    record = replace(with_memory(Layout(inner), content, noise(1, 2), chunk_size=size), pages="chunks")
    chunk = record.processes[0].regions[0].table.chunks[0]
    assert chunk.encoding == encoding
    (inner / "manifest.json").write_bytes(manifest_json.encode(record))
    assert verify_one(str(packed(images) if pack else images)).damaged == ()
    (inner / "manifest.json").write_text(
        manifest_json.encode(record).decode().replace(chunk.blake3, "ab" * 32)
    )
    (found,) = verify_one(str(packed(images) if pack else images)).damaged
    assert found.digest == chunk.blob
    assert found.what == (
        f"holds the chunk {chunk.plain} of {chunk.size} bytes, but its table has another BLAKE3 for that"
    )


def test_all_of_a_store_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify that is killed at any moment leaves nothing, as nothing of it is in a file with a name."""
    store = Store(tmp_path / "store").create()
    (tmp_path / "with").mkdir()
    keep(store, an_archive(tmp_path), ["stays"])
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    met: list[list[str]] = []
    found = verifying.verify_all(store, lambda done, whole: met.append(os.listdir(place)))
    assert found.damaged == ()
    assert met
    assert not any(met)


def test_all_of_a_store_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is removed meanwhile, gc may take; what stays and is damaged is found. No hold is had of each."""
    store = Store(tmp_path / "store").create()
    (tmp_path / "with").mkdir()
    keep(store, an_archive(tmp_path), ["stays"])
    keep_pages(store)
    real, opened = verifying._check_all, []

    def check(*words: object) -> object:
        opened.append(os.listdir(Path(store.path, "holds")))
        monkeypatch.setattr(verifying, "_check_all", real)
        (pages,) = (each.descriptor.digest for each in store.entries() if not each.name)
        store.remove(pages)
        store.collect()
        return real(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(verifying, "_check_all", check)
    assert verifying.verify_all(store).damaged == ()
    assert opened == [[]]
    keep_pages(store)
    monkeypatch.setattr(verifying, "_check_all", check)
    with kept.hold_artifact(InStore(store, "stays")) as (_, found):
        assert found.artifact.records is not None
        damage(Path(store.path, "blobs/sha256", found.artifact.records.digest.removeprefix("sha256:")))
        (one,) = verifying.verify_all(store).damaged
        assert one.digest == found.artifact.records.digest


def test_one_whose_records_go_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blobs were right, and gc takes them before the records are looked into: no damage."""
    store = Store(tmp_path / "store").create()
    (tmp_path / "with").mkdir()
    keep(store, an_archive(tmp_path), ["goes"])
    real = records.records_fault

    def look(*words: Any) -> str:
        store.remove("goes")
        store.collect()
        return real(*words)

    monkeypatch.setattr(verifying, "records_fault", look)
    assert verifying.verify_all(store).damaged == ()
