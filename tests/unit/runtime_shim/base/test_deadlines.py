"""What the kernel does not answer is not waited for without end; FIFOs stand in for what it waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import maps


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What a question that is not answered waits for; set at the end, so that no thread is left."""
    event = threading.Event()
    asked: Callable[..., object] = deadlines.ask
    monkeypatch.setattr(deadlines, "ask", lambda question, what: asked(question, what, within=0.1))
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name == "gpusnap-question" and not any(each.thread is thread for each in deadlines._idle):
            thread.join(60)
            assert not thread.is_alive()


def test_answers() -> None:
    """What a question gives or raises, from one and the same thread as long as it answers."""
    first = deadlines.ask(threading.get_ident, "x")
    assert deadlines.ask(threading.get_ident, "x") == first != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        deadlines.ask(lambda: 1 // 0, "x")
    assert deadlines.ask(threading.get_ident, "x") == first


def test_no_answer(over: threading.Event) -> None:
    """It is said of what; the next question has another thread."""
    with pytest.raises(TimeoutError, match=r"the kernel did not respond within 0.1 s: '/proc/7/maps'"):
        deadlines.ask(over.wait, "/proc/7/maps")
    assert deadlines.ask(lambda: 7, "x") == 7


def test_after_a_fork() -> None:
    """A child has none of its parent's threads, and asks all the same."""
    deadlines.ask(int, "x")
    pid = os.fork()
    if pid == 0:
        os._exit(deadlines.ask(lambda: 7, "x", within=5))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize(
    ("name", "ask"),
    [("cmdline", proc.command), ("environ", proc.environment), ("maps", proc.maps)],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_process_that_is_locked(
    over: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    ask: Callable[[int], object],
) -> None:
    """It is neither waited for nor taken for gone."""
    monkeypatch.setattr(proc, "PROC", str(tmp_path))
    (tmp_path / "7").mkdir()
    fifo = tmp_path / "7" / name
    os.mkfifo(fifo)
    with pytest.raises(
        GpusnapError, match=rf"{name} cannot be read: the kernel did not respond within 0.1 s"
    ):
        ask(7)
    os.close(os.open(fifo, os.O_WRONLY))


def test_mappings(over: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor is a process taken for one without memory."""
    monkeypatch.setattr("builtins.open", lambda *_, **__: over.wait())
    with pytest.raises(TimeoutError):
        maps.mappings(os.getpid())
