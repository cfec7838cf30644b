"""Watches the driver's threads in a process during a call, and helps them if they are blocked.

The driver works in a thread of the process, its restore thread, which uses the C library of the process. If
another thread was stopped while it held one of that library's locks (fork takes those of malloc and stdio),
the restore thread is blocked. So gpusnap watches it. While it waits in a futex without progress, gpusnap lets
the other threads run, one at a time and for a moment each: first the one that the lock names as its owner,
then those within the C library, then all others. If that does not help, several run at once.

The restore thread can also yield (sched_yield) for minutes. This was seen on two H100s, in processes that had
been locked and unlocked several times before. It then waits for another thread, usually the driver's second
one, which gpusnap tries first.

If a thread accesses memory that the driver has taken away, it stops at that instruction, and runs it again
when the memory is back.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies

if TYPE_CHECKING:
    from gpusnap.runtime_shim.process.ptrace.positions import Position
    from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

# The name of the second thread of NVIDIA's driver. The driver reports the first one by its number.
_HANDLER = "cuda-EvtHandlr"
# Seconds without any progress until a call has failed: in a futex, while it yields, and in anything else.
# While a driver works for a GPU, it sleeps in its own system calls, for minutes if the GPU is large, and it
# yields while the GPU copies.
_STUCK, _YIELDING, _ASLEEP = 10.0, 180.0, 600.0
# Seconds until a thread that waits for a lock is helped: the first time, and again.
_WAITING, _WAITING_AGAIN = 0.1, 0.002
# The same for a thread that yields, because it may yield for the GPU; and the rounds in which only the
# driver's second thread runs for it.
_YIELDS, _YIELDS_AGAIN, _ROUNDS_OF_HANDLER = 0.2, 0.02, 6
# Seconds of a call until a running thread is examined, which stops it for a moment; and between two of these.
_RUNS_LONG, _GLANCES = 0.3, 0.05
# Seconds that another thread runs: at first, and at most.
_MOMENT, _LONGEST_MOMENT = 0.002, 0.1

# Unusual events, from any thread, until `take_notes`.
_notes: collections.deque[str] = collections.deque(maxlen=256)


def add_note(text: str) -> None:
    """Record an unusual event for `take_notes`."""
    _notes.append(text)


def take_notes() -> list[str]:
    """Return and clear the unusual events of the calls so far, for the steps of a transaction."""
    found = list(_notes)
    _notes.clear()
    return found


def second_threads(pid: int) -> list[int]:
    """Return the TIDs of the driver's second thread: none or one."""
    return [tid for tid in proc.threads(pid) if proc.thread_name(pid, tid) == _HANDLER]


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a thread of the driver waits for."""

    futex: int
    """The address of a lock; 0 if the thread yields until something happens."""
    arguments: tuple[int, ...] = ()
    """The registers while it yields: the same within one loop."""


class Watch:
    """Checks whether the driver's threads make progress, and lets other threads run if they do not."""

    def __init__(self, pid: int, threads: Iterable[int], tracer: Tracer) -> None:
        self._pid, self._threads, self._tracer = pid, tuple(threads), tracer
        self._since = self._begin = time.monotonic()
        self._seen: object = None
        self._moment = _MOMENT
        self._waiting: list[list[int]] = []
        self._round = self._helped = 0
        self._last: list[int] = []
        self._glanced = 0.0
        self._at_glance: Position | None = None

    def begin_again(self) -> None:
        """Start the time anew: there was progress that the threads do not show."""
        self._seen = None

    def look(self) -> str:
        """Check once, and help if necessary; if nothing helped, return what the thread waits for, else ""."""
        now = time.monotonic()
        wait = self._wait(now)
        seen: object = wait
        if wait is None or wait.futex:
            seen = (self._tracer.stops, *(proc.progress(self._pid, tid) for tid in self._threads))
        if seen != self._seen:
            self._seen, self._since, self._waiting, self._round = seen, now, [], 0
            return ""
        quiet = now - self._since
        if wait is None:
            return self._describe("makes no progress") if quiet > _ASLEEP else ""
        first, again, last = (_WAITING, _WAITING_AGAIN, _STUCK)
        if not wait.futex:
            first, again, last = (_YIELDS, _YIELDS_AGAIN, _YIELDING)
        if quiet > last:
            return self._describe("waits for a lock" if wait.futex else "makes no progress")
        if quiet > (again if self._helped else first):
            self._help(wait)
        return ""

    def tell(self) -> None:
        """Record for `take_notes` that other threads had to run."""
        if self._helped:
            names = ", ".join(proc.thread_name(self._pid, tid) or str(tid) for tid in self._last[:3])
            _notes.append(
                f"the GPU driver waited for threads of process {self._pid}, which is stopped: threads "
                f"were resumed {self._helped} times (last: {names})"
            )

    def _wait(self, now: float) -> _Wait | None:
        """What a thread of the driver waits for; None if it does not wait, as far as gpusnap can tell."""
        from gpusnap.runtime_shim.process.ptrace.arch import this_machine
        from gpusnap.runtime_shim.process.ptrace.positions import position

        calls = this_machine().calls
        for tid in self._threads:
            found = position(self._pid, tid)
            if found is None and tid == self._threads[0]:
                found = self._glance(tid, now)
            if found is not None and found.call == calls["futex"]:
                return _Wait(found.arguments[0])
            if found is not None and found.call == calls["sched_yield"] and tid == self._threads[0]:
                return _Wait(0, found.arguments)
        return None

    def _glance(self, tid: int, now: float) -> Position | None:
        """The position of a thread that runs all the time, as of the last examination, a short time ago."""
        if now - self._begin < _RUNS_LONG:
            return None
        if now - self._glanced > _GLANCES:
            self._glanced, self._at_glance = now, self._tracer.glance(tid)
        return self._at_glance

    def _help(self, wait: _Wait) -> None:
        """Let one more thread run for a moment; after each was tried, all that may help, at once."""
        if not self._waiting:
            self._waiting = self._candidates(wait)
        if self._waiting:
            self._last = self._waiting.pop(0)
            self._tracer.run_briefly(self._last, self._moment)
            self._helped += 1

    def _candidates(self, wait: _Wait) -> list[list[int]]:
        """The threads to run next: each alone, the likeliest first; then several together.

        A thread that waits for a lock gets it only if it runs when the lock is released.
        """
        from gpusnap.runtime_shim.process.ptrace import positions

        self._round += 1
        self._moment = min(_MOMENT * 2**self._round, _LONGEST_MOMENT)
        handlers = [tid for tid in second_threads(self._pid) if tid not in self._threads]
        if handlers and not wait.futex and self._round <= _ROUNDS_OF_HANDLER:
            return [[tid] for tid in handlers]
        text = positions.read_text(self._pid)
        found = [each for each in positions.positions(self._pid) if each.tid not in self._threads]
        unsafe, waiting = set(positions.list_unsafe(self._pid)), set(positions.list_waiting(self._pid))
        owner = proc.thread_by_inner_number(self._pid, _owner(self._pid, wait.futex)) if wait.futex else 0

        def rank(each: positions.Position) -> int:
            if each.tid == owner:
                return 0
            if each.tid in unsafe:
                return 1
            if positions.is_within_libc(each, text):
                return 2
            return 3 if each.call < 0 else 4

        ranked = [each.tid for each in sorted(found, key=rank)]
        likely = [each.tid for each in found if each.tid in unsafe | waiting | {owner}]
        together = [each for each in (likely, ranked) if len(each) > 1]
        alone = [[tid] for tid in ranked]
        first = 1 + (_ROUNDS_OF_HANDLER if handlers and not wait.futex else 0)
        return alone + together if self._round == first else [*together, *alone]

    def _describe(self, what: str) -> str:
        """Describe where the driver's thread is, and the threads that may block it."""
        from gpusnap.runtime_shim.process.ptrace import positions

        unsafe = [tid for tid in positions.list_unsafe(self._pid) if tid not in self._threads]
        said = f"its thread {self._threads[0]} {what}"
        for tid in unsafe[:1]:
            said += f", and thread {tid} ({proc.thread_name(self._pid, tid)}) is stopped within the C library"
        return said


def _owner(pid: int, futex: int) -> int:
    """Return the owner of a mutex of glibc, which stands after the lock and a count (struct_mutex.h).

    A TID in the process's own namespace; any number if it is another kind of lock.
    """
    data = question_process.ask(pid, f"its lock at {futex:#x}", copies.peek, pid, futex + 8, 4)
    return int.from_bytes(data, sys.byteorder, signed=True) if len(data) == 4 else 0
