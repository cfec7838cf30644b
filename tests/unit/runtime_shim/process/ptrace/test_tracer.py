"""Threads that a tracer of ours lets run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import Signalled, signal_main_in, signals_raise, wait_for

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace.tracee import hold, state
from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

# A thread that ends when its process reads a byte, and the main one, which waits for ever.
PROGRAM = """
import os, signal, threading
threading.Thread(target=os.read, args=(0, 1)).start()
print(flush=True)
while True:
    signal.pause()
"""


def test_a_pid_that_was_used_again() -> None:
    """The process that was to stand has ended: no other one is stopped in its place."""
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        try:
            before = len(os.listdir("/proc/self/fd"))
            with Tracer(child.pid, ()) as tracer:
                wait_for(lambda: proc.is_still(child.pid), "the stop")
                tracer.pid, seen = other.pid, tracer.stopped_again
                wait_for(lambda: tracer.stopped_again > seen, "the next look")
                assert other.communicate(b"there", timeout=20)[0] == b"there"
            assert len(os.listdir("/proc/self/fd")) == before - 2  # those of the other's pipes
        finally:
            child.kill()
            other.kill()


def test_one_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others run on: who has reaped it does not wait for it again."""
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            (worker,) = {int(tid) for tid in os.listdir(f"/proc/{child.pid}/task")} - {child.pid}
            with Tracer(child.pid, [worker, child.pid], guard=False) as tracer:
                interrupt, into = ptrace.interrupt, child.stdin.fileno()

                def interrupted(tid: int) -> None:
                    os.write(into, b"x")
                    wait_for(lambda: state(child.pid, worker) == "Z", "the end of the thread")
                    monkeypatch.setattr(ptrace, "interrupt", interrupt)

                monkeypatch.setattr(ptrace, "interrupt", interrupted)
                assert tracer.glance(worker) is None
                assert tracer.traced == {child.pid}
                assert tracer.glance(child.pid) is not None
                assert tracer.lost == ""
        finally:
            child.kill()


def is_unharmed(pid: int, blocked: str) -> bool:
    """Whether a process has its mask again, and nobody traces it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return f"SigBlk:\t{blocked}\n" in status and "TracerPid:\t0\n" in status


def find_mask(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text().partition("SigBlk:\t")[2].partition("\n")[0]


@pytest.fixture
def stopped() -> Iterator[int]:
    """The PID of a stopped process."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: proc.is_still(child.pid), "the stop")
        yield child.pid
        child.kill()


@pytest.mark.parametrize("where", ["_bootstrap_inner", "_take", "_release"])
def test_a_signal_while_it_starts_or_ends(stopped: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended all the same, and its threads have their masks again."""
    before, owner = find_mask(stopped), threading.Thread if where == "_bootstrap_inner" else Tracer
    signal_main_in(monkeypatch, owner, where, "gpusnap-tracer")
    with signals_raise():
        with pytest.raises(Signalled), Tracer(stopped, [stopped], guard=False):
            pass
        assert is_unharmed(stopped, before)
    assert not [each for each in threading.enumerate() if each.name.startswith("gpusnap-tracer")]


@pytest.mark.parametrize("name", ["set_signal_mask", "seize", "let_go"])
def test_a_signal_while_a_thread_is_seized_or_released(
    stopped: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each call that it takes."""
    before, real = find_mask(stopped), getattr(ptrace, name)

    def signalled(*args: object) -> None:
        real(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ptrace, name, signalled)
    with signals_raise(), pytest.raises(Signalled), hold(stopped, stopped):
        pass
    assert is_unharmed(stopped, before)
