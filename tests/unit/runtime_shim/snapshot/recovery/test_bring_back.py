"""bring_back: in which order processes get what a killed gpusnap had taken from them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
from fakes import FakeDriver, gpu, uuid

from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import maps
from gpusnap.runtime_shim.process.memory.maps import Mapping
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry, JournalProcess, StagedRegion
from gpusnap.runtime_shim.snapshot.recovery import bring_back, held_threads
from gpusnap.runtime_shim.stopping.stop import stop


@pytest.fixture
def entry() -> Iterator[Entry]:
    """Of a process that a killed gpusnap has stopped."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            stop([child.pid], timeout=60)
            found = proc.process(child.pid)
            assert found is not None
            yield Entry("0" * 64, "", (1, 1), (JournalProcess(child.pid, found.start, ()),))
        finally:
            child.send_signal(signal.SIGKILL)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to it, in order."""
    did: list[str] = []
    monkeypatch.setattr(held_threads, "unblock_signals", lambda key: None)
    monkeypatch.setattr(bring_back, "let_finish", lambda driver, pid: did.append("let finish"))
    monkeypatch.setattr(bring_back, "is_suspended", lambda driver, pid: False)
    monkeypatch.setattr(bring_back, "resume", lambda *_, **__: did.append("resume"))
    return did


def test_the_driver_is_let_finish_before_the_check(entry: Entry, done: list[str]) -> None:
    """What the check asks may wait for the driver's thread of a process that stands."""
    bring_back.bring_back(entry, FakeDriver(), Memory(), None, check=lambda: done.append("check"))
    assert done == ["let finish", "check", "resume"]


def test_a_check_that_refuses(entry: Entry, done: list[str]) -> None:
    """Nothing is resumed."""

    def refuse() -> None:
        raise Refused("no access")

    with pytest.raises(Refused, match="no access"):
        bring_back.bring_back(entry, FakeDriver(), Memory(), None, check=refuse, cut_off=False)
    assert done == []


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_that_ends_meanwhile(
    entry: Entry, done: list[str], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Its mappings are gone with it, which is no fault; those of a process that lives are missing."""
    [process] = entry.processes

    def look(pid: int) -> tuple[Mapping, ...]:
        if ends:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return ()

    monkeypatch.setattr(bring_back, "is_suspended", lambda driver, pid: True)
    monkeypatch.setattr(maps, "mappings", look)
    region = StagedRegion("/dev/shm/gone", 1 << 32, 1 << 20)
    held = replace(entry, processes=(replace(process, staged=(region,)),))
    with nullcontext() if ends else pytest.raises(GpusnapError, match="no longer has a mapping"):
        bring_back.bring_back(held, FakeDriver(), Memory(), None, cut_off=False)


@pytest.mark.parametrize(("gpus", "known"), [(1, True), (2, False)])
def test_what_a_process_needs_at_least(
    entry: Entry, done: list[str], monkeypatch: pytest.MonkeyPatch, gpus: int, known: bool
) -> None:
    """As much as was taken out of it, if it sees one GPU: the driver is not asked before that is free."""
    asked: list[dict[int, list[tuple[str, int]]]] = []
    monkeypatch.setattr(bring_back, "resume", lambda *_, needs, **__: asked.append(needs))
    [process] = entry.processes
    staged = tuple(StagedRegion("/dev/shm/a", at << 32, at << 20) for at in (1, 2))
    held = replace(entry, processes=(replace(process, staged=staged),))
    driver = FakeDriver(gpus=tuple(gpu(at) for at in range(gpus)))
    driver.use(process.pid)
    bring_back.bring_back(held, driver, Memory(), None, cut_off=False)
    assert asked == [{process.pid: [(uuid(0), 3 << 20)]} if known else {}]
    for start, used in ((process.start + 1, asked[0]), (process.start, {process.pid: [(uuid(1), 7)]})):
        noted = {(process.pid, start): [(uuid(1), 7)]}
        monkeypatch.setattr(journal, "read_needs", lambda key, noted=noted: noted)
        bring_back.bring_back(held, driver, Memory(), None, cut_off=False)
        assert asked.pop() == used
    given = {process.pid: [(uuid(1), 5)]}
    bring_back.bring_back(held, driver, Memory(), None, needs=given, cut_off=False)
    assert asked[1] == given
