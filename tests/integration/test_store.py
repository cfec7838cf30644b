"""memory.pages = "store": an archive that only refers to the chunks, which lie in this host's store."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import shimhost
from support import Container, good, manifest, podman, run, sentence

from gpusnap.oci.chunks.table import Table, from_json
from gpusnap.oci.store.store import Store

WORK = ("--mib", "24")
STORE = Path("/var/lib/gpusnap-test")
SETTINGS = f"""\
runtime = "crun"
[memory]
pages = "store"
chunk-size = "1M"
[store]
path = "{STORE}"
"""


@pytest.fixture(autouse=True)
def store() -> Iterator[Store]:
    """An empty one, gone afterwards."""
    shutil.rmtree(STORE, ignore_errors=True)
    yield Store(STORE)
    shutil.rmtree(STORE, ignore_errors=True)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.tar"


def tables(archive: Path) -> list[Table]:
    record = manifest(archive)
    regions = [region for process in record["processes"] for region in process["regions"]]
    return [from_json(each) for each in (*regions, *record.get("files", ()))]


def idle(store: Store) -> bool:
    """Nobody has left anything behind in it."""
    return not list((Path(store.path) / "staging").iterdir())


def test_export_and_import(real: str, settings: shimhost.Writer, store: Store, archive: Path) -> None:
    """The archive is small, the chunks are in the store once, and the container goes on; twice in a row."""
    settings(SETTINGS.partition("\n")[2])
    container = Container.start("w", *WORK)
    for number in (1, 2):
        good(container.checkpoint(archive, "--compress", "none"))
        container.remove()
        assert archive.stat().st_size < 8 << 20, "GPU memory is in the archive"
        assert len(store.entries()) == number
        record = manifest(archive)
        assert record["pages"] == "store"
        with tarfile.open(archive) as tar:
            names = tar.getnames()
        assert "checkpoint/gpusnap/blobs" not in names
        assert not {f"checkpoint/{each['name']}" for each in record.get("files", ())} & set(names)
        assert idle(store)
        container = Container.restore("w", archive)
        container.goes_on()
        assert idle(store)


def test_leave_running(crun: None, store: Store, archive: Path) -> None:
    """The second checkpoint of a container that runs on writes only what has changed."""
    shimhost.write_settings(SETTINGS)
    container = Container.start("w", *WORK, "--slices", "24", "--touch", "1")
    for _ in range(2):
        good(container.checkpoint(archive, "--leave-running"))
        container.goes_on()
    record = manifest(archive)
    assert record["written"]["known"] > 20 << 20
    assert record["written"]["bytes"] < 4 << 20
    container.remove()
    Container.restore("other", archive, "--name", "other").goes_on()


def test_in_place(crun: None, store: Store) -> None:
    """Without --export: what is left of the images stays with the container."""
    shimhost.write_settings(SETTINGS)
    container = Container.start("w", *WORK)
    for _ in range(2):
        good(podman("container", "checkpoint", "w"))
        good(podman("container", "restore", "w"))
        container.goes_on()


def test_a_missing_chunk_is_named(crun: None, store: Store, archive: Path) -> None:
    """Before anything is started; with the chunk back in its place the same archive is restored."""
    shimhost.write_settings(SETTINGS)
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive))
    container.remove()
    chunk = tables(archive)[0].chunks[3]
    blob = STORE / "blobs" / "sha256" / chunk.blob.removeprefix("sha256:")
    aside = STORE / "aside"
    blob.rename(aside)
    said = sentence(podman("container", "restore", "--import", archive))
    assert chunk.blob in said
    assert str(STORE) in said
    assert "store.pull-from" in said
    assert not run("crun", "list", "-q").out.strip()
    podman("rm", "--force", "w")
    aside.rename(blob)
    Container.restore("w", archive).goes_on()


def test_a_store_that_cannot_be_used(crun: None, archive: Path) -> None:
    """Refused before anything is touched."""
    shimhost.write_settings(SETTINGS)
    STORE.write_text("a file")
    container = Container.start("w", *WORK)
    assert str(STORE) in sentence(container.checkpoint(archive))
    STORE.unlink()
    container.unharmed()
