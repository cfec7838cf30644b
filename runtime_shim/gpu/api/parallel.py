"""The same step on several processes at once.

The processes of one container share its GPU work (collectives, pipes between ranks): locked one after
another, the first would stop while the others still wait for it. And the driver takes one process' copies at
a time per call, so two processes of 8 GiB need 2.9 s at once and 5.3 s in turn.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.errors import DriverFailed, GpuError

T = TypeVar("T")

# The signals that ask us to stop.
_STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
# Seconds between two looks for one of them while we wait.
_LOOK = 0.05


# No slots: a generic dataclass that is frozen and slotted cannot be made as Outcome[int](…), up to Python
# 3.13.
@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of each process: every PID is in exactly one of the two, in the order of their ends."""

    results: dict[int, T]
    errors: dict[int, GpusnapError]

    def raise_first(self) -> None:
        """Raise the error that came first, if there is one, with the number of the others in its sentence."""
        errors = list(self.errors.values())
        if not errors:
            return
        first, more = errors[0], len(errors) - 1
        if not more or not isinstance(first, GpuError):
            raise first
        message = f"{first}, and {more} more process{'es' if more > 1 else ''} failed"
        raise type(first)(
            message, hint=first.hint, code=first.code, code_name=first.code_name, pid=first.pid
        ) from first


def run_at_once(
    operation: Callable[[int], T],
    pids: Iterable[int],
    *,
    limit: int | None = None,
    look: Callable[[], object] | None = None,
) -> Outcome[T]:
    """Run `operation` on each process, each in a thread of its own, and wait for all of them.

    No process is waited for before the last one was begun; `limit` allows at most so many at a time. An
    operation's `GpusnapError` goes into the outcome, any other exception (a mistake of ours) is raised once
    all have ended.

    A call into the driver cannot be called off, and a process that is left in the middle of one cannot be
    undone. So KeyboardInterrupt, or what a handler of SIGINT, SIGTERM or SIGHUP raises, is held back until
    all have ended, and then raised; the outcome is lost with it, and the driver has to be asked for the
    states. `look` is called every 50 ms in this thread meanwhile, before and after one came.
    """
    crew = _Crew(operation, pids, look)
    with _hold_stops_back():
        try:
            crew.start(min(len(crew.pids), limit or len(crew.pids)))
            crew.wait()
        except BaseException:
            crew.await_end()
            raise
    if crew.mistakes:
        raise crew.mistakes[0]
    return Outcome(crew.results, crew.errors)


class _Crew(Generic[T]):
    """Threads that take one PID after another until none is left.

    They wait at a gate until all of them are there: an exception that breaks into the starting finds nothing
    begun.
    """

    def __init__(
        self, operation: Callable[[int], T], pids: Iterable[int], look: Callable[[], object] | None
    ) -> None:
        self.pids = tuple(dict.fromkeys(pids))
        self.results: dict[int, T] = {}
        self.errors: dict[int, GpusnapError] = {}
        self.mistakes: list[BaseException] = []
        self._operation = operation
        # Taken from by many threads: next() of a tuple's iterator is one step under the GIL.
        self._left = iter(self.pids)
        self._workers: list[_Worker] = []
        self._gate = threading.Event()
        self._look = look
        self._go = False

    def start(self, number: int) -> None:
        """Start so many threads, or as many as the kernel gives: with one the work gets done, only later."""
        for _ in range(number):
            worker = _Worker(self._work)
            try:
                worker.start()
            except RuntimeError as error:
                if not self._workers:
                    self._fail_rest(str(error))
                break
            self._workers.append(worker)
        self._go = True
        self._gate.set()

    def wait(self) -> None:
        """Wait until every thread has ended.

        A look at a time: a stop signal that another thread of ours took is handled in this one, and only
        when it runs Python (docs.python.org/3/library/signal.html). One that is blocked is pending.
        """
        for worker in self._workers:
            while not worker.ended:
                worker.wait(_LOOK)
                if self._look is not None:
                    self._look()

    def await_end(self) -> None:
        """After an exception: send the threads home, or if they have begun, wait whatever else is raised."""
        self._gate.set()
        while self._go and not all(worker.ended for worker in self._workers):
            with suppress(BaseException):
                self.wait()

    def _work(self) -> None:
        self._gate.wait()
        if not self._go:
            return
        for pid in self._left:
            try:
                self.results[pid] = self._operation(pid)
            except GpusnapError as error:
                self.errors[pid] = error
            except BaseException as error:
                self.mistakes.append(error)

    def _fail_rest(self, why: str) -> None:
        for pid in self.pids:
            self.errors[pid] = DriverFailed(
                f"no thread could be started for process {pid}: {why}",
                hint="raise the limit on processes and threads for gpusnap (ulimit -u, pids.max)",
                pid=pid,
                code="GPS-003",
            )


class _Worker:
    """A thread whose end can be awaited again after an exception broke into the waiting.

    Thread.join() cannot: up to Python 3.12 an exception inside it marks the running thread as ended
    (_wait_for_tstate_lock). The flag is set before the lock is opened, and is what counts.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.ended = False
        self._work = work
        self._door = threading.Lock()
        self._door.acquire()
        self._thread = threading.Thread(target=self._run, name="gpusnap-gpu")

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout: float) -> None:
        """Wait for its end, for so many seconds."""
        if self._door.acquire(timeout=timeout):
            self._door.release()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self.ended = True
            self._door.release()


@contextmanager
def _hold_stops_back() -> Iterator[None]:
    """Block the stop signals in this thread and those that it starts.

    The threads inherit the mask, so a signal never breaks into a system call of the driver; and none breaks
    into the starting of threads. What is pending is delivered at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
