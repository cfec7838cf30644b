"""A container that a checkpoint ended, which Podman can restore with memory from a store."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive

__all__ = ["make_stopped"]


def make_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """Make a Podman with a checkpoint of the container w; `keep_pages` puts its memory into a store."""
    found = FakePodman(folder / "podman", monkeypatch)
    found.has(status="exited", checkpointed=True)
    found.lists(f"{ID} w")
    with tarfile.open(an_archive(folder, pages="store")) as whole:
        images = [each for each in whole.getmembers() if each.name.startswith("checkpoint/")]
        whole.extractall(found.folder, images, filter="data")
    return found
