"""Threads that do one thing together: all items, the first error, an end that is asked for."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from fakes import joining, wait_for

from gpusnap.oci.base import threads
from gpusnap.oci.base.errors import Stalled
from gpusnap.oci.base.threads import Crew, run_for_each
from gpusnap.runtime_shim.base.stop_signals import handle_signals


def test_each_item_once() -> None:
    """Every item is taken by exactly one thread."""
    done: list[int] = []
    run_for_each(range(100), done.append, threads=4)
    assert sorted(done) == list(range(100))
    run_for_each([], done.append, threads=0)


def test_the_first_error_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one thread raises is raised; the others leave before their next item."""
    done: list[int] = []
    begun, failed = threading.Event(), threading.Event()
    fail = Crew._fail

    def note(self: Crew, error: BaseException) -> None:
        fail(self, error)
        failed.set()

    def do(item: int) -> None:
        if item == 0:
            assert begun.wait(60)
            raise ValueError("the first")
        begun.set()
        assert failed.wait(60)
        done.append(item)

    monkeypatch.setattr(Crew, "_fail", note)
    with pytest.raises(ValueError, match="the first"):
        run_for_each(range(1000), do, threads=2)
    assert done == [1]


def only(count: int, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Let the system give so many threads more; those that it gave."""
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(self: threading.Thread) -> None:
        if len(started) == count:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return started


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives none for some work, those that run are ended."""
    started = only(2, monkeypatch)
    crew = Crew()

    def work() -> None:
        while True:
            crew.check()

    crew.start(2, work)
    with pytest.raises(RuntimeError, match="new thread"):
        crew.start(2, work)
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_threads_than_asked_for(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Those do it all; where there is none, the one that asks does."""
    started = only(count, monkeypatch)
    done: list[int] = []
    run_for_each(range(100), done.append, threads=4)
    assert sorted(done) == list(range(100))
    assert len(started) == count


def test_the_first_error_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the work of the one that asks, too."""
    only(0, monkeypatch)
    done: list[int] = []

    def do(item: int) -> None:
        if item == 3:
            raise ValueError("the first")
        done.append(item)

    with pytest.raises(ValueError, match="the first"):
        run_for_each(range(9), do, threads=4)
    assert done == [0, 1, 2]


def test_a_signal_while_it_waits() -> None:
    """Where a signal's exception ends the wait, the workers have ended too: what they use is freed then."""
    crew = Crew()
    interrupted, back = threading.Event(), threading.Event()
    main = threading.get_ident()
    seen: list[bool] = []

    class Interrupted(Exception):
        """By a signal."""

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise Interrupted

    def work() -> None:
        wait_for(lambda: joining(main), "the wait for the workers")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert interrupted.wait(60)
        # A long step without a check: nobody may go on meanwhile.
        seen.append(back.wait(0.2))

    with handle_signals(interrupt, (signal.SIGUSR1,)):
        crew.start(1, work)
        with pytest.raises(Interrupted):
            crew.join()
        back.set()
        assert seen == [False]


def test_workers_that_never_come_back() -> None:
    """Without progress they are left behind, also by a later `stop`, and end at their next check."""
    crew, answered = Crew(patience=0.01), threading.Event()
    went_on: list[bool] = []

    def work() -> None:
        answered.wait(60)
        crew.check()
        went_on.append(True)

    crew.start(2, work)
    with pytest.raises(Stalled, match=r"nothing could be read for 0\.01 s"):
        crew.join()
    crew.stop()
    answered.set()
    for thread in crew._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert went_on == []


def test_slow_workers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience begins anew with everything that arrives."""
    clock = [0.0]
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(threads, "_LOOK", 0.001)
    crew = Crew(patience=60)
    looked = threading.Semaphore(0)

    def work() -> None:
        for _ in range(5):
            clock[0] += 50
            looked.acquire(timeout=60)
            looked.acquire(timeout=60)
            crew.note_progress()

    crew.start(1, work)
    crew.join(looked.release)
    assert clock == [250]


def test_an_interrupt_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a worker does not come back."""
    monkeypatch.setattr(threads, "_ENDING", 0.01)
    crew, answered = Crew(patience=60), threading.Event()

    def interrupt() -> None:
        raise ValueError("that is enough")

    def work() -> None:
        answered.wait(60)

    crew.start(1, work)
    with pytest.raises(ValueError, match="that is enough"):
        crew.join(interrupt)
    answered.set()
