"""gpusnap checkpoint: what Podman exports becomes an artifact, and nothing is lost where that fails."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive, keep_pages

from gpusnap import checkpointing, convert, kept, where
from gpusnap.checkpointing import Made, Wish
from gpusnap.progress import Progress
from oci.errors import DiskFull
from oci.store import Store
from runtime_shim import orders
from runtime_shim import settings as settings_file
from runtime_shim.errors import GpusnapError, Interrupted
from runtime_shim.settings import Settings


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """This host's."""
    found = Settings(store=settings_file.Store(path=str(tmp_path / "store")))
    monkeypatch.setattr(settings_file, "load", lambda: found)
    monkeypatch.setattr(orders, "FOLDER", str(tmp_path / "orders"))
    return Store(tmp_path / "store")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has()
    found.exports(an_archive(tmp_path))
    return found


@pytest.fixture
def pages(fake: FakePodman, store: Store, tmp_path: Path) -> FakePodman:
    """A runtime that puts the pages into the store, as it was ordered to, before Podman exports the rest."""
    (tmp_path / "other").mkdir()
    keep_pages(Store(tmp_path / "other"))
    folder = tmp_path / "with"
    folder.mkdir()
    fake.exports(an_archive(folder, pages="store"))
    # The index is put in place by hand: a store of one artifact is copied over an empty one.
    fake.first(
        f'grep -q \'"pages": "store", "store": "{store.path}"\' {tmp_path}/orders/{ID}.json || exit 9\n'
        f"cp {tmp_path}/other/blobs/sha256/* {store.path}/blobs/sha256/\n"
        f"cp {tmp_path}/other/index.json {store.path}/\n"
    )
    return fake


def made(**more: object) -> Made:
    return checkpointing.checkpoint(Wish(container="w", **more), Progress(shown=False))  # type: ignore[arg-type]


def test_pages_in_the_store(pages: FakePodman, store: Store) -> None:
    """They are there already; the artifact with the records names them, and the runtime's is forgotten."""
    done = made()
    (entry,) = store.entries()
    assert entry.name == done.name
    assert re.fullmatch(r"w:\d{8}-\d{6}", done.name)
    with kept.held(where.InStore(store, done.name)) as (_, found):
        assert found.root.digest == done.digest
        assert found.artifact.records is not None
        assert found.record is not None
        assert found.record.pages == "store"
        assert done.size == found.size
        for each in found.artifact.blobs():
            store.layout.check_blob(each)
    assert done.new == done.size
    assert done.gpu_memory == 1 << 20
    assert pages.status() == "exited"
    assert os.listdir(store.path + "/staging") == []
    assert not os.path.exists(f"{orders.FOLDER}/{ID}.json")


def test_words_for_podman(fake: FakePodman) -> None:
    """Plain, as it is read again at once; options as given."""
    made(leave_running=True, tcp_established=True, file_locks=True, ignore_rootfs=True)
    (call,) = fake.calls()
    assert re.fullmatch(
        r"container checkpoint --export /\S+/staging/\w+/podman\.tar --compress none "
        rf"--leave-running --tcp-established --file-locks --ignore-rootfs {ID}",
        call,
    )


@pytest.mark.parametrize(
    ("container", "given", "name"),
    [("w", "mine", "mine"), ("a__b-", "", r"a_b:\d{8}-\d{6}"), ("-._", "", r"abababababab:\d{8}-\d{6}")],
)
def test_names(fake: FakePodman, container: str, given: str, name: str) -> None:
    """As given, or such as a store takes."""
    fake.has(name=container)
    assert re.fullmatch(name, made(name=given).name)


def test_a_bad_name_is_said_first(fake: FakePodman) -> None:
    """Before anything is done to the container."""
    with pytest.raises(GpusnapError, match="cannot be a name"):
        made(name="two words")
    assert fake.status() == "running"


def test_another_store(fake: FakePodman, tmp_path: Path, store: Store) -> None:
    """oci:DIR:NAME."""
    done = made(to=where.destination(f"oci:{tmp_path}/there:x"))
    assert (done.store, done.name) == (f"{tmp_path}/there", "x")
    assert not os.path.exists(store.path)


@pytest.mark.parametrize(
    ("name", "compress"),
    [("w.tar", "none"), ("w.tar.zst", "zstd"), ("w.tgz", "gzip"), ("w.tar.gz", "gzip"), ("./w", "zstd")],
)
def test_a_file(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, compress: str
) -> None:
    """Podman's own archive, under its name when it is whole."""
    monkeypatch.chdir(tmp_path / "podman")
    fake.first(f'grep -q \'"pages": "chunks"\' {tmp_path}/orders/{ID}.json || exit 9\n')
    done = made(to=where.destination(name))
    assert done.file == str(tmp_path / "podman" / name)
    assert Path(done.file).read_bytes() == Path(fake.folder, "archive").read_bytes()
    assert done.size == os.path.getsize(done.file)
    (call,) = fake.calls()
    assert "/.w" in call
    assert f"--compress {compress} " in call
    assert not [each for each in os.listdir(fake.folder) if each.startswith(".")]


def test_a_file_in_no_folder(fake: FakePodman, tmp_path: Path) -> None:
    """Said before anything is done."""
    with pytest.raises(GpusnapError, match="is no folder"):
        made(to=where.InFile(f"{tmp_path}/gone/w.tar"))
    assert fake.status() == "running"


def test_podman_fails_and_the_container_runs_on(fake: FakePodman, store: Store) -> None:
    """The runtime's sentence, and nothing else."""
    fake.fails("gpusnap: no room; make some\n")
    with pytest.raises(GpusnapError, match=r"^no room; make some$"):
        made()
    assert os.listdir(store.path + "/staging") == []


def test_podman_fails_after_the_end(fake: FakePodman) -> None:
    """Where the container is, and how it comes back."""
    fake.first(f"sed -i s/running/exited/ {fake.folder}/inspect.json\n")
    fake.fails("Error: writing the archive: no space left\n")
    with pytest.raises(GpusnapError) as raised:
        made()
    assert raised.value.sentence() == (
        "Podman failed: writing the archive: no space left; nothing is lost: Podman has the checkpoint of w "
        "in its storage; podman container restore w brings it back"
    )


@pytest.mark.parametrize("error", [DiskFull("the disk is full"), KeyboardInterrupt()])
def test_we_fail_after_the_end(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The same; the pages stay in the store, which what Podman has refers to."""

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(convert, "take_in", fails)
    with pytest.raises(GpusnapError) as raised:
        made()
    assert "podman container restore w brings it back" in raised.value.sentence()
    assert isinstance(raised.value, Interrupted) == isinstance(error, KeyboardInterrupt)
    (entry,) = store.entries()
    assert entry.name == ""


def test_we_fail_and_it_runs_on(pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing refers to the pages then."""

    def fails(*_: object, **__: object) -> None:
        raise DiskFull("the disk is full")

    monkeypatch.setattr(convert, "take_in", fails)
    with pytest.raises(GpusnapError, match=r"^the disk is full$"):
        made(leave_running=True)
    assert store.entries() == ()


def test_pages_that_are_not_there(pages: FakePodman, store: Store, tmp_path: Path) -> None:
    """A chunk that the runtime should have put into the store is named."""
    (tmp_path / "podman/first.sh").unlink()
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(GpusnapError, match=r"the chunk sha256:[0-9a-f]{64} of .* is neither in"):
        made()
