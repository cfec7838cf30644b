"""Threads that are stopped while they hold a lock of the C library which the driver's thread needs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from softgpu_box import DEADLINE, GPUWORK, Agent, Box, open_boxes, wait_until

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace import positions
from gpusnap.runtime_shim.process.ptrace.arch import X86_64
from gpusnap.runtime_shim.process.ptrace.tracee import Tracee
from gpusnap.runtime_shim.stopping.stop import go_on

CALLER = Path(__file__).parents[3] / "gpu_caller.py"
# By kind of lock, the system calls in which a thread has it.
CALLS = {"fork": ("clone",), "malloc": ("brk", "mprotect", "munmap", "mmap"), "dlopen": ("mmap", "munmap")}

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="of x86-64 alone")


class Caller:
    """gpu_caller.py in a box."""

    def __init__(self, box: Box) -> None:
        path = str(CALLER.parents[2])
        self.agent = Agent(box.popen([sys.executable, str(CALLER)], PYTHONPATH=path))
        box.agents.append(self.agent)
        self("open")

    def __call__(self, method: str, *arguments: Any) -> Any:
        kind, value = self.agent.call(method, *arguments)
        assert not kind, f"{kind}: {value}"
        return value


class Work:
    """gpuwork in a box, whose ticks are read."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid
        assert process.stdout
        self._number, self._said = process.stdout.fileno(), b""
        self.ticks(2)

    def ticks(self, number: int) -> None:
        """Wait for so many more ticks, each with every word right."""
        for _ in range(number):
            while b"\n" not in self._said:
                self._read(DEADLINE)
            line, _, self._said = self._said.partition(b"\n")
            assert b" ok " in line

    def drain(self) -> None:
        """Read what it has printed before it was stopped: ticks that are read then are later ones."""
        while select.select([self._number], [], [], 0)[0]:
            self._read(0)
        self.ticks(self._said.count(b"\n"))

    def _read(self, seconds: float) -> None:
        assert select.select([self._number], [], [], seconds)[0], "it does not tick"
        piece = os.read(self._number, 1 << 16)
        assert piece, "it has ended"
        self._said += piece

    def thread(self, name: str) -> int:
        """The first of its threads of a name."""
        return next(tid for tid in sorted(proc.threads(self.pid)) if proc.thread_name(self.pid, tid) == name)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with open_boxes(tmp_path / "state") as make:
        yield make(1)


@pytest.fixture
def caller(box: Box) -> Caller:
    return Caller(box)


@pytest.fixture
def works(box: Box) -> Iterator[Callable[..., Work]]:
    started: list[Work] = []

    def start(*words: str) -> Work:
        process = box.popen([str(GPUWORK), "--mib", "4", "--tick", "5", *words])
        started.append(Work(process))
        return started[-1]

    yield start
    for work in started:
        work.process.kill()
        work.process.communicate()


def stop_at_call(pid: int, tid: int, names: tuple[str, ...]) -> None:
    """Stop a process while one thread of it is in one of these system calls, and all others anywhere."""
    wanted = {X86_64.calls[name] for name in names}
    deadline = time.monotonic() + 60
    tracee = Tracee(pid, tid)
    try:
        while X86_64.get_call(tracee.registers())[0] not in wanted:
            assert time.monotonic() < deadline, f"the thread made no call of {names} in 60 s"
            tracee.to_call()
        os.kill(pid, signal.SIGSTOP)
    finally:
        tracee.let_go()
    wait_until(lambda: proc.is_still(pid), "the process stands")


def there_and_back(caller: Caller, work: Work) -> None:
    """Its GPU state is taken and given back, by the watched calls, and it goes on."""
    caller("safe_checkpoint", work.pid)
    assert caller("safe_state", work.pid) == 2
    assert proc.is_still(work.pid)
    caller("safe_restore", work.pid)
    assert proc.is_still(work.pid)
    work.drain()
    go_on([work.pid])
    caller("safe_unlock", work.pid)
    work.ticks(5)


@pytest.mark.parametrize("kind", CALLS)
def test_a_lock_that_a_stopped_thread_holds(caller: Caller, works: Callable[..., Work], kind: str) -> None:
    """The driver's thread waits for it; the thread that holds it is let run until it gets on."""
    work = works("--locks", kind)
    caller("safe_lock", work.pid)
    tid = work.thread(kind)
    stop_at_call(work.pid, tid, CALLS[kind])
    assert tid in positions.list_unsafe(work.pid)
    there_and_back(caller, work)


@pytest.mark.parametrize("kind", CALLS)
def test_a_safe_instant(caller: Caller, works: Callable[..., Work], kind: str) -> None:
    """Such a thread is let run until it stands elsewhere, before the driver begins."""
    work = works("--locks", kind)
    caller("safe_lock", work.pid)
    tid = work.thread(kind)
    stop_at_call(work.pid, tid, CALLS[kind])
    assert tid in positions.list_unsafe(work.pid)
    assert caller("settled_at_last", work.pid) == []
    assert proc.is_still(work.pid)
    there_and_back(caller, work)


@pytest.mark.parametrize("kind", [*CALLS, "stdio", "all"])
def test_a_storm(caller: Caller, works: Callable[..., Work], kind: str) -> None:
    """Stopped at ten instants as they come, with two threads that hold such locks most of the time."""
    work = works("--locks", kind, "--lock-threads", "2")
    for _ in range(10):
        caller("safe_lock", work.pid)
        caller("settled", work.pid)
        there_and_back(caller, work)


def test_a_lock_taken_in_the_programs_own_code(caller: Caller, works: Callable[..., Work]) -> None:
    """Nobody sees from outside that the thread holds stderr's lock; the driver gets on all the same."""
    work = works("--locks", "stdio")
    caller("safe_lock", work.pid)
    os.kill(work.pid, signal.SIGSTOP)
    wait_until(lambda: proc.is_still(work.pid), "the process stands")
    there_and_back(caller, work)


@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
@pytest.mark.parametrize("thread", ["handler", "others"])
def test_a_driver_that_yields(
    box: Box, caller: Caller, works: Callable[..., Work], operation: str, thread: str
) -> None:
    """It waits for what another thread does, and spins meanwhile: the driver's second one, or any other."""
    (box.state / "faults").write_text(f"{operation} spin={thread}\n")
    work = works()
    caller("safe_lock", work.pid)
    os.kill(work.pid, signal.SIGSTOP)
    wait_until(lambda: proc.is_still(work.pid), "the process stands")
    there_and_back(caller, work)
