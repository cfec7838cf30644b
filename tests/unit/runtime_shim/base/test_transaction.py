"""Transaction: undone in reverse, whatever happens; signals stop it only where that does no harm."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import pytest
from fakes import a_manifest

from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Interrupted
from gpusnap.runtime_shim.base.transaction import (
    Transaction,
    announce,
    forward_signals,
    hold_signals,
    make_interruptible,
    name_recover,
    stop_if_asked,
)
from gpusnap.runtime_shim.records.manifest_json import decode, encode

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def failing(transaction: Transaction, error: BaseException) -> None:
    with transaction:
        raise error


def raiser(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_a_failure_undoes_in_reverse() -> None:
    """Every undo runs, the last registered first, and the failure comes out as it was."""
    done: list[str] = []
    transaction = Transaction()
    for name in "abc":
        transaction.undo(name, lambda name=name: done.append(name))  # type: ignore[misc]
    error = GpusnapError("the dump failed", hint="try again")
    with pytest.raises(GpusnapError) as caught:
        failing(transaction, error)
    assert caught.value is error
    assert error.sentence() == "the dump failed; try again"
    assert done == ["c", "b", "a"]


def test_leaving_without_commit_undoes() -> None:
    """A block that ends without commit is taken back too."""
    done: list[str] = []
    with Transaction() as transaction:
        transaction.undo("a", lambda: done.append("a"))
    assert done == ["a"]


def test_commit_keeps_what_was_done() -> None:
    """After commit nothing is undone, also when something fails after it."""
    transaction = Transaction()
    transaction.undo("a", raiser(AssertionError("undone")))
    transaction.commit()
    assert transaction.committed
    with pytest.raises(GpusnapError, match=r"^late$"):
        failing(transaction, GpusnapError("late"))


def test_an_undo_that_fails_does_not_stop_the_others() -> None:
    """The rest is undone, and the sentence says what was not, in place of a hint that is no longer true."""
    done: list[str] = []
    transaction = Transaction()
    transaction.undo("first", lambda: done.append("first"))
    transaction.undo("resuming", raiser(GpusnapError("the GPU is lost", hint="reset it")))
    transaction.undo("removing", raiser(OSError(errno.ENOENT, "No such file or directory", "x")))
    transaction.undo("last", raiser(ValueError("odd")))
    with pytest.raises(GpusnapError) as caught:
        failing(transaction, GpusnapError("the dump failed", hint="the container runs on"))
    assert done == ["first"]
    sentence = caught.value.sentence()
    assert sentence.startswith("the dump failed; while undoing, last failed: ValueError('odd'); ")
    assert "while undoing, removing failed: it does not exist; " in sentence
    assert sentence.endswith("while undoing, resuming failed: the GPU is lost; reset it")
    assert "runs on" not in sentence


def test_a_failing_undo_without_another_error() -> None:
    """Leaving without commit raises what could not be undone."""
    transaction = Transaction()
    transaction.undo("a", raiser(GpusnapError("stuck")))
    with pytest.raises(GpusnapError, match="while undoing, a failed: stuck"), transaction:
        pass


def test_a_mistake_keeps_its_type() -> None:
    """An error that is not ours comes out as it was, with a note of what could not be undone."""
    transaction = Transaction()
    transaction.undo("a", raiser(GpusnapError("stuck")))
    with pytest.raises(ZeroDivisionError) as caught:
        failing(transaction, ZeroDivisionError())
    assert caught.value.__notes__ == ["while undoing, a failed: stuck"]


def test_steps_are_timed() -> None:
    """Each step has its start and length, a failed one too, and so have the undos."""
    ticks = iter([10.0, 10.5, 11.0, 11.25, 12.0, 12.0, 12.5])
    transaction = Transaction(clock=lambda: next(ticks))
    transaction.undo("lock", lambda: None)
    with transaction.step("inspect"):
        pass

    def failing_step() -> None:
        with transaction, transaction.step("lock"):
            raise ImageError("full")

    with pytest.raises(ImageError):
        failing_step()
    assert [(s.name, s.start, s.seconds) for s in transaction.steps] == [
        ("inspect", 0.5, 0.5),
        ("lock", 1.25, 0.75),
        ("undo: lock", 2.0, 0.5),
    ]


@pytest.mark.parametrize("number", STOPPING, ids=lambda number: signal.Signals(number).name)
def test_a_signal_undoes(number: int, heard: None) -> None:
    """A signal that asks us to stop becomes an error that undoes, and the handlers are as before."""
    before = [signal.getsignal(each) for each in STOPPING]
    done: list[str] = []

    def work() -> None:
        with make_interruptible(), Transaction() as transaction:
            transaction.undo("a", lambda: done.append("a"))
            stop(number)
            pytest.fail("the signal did not stop us")

    with pytest.raises(Interrupted) as caught:
        work()
    assert done == ["a"]
    assert str(caught.value) == f"stopped by {signal.Signals(number).name}"
    assert [signal.getsignal(each) for each in STOPPING] == before


@pytest.fixture
def heard() -> Iterator[None]:
    """None of the signals is ignored, as under nohup or in a shell's background."""
    before = {each: signal.signal(each, signal.SIG_DFL) for each in STOPPING}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_an_ignored_signal_stays_ignored() -> None:
    """Under nohup, SIGHUP does not stop a checkpoint."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with make_interruptible():
            stop(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_does_not_break_the_undo() -> None:
    """Two signals one after the other (Ctrl-C twice) undo everything all the same."""
    done: list[str] = []

    def undo() -> None:
        stop()
        done.append("a")

    def work() -> None:
        with make_interruptible(), Transaction() as transaction:
            transaction.undo("b", lambda: done.append("b"))
            transaction.undo("a", undo)
            try:
                stop(signal.SIGINT)
            finally:
                stop()  # while the first is on its way out

    with pytest.raises(Interrupted, match="SIGINT"):
        work()
    assert done == ["a", "b"]


def test_held_signals() -> None:
    """A signal that came while it was held back stops us at the next place where that does no harm."""
    done: list[str] = []

    def work() -> None:
        with make_interruptible():
            with hold_signals(), hold_signals():
                stop()
                done.append("held")
            done.append("still")
            stop_if_asked()
            pytest.fail("the signal was forgotten")

    with pytest.raises(Interrupted, match="SIGTERM"):
        work()
    assert done == ["held", "still"]
    stop_if_asked()  # once told, it is told


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_after_the_commit(number: int) -> None:
    """Raises nothing: whoever is told of a failure would take away what is there."""
    done: list[str] = []
    with make_interruptible(), Transaction() as transaction:
        transaction.undo("it", lambda: done.append("undone"))
        with hold_signals():
            transaction.commit()
        stop(number)
        done.append("said")
    assert done == ["said"]


def test_a_transaction_within_another() -> None:
    """What the inner one has done stays; the outer one can still be stopped, and is undone."""
    done: list[str] = []

    def work() -> None:
        with make_interruptible(), Transaction() as outer:
            outer.undo("outer", lambda: done.append("undone"))
            with make_interruptible(), Transaction() as inner:
                inner.commit()
                stop()
                done.append("inner")
            stop_if_asked()
            pytest.fail("the signal was forgotten")

    with pytest.raises(Interrupted, match="SIGTERM"):
        work()
    assert done == ["inner", "undone"]


def test_a_signal_before_the_child_stands_for_us() -> None:
    """Is handed on to it when it does."""
    with subprocess.Popen(["sleep", "1000"]) as child, make_interruptible(), Transaction() as transaction:
        transaction.commit()
        stop()
        with forward_signals(child.send_signal):
            assert child.wait(60) == -signal.SIGTERM


def test_a_signal_does_not_outlive_its_transaction() -> None:
    """One that came too late to stop anything does not stop the next."""
    with make_interruptible(), hold_signals():
        stop()
    with make_interruptible():
        stop_if_asked()


@pytest.mark.parametrize("by", ["step", "question"])
def test_a_signal_that_is_taken_for_a_failure(by: str) -> None:
    """Of something that may fail: the next step, or whoever asks, raises it again, and all is undone."""
    said: list[str] = []

    def work() -> None:
        with make_interruptible(), Transaction() as transaction:
            transaction.undo("all", lambda: said.append("undone"))
            with suppress(GpusnapError):
                stop()
            said.append("nobody has noticed")
            if by == "question":
                stop_if_asked()
            with transaction.step("next"):
                said.append("went on")

    with pytest.raises(Interrupted):
        work()
    assert said == ["nobody has noticed", "undone"]


def test_what_follows_a_signal_is_not_stopped_by_it() -> None:
    """A swap resumes the first container after a signal, in a transaction of its own."""
    said: list[str] = []

    def resume() -> None:
        with make_interruptible(), Transaction() as transaction:
            with transaction.step("plan"):
                said.append("planned")
            with hold_signals():
                stop_if_asked()
                transaction.commit()

    def swap() -> None:
        with make_interruptible():
            try:
                stop()
            except Interrupted:
                resume()
                raise

    with pytest.raises(Interrupted):
        swap()
    assert said == ["planned"]


def test_a_signal_is_raised_once_while_all_is_undone() -> None:
    """An undo may have steps of its own, and may ask."""
    said: list[str] = []

    def undo() -> None:
        with Transaction() as own, own.step("own"):
            stop_if_asked()
            own.commit()
        said.append("undone")

    def work() -> None:
        with make_interruptible(), Transaction() as transaction:
            transaction.undo("all", undo)
            stop()

    with pytest.raises(Interrupted) as raised:
        work()
    assert "failed" not in raised.value.sentence()
    assert said == ["undone"]


def signal_at(code: CodeType, *, line: int = 0) -> None:
    """Send SIGTERM when a function of that code begins, or goes on; or that many lines later."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code is not code:
            return None
        lines += event == "line"
        if lines == line:
            sys.settrace(None)
            stop()
        return trace

    sys.settrace(trace)


@pytest.mark.parametrize("begins", [Transaction.__exit__, Transaction._roll_back])
def test_a_signal_when_the_undo_begins(begins: Callable[..., object]) -> None:
    """It does not take the place of the failure, without an undo."""
    undone: list[str] = []
    transaction = Transaction()
    transaction.undo("it", lambda: undone.append("it"))
    signal_at(begins.__code__)
    with make_interruptible(), pytest.raises(GpusnapError, match="the lock failed"):
        failing(transaction, GpusnapError("the lock failed"))
    assert undone == ["it"]


@pytest.mark.parametrize("line", range(6))
def test_a_signal_when_a_committed_block_ends(line: int) -> None:
    """Nobody is told that what was done was left as it was: it is held back, or comes to who comes next."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with make_interruptible(), Transaction() as transaction:
            transaction.commit()
            signal_at(inspect.unwrap(make_interruptible).__code__, line=line)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGTERM, before)


def test_steps_are_announced() -> None:
    """Whoever asked is told of each step, and of each undo, before it begins; and where it goes on."""
    said: list[str] = []
    announce(said.append)
    try:
        with Transaction() as transaction:
            transaction.undo("lock", lambda: said.append("undone"))
            with transaction.step("dump"):
                said.append("dumping")
                with transaction.step("write"):
                    said.append("writing")
    finally:
        announce(None)
    with Transaction() as transaction, transaction.step("sync"):
        transaction.commit()
    assert said == ["dump", "dumping", "write", "writing", "dump", "undo: lock", "undone"]


def test_notes_of_many_processes() -> None:
    """What is said of a step is cut where a manifest would no longer take it."""
    transaction = Transaction()
    with transaction.step("driver checkpoint"):
        for pid in range(4096):
            transaction.note(f"process {pid}: no file for it: it exceeds memory.ceiling")
    (step,) = transaction.steps
    assert step.note.startswith("process 0: no file for it")
    record = replace(a_manifest(), timing=(step,))
    assert decode(encode(record), "here").timing[0].note == step.note


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GpusnapError("it fails"), "it fails; gpusnap recover c0ffee tries again"),
        (GpusnapError("it fails", hint="wait"), "it fails; wait; gpusnap recover c0ffee tries again"),
        (GpusnapError("it fails", hint="run gpusnap recover"), "it fails; run gpusnap recover"),
        (OSError(errno.EMFILE, ""), "Too many open files; gpusnap recover c0ffee tries again"),
    ],
)
def test_what_cannot_be_taken_back(error: Exception, said: str) -> None:
    """The error names the command that tries again, once."""
    with pytest.raises(GpusnapError) as caught, name_recover("c0ffee"):
        raise error
    assert caught.value.sentence() == said
