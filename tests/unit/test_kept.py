"""A checkpoint in a store: read, held, and what a runtime left beside it forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept_checkpoints import an_archive, keep, keep_pages

from gpusnap import kept
from gpusnap.failures import NotFound
from gpusnap.where import InStore
from oci.store import Store
from runtime_shim.errors import Refused


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_held(store: Store, tmp_path: Path) -> None:
    """Its parts; gc leaves them alone, though they are removed meanwhile."""
    digest = keep(store, an_archive(tmp_path), ["w"])
    with kept.held(InStore(store, "w")) as (_, found):
        store.remove("w")
        store.collect()
        assert found.root.digest == digest
        assert found.gpu_memory == 1 << 20
        assert len(found.tables) == 2
        assert found.size == sum(each.size for each in (*found.artifact.blobs(), found.root))
        for each in found.artifact.blobs():
            store.layout.check_blob(each)
    assert store.collect().blobs
    with pytest.raises(NotFound), kept.held(InStore(store, digest)):
        pass


def test_pages_only(store: Store, tmp_path: Path) -> None:
    """It says what it is, and cannot be restored."""
    digest = keep_pages(store)
    with kept.held(InStore(store, "")) as (_, found), pytest.raises(Refused) as raised:
        found.check_whole()
    assert digest in str(raised.value)
    assert "podman container restore abababababab" in raised.value.sentence()


def test_forget_pages(store: Store, tmp_path: Path) -> None:
    """What came without a name, without records and with that manifest; nothing else, and nothing older."""
    whole = keep(store, an_archive(tmp_path), ["w"])
    pages = keep_pages(store)
    with kept.held(InStore(store, whole)) as (_, other), kept.held(InStore(store, pages)) as (_, found):
        kept.forget_pages(store, found.artifact.config, kept.roots(store))
        kept.forget_pages(store, other.artifact.config, {whole})
        assert kept.roots(store) == {whole, pages}
        kept.forget_pages(store, found.artifact.config, {whole})
        assert kept.roots(store) == {whole}
    keep_pages(store)
    store.tag(pages, "mine")
    kept.forget_pages(store, None, {whole})
    assert kept.roots(store) == {whole, pages}
