"""The receiving side of a migration: what it asks Podman before the container comes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpusnap.engines import podman
from gpusnap.engines.podman_command import FinishedPodman
from gpusnap.migration import receiver
from gpusnap.migration.frames import Channel
from gpusnap.oci.store.store import Store


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
