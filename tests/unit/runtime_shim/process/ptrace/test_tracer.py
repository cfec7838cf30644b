"""Threads that a tracer of ours lets run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace.tracee import state
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
