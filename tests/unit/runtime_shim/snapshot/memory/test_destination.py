"""Where chunks go: the image's folder or a store, and what a killed gpusnap leaves in it."""

from __future__ import annotations

import errno
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import a_manifest

from gpusnap.oci.base.errors import DiskFull
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks import writer as writing
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.encoding import ReadSpeed
from gpusnap.oci.chunks.table import descriptors
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout import unsynced
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.store.read_rate import remember
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ImageError, Refused
from gpusnap.runtime_shim.records.artifact import label_tables
from gpusnap.runtime_shim.records.manifest import Manifest, RegionRecord
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.records.manifest_json import decode
from gpusnap.runtime_shim.runtime.criu.images import directory as images
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.memory.destination import (
    Destination,
    ImageDestination,
    StoreDestination,
    reopen_destination,
)
from gpusnap.runtime_shim.snapshot.memory.handover import Recipient, take_over

MEMORY = Memory(pages="store", chunk_size=4096, threads=2, ceiling=64 << 20)
ID = "c0ffee"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image directory with a large and a small image of memory, and another file."""
    path = tmp_path / "image"
    (path / "gpusnap").mkdir(parents=True)
    (path / "pages-1.img").write_bytes(os.urandom(1 << 20) + bytes(1 << 20))
    (path / "pages-2.img").write_bytes(b"small")
    (path / "core-1.img").write_bytes(os.urandom(2 << 20))
    return path


@pytest.fixture
def destination(tmp_path: Path, image: Path) -> StoreDestination:
    found = StoreDestination(str(tmp_path / "store"), str(image), ID, MEMORY)
    found.begin()
    return found


def written(destination: StoreDestination, size: int = 64 << 10) -> Manifest:
    """A manifest with one region, whose chunks have been written."""
    with destination.open_known() as known:
        (table,) = write(
            [Buffer(bytearray(os.urandom(size)))],
            destination.layout,
            threads=2,
            ceiling=64 << 20,
            chunk_size=4096,
            known=known,
        )
    record = a_manifest()
    process = replace(record.processes[0], regions=(RegionRecord(1 << 30, table),))
    return replace(record, pages="store", processes=(process,), container=ID)


def stagings(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "store" / "staging").iterdir())


def test_all_the_way(destination: StoreDestination, image: Path, tmp_path: Path) -> None:
    """Regions and large images are named by the store, the manifest as config; then they leave the folder."""
    record = written(destination)
    destination.mark_needed()
    destination.commit([table for _, table in label_tables(record)], kept=True)
    files = destination.write_images()
    assert [each.name for each in files] == ["pages-1.img"]
    assert sum(chunk.size for chunk in files[0].table.chunks) == 1 << 20, "zeros were stored"
    record = replace(record, files=files)
    destination.name(record)
    assert (image / "pages-1.img").exists(), "the manifest does not say yet that it is elsewhere"
    destination.close(record)
    assert sorted(path.name for path in image.iterdir()) == ["core-1.img", "gpusnap", "pages-2.img"]
    assert stagings(tmp_path) == []
    store = Store(tmp_path / "store")
    (entry,) = store.entries()
    found = artifact.read(entry.descriptor, store.read)
    assert decode(store.read(found.config), "the config") == record
    assert {each.digest for each in found.chunks} == {
        chunk.blob for _, table in label_tables(record) for chunk in table.chunks
    }
    assert store.collect().blobs == 0


@pytest.mark.parametrize(
    ("setting", "measured", "found"),
    [(0, None, None), (0, 3 << 30, 3 << 30), (1 << 20, 3 << 30, 1 << 20), (2 << 30, None, 2 << 30)],
)
def test_how_fast_it_is_read(
    image: Path, tmp_path: Path, setting: int, measured: int | None, found: int | None
) -> None:
    """As the setting says, else as restores have measured; with as many threads as a restore has."""
    (tmp_path / "store").mkdir()
    if measured is not None:
        remember(tmp_path / "store", measured)
    destination = StoreDestination(str(tmp_path / "store"), str(image), ID, MEMORY, read_rate=setting)
    assert destination.speed == (ReadSpeed(found, 2) if found is not None else None)
    assert ImageDestination(str(image), ID, MEMORY).speed is None


def test_images_for_such_a_disk(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored for the disk that they will come from."""
    found: list[object] = []

    def asked_to_write(*_: object, speed: object, **options: object) -> tuple[()]:
        found.append(speed)
        return ()

    monkeypatch.setattr(writing, "write", asked_to_write)
    destination = StoreDestination(str(tmp_path / "store"), str(image), ID, MEMORY, read_rate=5 << 30)
    destination.begin()
    destination.write_images()
    destination.discard(earlier=False)
    assert found == [ReadSpeed(5 << 30, 2)]


def test_the_store_knows_the_chunks_of_earlier_ones(
    destination: StoreDestination, image: Path, tmp_path: Path
) -> None:
    """Also of images, and of other containers."""
    record = replace(written(destination), files=destination.write_images())
    destination.name(record)
    destination.close(record)
    (image / "pages-1.img").write_bytes(bytes(4096) + os.urandom(1 << 20))
    second = StoreDestination(str(tmp_path / "store"), str(image), "another", MEMORY)
    second.begin()
    with second.open_known() as known:
        assert known is not None
        chunks = [chunk for _, table in label_tables(record) for chunk in table.chunks]
        assert all(known.find(chunk.plain) is not None for chunk in chunks)
    second.discard(earlier=False)


def test_discarded(destination: StoreDestination, image: Path, tmp_path: Path) -> None:
    """Nothing is left of it in the store, and the images are none of its business."""
    written(destination)
    destination.mark_needed()
    destination.discard(earlier=True)
    assert stagings(tmp_path) == []
    assert not Store(tmp_path / "store").entries()
    assert (image / "pages-1.img").exists()
    destination.discard(earlier=True)


def test_a_killed_one_is_spared_once_it_is_needed(
    destination: StoreDestination, image: Path, tmp_path: Path
) -> None:
    """gc takes what nobody had come to depend on, and leaves the rest to `gpusnap recover`."""
    record = written(destination)
    path = destination.layout.path
    destination._require_staging().close(leave=True)  # as its death would
    store = Store(tmp_path / "store")
    another = StoreDestination(str(tmp_path / "store"), str(image), "another", MEMORY)
    another.begin()
    kept = written(another)
    another.mark_needed()
    another._require_staging().close(leave=True)
    store.collect()
    assert stagings(tmp_path) == [Path(another.layout.path)]
    gone = reopen_destination(path, str(image), ID, MEMORY, [table for _, table in label_tables(record)])
    with pytest.raises(ImageError, match="sha256:"):
        gone.name(record)
    gone.discard(earlier=False)
    again = reopen_destination(
        another.layout.path, str(image), "another", MEMORY, [t for _, t in label_tables(kept)]
    )
    again.name(kept)
    again.close(kept)
    assert len(store.entries()) == 1
    for each in stagings(tmp_path):
        (each / "precious").unlink()
    store.collect()


def test_killed_after_it_was_named(destination: StoreDestination, image: Path, tmp_path: Path) -> None:
    """The chunks are in the store by then, and are found there."""
    record = written(destination)
    path = destination.layout.path
    destination.mark_needed()
    destination.name(record)
    destination.close(record)
    tables = [table for _, table in label_tables(record)]
    again = reopen_destination(path, str(image), ID, MEMORY, tables)
    for chunk in tables[0].chunks:
        assert again.layout.has_blob(chunk.blob, chunk.stored)
    again.commit(tables, kept=False)
    again.name(record)
    again.close(record)
    assert len(Store(tmp_path / "store").entries()) == 1
    assert stagings(tmp_path) == []


@pytest.mark.parametrize("alive", [True, False])
def test_with_a_recipient(image: Path, tmp_path: Path, alive: bool) -> None:
    """It gets the memory in the directory that it named, if it still runs; else the store names it."""
    owner = state_files.owner() if alive else (1, 0)
    path = str(tmp_path / "store")
    destination = StoreDestination(path, str(image), ID, MEMORY, recipient=Recipient("named", owner))
    destination.begin()
    assert destination.layout.path == f"{path}/staging/named"
    record = written(destination)
    destination.commit([table for _, table in label_tables(record)], kept=False)
    destination.name(record)
    destination.close(record)
    store = Store(path)
    assert len(store.entries()) == (0 if alive else 1)
    assert stagings(tmp_path) == ([tmp_path / "store/staging/named"] if alive else [])
    store.collect()
    taken = take_over(store, "named")
    assert (taken is not None) == alive
    if taken is not None:
        assert taken.commit() == record
        assert not taken.staging.layout.list_missing(descriptors(record.tables))
        taken.remove()


def test_handed_over_for_nothing(image: Path, tmp_path: Path) -> None:
    """A checkpoint that fails after it takes the memory back."""
    path, recipient = str(tmp_path / "store"), Recipient("named", state_files.owner())
    destination = StoreDestination(path, str(image), ID, MEMORY, recipient=recipient)
    destination.begin()
    destination.name(written(destination))
    destination.discard(earlier=False)
    assert stagings(tmp_path) == []
    assert Store(path).entries() == ()


@pytest.fixture
def handed_over(image: Path, tmp_path: Path) -> Manifest:
    """The manifest of memory whose runtime was killed when it had handed it over."""
    recipient = Recipient("named", state_files.owner())
    destination = StoreDestination(str(tmp_path / "store"), str(image), ID, MEMORY, recipient=recipient)
    destination.begin()
    record = written(destination)
    destination.name(record)
    destination.close(None)
    return record


def reopened(record: Manifest, image: Path, tmp_path: Path) -> Destination:
    """As `gpusnap recover` opens it."""
    tables = [table for _, table in label_tables(record)]
    return reopen_destination(f"{tmp_path}/store/staging/named", str(image), ID, MEMORY, tables)


@pytest.mark.parametrize("there", ["it", "from before the dump", "damaged"])
def test_killed_after_it_was_handed_over(
    handed_over: Manifest, image: Path, tmp_path: Path, there: str
) -> None:
    """If the image has its manifest, recover has the store name it, whatever it does with the processes."""
    draft = Draft(str(image))
    draft.begin()
    draft.prepare(handed_over)
    draft.finish(replace(handed_over, peak_memory=1) if there == "from before the dump" else handed_over)
    if there == "damaged":
        (image / "gpusnap/manifest.json").write_text("{")
    reopened(handed_over, image, tmp_path).discard(earlier=True)
    assert stagings(tmp_path) == []
    store = Store(tmp_path / "store")
    (entry,) = store.entries()
    for each in artifact.read(entry.descriptor, store.read).chunks:
        store.layout.check_blob(each)


def test_killed_before_its_manifest(handed_over: Manifest, image: Path, tmp_path: Path) -> None:
    """If the checkpoint has failed, recover leaves nothing of it in the store."""
    reopened(handed_over, image, tmp_path).discard(earlier=False)
    assert stagings(tmp_path) == []
    assert Store(tmp_path / "store").entries() == ()


def test_completed_after_it_was_handed_over(handed_over: Manifest, image: Path, tmp_path: Path) -> None:
    """Recover commits it once, with the manifest that it completes.

    Until then its chunks are written again, and nobody takes them for synced.
    """
    store = Store(tmp_path / "store")
    again = reopened(handed_over, image, tmp_path)
    assert store.list_handed_over() == {}
    assert [path.name for path in stagings(tmp_path) if (path / "precious").exists()] == ["named"]
    record = replace(handed_over, timing=())
    again.commit(record.tables, kept=False)
    again.name(record)
    again.close(record)
    assert len(store.entries()) == 1
    assert stagings(tmp_path) == []


def test_left_in_the_image(image: Path) -> None:
    """The journal of a checkpoint beside its images names their folder."""
    found = reopen_destination(str(image / "gpusnap"), str(image), ID, MEMORY)
    assert isinstance(found, ImageDestination)
    assert found.write_images() == ()


def test_a_store_that_cannot_be(tmp_path: Path, image: Path) -> None:
    """Refused, with the setting to look at."""
    (tmp_path / "store").write_text("a file")
    destination = StoreDestination(str(tmp_path / "store"), str(image), ID, MEMORY)
    with pytest.raises(Refused, match=str(tmp_path / "store")) as caught:
        destination.begin()
    assert "store.path" in caught.value.hint


def test_a_store_that_is_mounted_read_only(small_disk: Path, image: Path) -> None:
    """Refused, with how it becomes writable."""
    Store(small_disk / "store").create()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(Refused) as caught:
        StoreDestination(str(small_disk / "store"), str(image), ID, MEMORY).begin()
    assert caught.value.sentence() == (
        f"the store {small_disk}/store is read-only; remount it for writing, or set store.path to another "
        "directory [GPS-704]"
    )


def test_a_store_that_is_full(tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is right: the hint is to make room."""

    def fail(*_: object) -> None:
        raise DiskFull("/store/staging is full: the image layout of 30 B did not fit, 0 B are free")

    monkeypatch.setattr(Store, "stage", fail)
    with pytest.raises(Refused, match="is full: the image layout") as raised:
        StoreDestination(str(tmp_path / "store"), str(image), ID, MEMORY).begin()
    hint = "free some space there, such as with gpusnap prune --gc or gpusnap rm --gc"
    assert (raised.value.hint, raised.value.code) == (hint, "GPS-007")


def test_an_image_that_cannot_be_cut_stays(
    destination: StoreDestination, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container may be gone by then: a full disk must not cost it its images."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpusnap.oci.layout.layout.Layout.add_blob", full)
    assert destination.write_images() == ()
    assert (image / "pages-1.img").stat().st_size == 2 << 20


def test_only_the_manifest_from_before_the_dump_is_there(
    destination: StoreDestination, image: Path, tmp_path: Path
) -> None:
    """It says nothing of images, so they stay; nothing is left in the store but what it names."""
    record = replace(written(destination), files=destination.write_images())
    destination.mark_needed()
    destination.name(record)
    destination.close(None)
    assert (image / "pages-1.img").exists()
    assert stagings(tmp_path) == []


def chunks_of(tmp_path: Path, image: Path, memory: Memory = MEMORY) -> Chunks:
    destination = StoreDestination(str(tmp_path / "store"), str(image), ID, memory)
    found = Chunks(str(image), ID, memory, destination=destination, ahead=True)
    found.prepare()
    return found


NO_CEILING = replace(MEMORY, ceiling=0)


def test_images_of_an_earlier_dump_are_not_written(tmp_path: Path, image: Path) -> None:
    """While CRIU still waits, they are in the same directory."""
    (image / "pages-9.img").write_bytes(os.urandom(2 << 20))
    earlier = images.note_earlier(str(image))
    (image / "pages-1.img").write_bytes(os.urandom(2 << 20))
    chunks = chunks_of(tmp_path, image, NO_CEILING)
    chunks.write_images(but=images.list_earlier(str(image), earlier))
    images.drop_earlier(str(image), earlier)
    assert [each.name for each in chunks.commit(kept=False)] == ["pages-1.img"]


def test_images_of_a_dump_that_has_failed_are_forgotten(tmp_path: Path, image: Path) -> None:
    """The second dump need not wait, as nothing is left to write: its images are written afterwards."""
    chunks = chunks_of(tmp_path, image, NO_CEILING)
    chunks.write_images()
    chunks.forget_images()
    second = os.urandom(2 << 20)
    (image / "pages-1.img").write_bytes(second)
    (file,) = chunks.commit(kept=False)
    assert file.table.chunks[0].plain == digest_of(second[:4096])


def test_a_chunk_of_an_image_cannot_be_flushed(
    tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays an image: that is no reason to fail, after the dump has ended the container."""
    chunks = chunks_of(tmp_path, image)
    chunks.write_durably()

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(unsynced, "_start_writeback", fail)
        assert chunks.commit(kept=False) == ()
    assert (image / "pages-1.img").exists()
