"""A store after a crash, or on a full disk, at any step: nothing that was there is harmed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from oci_checkpoints import begin, blobs_of, commit, end, names, save_to, stagings, whole
from oci_regions import fill
from synced import Synced

from gpusnap.oci.base.errors import DiskFull
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", patience=5).create()


CALLS = ("link", "rename", "fsync", "unlink", "mkdir", "rmdir", "write")


@contextmanager
def interrupted(at: int, calls: tuple[str, ...], fail: Callable[[], None]) -> Iterator[list[str]]:
    """Call `fail` in place of the `at`-th of these system calls; what was called."""
    made: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == at:
                fail()
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield made


def a_whole_life(store: Store) -> None:
    """A write of chunks, a commit that moves a name, a removal and a gc."""
    with store.stage("life") as staging:
        staging.take(digest_of(b"shared"), 6)
        root, tables = save_to(staging, fill(5000, "random"))
        staging.commit(root, names=["moved", "new"], tables=tables, threads=1)
    with store.hold(root.digest):
        store.remove("gone")
        store.collect()


def a_past(path: Path) -> tuple[Store, dict[str, str]]:
    """A store with some checkpoints, and what they are."""
    store = Store(path, patience=5).create()
    commit(store, b"shared", names=("kept", "moved"))
    commit(store, b"gone", names=("gone",))
    return store, whole(store)


def check_past(store: Store, before: dict[str, str]) -> None:
    """All that was there is there, or was meant to go; the store goes on, and gc leaves nothing over."""
    now = whole(store)
    assert now["kept"] == before["kept"]
    assert now["moved"] in (before["moved"], now.get("new"))
    assert now.get("gone", before["gone"]) == before["gone"]
    if "gone" in now:
        a_whole_life(store)
    store.collect()
    now = whole(store)
    assert {*now} == {"kept", "moved", "new"}
    assert now["kept"] == before["kept"]
    assert now["moved"] == now["new"]
    assert stagings(store) == []
    assert os.listdir(Path(store.path, "holds")) == []
    live = {each.digest[7:] for root in store.entries() for each in blobs_of(store, root.descriptor)}
    assert names(store.layout) == live
    assert not [each for each in os.listdir(store.path) if each.startswith(".new-")]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: the host does not crash here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("quick")
def test_killed_at_every_step(tmp_path: Path) -> None:
    """A process that dies before any of the system calls that change something loses nothing."""
    at, status = 0, 9
    while status == 9:
        at += 1
        store, before = a_past(tmp_path / str(at))

        def life(store: Store = store, at: int = at) -> None:
            with interrupted(at, CALLS, lambda: os._exit(9)):
                a_whole_life(store)

        status = end(begin(life))
        assert status in (0, 9)
        check_past(store, before)
    assert at > 30


@pytest.mark.usefixtures("quick")
def test_full_at_every_step(tmp_path: Path) -> None:
    """A disk that is full at any point is DiskFull, and harms nothing that was there."""

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    at, made, failed = 0, [""], 0
    while len(made) >= at:
        at += 1
        store, before = a_past(tmp_path / str(at))
        with interrupted(at, ("link", "rename", "fsync", "mkdir", "write"), full) as made:
            try:
                a_whole_life(store)
            except DiskFull:
                failed += 1
        check_past(store, before)
    assert failed > 15


def test_a_disk_that_is_full(small_disk: Path) -> None:
    """On a real one: what does not fit is DiskFull, gc works there, and then it fits."""
    store, before = a_past(small_disk / "store")
    filler = small_disk / "filler"
    failed = 0
    for free in range(0, 30 * 4096, 4096):
        room = os.statvfs(small_disk)
        filler.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - free)))
        try:
            commit(store, bytes(range(256)) * 64, names=("new",))
        except DiskFull:
            failed += 1
            assert "new" not in whole(store)
        else:
            assert {*whole(store)} == {*before, "new"}
            store.remove("new")
        store.collect()
        assert whole(store) == before
        filler.unlink()
    assert 0 < failed < 30


def test_durable_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is durable before the store names it, and its folder before the index does."""
    synced: set[int] = set()
    folder = os.stat(Path(store.path, "blobs/sha256")).st_ino
    link, fsync, rename = os.link, os.fsync, os.rename
    linked: list[int] = []

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def watched_link(source: str, target: str, **options: Any) -> None:
        if os.fstat(options["dst_dir_fd"]).st_ino == folder:
            linked.append(os.stat(source, dir_fd=options["src_dir_fd"]).st_ino)
            assert linked[-1] in synced
            synced.discard(folder)
        link(source, target, **options)

    def watched_rename(source: str, target: str, **options: Any) -> None:
        if target == "index.json":
            assert folder in synced
            assert os.stat(source, dir_fd=options["src_dir_fd"]).st_ino in synced
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    monkeypatch.setattr(os, "rename", watched_rename)
    commit(store, b"1", b"2", names=("a",))
    assert len(linked) == 4


def test_a_new_store_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the directories that were made for it, and what is committed to it."""
    disk = Synced(tmp_path, monkeypatch)
    made = Store(tmp_path / "new" / "folder" / "store").create()
    commit(made, b"1", names=("a",))
    for name in ("index.json", "oci-layout", "staging", "holds"):
        assert disk.has(f"{made.path}/{name}")
    for blob in os.listdir(f"{made.path}/blobs/sha256"):
        assert disk.has(f"{made.path}/blobs/sha256/{blob}")
