"""Calls of the GPU driver on a process: all of them go through `call`.

NVIDIA's driver does the work in a thread of its own within the process, its restore thread. So a call on a
process that is stopped needs that thread let run, and no other: the process' own threads may need memory that
the driver has taken away. What was measured on an H100 (driver 580.159.04, PyTorch, ten tries):

- The restore thread alone answers for the state, checkpoints and restores. Asked of a process of which no
  thread may run, the driver waits for ever; that thread's number it tells at once.
- To lock, that thread alone is not enough: the driver waits, beyond its own timeout. With the driver's second
  thread (cuda-EvtHandlr) a process that had nothing under way was locked in 1.4 ms.
- Where the process was stopped within a call of CUDA's, that call has to end first. Then the whole process is
  let run until the driver has answered: locked 0.5 to 1.9 ms after the SIGCONT, and standing again 1.0 to
  3.0 ms after it.

The restore thread uses the C library of the process. A thread that was stopped while it held one of that
library's locks (fork takes those of malloc and stdio) blocks it. So it is watched: while it waits in a futex
and gets nowhere, the other threads are let run, one at a time and for a moment each, until it gets on: the
one that the lock names as its owner first, then those within the C library, then all others; and where that
does not help, several at once. It has also been seen to yield (sched_yield) for minutes, on two H100s, in
processes that had been locked and unlocked several times before: it waits for another thread then, first of
all the driver's second one. A thread that comes upon memory that the driver has taken away stands at that
instruction, and runs it again when the memory is back. Where nothing helps before the deadline, the call
fails; a process that is being locked, unlocked or checkpointed is let run as a whole, so that the driver's
call ends, and the caller undoes it. No call waits for ever.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim import question_process
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.device_files import ends
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    DriverFailed,
    DriverNotReady,
    GpuError,
    IllegalState,
    LockTimeout,
    NotInitialized,
    ProcessGone,
)
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.stopping.stop import go_on, only, several, stop

if TYPE_CHECKING:
    from gpusnap.runtime_shim.process.ptrace.positions import Position
    from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

T = TypeVar("T")

# Seconds for an answer while the driver's threads alone run: it takes 1.4 ms, or does not come.
_BRIEFLY = 0.2
# Seconds beyond the driver's own deadline, which it keeps for a process that runs.
_MARGIN = 5.0
# Seconds that a killed process may take to be gone.
_DYING = 0.2
# As NVIDIA's driver names its second thread; the first one it tells by number.
_HANDLER = "cuda-EvtHandlr"
# Seconds without any progress until a call has failed: in a futex, while it yields, and in anything else. A
# driver that works for a GPU sleeps in its own calls of the kernel, for minutes where the GPU is large, and
# yields while the GPU copies.
_STUCK, _YIELDING, _ASLEEP = 10.0, 180.0, 600.0
# Seconds that all of a call may take. A whole GPU takes a driver one or two minutes (docs/benchmarks.md); a
# thread that spins in a damaged process never ends.
_LONGEST = 900.0
# Seconds for the state of a process.
_SHORT = 30.0
# Seconds for a process to stand that is to stand.
_STOPPING = 10.0
# Seconds between two looks at the thread; until one that waits for a lock is helped, and again; until one
# that somebody has stopped is let run.
_LOOK, _WAITING, _WAITING_AGAIN, _STANDING = 0.005, 0.1, 0.002, 0.02
# The same of one that yields, since that may be for the GPU; and the rounds in which the driver's second
# thread alone is let run for it.
_YIELDS, _YIELDS_AGAIN, _ROUNDS_OF_HANDLER = 0.2, 0.02, 6
# Seconds of a call until a thread that only runs is looked at, which stops it for a moment; and between two.
_RUNS_LONG, _GLANCES = 0.3, 0.05
# Seconds that another thread is let run, and at most.
_MOMENT, _LONGEST_MOMENT = 0.002, 0.1


# What was out of the ordinary, from any thread, until it is taken.
_notes: collections.deque[str] = collections.deque(maxlen=256)


def note(text: str) -> None:
    """Keep something for `take_notes`."""
    _notes.append(text)


def take_notes() -> list[str]:
    """What was out of the ordinary in the calls since this was asked last, for the steps of a transaction."""
    found = list(_notes)
    _notes.clear()
    return found


class _Answer(Generic[T]):
    """A call in a thread of its own: into the driver, which cannot be called off."""

    def __init__(self, operation: Callable[[], T]) -> None:
        self._operation = operation
        self._begun = False
        self._done = threading.Event()
        self._value: list[T] = []
        self.error: BaseException | None = None

    @property
    def came(self) -> bool:
        return self._done.is_set()

    def begin(self) -> None:
        """Make the call, unless it has been begun."""
        if self._begun:
            return
        try:
            threading.Thread(target=self._run, name="gpusnap-gpu-call", daemon=True).start()
        except RuntimeError as error:
            raise DriverFailed(
                f"no thread could be started for a call of the GPU driver: {error}",
                hint="raise the limit on processes and threads for gpusnap (ulimit -u, pids.max)",
                code="GPS-003",
            ) from error
        self._begun = True

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def value(self) -> T:
        if self.error is not None:
            raise self.error
        return self._value[0]

    def _run(self) -> None:
        try:
            self._value.append(self._operation())
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a thread of the driver's waits for."""

    futex: int
    """The address of a lock; 0 where it yields until something has happened."""
    arguments: tuple[int, ...] = ()
    """The registers with which it yields: the same in one loop."""


class _Watch:
    """Whether the driver's threads get on; where they do not, the others are let run."""

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
        """Something has happened that cannot be seen in the threads."""
        self._seen = None

    def look(self) -> str:
        """Look once, and help if need be; what it waits for where all has been in vain, else empty."""
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
            return self._describe("does not get on") if quiet > _ASLEEP else ""
        first, again, last = (_WAITING, _WAITING_AGAIN, _STUCK)
        if not wait.futex:
            first, again, last = (_YIELDS, _YIELDS_AGAIN, _YIELDING)
        if quiet > last:
            return self._describe("waits for a lock" if wait.futex else "does not get on")
        if quiet > (again if self._helped else first):
            self._help(wait)
        return ""

    def tell(self) -> None:
        """Keep for `take_notes` that threads were let run, which they should not have to be."""
        if self._helped:
            names = ", ".join(proc.thread_name(self._pid, tid) or str(tid) for tid in self._last[:3])
            _notes.append(
                f"the GPU driver waited for threads of process {self._pid}, which stands: "
                f"threads were let run {self._helped} times (last: {names})"
            )

    def _wait(self, now: float) -> _Wait | None:
        """What a thread of the driver's waits for; None where none does as far as can be told."""
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
        """Where a thread is that runs all the time, as the last look at it found, which is not long ago."""
        if now - self._begin < _RUNS_LONG:
            return None
        if now - self._glanced > _GLANCES:
            self._glanced, self._at_glance = now, self._tracer.glance(tid)
        return self._at_glance

    def _help(self, wait: _Wait) -> None:
        """Let one more thread run for a moment, or after a round of that all that may be of help, at once."""
        if not self._waiting:
            self._waiting = self._candidates(wait)
        if self._waiting:
            self._last = self._waiting.pop(0)
            self._tracer.run_briefly(self._last, self._moment)
            self._helped += 1

    def _candidates(self, wait: _Wait) -> list[list[int]]:
        """The threads of the next moments: each alone, the likeliest first; then together.

        Who waits for a lock gets it only if it runs when that is let go of.
        """
        from gpusnap.runtime_shim.process.ptrace import positions

        self._round += 1
        self._moment = min(_MOMENT * 2**self._round, _LONGEST_MOMENT)
        handlers = [tid for tid in _handlers(self._pid) if tid not in self._threads]
        if handlers and not wait.futex and self._round <= _ROUNDS_OF_HANDLER:
            return [[tid] for tid in handlers]
        text = positions.read_text(self._pid)
        found = [each for each in positions.positions(self._pid) if each.tid not in self._threads]
        unsafe, waiting = set(positions.unsafe(self._pid)), set(positions.waiting(self._pid))
        owner = proc.thread_by_inner_number(self._pid, _owner(self._pid, wait.futex)) if wait.futex else 0

        def rank(each: positions.Position) -> int:
            if each.tid == owner:
                return 0
            if each.tid in unsafe:
                return 1
            if positions.within_libc(each, text):
                return 2
            return 3 if each.call < 0 else 4

        ranked = [each.tid for each in sorted(found, key=rank)]
        likely = [each.tid for each in found if each.tid in unsafe | waiting | {owner}]
        together = [each for each in (likely, ranked) if len(each) > 1]
        alone = [[tid] for tid in ranked]
        first = 1 + (_ROUNDS_OF_HANDLER if handlers and not wait.futex else 0)
        return alone + together if self._round == first else [*together, *alone]

    def _describe(self, what: str) -> str:
        """Where the driver's thread and those that may block it stand."""
        from gpusnap.runtime_shim.process.ptrace import positions

        unsafe = [tid for tid in positions.unsafe(self._pid) if tid not in self._threads]
        said = f"its thread {self._threads[0]} {what}"
        for tid in unsafe[:1]:
            said += f", and thread {tid} ({proc.thread_name(self._pid, tid)}) stands within the C library"
        return said


def _owner(pid: int, futex: int) -> int:
    """The owner that a lock names, if it is a mutex of glibc's: behind the lock and a count (struct_mutex.h).

    A TID in the process' own namespace; any number where it is another kind of lock.
    """
    data = question_process.ask(pid, f"its lock at {futex:#x}", copies.peek, pid, futex + 8, 4)
    return int.from_bytes(data, sys.byteorder, signed=True) if len(data) == 4 else 0


def call(
    driver: Driver,
    pid: int,
    operation: Callable[[], T],
    *,
    thread: Callable[[int, int], AbstractContextManager[Tracer]] | None = None,
    within: float = _LONGEST,
    may_run: bool = False,
    waits: Callable[[], bool] = bool,
) -> T:
    """Make the `operation` of the driver's on a process, whether that runs or stands; what it gives.

    A process that stands does so afterwards. One that is stopped meanwhile, by whomever, gets its answer all
    the same. With `thread` it has to stand: it is stopped, and kept so, and that lets the driver's thread
    (PID, TID) run. `may_run`: where no answer comes, all of it may run for a while, so that the call ends.
    `waits`: whether the thread waits for memory that is sure to come; that time does not count.

    Raises what the operation raises, ProcessGone where the process ends, DriverNotReady where no answer comes
    (`within` seconds, or some without any progress), PermissionRefused where the thread cannot be traced.
    """
    with _in_its_hands(pid):
        tid = driver.restore_thread(pid)
        answer = _Answer(operation)
        if thread is not None:
            stop([pid], timeout=_STOPPING)
        elif not proc.stopped_thread(pid, tid) and _answered_running(answer, pid, tid, within):
            return answer.value()
        # Without `thread` it may be somebody else's stop: whoever made it may end it.
        lets_run = thread(pid, tid) if thread is not None else several(pid, [tid], guard=False)
        why = _run_threads(answer, pid, [tid], lets_run, within, waits)
        if answer.came:
            return answer.value()
        if may_run:
            _run_all(answer, pid, stands=True, within=_STUCK)
        raise _no_answer(pid, why)


def call_or_run(driver: Driver, pid: int, operation: Callable[[], object], *, timeout: float) -> bool:
    """As `call`, for locks and unlocks; whether all of a process that stands had to run for it.

    First both of the driver's threads alone run; where no answer comes, or that something is under way, the
    whole process does until there is one, `timeout` seconds at most. A process that stands does so
    afterwards.
    """
    with _in_its_hands(pid):
        tid = driver.restore_thread(pid)
        answer = _Answer(operation)
        if not proc.stopped_thread(pid, tid) and _answered_running(answer, pid, tid, timeout + _MARGIN):
            answer.value()
            return False
        stood = proc.still(pid)
        tids = [tid, *(each for each in _handlers(pid) if each != tid)]
        lets_run = several(pid, tids, guard=False)
        why = _run_threads(answer, pid, tids, lets_run, _BRIEFLY if stood else timeout + _MARGIN)
        if answer.came and not (stood and isinstance(answer.error, LockTimeout)):
            answer.value()
            return False
        if answer.came:
            answer = _Answer(operation)
        _run_all(answer, pid, stands=stood, within=timeout + _MARGIN, stopping=timeout)
        if not answer.came:
            raise _no_answer(pid, why)
        answer.value()
        return True


def state(driver: Driver, pid: int) -> ProcessState | None:
    """The state of a process, as `Driver.state`: None where it has no GPU state or is gone."""
    try:
        return call(driver, pid, lambda: driver.state(pid), within=_SHORT)
    except (NotInitialized, ProcessGone):
        return None


def lock(driver: Driver, pid: int, *, timeout: float) -> bool:
    """Lock a process; whether all of one that stands had to run for it."""
    return call_or_run(driver, pid, lambda: driver.lock(pid, timeout=timeout), timeout=timeout)


def checkpoint(
    driver: Driver, pid: int, thread: Callable[[int, int], AbstractContextManager[Tracer]] = only
) -> None:
    """Have the driver take the GPU state of a locked process."""
    call(driver, pid, lambda: driver.checkpoint(pid), thread=thread, may_run=True)


def restore(
    driver: Driver,
    pid: int,
    pairs: Sequence[tuple[str, str]] = (),
    *,
    waits: Callable[[], bool] | None = None,
) -> None:
    """Have the driver put it back; `pairs` as for `Driver.restore`.

    With `waits`, as for `call`, its memory still comes: the process ends with gpusnap, as it would go on with
    memory that is not there.
    """
    thread = partial(only, exit_kill=waits is not None)
    call(driver, pid, lambda: driver.restore(pid, pairs), thread=thread, waits=waits or bool)


def unlock(driver: Driver, pid: int) -> None:
    """Unlock a process. One that a killed gpusnap was about to unlock may be so by itself in between."""
    try:
        call_or_run(driver, pid, lambda: driver.unlock(pid), timeout=_STUCK)
    except IllegalState:
        if state(driver, pid) is not ProcessState.RUNNING:
            raise


def let_finish(driver: Driver, pid: int, *, within: float, quiet: float) -> None:
    """Let the driver's thread of a process that stands end what it is at, as `suspension.let_finish`."""
    with _in_its_hands(pid):
        tid = driver.restore_thread(pid)
        deadline = time.monotonic() + within
        with only(pid, tid):
            since, seen = time.monotonic(), proc.activity(pid, tid)
            while time.monotonic() < min(deadline, since + quiet):
                time.sleep(_LOOK)
                now = proc.activity(pid, tid)
                if now != seen or now[0] not in "SX":
                    since, seen = time.monotonic(), now


def _answered_running(answer: _Answer[T], pid: int, tid: int, within: float) -> bool:
    """Begin, and wait for the answer of a process that runs; whether it came before somebody stopped it."""
    answer.begin()
    deadline, since = time.monotonic() + within, 0.0
    while not answer.wait(_LOOK):
        now = time.monotonic()
        if not proc.stopped_thread(pid, tid):
            since = 0.0
        elif not since:
            since = now
        elif now - since > _STANDING:
            return False
        if now > deadline:
            raise _no_answer(pid, f"none came within {within:g} s")
    return True


def _run_threads(
    answer: _Answer[T],
    pid: int,
    tids: Sequence[int],
    lets_run: AbstractContextManager[Tracer],
    within: float,
    waits: Callable[[], bool] = bool,
) -> str:
    """Let the driver's threads run until the answer comes; where it does not, what they wait for."""
    with lets_run as tracer:
        answer.begin()
        watch, deadline = _Watch(pid, tids, tracer), time.monotonic() + within
        why = ""
        while not why and not answer.wait(_LOOK):
            if waits():
                watch.begin_again()
                deadline = time.monotonic() + within
                continue
            with contextlib.suppress(GpusnapError):  # the kernel is short of memory: no news
                why = watch.look()
            if not why and tracer.lost:
                why = f"its thread cannot be let run: {tracer.lost}"
            if not why and time.monotonic() > deadline:
                why = f"none came within {within:g} s"
    watch.tell()
    return why


def _run_all(answer: _Answer[T], pid: int, *, stands: bool, within: float, stopping: float = _STUCK) -> None:
    """Let the whole process run until the answer comes, if it comes; it is stopped again if it stood."""
    if not stands:
        answer.wait(within)
        return
    go_on([pid])
    try:
        answer.begin()
        answer.wait(within)
    finally:
        stop([pid], timeout=stopping)


def _handlers(pid: int) -> list[int]:
    """The driver's second thread."""
    return [tid for tid in proc.threads(pid) if proc.thread_name(pid, tid) == _HANDLER]


@contextlib.contextmanager
def _in_its_hands(pid: int) -> Iterator[None]:
    """Raise ProcessGone where the process ends in the block: the driver's answer is not clear then."""
    try:
        yield
    except GpuError as error:
        if not isinstance(error, ProcessGone) and ends(pid, within=_DYING):
            raise ProcessGone(f"process {pid} ended in the GPU driver's hands: {error}", pid=pid) from error
        raise


def _no_answer(pid: int, why: str) -> DriverNotReady:
    return DriverNotReady(
        f"the GPU driver does not answer for process {pid} ({proc.comm(pid)}): {why}",
        hint="try again; if it stays so, see with nvidia-smi that the driver works, and look for Xid lines "
        "in the kernel log",
        pid=pid,
    )
