"""Whose an export is that a killed command left, and which memory it needs."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from archives import written
from fake_podman import ID, FakePodman
from fakes import exporting
from kept_checkpoints import keep_pages, leave_export, write_export

from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import exported_containers
from gpusnap.operations.checkpointing.left_exports import LeftExport
from gpusnap.operations.restoring import in_podman
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.shim import overrides


def test_in_a_store(host_store: Store, tmp_path: Path) -> None:
    """It names the container, and the chunks that the store has for it; one with other memory needs none."""
    leave_export(host_store, tmp_path / "exported")
    assert in_podman.list_exported(host_store) == ()
    keep_pages(host_store)
    (found,) = in_podman.list_exported(host_store)
    assert (found.id, found.name, found.store) == (ID, "k", host_store.path)
    assert in_podman.find_needed(host_store, [found]) == {host_store.entries()[0].descriptor.digest}


def test_one_that_podman_has_not_begun(
    host_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows yet what it needs: that is an error."""
    host_store.create()
    monkeypatch.setattr(overrides, "list_ended", lambda: {("c0ffee", host_store.path)})
    archive = f"{host_store.path}/staging/one/podman.tar"
    said = f"Podman is still exporting to {archive}: which memory"
    with exporting(tmp_path, archive), pytest.raises(GpusnapError, match=said):
        in_podman.list_exported(host_store)


def test_one_at_which_podman_works(host_store: Store, tmp_path: Path) -> None:
    """It is not called useless, nor is its removal advised; once Podman has ended, what is cut short is."""
    archive = Path(leave_export(host_store, tmp_path / "exported"))
    archive.write_bytes(archive.read_bytes()[:700])
    said = f"Podman is still exporting to {archive}: which memory its restore needs is not known yet"
    with exporting(tmp_path, str(archive)), pytest.raises(GpusnapError, match=said) as caught:
        in_podman.list_exported(host_store)
    assert "remove" not in caught.value.sentence()
    with pytest.raises(GpusnapError, match=r"cannot be examined: .* is cut short") as caught:
        in_podman.list_exported(host_store)
    assert caught.value.hint == "if it is of no use, remove it"


def test_one_that_podman_has_written_so_far(host_store: Store, tmp_path: Path) -> None:
    """What is needed of it is there: that counts."""
    archive = leave_export(host_store, tmp_path / "exported")
    keep_pages(host_store)
    with exporting(tmp_path, archive):
        (found,) = in_podman.list_exported(host_store)
    assert found.name == "k"


def test_in_another_store(host_store: Store, tmp_path: Path) -> None:
    """The command names that store."""
    other = Store(tmp_path / "other")
    archive = leave_export(other, tmp_path / "exported")
    (found,) = in_podman.find_exported("k", [host_store.path, other.path])
    assert found.make_command() == f"GPUSNAP_STORE={other.path} podman container restore --import {archive}"


def test_its_volumes(host_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman refuses volumes that exist; the command leaves them as they are."""
    fake = FakePodman(tmp_path / "podman", monkeypatch)
    fake.has_volumes("data")
    left = LeftExport("/x.tar", host_store.path, "")
    found = exported_containers.ExportedContainer("c0ffee", "k", "", ["data"], left, (), host_store.path)
    assert found.make_command() == "podman container restore --import /x.tar --ignore-volumes"
    # Podman does not import it (Quadlet).
    quadlet = replace(found, config=b'{"cgroupsMode": "split", "cgroupParent": "/libpod_parent"}')
    assert quadlet.make_command() == "gpusnap copy /x.tar k:kept && gpusnap restore k:kept"
    elsewhere = replace(quadlet, store="/a b").make_command()
    assert elsewhere == "gpusnap copy /x.tar 'oci:/a b:k:kept' && gpusnap restore 'oci:/a b:k:kept'"


def test_with_its_memory(tmp_path: Path) -> None:
    """No more of --to FILE is read than up to its memory: here, the rest cannot be read."""
    archive = tmp_path / ".k.tar.zst.1234"
    plain = Path(write_export(tmp_path / "in.tar", tmp_path / "exported", pages="chunks")).read_bytes()
    # Podman writes config.dump before CRIU's images.
    at, blobs = plain.index(b"config.dump\0"), plain.index(b"checkpoint/gpusnap/blobs/sha256/")
    archive.write_bytes(
        zstandard.ZstdCompressor().compress(plain[at : at + 1024] + plain[blobs : blobs + 512])
    )
    found = exported_containers.read(LeftExport(str(archive), "", ""), "/store")
    assert (found.name, found.needed) == ("k", ())


def test_one_that_is_read_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for long, and it is not taken for one that needs nothing."""
    end = threading.Event()
    monkeypatch.setattr(exported_containers, "entries", lambda _: end.wait(60))
    try:
        with pytest.raises(GpusnapError, match=r"/x\.tar could not be read within 0\.05 s"):
            exported_containers.read(LeftExport("/x.tar", "", ""), "/store", within=0.05)
    finally:
        end.set()


@pytest.mark.parametrize("config", [b"{}", b"[]", b"", b'{"id": "x", "name": "k", "namedVolumes": [1]}'])
def test_one_of_nobody(tmp_path: Path, config: bytes) -> None:
    """Its config.dump has another form."""
    archive = written(tmp_path / "in.tar", None, None, more={"config.dump": config})
    with pytest.raises(GpusnapError, match=r"config\.dump does not name a container"):
        exported_containers.read(LeftExport(archive, "/store", ""), "/store")
