"""Containers whose processes start programs all the time: CRIU never stops one that waits within vfork(2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import shimhost
from support import Container, good, kill_at, manifest, members, podman, run, sentence, until

# A child waits for most of the time: with CRIU alone nearly every dump ends with its timeout.
BUSY = ("--vforks", "60")


def left() -> list[str]:
    folder = Path("/run/gpusnap/journal")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def starts_programs(container: Container) -> None:
    """Wait until it ticks on, and until a third process is about to begin a program."""
    container.goes_on()
    until(lambda: len(members(container)) > 2, "a program that begins")


def test_checkpoints(real: str, tmp_path: Path) -> None:
    """It is checkpointed as often as one likes while it runs, and comes back from the last one."""
    container = Container.start("w", *BUSY)
    for _ in range(3):
        good(container.checkpoint(tmp_path / "a.tar", "--leave-running"))
        assert "pause container" in [step["step"] for step in manifest(tmp_path / "a.tar")["timing"]]
        assert container.inspect()["State"]["Status"] == "running"
        starts_programs(container)
    good(container.checkpoint(tmp_path / "a.tar"))
    container.remove()
    back = Container.restore("w", tmp_path / "a.tar")
    starts_programs(back)
    good(back.checkpoint(tmp_path / "b.tar"))
    assert left() == []


def test_paused_by_its_user(real: str, tmp_path: Path) -> None:
    """A pause comes upon such a process as well, and is not over when that goes on."""
    container = Container.start("w", *BUSY)
    for _ in range(3):
        good(podman("pause", "w"))
        before = container.log()
        good(run(*container.line(tmp_path, "--leave-running")))
        assert container.inspect()["State"]["Status"] == "paused"
        assert container.log() == before
        good(podman("unpause", "w"))
        starts_programs(container)
    assert left() == []


@pytest.mark.parametrize("paused", [False, True])
def test_for_good(real: str, settings: shimhost.Writer, tmp_path: Path, *, paused: bool) -> None:
    """One that never comes to its program is named, and the container goes on, or is paused, as it was."""
    settings("[nvidia]\nlock-timeout = 1\n")
    container = Container.start("w", "--vforks", "600000")
    if paused:
        good(podman("pause", "w"))
    said = sentence(run(*container.line(tmp_path, "--leave-running")))
    assert "waits for its child" in said
    assert "longer than 1 s" in said
    assert container.inspect()["State"]["Status"] == ("paused" if paused else "running")
    if paused:
        good(podman("unpause", "w"))
    container.goes_on()
    assert left() == []


@pytest.mark.parametrize("then", ["recover", "checkpoint"])
def test_killed_in_the_pause(real: str, tmp_path: Path, then: str) -> None:
    """The container was paused for the dump alone: `recover`, or the next checkpoint, has it run again."""
    container = Container.start("w", "--children", "1", *BUSY)
    init = container.pid
    kill_at("dump", container.line(tmp_path, "--leave-running", debug=True))
    assert left() != []
    if then == "recover":
        good(run("/usr/local/bin/gpusnap", "recover"))
    else:
        good(run(*container.line(tmp_path, "--leave-running")))
    assert left() == []
    assert container.pid == init
    assert container.inspect()["State"]["Status"] == "running"
    container.goes_on()
    good(run(*container.line(tmp_path, "--leave-running")))
    container.goes_on()
