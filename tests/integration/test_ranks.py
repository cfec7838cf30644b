"""Ranks that wait for each other on the GPU: every checkpoint of them, at any instant, succeeds.

A collective of softgpu's ends when all ranks have launched it, as NCCL's do. So a rank that is locked before
it launches its part keeps the others from being locked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import Container, faults, good, podman, run, sentence

# Checkpoints of each job; and at most, until one met ranks of which one waited for another.
TIMES, MOST = 6, 30
# Each rank takes up to so many milliseconds of a tick for itself, each time others. Then it waits for the
# others, so that half of the time and more some rank waits.
IDLE = ("--tick", "60")
NEVER_IDLE = ("--tick", "1")
WAITED = "wait for each other's GPU work: locked in "


def start(ranks: int, words: Sequence[str]) -> Container:
    """A job of so many ranks."""
    job = ("--mib", "2", "--procs", str(ranks), "--collective")
    return Container.start("w", *job, *words, workers=ranks)


def locked_in(steps: Sequence[Mapping[str, Any]]) -> str:
    """What the manifest says of the lock."""
    (note,) = [step.get("note", "") for step in steps if step["step"] == "lock"]
    return str(note)


def in_step(container: Container, ranks: int) -> None:
    """Wait until every rank has ticked on, with every word and every sum right."""
    container.goes_on()
    assert len(container.ticks()) == ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, IDLE), (2, NEVER_IDLE), (4, IDLE), (4, NEVER_IDLE)],
    ids=["2-idle", "2-busy", "4-idle", "4-busy"],
)
def test_running(real: str, tmp_path: Path, ranks: int, words: Sequence[str]) -> None:
    """It is checkpointed again and again while it runs, and comes back from the last one."""
    container = start(ranks, words)
    said: list[str] = []
    # An idle job may be met at instants at which nobody waits, and be so for long.
    while len(said) < TIMES or (words == NEVER_IDLE and not any(WAITED in note for note in said)):
        assert len(said) < MOST, said
        good(run(*container.line(tmp_path, "--leave-running")))
        said.append(locked_in(json.loads((tmp_path / "image/gpusnap/manifest.json").read_text())["timing"]))
        container.goes_on(more=1)
    archive = tmp_path / "a.tar"
    good(container.checkpoint(archive))
    container.remove()
    in_step(Container.restore("w", archive), ranks)


@pytest.mark.parametrize(("ranks", "words"), [(2, IDLE)], ids=["2-idle"])
def test_paused(real: str, tmp_path: Path, ranks: int, words: Sequence[str]) -> None:
    """The same of one that its user has paused, at whatever instant; it is paused afterwards."""
    container = start(ranks, words)
    for _ in range(TIMES):
        good(podman("pause", "w"))
        good(run(*container.line(tmp_path, "--leave-running")))
        assert container.inspect()["State"]["Status"] == "paused"
        good(podman("unpause", "w"))
        container.goes_on(more=1)


def test_ended_and_restored(real: str, tmp_path: Path) -> None:
    """Each time it ends with the checkpoint, and goes on from there."""
    container = start(2, IDLE)
    for _ in range(5):
        good(container.checkpoint(tmp_path / "a.tar"))
        container.remove()
        container = Container.restore("w", tmp_path / "a.tar")
        in_step(container, 2)


def test_a_rank_that_does_not_come(crun: None, tmp_path: Path) -> None:
    """Locked too late: the sentence names it, and all run on in step."""
    container = Container.start("w", "--mib", "2", "--procs", "2", "--collective", workers=2)
    faults("lock hang=60000")
    said = sentence(run(*container.line(tmp_path, "--leave-running")))
    assert "at the same time as 1 more: its GPU work did not stop within 10 s, in " in said
    faults("")
    in_step(container, 2)
