"""The store: what it is, and what many processes and any order of steps make of it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oci_checkpoints import begin, commit, end, names, put, stagings, whole

from gpusnap.base.user_errors import failure
from gpusnap.oci.base.errors import (
    Ambiguous,
    DiskFull,
    LayoutError,
    NotThere,
    OciError,
    ReadOnlyStore,
    StoreBusy,
    StoreError,
)
from gpusnap.oci.chunks.verify import verify
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Index, Manifest
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", patience=5).create()


def test_the_tree(store: Store) -> None:
    """A new store is a layout with an empty index, for its owner alone, and stays as it is."""
    root = Path(store.path)
    assert sorted(str(each.relative_to(root)) for each in root.rglob("*")) == [
        "blobs",
        "blobs/sha256",
        "holds",
        "index.json",
        "lock",
        "oci-layout",
        "staging",
    ]
    assert all(each.stat().st_mode & 0o077 == 0 for each in [root, *root.rglob("*")])
    root_descriptor = commit(store, b"x", names=("a",))
    assert Store(store.path).create().find("a").descriptor.digest == root_descriptor.digest


def test_through_a_link(store: Store, tmp_path: Path) -> None:
    """The path of a store may be a link."""
    (tmp_path / "link").symlink_to(store.path)
    commit(Store(tmp_path / "link"), b"x", names=("a",))
    assert [each.name for each in store.entries()] == ["a"]


def test_no_store(tmp_path: Path) -> None:
    """A folder without a store, or with half of one, says so."""
    with pytest.raises(LayoutError, match="oci-layout cannot be read"):
        Store(tmp_path).check()
    Layout(tmp_path / "layout").create().write_index(Index())
    with pytest.raises(StoreError, match="is an image layout, but no store"):
        Store(tmp_path / "layout").check()
    with pytest.raises(StoreError, match="cannot be used as a store: its lock cannot be opened"):
        Store(tmp_path / "none").tag("a", "b")
    assert Store(tmp_path / "layout").create().entries() == ()


def test_on_a_full_disk(small_disk: Path) -> None:
    """The store is named, not the directory of the writer, and what frees space there."""
    store = Store(small_disk / "store").create()
    said = rf"^the file system of {store.path} is full: a blob of 2\.0 MiB did not fit, "
    with store.stage() as staging, pytest.raises(DiskFull, match=said) as raised:
        staging.layout.add_blob(bytes(2 << 20), media_type="a/b")
    assert failure(raised.value).hint.endswith("such as with gpusnap prune --gc or gpusnap rm --gc")
    with store.stage() as staging:
        config = staging.layout.add_blob(b"{}", media_type="a/b")
        staging.commit(staging.layout.add_manifest(Manifest(config, (), "a/b")), names=["a", "b"])
    with (small_disk / "else").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))
    with pytest.raises(DiskFull, match=f"^the file system of {store.path} is full: the index of ") as raised:
        store.remove("a")
    assert failure(raised.value).hint == "free some space there, such as with gpusnap gc"
    store.collect()
    (small_disk / "else").unlink()
    with pytest.raises(DiskFull, match=rf"^the file system of {small_disk}/layout is full: ") as raised:
        Layout(small_disk / "layout").create().add_blob(bytes(2 << 20), media_type="a/b")
    assert failure(raised.value).hint == "free some space there"


def test_mounted_read_only(small_disk: Path) -> None:
    """It can be read; whatever would change it says that it is read-only."""
    store = Store(small_disk / "store").create()
    digest = commit(store, b"x", names=("a",)).digest
    staging = store.stage("left")
    staging.close(leave=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert [each.name for each in store.entries()] == ["a"]
    assert store.create() is store
    for change in (
        store.stage,
        partial(store.tag, "a", "b"),
        partial(store.remove, "a"),
        partial(store.remove_unused, {digest: []}),
        store.collect,
        partial(store.adopt, staging.path),
        Store(small_disk / "new").create,
        lambda: store.hold(digest).__enter__(),
    ):
        with pytest.raises(ReadOnlyStore, match=rf"^the store {small_disk}/(store|new) is read-only$"):
            change()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP])
def test_no_hard_links(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Where no links can be made there can be no store, and that is said before anything is written."""

    def no_link(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    with pytest.raises(StoreError, match=r"no hard link can be created in it .*; use one file system"):
        Store(store.path + "2").create()
    with pytest.raises(StoreError, match="no hard link can be created in it"):
        commit(store, b"x")
    assert store.entries() == ()


def test_busy(store: Store) -> None:
    """Who does not get the lock in time is told what for."""
    commit(store, b"x", names=("a",))
    hasty = Store(store.path, patience=0.02)
    waits: list[tuple[Callable[[], object], str]] = [
        (hasty.collect, "gc waited 0.02 s for .*/lock, which another process has locked; try again later"),
        (lambda: hasty.tag("a", "b"), "the name b waited"),
        (lambda: hasty.remove("a"), "the removal of a waited"),
        (hasty.stage, "the staging [0-9a-f]+ waited"),
    ]
    with store.stage() as staging, Path(store.path, "lock").open("w") as lock:
        late = hasty.adopt
        fcntl.flock(lock, fcntl.LOCK_EX)
        for call, message in [*waits, (lambda: late(staging.path), "the staging [0-9a-f]+ waited")]:
            with pytest.raises(StoreBusy, match=message):
                call()
        assert len(store.entries()) == 1
        with store.hold(store.find("a").descriptor.digest):
            pass


def test_many_at_once(store: Store) -> None:
    """Processes that commit, read, remove and collect at once all succeed, and see what is right."""

    def commits(who: int) -> None:
        for at in range(12):
            root = commit(store, b"same", b"%d %d" % (who, at), names=("a", f"n{at}"))
            with store.hold(root.digest) as held:
                if at % 3 == 0:
                    store.remove(root.digest)
                store.collect(dry_run=True)
                assert verify(store.layout, held, threads=1) == ()

    def collects(_: int) -> None:
        for _ in range(20):
            store.collect()

    children = [begin(partial(work, who)) for who, work in enumerate((commits, collects) * 3)]
    assert [end(child) for child in children] == [0] * 6
    there = {*whole(store)}
    assert {f"n{at}" for at in range(12) if at % 3} | {"a"} <= there
    assert store.collect().live_blobs == 3 * 8 * 2 + 2
    assert stagings(store) == []


NAMES = st.sampled_from(["a", "b", "c"])
CONTENTS = st.integers(0, 4)
STEPS = st.one_of(
    st.tuples(st.just("commit"), CONTENTS, st.lists(NAMES, max_size=2)),
    st.tuples(st.just("tag"), CONTENTS, NAMES),
    st.tuples(st.just("rename"), NAMES, NAMES),
    st.tuples(st.just("remove"), NAMES, st.none()),
    st.tuples(st.just("remove all"), CONTENTS, st.none()),
    st.tuples(st.just("hold"), CONTENTS, st.none()),
    st.tuples(st.just("let go"), CONTENTS, st.none()),
    st.tuples(st.just("gc"), st.none(), st.none()),
)


class Model:
    """What a store should be: names of each checkpoint, those that are held, those whose blobs are there."""

    def __init__(self) -> None:
        self.named: dict[int, set[str]] = {}
        self.held: set[int] = set()
        self.there: set[int] = set()

    def at(self, name: str) -> int | None:
        """Which one has that name."""
        return next((one for one, found in self.named.items() if name in found), None)

    def give(self, one: int, name: str) -> None:
        """Move a name."""
        for found in self.named.values():
            found.discard(name)
        self.named[one].add(name)

    def step(self, what: str, one: Any, other: Any) -> bool:
        """Do it; whether it can be done."""
        if what == "commit":
            self.named.setdefault(one, set())
            self.there.add(one)
            for name in other:
                self.give(one, name)
        elif what in ("tag", "rename", "remove", "remove all", "hold"):
            at = self.at(one) if what in ("rename", "remove") else one
            if at is None or at not in self.named:
                return False
            if what in ("tag", "rename"):
                self.give(at, other)
            elif what == "hold":
                self.held.add(at)
            elif what == "remove" and len(self.named[at]) > 1:
                self.named[at].discard(one)
            else:
                del self.named[at]
        elif what == "let go":
            self.held.discard(one)
        else:
            self.there &= self.held | set(self.named)
        return True


def content(one: int) -> list[bytes]:
    """Neighbours share a chunk."""
    return [b"chunk %d" % one, b"chunk %d" % (one + 1)]


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_any_sequence(steps: list[tuple[str, Any, Any]]) -> None:
    """Commits, tags, removals, holds and gc in any order leave what a simple model says."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(os, "fsync", lambda _: None)
        layout = Layout(folder + "/other").create()
        digests = {at: put(layout, *content(at)).digest for at in range(5)}
        store, model = Store(folder + "/store").create(), Model()
        holds: dict[int, ExitStack] = {}
        for what, one, other in steps:

            def real(what: str = what, one: Any = one, other: Any = other) -> None:
                if what == "commit":
                    commit(store, *content(one), names=tuple(other))
                elif what in ("tag", "rename"):
                    store.tag(digests[one] if what == "tag" else one, other)
                elif what in ("remove", "remove all"):
                    store.remove(one if what == "remove" else digests[one])
                elif what == "hold":
                    hold = stack.enter_context(ExitStack())
                    hold.enter_context(store.hold(digests[one]))
                    holds.setdefault(one, stack.enter_context(ExitStack())).push(hold.pop_all())
                elif what == "let go":
                    holds.pop(one, ExitStack()).close()
                else:
                    store.collect()

            if model.step(what, one, other):
                real()
            else:
                with pytest.raises(NotThere):
                    real()
            found: dict[str, set[str]] = {}
            for entry in store.entries():
                found.setdefault(entry.descriptor.digest, set()).update({entry.name} - {""})
            assert found == {digests[at]: named for at, named in model.named.items()}
            chunks = {digest_of(each)[7:] for at in model.there for each in content(at)}
            manifests = {digests[at][7:] for at in model.there}
            empty = {digest_of(b"{}")[7:]} if model.there else set()
            assert names(store.layout) == chunks | manifests | empty


def test_every_error_is_ours() -> None:
    """The store's errors are of one tree, so that a caller can catch them all."""
    assert issubclass(StoreError, OciError)
    assert all(issubclass(each, StoreError) for each in (NotThere, Ambiguous, StoreBusy))
