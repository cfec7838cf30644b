"""Stagings: a writer's own until he commits, lets go or dies; what is committed is whole and durable."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oci_checkpoints import blob_path, commit, names, put, save_to, stagings, whole
from oci_regions import CEILING, PAGE, fill

from gpusnap.oci.base.errors import (
    BlobError,
    DigestError,
    DiskError,
    LayoutError,
    NotThere,
    StagingBusy,
    StoreBusy,
    StoreError,
)
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.artifact import Artifact, chunk_layers
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.reader import read
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.chunks.verify import verify
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import INDEX, Index, encode_document
from gpusnap.oci.store.gc import Spared
from gpusnap.oci.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", patience=5).create()


def test_a_staging(store: Store) -> None:
    """It is a layout of its own, and gone at the end, whatever was written there."""
    with store.stage() as staging:
        staging.layout.add_blob(b"x")
        assert Path(staging.path).parent == Path(store.path, "staging")
        assert stat.S_IMODE(os.stat(staging.path).st_mode) == 0o700
    staging.close()
    assert stagings(store) == []
    assert names(store.layout) == set()


def test_a_name_of_two(store: Store) -> None:
    """One name is one writer's, until he lets go."""
    with store.stage("pull-1") as staging:
        with pytest.raises(StoreBusy, match=r"another process is working on .*pull-1; try again"):
            store.stage("pull-1")
        with pytest.raises(StoreBusy, match="another process is working"):
            store.adopt(staging.path)
    store.stage("pull-1").close()
    for name in ("../x", ".gone-1", "a/b", "a" * 201):
        with pytest.raises(StoreError, match="not a valid name for a staging"):
            store.stage(name)


def test_writers_of_several_hosts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS, another host does not see a directory's lock: a living writer is not taken for dead."""
    real = fcntl.flock

    def flock(descriptor: int, kind: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with store.stage("pull-1") as staging:
        staging.mark_precious("for a test")
        blob = staging.layout.add_blob(b"x")
        with pytest.raises(StagingBusy):
            store.stage("pull-1")
        with pytest.raises(StagingBusy):
            store.adopt(staging.path)
        assert store.list_precious("precious") == {}
        staging.unmark_precious()
        assert store.collect().stagings == ()
        assert staging.layout.read_blob(blob) == b"x"
        staging.mark_precious("for a test")
    assert store.list_precious("precious") == {staging.path: "for a test"}
    with store.adopt(staging.path) as adopted:
        adopted.unmark_precious()
    assert stagings(store) == []


def test_a_removed_lock_that_is_open(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS, it keeps its directory until it is closed; that is gone then, too."""
    real, kept = os.rmdir, list[str]()

    def rmdir(path: str) -> None:
        for each in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{each}") == f"{path}/lock (deleted)":
                    kept.append(path)
                    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        store.stage("closed").close()
        assert stagings(store) == []
        store.stage("dead").close(leave=True)
        store.collect()
        assert stagings(store) == []
    assert len(kept) == 2


def test_a_lock_without_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead writer left is taken over on a full disk; that of an earlier gpusnap has no file."""
    with ExitStack() as stack:
        staging = store.stage("pull-1")
        stack.callback(staging.close, leave=True)
        blob = staging.layout.add_blob(b"x")
    Path(staging.path, "lock").unlink()
    real = os.open

    def full(path: str, flags: int, *rest: int, **more: Any) -> int:
        if path == "lock" and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    with store.adopt(staging.path) as adopted:
        assert adopted.layout.read_blob(blob) == b"x"
        with pytest.raises(StagingBusy):
            store.adopt(staging.path)
        assert store.collect().stagings == ()


def test_what_was_left(store: Store) -> None:
    """A dead writer's whole blobs are there again under his name; torn ones are not."""
    taken = commit(store, b"taken", names=("a",))
    with ExitStack() as stack:
        staging = store.stage("pull-1")
        stack.callback(staging.close, leave=True)
        good, torn = staging.layout.add_blob(b"good" * 99), staging.layout.add_blob(b"torn" * 99)
        assert staging.take(taken.digest, taken.size)
    blob_path(staging.layout, torn.digest).write_bytes(bytes(torn.size))
    for name in (".new-0123456789abcdef", "else"):
        blob_path(staging.layout, name).write_bytes(b"")
    with store.stage("pull-1") as again:
        assert names(again.layout) == {each.digest.removeprefix("sha256:") for each in (good, taken)}
        assert again.layout.read_blob(good) == b"good" * 99
    assert stagings(store) == []


def test_what_did_not_come_to_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next writer of that name does not find it, though the kernel would say that it is well."""
    failed, real = list[int](), os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and not failed:
            failed.append(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with ExitStack() as stack:
        staging = store.stage("pull-1")
        stack.callback(staging.close, leave=True)
        root, _ = save_to(staging, fill(PAGE, "random"))
        there = names(staging.layout)
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(DiskError, match="Input/output error"):
            staging.commit(root)
    assert store.entries() == ()
    with store.stage("pull-1") as again:
        assert len(there - names(again.layout)) == 1


def test_take(store: Store) -> None:
    """A blob is taken by a link, if the store has it, in that size."""
    root = commit(store, b"x", names=("a",))
    with store.stage() as staging:
        assert staging.take(root.digest, root.size)
        assert not staging.take(root.digest, root.size + 1)
        assert not staging.take(digest_of(b"else"), 4)
        assert os.path.samefile(blob_path(staging.layout, root.digest), blob_path(store.layout, root.digest))
        with pytest.raises(DigestError):
            staging.take("sha256:../../x", 1)


def test_precious(store: Store) -> None:
    """A precious one stays, through gc and its owner's end, until somebody adopts it and says it is not."""
    with store.stage("kept") as staging:
        staging.mark_precious("GPU memory of\ncontainer c")
        blob = staging.layout.add_blob(b"x")
    spared = Spared(staging.path, "GPU memory of\ncontainer c")
    assert store.collect().spared == (spared,)
    with store.adopt(staging.path) as adopted:
        assert adopted.layout.read_blob(blob) == b"x"
        assert store.collect().spared == ()
        root = put(adopted.layout, b"x")
        adopted.commit(root, names=["a"])
        # Who was killed here looks for his blobs where he left them.
        assert adopted.layout.read_blob(blob) == b"x"
        adopted.unmark_precious()
        adopted.unmark_precious()
    assert stagings(store) == []
    assert whole(store) == {"a": root.digest}
    with pytest.raises(NotThere, match="cannot be taken over: it does not exist"):
        store.adopt(staging.path)
    with pytest.raises(StoreError, match="is not a staging of the store"):
        store.adopt(store.path)


def test_adopted_blobs_are_checked(store: Store) -> None:
    """What a crash of the host tore does not get into the store by way of a staging that was adopted."""
    staging = store.stage()
    root = put(staging.layout, b"x" * 99)
    blob_path(staging.layout, digest_of(b"x" * 99)).write_bytes(bytes(99))
    staging.close(leave=True)
    with store.adopt(staging.path) as adopted, pytest.raises(BlobError, match=digest_of(b"x" * 99)):
        adopted.commit(root)
    assert names(store.layout) == set()


def test_missing_blobs(store: Store) -> None:
    """A commit of what is not all there names what is missing, and changes nothing."""
    with store.stage() as staging:
        root = put(staging.layout, b"1", b"2")
        blob_path(staging.layout, digest_of(b"2")).unlink()
        with pytest.raises(BlobError, match=f"{digest_of(b'2')} of 1 bytes is neither in its staging nor in"):
            staging.commit(root, names=["a"])
        blob_path(staging.layout, root.digest).unlink()
        with pytest.raises(BlobError, match=root.digest):
            staging.commit(root)
        with pytest.raises(StoreError, match="the parts of a a/b are unknown"):
            staging.commit(staging.layout.add_blob(b"x", media_type="a/b"))
    assert store.entries() == ()
    assert names(store.layout) == set()


def test_a_commit_mends(store: Store) -> None:
    """A blob that was written anew takes the place of a damaged one of that name."""
    root = commit(store, b"x" * 99, names=("a",))
    blob_path(store.layout, digest_of(b"x" * 99)).write_bytes(bytes(99))
    assert len(verify(store.layout, root, threads=1)) == 1
    commit(store, b"x" * 99)
    assert whole(store) == {"a": root.digest}


def test_known(store: Store) -> None:
    """Chunks that were committed are known, in the store, and to every process; a broken index is empty."""
    with store.stage() as staging:
        root, tables = save_to(staging, fill(50000, "random"))
        assert len(store.open_known_chunks()) == 0
        staging.commit(root, tables=tables)
    for chunk in tables[0].chunks:
        place = store.open_known_chunks().find(chunk.plain)
        assert place is not None
        assert place.layout == store.path
    with store.stage() as staging:
        region = Buffer(bytearray(fill(50000, "random")))
        write(
            [region],
            staging.layout,
            threads=2,
            ceiling=CEILING,
            chunk_size=PAGE,
            known=store.open_known_chunks(),
        )
        for name in names(staging.layout):
            assert os.path.samefile(blob_path(staging.layout, name), blob_path(store.layout, name))
    Path(store.path, "known.json").write_bytes(b"{")
    assert len(store.open_known_chunks()) == 0
    with store.stage() as staging:
        root, tables = save_to(staging, fill(50000, "random", 2))
        staging.commit(root, tables=tables)
    assert len(store.open_known_chunks()) == len(tables[0].chunks)


def test_what_a_foreign_checkpoint_says(store: Store) -> None:
    """What a checkpoint from elsewhere says of a compressed chunk is not believed for one made here."""
    ours = bytearray(fill(PAGE, "text"))
    with store.stage() as staging:
        _, (honest,) = save_to(staging, fill(PAGE, "text", 2))
        (chunk,) = honest.chunks
        assert chunk.encoding == "zstd"
        lie = Table(PAGE, (replace(chunk, plain=digest_of(ours)),))
        root = artifact.write(staging.layout, Artifact(chunks=chunk_layers([("0", lie)])))
        staging.commit(root, names=["evil"], foreign=[lie])
    assert [fault.what for fault in verify(store.layout, root, threads=1, tables=[lie])] == [
        f"does not contain the expected chunk {digest_of(ours)} of {PAGE} bytes"
    ]
    with store.stage() as staging:
        known = store.open_known_chunks()
        source = [Buffer(ours)]
        tables = write(source, staging.layout, threads=1, ceiling=CEILING, known=known, chunk_size=PAGE)
        found = bytearray(PAGE)
        read(tables, staging.layout, [Buffer(found)], threads=1, ceiling=CEILING)
    assert found == ours


def test_an_index_of_what_is_not_known(store: Store) -> None:
    """An index that names what gc could not follow is not committed: no gc of the store could go on."""
    with store.stage() as staging:
        odd = staging.layout.add_blob(b"x", media_type="application/vnd.somebody.else")
        written = encode_document(Index((odd,)).to_json())
        root = staging.layout.add_blob(written, media_type=INDEX)
        with pytest.raises(
            LayoutError, match=f"gpusnap does not know what {odd.digest}, a .*else, refers to"
        ):
            staging.commit(root, names=["odd"])
    store.collect()
    assert store.entries() == ()
