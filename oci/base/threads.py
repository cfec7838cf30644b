"""Threads that do one job together: the first error ends all of them.

Python threads are enough, because every long step (a copy, a hash, zstd, a system call) lets the others run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from gpusnap.oci.base.errors import Stalled

T = TypeVar("T")

# With a `patience`: seconds between two looks at the time, and for which `stop` waits for threads.
_LOOK, _ENDING = 0.2, 5.0


class _Stopped(Exception):
    """Another worker failed: end without an error."""


class SharedIterator(Iterator[T]):
    """An iterator that several threads can share."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


class Crew:
    """A number of threads. They call `check` between steps; `join` raises the first error.

    ending: called by `stop`, to end what they wait for, such as an answer from the network. patience: seconds
    that `join` waits without a call of `note_progress`. Threads that are still in a system call then, or some
    seconds after a `stop`, are left behind. They end at their next check, or with this process.
    """

    def __init__(self, ending: Callable[[], object] = lambda: None, *, patience: float | None = None) -> None:
        self._ending = ending
        self._patience, self._left_behind = patience, False
        self._moved = time.monotonic()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        # The threads count themselves: if a signal's exception interrupts Thread.join(), Python 3.11
        # considers that thread ended (bpo-45274), and the next join() returns while it still works.
        self._begun, self._ended = 0, 0

    def start(self, count: int, work: Callable[[], None]) -> None:
        """Run `work` in `count` more threads, or in as many as the system permits.

        Raises RuntimeError if it permits none; the others have ended then.
        """
        try:
            for begun in range(count):
                thread = threading.Thread(target=self._run, args=(work,), name="gpusnap-oci", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not begun:
                        raise
                    return
                self._threads.append(thread)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """End this worker if another one failed, or the caller was interrupted."""
        if self._error is not None:
            raise _Stopped

    def failed(self) -> BaseException | None:
        """The error of the first worker that failed, if any."""
        return None if isinstance(self._error, _Stopped) else self._error

    @property
    def is_over(self) -> bool:
        """Whether a worker failed, or they were told to end."""
        return self._error is not None

    @property
    def is_left_behind(self) -> bool:
        """Whether workers did not end in time when they were told to, and may still be at work."""
        return self._left_behind

    def stop(self) -> None:
        """End all workers at their next check, and wait for them."""
        self._fail(_Stopped())
        self._ending()
        if self._left_behind:
            return
        last = None if self._patience is None else time.monotonic() + _ENDING
        # A thread that has not begun by now never will.
        self._left_behind = not self._wait(lambda: self._ended == self._begun, lambda: last)

    def note_progress(self, *, more: float = 0.0) -> None:
        """Say that something was done: the patience of `join` begins anew, with so many seconds more."""
        self._moved = time.monotonic() + more

    def join(self, interrupt: Callable[[], object] = lambda: None) -> None:
        """Wait for all workers; raise the first error. A signal's exception ends them first.

        `interrupt`: with a patience, called from time to time; what it raises ends them. Raises Stalled.
        """

        def last() -> float | None:
            interrupt()
            return None if self._patience is None else self._moved + self._patience

        try:
            if not self._wait(lambda: self._ended >= len(self._threads), last):
                raise Stalled(f"nothing could be read for {self._patience:g} s")
        except BaseException:
            self.stop()
            raise
        error = self.failed()
        if error is not None:
            raise error

    def _wait(self, done: Callable[[], bool], last: Callable[[], float | None]) -> bool:
        """Wait for threads; return False if that takes longer than until `last`, by time.monotonic()."""
        late: float | None = None
        with self._lock:
            while not done():
                deadline = last()
                if deadline is not None and time.monotonic() > deadline:
                    # Twice: this process may have been stopped, and then the threads have, too.
                    if late == deadline:
                        return False
                    late = deadline
                self._changed.wait(None if deadline is None else _LOOK)
        for thread in self._threads:
            thread.join()
        return True

    def _run(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._begun += 1
            wanted = self._error is None
        try:
            if wanted:
                work()
        except _Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            with self._lock:
                self._ended += 1
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error


def run_for_each(
    items: Iterable[T],
    do: Callable[[T], None],
    *,
    threads: int,
    ending: Callable[[], object] = lambda: None,
) -> None:
    """Call `do` with each item, in that many threads, or in this one if the system permits none.

    ending: as for Crew. Raises the first error; further items are not started then.
    """
    crew, shared = Crew(ending), SharedIterator(items)

    def work() -> None:
        for item in shared:
            crew.check()
            do(item)

    try:
        crew.start(threads, work)
    except RuntimeError:
        for item in shared:
            do(item)
        return
    crew.join()
