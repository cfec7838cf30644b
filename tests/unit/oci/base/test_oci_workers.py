"""Threads that do one thing together: all items, the first error, an end that is asked for."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
from fakes import wait_for

from gpusnap.oci.base.threads import Crew, for_each


def test_each_item_once() -> None:
    """Every item is taken by exactly one thread."""
    done: list[int] = []
    for_each(range(100), done.append, threads=4)
    assert sorted(done) == list(range(100))
    for_each([], done.append, threads=0)


def test_the_first_error_ends_it() -> None:
    """What one thread raises is raised; the others leave before their next item."""
    done: list[int] = []
    failed = threading.Event()

    def do(item: int) -> None:
        if item == 0:
            failed.set()
            raise ValueError("the first")
        assert failed.wait(60)
        done.append(item)

    with pytest.raises(ValueError, match="the first"):
        for_each(range(1000), do, threads=2)
    assert len(done) < 1000


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives fewer threads than asked for, those that run are ended."""
    real = threading.Thread.start
    started: list[threading.Thread] = []

    def start(self: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    crew = Crew()

    def work() -> None:
        while True:
            crew.check()

    with pytest.raises(RuntimeError, match="new thread"):
        crew.start(4, work)
    assert not any(thread.is_alive() for thread in started)


def joining(thread: int) -> bool:
    """Whether a thread is within Crew.join."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is Crew.join.__code__:
            return True
        frame = frame.f_back
    return False


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

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        crew.start(1, work)
        with pytest.raises(Interrupted):
            crew.join()
        back.set()
        assert seen == [False]
    finally:
        signal.signal(signal.SIGUSR1, before)
