"""The receiving side of a migration: what it asks Podman, and what it records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusnap.checkpoints import migrations
from gpusnap.engines import podman, podman_objects
from gpusnap.engines.podman_command import FinishedPodman
from gpusnap.migration import receiver, records
from gpusnap.migration.frames import Channel
from gpusnap.oci.store.store import Store
from gpusnap.operations.restoring import restore as restoring
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused

ID = "0" * 32


@pytest.fixture
def channel() -> Iterator[Channel]:
    reading, writing = os.pipe()
    yield Channel(reading, writing, "here")
    os.close(reading)
    os.close(writing)


def test_the_image_is_pulled(channel: Channel, host_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as --patience says: a large image takes longer than other answers of Podman's."""
    asked: dict[str, float | None] = {}

    def ask(*words: str, seconds: float | None = None) -> FinishedPodman:
        asked[words[0]] = seconds
        return FinishedPodman(0, "", "")

    monkeypatch.setattr(podman, "ask", ask)
    monkeypatch.setattr(podman, "full_id", lambda name, *, seconds: "")
    monkeypatch.setattr(podman, "exists", lambda kind, wanted: False)
    channel.patience = 3600.0
    frame = {"ask": "check", "name": "w", "image": "server:1", "needs": 0, "pull": True, "gpus": []}
    assert receiver._Receiver(channel)._do(frame)["image"]
    assert asked == {"pull": 3600.0}


def test_a_volume_of_that_name(channel: Channel, host_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are not those of the checkpoint: refused while the container still runs over there."""
    monkeypatch.setattr(podman, "full_id", lambda name, *, seconds: "")
    monkeypatch.setattr(podman, "exists", lambda kind, wanted: True)
    monkeypatch.setattr(podman_objects, "volumes", lambda: {"data", "other"})
    frame = {"ask": "check", "name": "w", "image": "server:1", "needs": 0, "pull": True, "gpus": []}
    with pytest.raises(Refused, match="already has the volume data, and") as raised:
        receiver._Receiver(channel)._do({**frame, "volumes": ["data", "mine"]})
    assert "podman volume rm data there" in raised.value.hint
    for volumes in ({}, {"volumes": ["mine"]}):
        assert receiver._Receiver(channel)._do({**frame, **volumes})["image"]


@pytest.fixture
def restored(channel: Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> receiver._Receiver:
    """A receiver that has restored the container w, and waits for the confirmation."""
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(migrations, "FOLDER", str(tmp_path / "state" / "migrations"))
    found = podman.Container(id="new", name="w", runtime="", status="running", created="2026-11-27T10:00:00Z")
    done = restoring.RestoreResult("new", "w", 1.0)
    monkeypatch.setattr(podman, "ids", set)
    monkeypatch.setattr(podman, "inspect_container", lambda wanted: found)
    monkeypatch.setattr(restoring, "restore", lambda *_: done)
    made = receiver._Receiver(channel)
    made._id = ID
    made._record_coming("w", "a" * 32)
    frame = {"ask": "restore", "name": "w", "newName": "", "digest": f"sha256:{ID}{ID}", "gpuMap": ""}
    made._do({**frame, "ignoreVolumes": False})
    return made


def test_which_container_it_restored(restored: receiver._Receiver) -> None:
    """Its record tells it from a later container with the same ID."""
    (found,) = records.list_records()
    assert (found.state, found.container, found.source) == ("running", "new", "a" * 32)
    assert found.created == "2026-11-27T10:00:00Z"


def test_it_is_taken_back_on_a_full_disk(
    restored: receiver._Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left that names a container which somebody restores later."""
    removed: list[str] = []
    monkeypatch.setattr(podman, "run_query", lambda *words, wanted: removed.append(words[-1]))
    with monkeypatch.context() as full:
        full.setattr(migrations, "write", lambda *_: fail(GpusnapError("no space left")))
        restored._take_back()
    assert removed == ["new"]
    assert records.list_records() == ()


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), GpusnapError("the directory cannot be synced")])
def test_a_confirmation_that_is_written_and_fails(
    restored: receiver._Receiver, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    """Whoever asks is told that the container is confirmed, so it is not taken back."""
    removed: list[str] = []
    monkeypatch.setattr(podman, "run_query", lambda *words, wanted: removed.append(words[-1]))
    write = migrations.write

    def write_and_fail(path: str, value: object) -> None:
        write(path, value)
        raise raised

    with monkeypatch.context() as failing:
        failing.setattr(migrations, "write", write_and_fail)
        with pytest.raises(type(raised)):
            restored._confirm()
    assert records.settle(ID) == "confirmed"
    restored._take_back()
    assert removed == []
    assert records.settle(ID) == "confirmed"


def test_a_confirmation_while_somebody_asks(
    restored: receiver._Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits: who has read the record before would take the receiver for one that was killed."""
    monkeypatch.setattr(records, "_LOCKING", 0.05)
    with records._hold_lock(ID), pytest.raises(GpusnapError, match="is still being undone"):
        restored._confirm()
    assert [each.state for each in records.list_records()] == ["running"]
    restored._confirm()
    assert records.settle(ID) == "confirmed"


def fail(error: Exception) -> None:
    raise error
