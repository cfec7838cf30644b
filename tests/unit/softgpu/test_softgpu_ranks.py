"""softgpu's collectives: a kernel that ends when the processes of all ranks have launched it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from softgpu_box import (
    DEADLINE,
    GPUWORK,
    LOCKED,
    OK,
    RUNNING,
    Agent,
    Box,
    read_line,
    wait_until,
)

GROUP = 1 << 40
BRIEFLY = 50
"""Milliseconds of a lock that is to time out."""


@pytest.fixture
def box(boxes: Callable[..., Box]) -> Box:
    return boxes(1)


class Rank:
    """A process that takes part, with a word in device memory."""

    def __init__(self, box: Box, number: int, count: int) -> None:
        self.agent: Agent = box.agent().start(0)
        self.pid = self.agent.pid
        self.number, self.count = number, count
        self.word = self.agent.alloc(8)
        assert self.agent.kernel("barrier") == OK

    def launch(self, value: int, *, group: int = GROUP) -> None:
        """Launch it with a value, and do not wait."""
        assert self.agent.fill(self.word, 0, 2) == OK
        assert self.agent.fill(self.word, value, 1) == OK
        self.agent.begin("barrier", 0, "launch", "barrier", 1, group, self.count, self.number, self.word)

    def waits(self) -> bool:
        return not self.agent.ended("barrier")

    def sum(self) -> Any:
        """The sum of all, once they have launched it."""
        wait_until(lambda: bool(self.agent.ended("barrier")), f"the collective of rank {self.number}")
        assert self.agent.end("barrier") == OK
        return self.agent.words(self.word, 2)[0]


@pytest.fixture
def ranks(box: Box) -> list[Rank]:
    return [Rank(box, number, 3) for number in range(3)]


@pytest.fixture
def caller(box: Box) -> Agent:
    return box.agent().start()


def meet(ranks: list[Rank], values: list[int]) -> list[int]:
    """One round: none is done before the last one has launched."""
    for rank, value in zip(ranks[:-1], values, strict=False):
        rank.launch(value)
    assert all(rank.waits() for rank in ranks[:-1])
    ranks[-1].launch(values[-1])
    return [rank.sum() for rank in ranks]


def test_rounds(ranks: list[Rank]) -> None:
    """All get the sum of all, round by round, in any order."""
    assert meet(ranks, [1, 2, 3]) == [6, 6, 6]
    assert meet(ranks[::-1], [10, 20, 30]) == [60, 60, 60]


def test_groups_are_apart(box: Box, ranks: list[Rank]) -> None:
    """Another group's ranks do not count."""
    for rank in ranks[:2]:
        rank.launch(1)
    other = Rank(box, 2, 3)
    other.launch(1, group=GROUP + 1)
    assert all(rank.waits() for rank in [*ranks[:2], other])
    ranks[2].launch(1)
    assert [rank.sum() for rank in ranks] == [3, 3, 3]
    assert other.waits()


def wait_until_busy(caller: Agent, rank: Rank) -> None:
    """A launch is only begun when `Rank.launch` returns, and a lock may come first."""

    def is_busy() -> bool:
        found = caller.lock(rank.pid, BRIEFLY)
        if found == OK:
            assert caller.unlock(rank.pid) == OK
        return bool(found == "NOT_READY")

    wait_until(is_busy, f"the launch of rank {rank.number}")


def test_locks(caller: Agent, ranks: list[Rank]) -> None:
    """One that has launched is not locked before the others have; one that is locked keeps all waiting."""
    ranks[0].launch(1)
    wait_until_busy(caller, ranks[0])
    assert caller.state(ranks[0].pid) == RUNNING
    assert caller.lock(ranks[1].pid) == OK
    ranks[2].launch(3)
    ranks[1].agent.begin("barrier", 0, "launch", "barrier", 1, GROUP, 3, 1, ranks[1].word)
    wait_until_busy(caller, ranks[2])
    assert all(rank.waits() for rank in ranks)
    assert caller.unlock(ranks[1].pid) == OK
    assert [rank.sum() for rank in ranks] == [4, 4, 4]
    assert [caller.lock(rank.pid) for rank in ranks] == [OK] * 3
    assert [caller.state(rank.pid) for rank in ranks] == [LOCKED] * 3


def test_restored_ranks_meet_again(caller: Agent, ranks: list[Rank]) -> None:
    """Nothing of an earlier round counts for them, whether they stood at the gate or had yet to come."""
    assert meet(ranks, [1, 2, 3]) == [6, 6, 6]
    assert [caller.lock(rank.pid) for rank in ranks] == [OK] * 3
    ranks[0].agent.begin("barrier", 0, "launch", "barrier", 1, GROUP, 3, 0, ranks[0].word)
    for operation in ("checkpoint", "restore", "unlock"):
        assert [caller.call(operation, rank.pid) for rank in ranks] == [OK] * 3
    assert ranks[0].waits()
    ranks[1].launch(1)
    assert ranks[1].waits()
    ranks[2].launch(1)
    assert [rank.sum() for rank in ranks] == [8, 8, 8]


@pytest.mark.parametrize("done", [True, False])
def test_one_that_was_killed(box: Box, ranks: list[Rank], done: bool) -> None:
    """What it left counts for nothing: the others wait for the process that takes its rank."""
    if done:
        assert meet(ranks, [1, 2, 3]) == [6, 6, 6]
    else:
        ranks[2].launch(1000)
        assert ranks[2].waits()
    ranks[2].agent.kill()
    ranks[0].launch(1)
    ranks[1].launch(2)
    assert ranks[0].waits()
    assert ranks[1].waits()
    ranks[2] = Rank(box, 2, 3)
    ranks[2].launch(4)
    assert [rank.sum() for rank in ranks] == [7, 7, 7]


@pytest.mark.parametrize(("count", "number"), [(0, 0), (2, 2), (65, 0)])
def test_ranks_that_are_none(box: Box, count: int, number: int) -> None:
    """They are refused at once."""
    rank = Rank(box, number, count)
    rank.launch(1)
    assert rank.agent.end("barrier") == "INVALID_VALUE"


def test_a_rank_that_is_taken(box: Box, ranks: list[Rank]) -> None:
    """Two processes of one rank: the first one's collective fails, as nothing can come of it."""
    ranks[0].launch(1)
    Rank(box, 0, 3).launch(2)
    assert ranks[0].agent.end("barrier") == "UNKNOWN"


def test_gpuwork(boxes: Callable[..., Box]) -> None:
    """Its workers check each sum, go in step, and end together when one of them is told to."""
    line = [str(GPUWORK), "--mib", "2", "--tick", "1", "--procs", "3", "--collective"]
    with boxes(1).popen(line) as work:
        try:
            lines = [read_line(work) for _ in range(60)]
        finally:
            work.terminate()
        lines += iter(lambda: read_line(work), "")
        assert work.wait(DEADLINE) == 0
    found: dict[str, list[int]] = {}
    for each in lines:
        match = re.match(r"pid=(\d+) tick=(\d+) ok ", each)
        assert match, each
        found.setdefault(match[1], []).append(int(match[2]))
    assert len(found) == 3
    assert len({tuple(numbers) for numbers in found.values()}) == 1
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in found.values())


def test_gpuwork_whose_rank_dies(boxes: Callable[..., Box]) -> None:
    """The others wait for it on the GPU without end: the launcher ends them, and says that it failed."""
    line = [str(GPUWORK), "--mib", "2", "--tick", "1", "--procs", "3", "--collective"]
    with boxes(1).popen(line) as work:
        try:
            pid = int(read_line(work).split()[0].removeprefix("pid="))
            os.kill(pid, signal.SIGKILL)
            work.communicate(timeout=DEADLINE)
        finally:
            work.kill()
    assert work.returncode == 1


def test_gpuwork_alone() -> None:
    """A collective needs others."""
    done = subprocess.run([GPUWORK, "--collective"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "gpuwork: --collective is for the workers of --procs\n")
