"""A container that its user has paused with Podman is checkpointed, and is paused afterwards."""

from __future__ import annotations

from pathlib import Path

from support import Container, good, podman, run


def test_paused_by_its_user(real: str, tmp_path: Path) -> None:
    """It ticks on only when it is unpaused, and leaves no tick out."""
    container = Container.start("w", "--procs", "2", workers=2)
    good(podman("pause", "w"))
    before = container.log()
    good(run(*container.line(tmp_path, "--leave-running")))
    assert (tmp_path / "image/gpusnap/manifest.json").exists()
    assert container.inspect()["State"]["Status"] == "paused"
    assert container.log() == before
    good(podman("unpause", "w"))
    container.goes_on()
