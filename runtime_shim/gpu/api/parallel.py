"""Runs the same step on several processes at once.

The processes of one container share its GPU work (collectives, pipes between ranks): if they were locked one
after another, the first would stop while the others still wait for it. And the driver copies one process at a
time per call, so two processes of 8 GiB need 2.9 s at once and 5.3 s in turn.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.errors import DriverFailed, GpuError

T = TypeVar("T")

# The signals that ask gpusnap to stop.
_STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
# Seconds between two checks for one of them during a wait.
_LOOK = 0.05


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The result for each process: every PID is in exactly one of the two, in the order of their ends."""

    results: dict[int, T]
    errors: dict[int, GpusnapError]

    def raise_first(self) -> None:
        """Raise the error that came first, if there is one, with the number of the others in its message."""
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

    All are started before any is waited for; `limit` allows at most that many at a time. An operation's
    `GpusnapError` goes into the outcome; any other exception (a bug) is raised once all have ended.

    A call of the driver cannot be cancelled, and a process in the middle of one cannot be undone. So
    KeyboardInterrupt, or an exception of a handler of SIGINT, SIGTERM or SIGHUP, is held back until all have
    ended, and then raised; the outcome is lost with it, and the driver must be asked for the states.
    Meanwhile this thread calls `look` every 50 ms, also after a signal.
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

    They wait at a gate until all of them have started. So if an exception interrupts the start, no work has
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
        # Used by many threads: next() of a tuple's iterator is one step under the GIL.
        self._left = iter(self.pids)
        self._workers: list[_Worker] = []
        self._gate = threading.Event()
        self._look = look
        self._go = False

    def start(self, number: int) -> None:
        """Start that many threads, or as many as the kernel permits: one is enough, only slower."""
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

        In short waits: a stop signal that another thread took is handled in this one, and only when it runs
        Python (docs.python.org/3/library/signal.html). A blocked signal stays pending.
        """
        for worker in self._workers:
            while not worker.ended:
                worker.wait(_LOOK)
                if self._look is not None:
                    self._look()

    def await_end(self) -> None:
        """After an exception: let the threads end, or if they have begun, wait whatever else is raised."""
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
    """A thread whose end can be awaited again after an exception interrupted a wait.

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
        """Wait for its end, for `timeout` seconds."""
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

    The threads inherit the mask, so a signal never interrupts a system call of the driver, nor the start of
    threads. Pending signals are delivered at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
