"""A checkpoint in a store: read, held, and what a runtime left beside it forgotten."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from archives import record, regions
from kept_checkpoints import an_archive, keep, keep_pages

from gpusnap.base.user_errors import Damaged, NotFound
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints.formats.podman import take_in
from gpusnap.checkpoints.locator import InStore
from gpusnap.oci.base.errors import DiskError, disk_error
from gpusnap.oci.chunks import artifact
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.records.manifest_json import encode


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_held(store: Store, tmp_path: Path) -> None:
    """Its parts; gc leaves them alone, though they are removed meanwhile."""
    digest = keep(store, an_archive(tmp_path), ["w"])
    with kept.hold_artifact(InStore(store, "w")) as (_, found):
        store.remove("w")
        store.collect()
        assert found.root.digest == digest
        assert found.gpu_memory == 1 << 20
        assert len(found.tables) == 2
        assert found.size == sum(each.size for each in (*found.artifact.blobs(), found.root))
        for each in found.artifact.blobs():
            store.layout.check_blob(each)
    assert store.collect().blobs
    with pytest.raises(NotFound), kept.hold_artifact(InStore(store, digest)):
        pass


def test_pages_only(store: Store, tmp_path: Path) -> None:
    """It says what it is, and cannot be restored."""
    digest = keep_pages(store)
    with kept.hold_artifact(InStore(store, "")) as (_, found), pytest.raises(Refused) as raised:
        found.check_whole()
    assert digest in str(raised.value)
    assert "podman container restore abababababab" in raised.value.sentence()


def test_pages_become_the_whole(store: Store, tmp_path: Path) -> None:
    """One index takes the whole in place of its memory; what was there before stays, and so does a name."""
    pages = keep_pages(store)
    other = keep(store, an_archive(tmp_path), ["other"])

    (tmp_path / "of").mkdir()
    archive = an_archive(tmp_path / "of", pages="store")

    def complete(before: set[str]) -> str:
        with store.stage() as staging:
            taken = take_in(archive, staging.layout, known=staging.take)
            parts = artifact.Artifact(taken.config, taken.records, chunks=taken.chunks)
            root = artifact.write(staging.layout, parts)
            found = kept.load(root, staging.layout)
            staging.commit(root, names=["w"], completes=kept.pages_of(found, staging.layout, before))
        return root.digest

    whole = complete({pages})
    assert kept.roots(store) == {whole, pages, other}
    store.tag(pages, "mine")
    complete(set())
    assert kept.roots(store) == {whole, pages, other}
    store.remove("mine")
    store.remove("w")
    pages = keep_pages(store)
    assert complete(set()) == whole
    assert kept.roots(store) == {whole, other}


def test_a_chunk_that_is_no_layer(store: Store) -> None:
    """A pull would not bring it, and gc would not spare it."""
    with store.create().stage() as staging:
        tables = regions(staging.layout)
        config = staging.layout.add_blob(encode(record(tables)), media_type=artifact.CONFIG)
        layers = artifact.chunk_layers([("1:0", table) for table in tables])
        kept.load(artifact.write(staging.layout, artifact.Artifact(config, chunks=layers)), staging.layout)
        root = artifact.write(staging.layout, artifact.Artifact(config, chunks=layers[1:]))
        with pytest.raises(Damaged, match=f"names the chunk {layers[0].digest} of .*, but not among its"):
            kept.load(root, staging.layout)


def test_a_hold_that_cannot_be_had(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only store it is not needed; on a full one gc could take what is being read."""
    keep(store, an_archive(tmp_path), ["w"])

    def hold(code: int) -> None:
        def fails(*_: object) -> None:
            error = OSError(code, "")
            raise disk_error(error, store.path, "a hold", None) from error

        monkeypatch.setattr(Store, "hold", fails)

    hold(errno.EROFS)
    with kept.hold_artifact(InStore(store, "w")) as (_, found):
        assert found.record is not None
    for code in (errno.ENOSPC, errno.EMFILE):
        hold(code)
        with pytest.raises(DiskError), kept.hold_artifact(InStore(store, "w")):
            pass


def test_another_tool_s_layout(store: Store, tmp_path: Path) -> None:
    """It has no gc, and so no holds, and stays as it is."""
    keep(store, an_archive(tmp_path), ["w"])
    for name in ("staging", "holds", "lock", "known.json"):
        path = Path(store.path, name)
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    before = sorted(Path(store.path).iterdir())
    with kept.hold_artifact(InStore(store, "w")) as (_, found):
        assert found.record is not None
    assert sorted(Path(store.path).iterdir()) == before
