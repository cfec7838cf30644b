"""Signals that ask gpusnap to stop: what each raises, and what is made of the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gpusnap.runtime_shim.base import stop_signals
from gpusnap.runtime_shim.base.stop_signals import (
    find_first,
    make_interrupted,
    note_signal,
    put_off_signals,
    raise_interrupts,
)

CHECKOUT = Path(__file__).resolve().parents[4]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_each_interrupts(number: signal.Signals) -> None:
    """As Ctrl-C does, until the block ends; the first one stays known for what is said and returned."""
    before = [signal.getsignal(each) for each in stop_signals.STOPPING]
    with raise_interrupts():
        with pytest.raises(KeyboardInterrupt):
            send(number)
        note_signal(signal.SIGHUP)
        note_signal(signal.SIGTERM)
        assert find_first() == (number if number != signal.SIGINT else signal.SIGHUP)
    assert [signal.getsignal(each) for each in stop_signals.STOPPING] == before


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_one_at_once(second: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is closed sends two. One that comes later is another wish."""
    now = 100.0
    monkeypatch.setattr("gpusnap.runtime_shim.base.stop_signals.time.monotonic", lambda: now)
    with raise_interrupts():
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGHUP)
        now += 0.9
        send(second)
        now += 1.0
        with pytest.raises(KeyboardInterrupt):
            send(second)
        assert find_first() == signal.SIGHUP


def test_one_that_is_ignored() -> None:
    """It stays so, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_interrupts():
            send(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_said() -> None:
    """The name of the signal, but for Ctrl-C. What came outside of a command is not of the next one."""
    note_signal(signal.SIGHUP)
    with raise_interrupts():
        assert str(make_interrupted()) == "interrupted"
        note_signal(signal.SIGTERM)
        assert make_interrupted(hint="again").sentence() == "interrupted by SIGTERM; again"
    assert find_first() == signal.SIGINT


def test_another_thread() -> None:
    """It gets no signals, and can have no handlers."""
    entered = []

    def enter() -> None:
        with raise_interrupts():
            entered.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.getsignal(signal.SIGTERM)]


# A signal in importlib's callback that has the lock of all imports, while another thread imports. Where it
# comes is the function that sends it, so that counts as a part of importlib, too.
_SENDING = """
def trace(frame, event, _):
    code = frame.f_code
    if code.co_name != "cb" or "importlib" not in code.co_filename:
        return None
    if event == "line" and frame.f_lineno > code.co_firstlineno + 1 and not sent:
        sent.append(True)
        os.kill(os.getpid(), number)
    return trace
"""
_IMPORTING = """
import os, signal, sys, threading
from gpusnap.runtime_shim.base.errors import Interrupted
from gpusnap.runtime_shim.base.stop_signals import raise_interrupts
from gpusnap.runtime_shim.base.transaction import make_interruptible

sent, number = [], int(sys.argv[2])
exec(compile(sys.argv[3], "<frozen importlib._bootstrap>", "exec"))
try:
    with globals()[sys.argv[1]]():
        sys.settrace(trace)
        import colorsys
        sys.settrace(None)
        thread = threading.Thread(target=lambda: __import__("wave"))
        thread.start()
        thread.join()
        threading.Event().wait(30)
except (KeyboardInterrupt, Interrupted):
    print("interrupted", sent)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["raise_interrupts", "make_interruptible"])
def test_while_modules_are_imported(how: str, number: signal.Signals) -> None:
    """Python would lose the signal, and keep the lock of all imports: a thread that imports would hang."""
    argv = [sys.executable, "-c", _IMPORTING, how, str(int(number)), _SENDING]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False, cwd=CHECKOUT)
    assert (done.stdout, done.stderr) == ("interrupted [True]\n", "")


class Ended:
    """At its end comes a signal, and what it calls takes longer than until the signal is sent again."""

    def __init__(self, number: int, ended: list[str]) -> None:
        self._number, self._ended = number, ended

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        send(self._number)
        wait(3 * stop_signals._AGAIN)
        self._ended.append("an object")


def generate(number: int, ended: list[str]) -> Iterator[None]:
    """Likewise, in the cleanup of a generator, and there after an error of its own."""
    try:
        yield
    finally:
        try:
            raise OSError
        except OSError:
            send(number)
            wait(3 * stop_signals._AGAIN)
            ended.append("a generator")


def begin_generator(number: int, ended: list[str]) -> Iterator[None]:
    generator = generate(number, ended)
    next(generator)
    return generator


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("make", "name"), [(Ended, "an object"), (begin_generator, "a generator")])
def test_while_something_is_deleted(
    make: Callable[[int, list[str]], object], name: str, number: signal.Signals
) -> None:
    """Python would lose the signal, and say so on stderr: it counts as soon as the object is gone."""
    ended: list[str] = []

    def work() -> None:
        del [make(number, ended)][0]
        wait(30)

    with raise_interrupts(), pytest.raises(KeyboardInterrupt):
        work()
    assert ended == [name]


def delete_from_set() -> None:
    """Delete an object to which a WeakSet refers."""

    class Watched:
        """Something to refer to."""

    watched, one = weakref.WeakSet[Any](), Watched()
    watched.add(one)
    del one
    assert not watched


def delete_pool() -> None:
    """Delete a pool of threads that has not been shut down."""
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    del pool


@pytest.mark.parametrize(("name", "delete"), [("_remove", delete_from_set), ("weakref_cb", delete_pool)])
def test_within_the_callback_of_a_weak_reference(name: str, delete: Callable[[], None]) -> None:
    """As where an object is deleted."""
    seen: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name != name:
            return None
        if event == "line" and not seen:
            seen.append(name)
            send(signal.SIGTERM)
        return trace

    def work() -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            delete()
        finally:
            sys.settrace(before)
        wait(30)

    with raise_interrupts(), pytest.raises(KeyboardInterrupt):
        work()
    assert seen == [name]


def test_signals_that_are_put_off() -> None:
    """The block runs to its end, also if it fails, and each of them counts then as it would have before."""
    done: list[int] = []

    def work(*numbers: int, fail: bool = False) -> None:
        with put_off_signals():
            for number in numbers:
                send(number)
            done.append(len(numbers))
            if fail:
                raise OSError
        done.append(0)

    work()
    with raise_interrupts():
        with pytest.raises(KeyboardInterrupt):
            work(signal.SIGTERM, signal.SIGTERM)
        assert find_first() == signal.SIGTERM
        work(signal.SIGHUP)  # at once after the first
    with raise_interrupts(), pytest.raises(KeyboardInterrupt) as raised:
        work(signal.SIGINT, fail=True)
    assert isinstance(raised.value.__context__, OSError)
    assert done == [0, 0, 2, 1, 0, 1]


def test_a_signal_that_nobody_handles_is_put_off() -> None:
    """It ends the program after the block."""
    script = (
        "import os, signal\n"
        "from gpusnap.runtime_shim.base.stop_signals import put_off_signals\n"
        "with put_off_signals():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('done', flush=True)\n"
        "print('after', flush=True)\n"
    )
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False, cwd=CHECKOUT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "done\n", "")


def wait(seconds: float) -> None:
    """Wait in Python code of this file."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_an_import_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may wait within an import for another's: it is interrupted after some seconds."""
    monkeypatch.setattr(stop_signals, "_IMPORTS", __file__)
    monkeypatch.setattr(stop_signals, "_AT_MOST", 0.1)
    begun = time.monotonic()
    with raise_interrupts():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            wait(30)
    assert time.monotonic() - begun >= 0.1


def test_an_import_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody can send the signal again, it counts at once."""

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stop_signals, "_IMPORTS", __file__)
    monkeypatch.setattr("_thread.start_new_thread", fail)
    with raise_interrupts(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
