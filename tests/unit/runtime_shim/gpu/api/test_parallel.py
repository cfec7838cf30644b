"""at_once: all begun before any is awaited, nothing lost, and no interrupt leaves a thread behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from gpusnap.runtime_shim.base.errors import Interrupted
from gpusnap.runtime_shim.base.stop_signals import handle_signals
from gpusnap.runtime_shim.gpu.api.errors import DriverFailed, GpuError, LockTimeout, ProcessGone
from gpusnap.runtime_shim.gpu.api.parallel import Outcome, run_at_once

DEADLINE = 90.0


def test_results_by_pid() -> None:
    outcome = run_at_once(lambda pid: pid * 2, [3, 1, 2, 3])
    assert sorted(outcome.results.items()) == [(1, 2), (2, 4), (3, 6)]
    assert outcome.errors == {}
    outcome.raise_first()


def test_no_process_at_all() -> None:
    assert run_at_once(str, []) == Outcome({}, {})


def test_all_are_begun_before_any_ends() -> None:
    barrier = threading.Barrier(16, timeout=DEADLINE)  # opens only once all are in it
    assert len(run_at_once(lambda pid: barrier.wait(), range(16)).results) == 16


def test_limit() -> None:
    lock = threading.Lock()
    running = most = 0
    pairs = threading.Barrier(2, timeout=DEADLINE)

    def work(pid: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pairs.wait()
        with lock:
            running -= 1

    assert len(run_at_once(work, range(8), limit=2).results) == 8
    assert most == 2


def test_every_error_is_kept() -> None:
    def work(pid: int) -> int:
        if pid % 2:
            raise ProcessGone(f"process {pid} has ended", hint="look", code_name="C", pid=pid)
        return pid

    outcome = run_at_once(work, range(6), limit=1)
    assert sorted(outcome.results) == [0, 2, 4]
    assert sorted(outcome.errors) == [1, 3, 5]
    with pytest.raises(ProcessGone) as caught:
        outcome.raise_first()
    assert str(caught.value) == "process 1 has ended, and 2 more processes failed"
    assert (caught.value.hint, caught.value.code_name, caught.value.pid) == ("look", "C", 1)
    assert caught.value.__cause__ is outcome.errors[1]


def test_one_error_is_raised_as_it_is() -> None:
    error = LockTimeout("late")
    with pytest.raises(LockTimeout) as caught:
        Outcome[None]({}, {1: error}).raise_first()
    assert caught.value is error
    with pytest.raises(GpuError, match="and 1 more process failed"):
        Outcome[None]({}, {1: error, 2: error}).raise_first()


def test_a_mistake_is_raised_once_all_have_ended() -> None:
    others = threading.Barrier(3, timeout=DEADLINE)
    ended = []

    def work(pid: int) -> None:
        others.wait()
        if pid == 0:
            raise ZeroDivisionError
        ended.append(pid)

    with pytest.raises(ZeroDivisionError):
        run_at_once(work, range(3))
    assert sorted(ended) == [1, 2]


@pytest.fixture
def on_term() -> object:
    """SIGTERM raises Interrupted, as in the program."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted("asked to stop")

    with handle_signals(handler, (signal.SIGTERM,)):
        yield


@pytest.mark.usefixtures("on_term")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_threads(number: signal.Signals) -> None:
    sent = threading.Event()
    ended = []

    def work(pid: int) -> None:
        if pid == 0:
            os.kill(os.getpid(), number)
            sent.set()
        assert sent.wait(DEADLINE)
        ended.append(pid)

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run_at_once(work, range(4))
    assert sorted(ended) == [0, 1, 2, 3]
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_exception_that_breaks_into_the_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start
    started: list[threading.Thread] = []
    done: list[int] = []

    def start(self: threading.Thread) -> None:
        real(self)
        started.append(self)
        if len(started) == 2:
            raise Interrupted("asked to stop")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Interrupted):
        run_at_once(done.append, range(3))
    for thread in started:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert done == []  # nothing was begun


def test_an_exception_that_breaks_into_the_waiting() -> None:
    """A signal that is not held back, so that its handler runs in the middle of the waiting."""
    inside, go = threading.Event(), threading.Event()
    ended = []

    def work(pid: int) -> None:
        if pid == 2:
            inside.set()
        assert go.wait(DEADLINE)
        ended.append(pid)

    handled = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        handled.set()
        raise Interrupted("asked to stop")

    def outside() -> None:
        assert inside.wait(DEADLINE)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert handled.wait(DEADLINE)
        go.set()

    thread = threading.Thread(target=outside)
    with handle_signals(handler, (signal.SIGUSR1,)):
        thread.start()
        try:
            with pytest.raises(Interrupted):
                run_at_once(work, range(3))
        finally:
            thread.join()
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("given", [0, 1])
def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    real: Callable[[threading.Thread], None] = threading.Thread.start
    started: list[threading.Thread] = []

    def start(self: threading.Thread) -> None:
        if len(started) == given:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    outcome = run_at_once(lambda pid: pid, range(3))
    if given:
        assert sorted(outcome.results) == [0, 1, 2]
    else:
        assert sorted(outcome.errors) == [0, 1, 2]
        assert all(type(error) is DriverFailed for error in outcome.errors.values())
        assert "can't start new thread" in str(outcome.errors[0])
