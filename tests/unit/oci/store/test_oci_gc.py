"""gc: what nothing names and nobody reads goes, and nothing else does."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from oci_checkpoints import blob_path, commit, index, names, put, stagings, whole

from gpusnap.oci.base.errors import BlobError, NotThere, StoreBusy, StoreError
from gpusnap.oci.chunks.index import Place
from gpusnap.oci.chunks.verify import verify
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import INDEX, Descriptor, Index, encode_document
from gpusnap.oci.store.store import Store

DOCKER = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", patience=5).create()


def test_gc_during_a_write(store: Store) -> None:
    """What a writer has taken, or written, is his though nothing names it."""
    old = commit(store, b"shared" * 99, b"old", names=("a",))
    with store.stage() as staging:
        assert staging.take(digest_of(b"shared" * 99), 594)
        root = put(staging.layout, b"shared" * 99, b"new")
        store.remove(old.digest)
        assert store.collect().blobs == 4
        assert names(store.layout) == set()
        staging.commit(root, names=["b"])
    assert whole(store) == {"b": root.digest}


def test_gc_takes_what_was_not_taken(store: Store) -> None:
    """A writer who relied on the store without taking a blob is told which one has gone."""
    old = commit(store, b"shared", names=("a",))
    with store.stage() as staging:
        root = put(staging.layout, b"shared")
        blob_path(staging.layout, digest_of(b"shared")).unlink()
        store.remove(old.digest)
        store.collect()
        with pytest.raises(BlobError, match=digest_of(b"shared")):
            staging.commit(root)


def test_gc_during_a_hold(store: Store) -> None:
    """What somebody reads stays, with all below it, until the last reader is done."""
    root = commit(store, b"1", b"2", names=("a",))
    with store.hold(root.digest) as first:
        assert first == store.find("a").descriptor
        with store.hold(root.digest):
            store.remove("a")
            assert store.collect().blobs == 0
        assert store.collect(dry_run=True).blobs == 0
        assert verify(store.layout, first, threads=1) == ()
        with pytest.raises(NotThere), store.hold(root.digest):
            pass
        assert store.collect().live_blobs == 4
    assert os.listdir(Path(store.path, "holds")) == []
    assert store.collect().blobs == 4
    with pytest.raises(NotThere, match=f"has the digest {root.digest}"), store.hold(root.digest):
        pass


def test_gc_forgets_what_it_removed(store: Store) -> None:
    """The index of known chunks does not grow with checkpoints that have gone; what is there stays known."""
    commit(store, b"stays", names=("a",))
    root = commit(store, b"goes", names=("b",))
    known = store.open_known_chunks()
    for data in (b"stays", b"goes"):
        file = blob_path(store.layout, digest_of(data)).stat()
        place = Place(digest_of(data), len(data), "plain", store.path, file.st_ino, file.st_mtime_ns)
        known.add(digest_of(data), place)
    known.save()
    store.remove(root.digest)
    store.collect(dry_run=True)
    assert len(store.open_known_chunks()) == 2
    store.collect()
    assert len(store.open_known_chunks()) == 1
    assert store.open_known_chunks().find(digest_of(b"stays")) is not None


def test_gc_and_an_index_that_is_held(store: Store) -> None:
    """An index, and a manifest that does not say its media type, are followed where only a hold has them."""
    held = []
    with ExitStack() as stack:
        for media_type in (INDEX, DOCKER):
            with store.stage() as staging:
                inner = put(staging.layout, b"in " + media_type.encode())
                config = staging.layout.add_blob(b"{}")
                value: dict[str, object] = {"schemaVersion": 2}
                if media_type == INDEX:
                    value["manifests"] = [inner.to_json()]
                else:
                    value |= {"config": config.to_json(), "layers": []}
                root = staging.layout.add_blob(encode_document(value), media_type=media_type)
                staging.commit(root)
            held.append(stack.enter_context(store.hold(root.digest)))
            store.remove(root.digest)
        store.collect()
        assert [verify(store.layout, each, threads=1) for each in held] == [(), ()]


def test_a_hold_that_comes_too_late(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is removed, and collected, while a reader is about to hold it is not held."""
    root = commit(store, b"x", names=("a",))
    flock = fcntl.flock

    def late(lock: int, how: int) -> None:
        if how & fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", flock)
            store.remove("a")
            assert store.collect().blobs == 3
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(NotThere), store.hold(root.digest):
        pass
    assert os.listdir(Path(store.path, "holds")) == []


def test_a_hold_whose_file_goes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gc removes the file of a hold before its lock is had, the reader makes another."""
    root = commit(store, b"x", names=("a",))
    flock = fcntl.flock

    def late(lock: int, how: int) -> None:
        if how & fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", flock)
            store.collect()
            assert os.listdir(Path(store.path, "holds")) == []
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with store.hold(root.digest):
        store.remove("a")
        assert store.collect().blobs == 0


def test_a_hold_whose_file_stays_locked(store: Store) -> None:
    """By a process that was stopped while it removed something: a reader does not wait for ever."""
    root = commit(store, b"x", names=("a",))
    file = os.open(Path(store.path, "holds", root.digest.removeprefix("sha256:")), os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    later = threading.Timer(20, fcntl.flock, (file, fcntl.LOCK_UN))
    later.start()
    try:
        with (
            pytest.raises(StoreBusy, match=r"a reader waited 0 s for .*, which another process has locked"),
            Store(store.path, patience=0).hold(root.digest),
        ):
            pass
    finally:
        later.cancel()
        os.close(file)


def test_a_dead_hold(store: Store) -> None:
    """The file of a reader who was killed keeps nothing, and goes."""
    root = commit(store, b"x")
    file = Path(store.path, "holds", root.digest.removeprefix("sha256:"))
    file.touch()
    store.remove(root.digest)
    assert store.collect(dry_run=True).blobs == 3
    assert file.exists()
    assert store.collect().blobs == 3
    assert not file.exists()


def test_gc_says_what(store: Store) -> None:
    """It counts what goes and what stays; a dry run is the same, and removes nothing."""
    commit(store, b"live", names=("a",))
    dead = commit(store, b"dead" * 100)
    store.remove(dead.digest)
    store.stage("left").close(leave=True)
    for path in (
        "blobs/sha256/.new-0123456789abcdef",
        ".new-0123456789abcdef",
        "blobs/sha256/theirs",
        "kept/x",
    ):
        Path(store.path, path).parent.mkdir(exist_ok=True)
        Path(store.path, path).touch()
    with store.stage("alive"):
        before = sorted(Path(store.path).rglob("*"))
        dry = store.collect(dry_run=True)
        assert sorted(Path(store.path).rglob("*")) == before
        assert store.collect() == dry
        assert (dry.blobs, dry.size, dry.stagings) == (2, dead.size + 400, ("left",))
        assert (dry.live_blobs, dry.spared) == (3, ())
        assert stagings(store) == ["alive"]
        gone = {Path(store.path, ".new-0123456789abcdef"), Path(store.path, "staging/left")}
        assert not gone.intersection(Path(store.path).rglob("*"))
    assert {each for each in names(store.layout) if len(each) < 64} == {"theirs"}
    assert Path(store.path, "kept/x").exists()
    again = store.collect()
    assert (again.blobs, again.stagings) == (0, ())


@pytest.mark.parametrize(
    "harm", ["media type", "inner media type", "missing blob", "missing manifest", "broken"]
)
def test_gc_refuses(store: Store, harm: str) -> None:
    """Where it cannot be known what is needed nothing goes, and the reason is named."""
    root = commit(store, b"x", names=("a",))
    other = commit(store, b"dead")
    store.remove(other.digest)
    value = index(store)
    wanted = root.digest
    if harm == "media type":
        value["manifests"].append(Descriptor("a/b", other.digest, other.size).to_json())
        wanted = f"{other.digest}: it is unknown what a a/b refers to"
    elif harm == "inner media type":
        strange = Index((Descriptor("a/b", other.digest, other.size),))
        document = encode_document(strange.to_json())
        value["manifests"].append(store.layout.add_blob(document, media_type=INDEX).to_json())
        wanted = f"gpusnap does not know what {other.digest}, a a/b, refers to"
    elif harm == "missing blob":
        wanted = digest_of(b"x")
        blob_path(store.layout, wanted).unlink()
    elif harm == "missing manifest":
        blob_path(store.layout, root.digest).unlink()
    else:
        blob_path(store.layout, root.digest).write_bytes(bytes(root.size))
    Path(store.path, "index.json").write_text(json.dumps(value))
    before = names(store.layout)
    for dry_run in (True, False):
        with pytest.raises(StoreError, match=f"gc removed nothing from .*{wanted}.*remove what is damaged"):
            store.collect(dry_run=dry_run)
    assert names(store.layout) == before
    store.remove("a")
    if "media" in harm:
        store.remove(value["manifests"][-1]["digest"])
    store.collect()
    assert names(store.layout) == set()
