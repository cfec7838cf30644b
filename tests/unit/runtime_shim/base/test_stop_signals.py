"""Signals that ask gpusnap to stop: what each raises, and what is made of the first."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gpusnap.runtime_shim.base import stop_signals
from gpusnap.runtime_shim.base.stop_signals import find_first, make_interrupted, note_signal, raise_interrupts


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
