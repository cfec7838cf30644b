"""Threads that do one thing together: the first error ends all of them.

Python threads serve here because every long step of theirs (a copy, a hash, zstd, a system call) lets the
other ones run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class _Stopped(Exception):
    """Another worker failed: leave, and say nothing."""


class SharedIterator(Iterator[T]):
    """An iterator that several threads may take from."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


class Crew:
    """A number of threads. `check` is theirs to call between steps; `join` raises the first error.

    ending: called by `stop`, to end what they wait for, such as an answer from the network.
    """

    def __init__(self, ending: Callable[[], object] = lambda: None) -> None:
        self._ending = ending
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        # Counted by the threads themselves: where a signal's exception ends a Thread.join(), Python 3.11
        # takes that thread for ended (bpo-45274), and the next join() returns while it is at work.
        self._begun, self._ended = 0, 0

    def start(self, count: int, work: Callable[[], None]) -> None:
        """Run `work` in `count` more threads, or in as many as the system gives.

        Raises RuntimeError where it gives none; the others have been ended then.
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
        """Leave this worker where another one failed, or the caller was interrupted."""
        if self._error is not None:
            raise _Stopped

    def failed(self) -> BaseException | None:
        """What the first worker that failed raised, if one has."""
        return None if isinstance(self._error, _Stopped) else self._error

    @property
    def is_over(self) -> bool:
        """Whether a worker failed, or they were told to end."""
        return self._error is not None

    def stop(self) -> None:
        """End all workers at their next check, and wait for them."""
        self._fail(_Stopped())
        self._ending()
        # One that has not begun by now never does.
        self._wait(lambda: self._ended == self._begun)

    def join(self) -> None:
        """Wait for all workers; raise the first error. A signal's exception ends them first."""
        try:
            self._wait(lambda: self._ended >= len(self._threads))
        except BaseException:
            self.stop()
            raise
        error = self.failed()
        if error is not None:
            raise error

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._lock:
            while not done():
                self._changed.wait()
        for thread in self._threads:
            thread.join()

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
    """Call `do` with each item, in that many threads, or in this one where the system gives none.

    ending: as for Crew. Raises the first error; the rest is not begun then.
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
