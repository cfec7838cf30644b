"""A call of the driver's on a process that stands."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from fakes import FakeDriver, Family

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.errors import DriverNotReady, LockTimeout, NotInitialized, NotSupported
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace.tracer import Tracer
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls, driver_watch
from gpusnap.runtime_shim.snapshot.gpu_processes.driver_calls import call_or_run
from gpusnap.runtime_shim.stopping.stop import run_only, stop


@pytest.fixture
def family() -> Iterator[Family]:
    with Family() as found:
        yield found


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_calls, "_BRIEFLY", 0.05)


def _runs(pid: int) -> bool:
    """Whether the main thread of the process, and not only one that is traced, may run."""
    return not proc.is_stopped(pid)


@contextmanager
def a_process(family: Family, driver: FakeDriver) -> Iterator[int]:
    pid = driver.use(family.spawn())
    stop([pid], timeout=60)
    yield pid
    assert proc.is_still(pid), "it stands afterwards, whatever happened"


def test_an_answer_at_once(family: Family, driver: FakeDriver) -> None:
    """The driver's threads alone ran."""
    with a_process(family, driver) as pid:
        assert call_or_run(driver, pid, lambda: None, timeout=60) is False


def test_an_answer_only_when_all_runs(family: Family, driver: FakeDriver) -> None:
    """A call that waits, beyond any deadline of its own, is the one that gets its answer when all runs."""
    calls: list[int] = []
    with a_process(family, driver) as pid:

        def waits() -> None:
            calls.append(pid)
            while not runs.is_set():
                runs.set() if _let_go(pid) else time.sleep(0.001)

        runs = threading.Event()
        assert call_or_run(driver, pid, waits, timeout=60) is True
    assert calls == [pid]


def _let_go(pid: int) -> bool:
    """Whether nobody traces it and it runs: the driver's thread of these processes is their only one.

    It sleeps then. One that is only woken to stop again is not in that state.
    """
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return found["TracerPid"].strip() == "0" and found["State"].strip().startswith("S")


def test_something_under_way(family: Family, driver: FakeDriver) -> None:
    """The driver says that a call is under way: it is asked again while all runs."""
    answers = iter([LockTimeout("a call is in progress"), None])
    with a_process(family, driver) as pid:

        def call() -> None:
            answer = next(answers)
            if answer is not None:
                raise answer

        assert call_or_run(driver, pid, call, timeout=60) is True
    assert next(answers, "none") == "none"


@pytest.mark.parametrize("late", [False, True])
def test_errors(family: Family, driver: FakeDriver, late: bool) -> None:
    """What the driver refuses is raised, sooner or later."""
    with a_process(family, driver) as pid:

        def call() -> None:
            while late and not _let_go(pid):
                time.sleep(0.001)
            raise NotSupported("managed memory")

        with pytest.raises(NotSupported, match="managed memory"):
            call_or_run(driver, pid, call, timeout=60)


def test_no_answer(family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is ours where the driver does not keep its own."""
    monkeypatch.setattr(driver_calls, "_MARGIN", 0.05)
    end = threading.Event()
    with a_process(family, driver) as pid:
        with pytest.raises(DriverNotReady, match=f"does not respond for process {pid} "):
            call_or_run(driver, pid, end.wait, timeout=0.05)
        end.set()


def test_a_wait_for_memory_is_no_deadlock(
    family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While memory comes that the driver's thread waits for nobody is let run, and no deadline passes."""
    looks: list[float] = []

    def look(_: object) -> str:
        looks.append(time.monotonic())
        return ""

    monkeypatch.setattr(driver_watch.Watch, "look", look)
    asked, end = [0], threading.Event()
    with a_process(family, driver) as pid:

        def waits() -> bool:
            asked[0] += 1
            if asked[0] == 40:  # of 5 ms and more: twice the deadline
                came.append(time.monotonic())
            return asked[0] < 40

        came: list[float] = []
        begun = time.monotonic()
        with pytest.raises(DriverNotReady, match=r"no response within 0\.1 s"):
            driver_calls.call(driver, pid, end.wait, thread=run_only, within=0.1, waits=waits)
        assert time.monotonic() - begun > 0.3
        assert looks
        assert min(looks) >= came[0]
        end.set()


def test_memory_that_came(family: Family, driver: FakeDriver) -> None:
    """The answer that comes then is the driver's."""
    with a_process(family, driver) as pid:
        asked = [0]
        came = threading.Event()

        def waits() -> bool:
            asked[0] += 1
            if asked[0] == 10:
                came.set()
            return not came.is_set()

        assert driver_calls.call(
            driver, pid, lambda: came.wait(60), thread=run_only, within=0.01, waits=waits
        )


def test_a_tracer_that_fails(family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's thread runs no more, so no answer is waited for."""
    end = threading.Event()
    with a_process(family, driver) as pid:
        monkeypatch.setattr(Tracer, "_answer_stops", _fail)
        with pytest.raises(DriverNotReady, match=r"its thread cannot be resumed: .*Input/output error"):
            driver_calls.call(driver, pid, end.wait, thread=run_only)
        end.set()


def _fail(tracer: Tracer) -> bool:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_one_that_is_killed(family: Family, driver: FakeDriver) -> None:
    """It ended: no answer is wanted any more."""
    pid = driver.use(family.spawn())
    stop([pid], timeout=60)

    def call() -> None:
        os.kill(pid, signal.SIGKILL)
        raise NotSupported("no such process")

    with pytest.raises(GpusnapError, match="exited during a GPU driver call"):
        call_or_run(driver, pid, call, timeout=60)


@pytest.mark.parametrize("ending", [False, True])
def test_one_without_gpu_state(
    family: Family, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, ending: bool
) -> None:
    """Most processes of a container are such: only for the end of one that is ending anybody waits."""
    patience: list[float] = []

    def ends(pid: int, *, within: float) -> bool:
        patience.append(within)
        return False

    def no_thread(pid: int) -> int:
        if ending:
            os.kill(pid, signal.SIGKILL)
        raise NotInitialized("could not find the restore thread", pid=pid)

    monkeypatch.setattr(driver_calls, "has_ended", ends)
    monkeypatch.setattr(driver, "restore_thread", no_thread)
    pid = family.spawn()
    assert driver_calls.state(driver, pid) is None
    assert [bool(each) for each in patience] == [ending]
    with pytest.raises(NotInitialized):  # one that is to have some may be about to end
        driver_calls.lock(driver, pid, timeout=60)
    assert patience[1:] == [driver_calls._DYING]


def looks(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int], lost: str = "") -> list[tuple[str, int]]:
    """Have the driver's thread found so at each look, again and again; what was found."""
    seen: list[tuple[str, int]] = []
    states = itertools.cycle(found)

    def look(pid: int, tid: int) -> tuple[str, int]:
        seen.append(next(states))
        return seen[-1]

    monkeypatch.setattr(proc, "activity", look)
    monkeypatch.setattr(driver_calls, "run_only", lambda pid, tid: nullcontext(SimpleNamespace(lost=lost)))
    return seen


@pytest.mark.parametrize(
    ("found", "done"),
    [
        ([("S", 5)], True),
        # Its process is stopped and let go on all day, and so the thread stops for its tracer.
        ([("S", 5), ("t", 5), ("S", 5), ("T", 5)], True),
        ([("S", 5), ("R", 5)], False),
        ([("S", 5), ("D", 5)], False),
        ([("S", 5), ("S", 6)], False),
    ],
)
def test_let_finish(monkeypatch: pytest.MonkeyPatch, found: list[tuple[str, int]], done: bool) -> None:
    """A thread is done that has slept for a while, without running; not one that only has to stand."""
    looks(monkeypatch, *found)
    driver = FakeDriver()
    monkeypatch.setattr(driver, "restore_thread", lambda pid: pid)
    began = time.monotonic()
    driver_calls.let_finish(driver, os.getpid(), within=60 if done else 0.5, quiet=0.1)
    assert (time.monotonic() - began < 30) if done else (time.monotonic() - began >= 0.5)


def test_let_finish_of_one_that_cannot_be_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it."""
    seen = looks(monkeypatch, ("t", 5), lost="the kernel said no")
    driver = FakeDriver()
    monkeypatch.setattr(driver, "restore_thread", lambda pid: pid)
    driver_calls.let_finish(driver, os.getpid(), within=60, quiet=0.1)
    assert len(seen) == 1
