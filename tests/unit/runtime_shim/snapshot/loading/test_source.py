"""Chunks of a store, and of a registry, on their way to a restore."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import subprocess
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fakes import a_manifest
from kept_checkpoints import keep_pages

from gpusnap.oci.base.errors import BlobError, Unreachable
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.read_meter import ReadMeter
from gpusnap.oci.chunks.reader import Reader, read
from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.registry.repository import Repository
from gpusnap.oci.store.read_rate import recall
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ImageError, Refused
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.records.artifact import label_tables, write_artifact
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest, RegionRecord
from gpusnap.runtime_shim.settings import Store as Settings
from gpusnap.runtime_shim.snapshot.loading import source as module
from gpusnap.runtime_shim.snapshot.loading.source import BlobSource, ImageRebuild, rebuild
from gpusnap.runtime_shim.snapshot.memory import handover, transfer
from gpusnap.runtime_shim.snapshot.memory.handover import Recipient

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB
NOWHERE = "/nonexistent"
ROOM = {"at first": "area", "on the way": "populate"}


@pytest.fixture
def content() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def made(tmp_path: Path, content: bytes) -> tuple[Manifest, Layout]:
    """A checkpoint of one region and one image, and the layout that has its chunks."""
    layout = Layout(tmp_path / "registry").create()
    sources = [Buffer(bytearray(content)), Buffer(bytearray(content[::-1]))]
    region, image = write(sources, layout, threads=2, ceiling=64 << 20, chunk_size=4 * KIB)
    record = a_manifest()
    process = replace(record.processes[0], regions=(RegionRecord(1 << 30, region),))
    files = (FileRecord("pages-1.img", image),)
    return replace(record, pages="store", processes=(process,), files=files), layout


class FakeRepository:
    """A registry that has what a layout has."""

    def __init__(self, layout: Layout, *, lacks: str = "") -> None:
        self.layout, self.lacks = layout, lacks
        self.asked: list[str] = []
        self.fetched: list[str] = []
        self.closes = 0

    def close(self) -> None:
        self.closes += 1

    def interrupt(self) -> None:
        """Nobody waits for it."""

    def has_blob(self, digest: str, size: int) -> bool:
        self.asked.append(digest)
        return digest != self.lacks

    def fetch_blob(self, wanted: Descriptor, layout: Layout) -> None:
        self.fetched.append(wanted.digest)
        if not self.layout.has_blob(wanted.digest, wanted.size):
            raise BlobError(f"the registry has something else as {wanted.digest}")
        layout.link_blob(wanted.digest, wanted.size, self.layout)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, made: tuple[Manifest, Layout]) -> FakeRepository:
    found = FakeRepository(made[1])
    monkeypatch.setattr(module, "_open_repository", lambda text: found)
    return found


def stored(path: Path, record: Manifest, layout: Layout) -> Store:
    """A store that has that checkpoint, as the shim puts it there."""
    store = Store(path).create()
    with store.stage() as staging:
        tables = [table for _, table in label_tables(record)]
        for table in tables:
            for chunk in table.chunks:
                staging.layout.link_blob(chunk.blob, chunk.stored, layout)
        staging.commit(write_artifact(staging.layout, record), tables=tables)
    return store


def handed_over(path: Path, record: Manifest, layout: Layout, owner: tuple[int, int]) -> Store:
    """A store in which that checkpoint waits for its command."""
    store = Store(path).create()
    with store.stage("handed") as staging:
        staging.mark_precious("a checkpoint")
        for each in descriptors(record.tables):
            staging.layout.link_blob(each.digest, each.size, layout)
        handover.hand_over(staging, record, Recipient("handed", owner))
    return store


def bytes_of(table: Table, fetching: BlobSource) -> bytes:
    found = bytearray(table.size)
    read([table], fetching, [Buffer(found)], threads=2, ceiling=64 << 20)
    return bytes(found)


def idle(path: Path) -> bool:
    return not list((path / "staging").iterdir())


def region_of(record: Manifest) -> Table:
    return record.processes[0].regions[0].table


def test_all_of_it_is_in_the_store(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository, content: bytes
) -> None:
    """No registry is asked; gc, and worse, in between take nothing away."""
    record, layout = made
    store = stored(tmp_path / "store", record, layout)
    with BlobSource(record, NOWHERE, store.path, ["r.example/a"]) as fetching:
        store.remove(store.entries()[0].descriptor.digest)
        store.collect()
        assert not list((tmp_path / "store" / "blobs" / "sha256").iterdir())
        assert bytes_of(region_of(record), fetching) == content
        fetching.finish()
    assert registry.asked == []
    assert idle(tmp_path / "store")


@pytest.mark.parametrize("held", [True, False])
def test_the_disk_is_measured(
    tmp_path: Path, made: tuple[Manifest, Layout], monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """What blobs of the store's needed to come from the disk is remembered there, whoever holds them."""
    record, layout = made
    store = stored(tmp_path / "store", record, layout)
    artifact = store.entries()[0].descriptor.digest if held else ""
    ticks = itertools.count()
    monkeypatch.setattr("gpusnap.oci.chunks.read_meter._LEAST", SIZE)
    with BlobSource(record, NOWHERE, store.path, [], artifact) as fetching:
        fetching.meter = ReadMeter(lambda: next(ticks) / 1024, lambda file, size: False)
        table, room = region_of(record), bytearray(SIZE)
        reads = fetching.meter.around()
        with Reader([table], fetching, threads=1, ceiling=MIB, targets=[Buffer(room)], reads=reads) as each:
            each.wait()
        fetching.finish()
    assert recall(store.path) == 4 * MIB, "4 KiB in each 1024th of a second"


def test_what_is_beside_the_images_is_no_measure(
    tmp_path: Path, made: tuple[Manifest, Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie on another disk, maybe."""
    record, layout = made
    monkeypatch.setattr("gpusnap.oci.chunks.read_meter._LEAST", 1)
    shutil.copytree(layout.path, tmp_path / "image" / "gpusnap")
    with BlobSource(record, str(tmp_path / "image"), str(tmp_path / "store"), []) as fetching:
        fetching.meter = ReadMeter(cached=lambda file, size: False)
        with fetching.open_blob(region_of(record).chunks[0].blob, 4 * KIB), fetching.meter.around():
            pass
        assert fetching.meter.rate is None


def test_the_artifact_is_held(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository, content: bytes
) -> None:
    """Who knows which artifact of the store it is links nothing; gc takes nothing away until the end."""
    record, layout = made
    store = stored(tmp_path / "store", record, layout)
    (entry,) = store.entries()
    environ = {"GPUSNAP_STORE": store.path, "GPUSNAP_ARTIFACT": entry.descriptor.digest}
    blobs = tmp_path / "store" / "blobs" / "sha256"
    with BlobSource.from_settings(record, NOWHERE, Settings(path=str(tmp_path)), environ) as fetching:
        assert idle(tmp_path / "store")
        assert fetching.folders == (store.path,)
        store.remove(entry.descriptor.digest)
        store.collect()
        assert bytes_of(region_of(record), fetching) == content
        fetching.finish()
    store.collect()
    assert not list(blobs.iterdir())
    assert registry.asked == []


@pytest.mark.parametrize("what", ["another", "none", "no digest"])
def test_another_artifact(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository, content: bytes, what: str
) -> None:
    """What it does not have is linked, or asked for, as without it."""
    record, _ = made
    store = Store(tmp_path / "store")
    other = keep_pages(store)
    artifact = {"another": other, "none": f"sha256:{'0' * 64}", "no digest": "x"}[what]
    with BlobSource(record, NOWHERE, store.path, ["r.example/a"], artifact) as fetching:
        assert bytes_of(region_of(record), fetching) == content
        assert bytes_of(record.files[0].table, fetching) == content[::-1]
        fetching.finish()
    assert registry.fetched
    assert idle(tmp_path / "store")
    assert not list((tmp_path / "store" / "holds").iterdir())


def test_what_the_store_lacks_is_fetched_and_kept(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository, content: bytes
) -> None:
    """Each missing chunk once, and the next restore has them all."""
    record, _ = made
    path = tmp_path / "store"
    with BlobSource(record, NOWHERE, str(path), ["r.example/a"]) as fetching:
        assert len(registry.asked) == 2 * SIZE // (4 * KIB)
        assert registry.fetched == []
        assert bytes_of(region_of(record), fetching) == content
        assert bytes_of(region_of(record), fetching) == content
        assert bytes_of(record.files[0].table, fetching) == content[::-1]
        assert len(registry.fetched) == len(set(registry.fetched)) == 2 * SIZE // (4 * KIB)
        assert registry.closes == 0
        fetching.finish()
    assert registry.closes == 1
    assert idle(path)
    registry.asked.clear()
    with BlobSource(record, NOWHERE, str(path), ["r.example/a"]) as fetching:
        assert bytes_of(region_of(record), fetching) == content
    assert registry.asked == []
    assert len(Store(path).entries()) == 1


def test_chunks_beside_the_images(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository, content: bytes
) -> None:
    """An archive that was made self-contained again needs no store, and only what it lacks is fetched."""
    record, layout = made
    images = tmp_path / "images"
    images.mkdir()
    shutil.copytree(layout.path, images / "gpusnap")
    with BlobSource(record, str(images), str(tmp_path / "store"), []) as fetching:
        assert bytes_of(region_of(record), fetching) == content
        fetching.finish()
    assert not (tmp_path / "store").exists()
    lost = region_of(record).chunks[5].blob
    (images / "gpusnap/blobs/sha256" / lost.removeprefix("sha256:")).unlink()
    with BlobSource(record, str(images), str(tmp_path / "store"), ["r.example/a"]) as fetching:
        assert bytes_of(region_of(record), fetching) == content
        assert registry.fetched == [lost]
        fetching.finish()
    assert idle(tmp_path / "store")


def test_given_up(tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository) -> None:
    """A restore that fails leaves nothing of what it had fetched."""
    record, _ = made
    with BlobSource(record, NOWHERE, str(tmp_path / "store"), ["r.example/a"]) as fetching:
        bytes_of(region_of(record), fetching)
    assert idle(tmp_path / "store")
    assert not Store(tmp_path / "store").entries()


@pytest.mark.parametrize("sources", [[], ["r.example/a"]], ids=["no registry", "one that lacks it"])
def test_a_chunk_that_is_nowhere(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository, sources: list[str]
) -> None:
    """It is named before anything is started, with what to do, and nothing is left in the store."""
    record, layout = made
    store = stored(tmp_path / "store", record, layout)
    lost = region_of(record).chunks[5].blob
    os.unlink(tmp_path / "store" / "blobs" / "sha256" / lost.removeprefix("sha256:"))
    registry.lacks = lost
    with pytest.raises(Refused) as caught:
        BlobSource(record, NOWHERE, store.path, sources)
    assert f"the chunk {lost} of the checkpoint is not in the store {store.path}" in str(caught.value)
    assert ("r.example/a does not have it either" in str(caught.value)) == bool(sources)
    assert "store.pull-from" in caught.value.hint
    assert idle(tmp_path / "store")


def test_several_chunks_that_are_nowhere(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository
) -> None:
    """How many, of which size, and one of them."""
    record, layout = made
    store = stored(tmp_path / "store", record, layout)
    blobs = {each.blob for each in region_of(record).chunks[5:7]}
    for blob in blobs:
        os.unlink(tmp_path / "store" / "blobs" / "sha256" / blob.removeprefix("sha256:"))
    with pytest.raises(Refused) as caught:
        BlobSource(record, NOWHERE, store.path, [])
    said = rf"^2 chunks \(\S+ KiB\) of the checkpoint, such as ({'|'.join(blobs)}), are not in the store "
    assert re.search(said + re.escape(store.path), str(caught.value))


def test_a_registry_that_does_not_answer(
    tmp_path: Path, made: tuple[Manifest, Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is asked; where none has it, what the first one said is in the sentence."""
    record, layout = made
    good = FakeRepository(layout)

    def one(text: str) -> FakeRepository:
        if text == "broken.example/a":
            raise Unreachable("broken.example is gone for good")
        return good

    monkeypatch.setattr(module, "_open_repository", one)
    with BlobSource(record, NOWHERE, str(tmp_path / "store"), ["broken.example/a", "r.example/a"]):
        assert good.asked
    with pytest.raises(Refused, match=r"broken\.example is gone for good"):
        BlobSource(record, NOWHERE, str(tmp_path / "store"), ["broken.example/a"])


def test_what_the_registry_gives_is_checked(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository
) -> None:
    """A blob that cannot be had ends the reading with its name."""
    record, layout = made
    lost = region_of(record).chunks[5].blob
    os.unlink(Path(layout.path) / "blobs" / "sha256" / lost.removeprefix("sha256:"))
    with (
        BlobSource(record, NOWHERE, str(tmp_path / "store"), ["r.example/a"]) as fetching,
        pytest.raises(BlobError, match=lost),
    ):
        bytes_of(region_of(record), fetching)


def test_a_store_that_cannot_be_written_to(
    made: tuple[Manifest, Layout], content: bytes, small_disk: Path
) -> None:
    """What it has is read where it is."""
    record, layout = made
    store = stored(small_disk / "store", record, layout)
    Store(small_disk / "another").create()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with BlobSource(record, NOWHERE, store.path, []) as fetching:
        assert fetching.scratch is None
        assert bytes_of(region_of(record), fetching) == content
        fetching.finish()
    with pytest.raises(Refused, match="the store cannot be written to"):
        BlobSource(record, NOWHERE, str(small_disk / "another"), ["r.example/a"])


def test_the_environment_comes_before_the_settings(
    tmp_path: Path, made: tuple[Manifest, Layout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the caller of a restore wants it; the checkpoint has no say."""
    record, layout = made
    asked: list[str] = []

    def one(text: str) -> FakeRepository:
        asked.append(text)
        return FakeRepository(layout)

    monkeypatch.setattr(module, "_open_repository", one)
    settings = Settings(path=str(tmp_path / "own"), pull_from=("own.example/a",))
    with BlobSource.from_settings(record, NOWHERE, settings, {}) as fetching:
        assert fetching.folders[-1] == str(tmp_path / "own")
    environ = {"GPUSNAP_STORE": str(tmp_path / "given"), "GPUSNAP_PULL_FROM": "http://given.example/a x"}
    with BlobSource.from_settings(record, NOWHERE, settings, environ) as fetching:
        assert fetching.folders[-1] == str(tmp_path / "given")
    assert asked == ["own.example/a", "http://given.example/a"]


def test_the_repository_of_a_line() -> None:
    """TLS unless the line says http://."""
    for text in ("r.example:5000/team/app", "http://r.example:5000/team/app"):
        found = module._open_repository(text)
        assert isinstance(found, Repository)
        assert found.reference.name == "r.example:5000/team/app"


def test_images_are_rebuilt(tmp_path: Path, made: tuple[Manifest, Layout], content: bytes) -> None:
    """Byte for byte; a broken chunk is found, and a full folder is said."""
    record, layout = made
    folder = tmp_path / "images"
    folder.mkdir()
    rebuild(record.files, layout, str(folder), threads=2, ceiling=64 << 20)
    assert (folder / "pages-1.img").read_bytes() == content[::-1]
    shutil.rmtree(folder)
    with pytest.raises(ImageError, match="cannot be"):
        rebuild(record.files, layout, str(folder), threads=2, ceiling=64 << 20)
    folder.mkdir()
    blob = record.files[0].table.chunks[0].blob
    (Path(layout.path) / "blobs" / "sha256" / blob.removeprefix("sha256:")).write_bytes(os.urandom(4 * KIB))
    with pytest.raises(ImageError, match=blob):
        rebuild(record.files, layout, str(folder), threads=2, ceiling=64 << 20)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tmpfs of a test's own."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a tmpfs")
    folder = tmp_path / "gpusnap" / "stage"
    monkeypatch.setattr(tmpfs, "FOLDER", str(folder))
    return folder


def test_images_in_ram(tmp_path: Path, stage: Path, made: tuple[Manifest, Layout], content: bytes) -> None:
    """Byte for byte, and nothing of it stays; what has to be written is not in the folder."""
    record, layout = made
    folder = tmp_path / "images"
    folder.mkdir()
    begun = partial(ImageRebuild, record.files, layout, str(folder), threads=2, ceiling=64 << 20)
    with closing(begun(stage=tmpfs.Stage("some-key"))) as rebuilding:
        rebuilding.wait()
        assert Path(rebuilding.paths["pages-1.img"]).read_bytes() == content[::-1]
        assert Path(rebuilding.paths["pages-1.img"]).parent == stage / "some-key"
    assert list(folder.iterdir()) == []
    assert not os.path.ismount(stage)
    blob = record.files[0].table.chunks[0].blob
    (Path(layout.path) / "blobs" / "sha256" / blob.removeprefix("sha256:")).write_bytes(os.urandom(4 * KIB))
    rebuilding = begun(stage=tmpfs.Stage("some-key"))
    with closing(rebuilding), pytest.raises(ImageError, match=blob):
        rebuilding.wait()
    assert not os.path.ismount(stage)


@pytest.mark.parametrize("when", ["at first", "on the way"])
def test_no_ram_for_images(
    tmp_path: Path,
    stage: Path,
    made: tuple[Manifest, Layout],
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """Where no file in RAM can be had they are in the folder; so they are where one has no page left."""
    record, layout = made
    folder = tmp_path / "images"
    folder.mkdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(stage / "some-key" / "images"))

    monkeypatch.setattr(tmpfs.Stage if when == "at first" else tmpfs.Area, ROOM[when], full)
    rebuilding = ImageRebuild(
        record.files, layout, str(folder), threads=2, ceiling=64 << 20, stage=tmpfs.Stage("some-key")
    )
    with closing(rebuilding):
        rebuilding.wait()
        assert rebuilding.paths == {"pages-1.img": str(folder / "pages-1.img")}
        assert (folder / "pages-1.img").read_bytes() == content[::-1]
        assert not (stage / "some-key" / "images-pages-1.img").exists()
    assert not os.path.ismount(stage)


def test_what_is_full(stage: Path) -> None:
    """RAM, or the disk that the chunks are on: each has a sentence of its own."""
    full = errno.ENOSPC, os.strerror(errno.ENOSPC)
    said = f"no RAM left .* through {stage}"
    with pytest.raises(ImageError, match=said) as caught, transfer.as_image_error("/image"):
        raise OSError(*full, str(stage / "some-key" / "7-1000"))
    assert caught.value.code == "GPS-216"
    said = "in /image cannot be transferred: No space left"
    for where in (f"{stage}d/file", None):
        with pytest.raises(ImageError, match=said) as caught, transfer.as_image_error("/image"):
            raise OSError(*full, where)
        assert caught.value.code == "GPS-512"


def test_chunks_that_are_committed_meanwhile(
    tmp_path: Path, made: tuple[Manifest, Layout], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their command, after the store was asked and before its staging directories are read."""
    record, layout = made
    store = handed_over(tmp_path / "store", record, layout, state_files.owner())
    link_from_staging = BlobSource._link_from_staging

    def commit_and_link(self: BlobSource, wanted: Descriptor, staging: Staging) -> bool:
        taken = handover.take_over(store, "handed")
        if taken is not None:
            taken.commit()
            taken.remove()
        return link_from_staging(self, wanted, staging)

    monkeypatch.setattr(BlobSource, "_link_from_staging", commit_and_link)
    with BlobSource(record, str(tmp_path / "images"), store.path, []) as source:
        assert bytes_of(region_of(record), source) == content
    assert idle(tmp_path / "store")


def test_chunks_whose_command_was_killed(
    tmp_path: Path, made: tuple[Manifest, Layout], registry: FakeRepository, content: bytes
) -> None:
    """The store names them from then on; no registry is asked, and no chunk is read to be checked."""
    record, layout = made
    store = handed_over(tmp_path / "store", record, layout, (1, 0))
    with BlobSource(record, str(tmp_path / "images"), store.path, ["registry.example/w"]) as source:
        assert bytes_of(region_of(record), source) == content
    assert len(store.entries()) == 1
    assert idle(tmp_path / "store")


def test_chunks_that_a_crash_left_in_a_staging(
    tmp_path: Path, made: tuple[Manifest, Layout], content: bytes
) -> None:
    """Those of a checkpoint that the store never came to name are found; a torn one is as good as none."""
    record, layout = made
    store = Store(tmp_path / "store").create()
    staging = store.stage()
    staging.mark_precious("a checkpoint")
    for _, table in label_tables(record):
        for chunk in table.chunks:
            staging.layout.link_blob(chunk.blob, chunk.stored, layout)
    staging.close()
    with BlobSource(record, NOWHERE, store.path, []) as fetching:
        assert bytes_of(region_of(record), fetching) == content
    torn = region_of(record).chunks[5]
    path = Path(staging.path) / "blobs" / "sha256" / torn.blob.removeprefix("sha256:")
    path.unlink()
    path.write_bytes(bytes(torn.stored))
    with pytest.raises(Refused, match=torn.blob):
        BlobSource(record, NOWHERE, store.path, [])
