"""Starts threads if this host permits one more, and runs work in threads while others wait.

threading.Thread.start waits without a deadline until the new thread says that it runs (cpython,
Lib/threading.py). If the kernel has no memory for the thread's first steps, it ends without a message, and
the caller would wait forever: seen with ENOMEM injected into one mmap(2).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpusnap.runtime_shim.base.errors import no_thread
from gpusnap.runtime_shim.base.stop_signals import put_off_signals

# Seconds for a thread to start running. On a busy host it takes some milliseconds.
_BEGINNING = 30.0
# Seconds for the calls of `run_meanwhile` to end: a disk or a driver may not answer.
_PATIENCE = 60.0

_start = threading.Thread.start


class _Begun(threading.Event):
    """Signals that a thread runs, or that it does not and never will."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up = False
        self._deciding = threading.Lock()

    def set(self) -> None:
        with self._deciding:
            if not self.given_up:
                super().set()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None and not super().wait(_BEGINNING):
            with self._deciding:
                self.given_up = not self.is_set()
            if self.given_up:
                raise RuntimeError("can't start new thread: it ended before it began")
        return super().wait(timeout)


def bound_thread_starts() -> None:
    """Make every thread of this process, a pool's too, start in time or fail with RuntimeError."""
    threading.Thread.start = _start_in_time  # type: ignore[assignment, method-assign]


def _start_in_time(thread: threading.Thread) -> None:
    # Made by __init__ and waited for by start, in every Python from 3.9 to 3.14.
    if isinstance(getattr(thread, "_started", None), threading.Event) and not thread._started.is_set():  # type: ignore[attr-defined]
        begun = thread._started = _Begun()  # type: ignore[attr-defined]

        def run() -> None:
            del thread.run  # its class's method from here on
            if not begun.given_up:  # otherwise nobody knows of it, nor would end its work
                thread.run()

        thread.run = run  # type: ignore[method-assign]
    _start(thread)


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises GpusnapError if the kernel permits none."""
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(error) from error


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread, whatever signals come: they are handled then.

    Up to Python 3.12, an exception within Thread.join() marks the running thread as ended (bpo-45274).
    """
    with put_off_signals():
        thread.join()


def run_apart(work: Callable[[], object], *, name: str) -> None:
    """Run `work` in a thread of its own, which it may change, and wait for it; raise what it raises.

    `name`: of the thread. Raises GpusnapError if the kernel permits none.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=name)
    start(thread)
    join(thread)
    if failed:
        raise failed[0]


@contextmanager
def run_meanwhile(*calls: Callable[[], object], name: str) -> Iterator[None]:
    """Run each of these in a thread of its own while the block runs; then wait for them, but not forever.

    It only saves time, and nothing depends on it: a caller that needs the result does the work too, and gets
    the error. `name`: of the threads.
    """
    begun: list[threading.Thread] = []
    for call in calls:
        thread = threading.Thread(target=_try, args=(call,), name=name, daemon=True)
        with suppress(RuntimeError):  # no thread can be started
            thread.start()
            begun.append(thread)
    try:
        yield
    finally:
        end = time.monotonic() + _PATIENCE
        for thread in begun:
            thread.join(max(0.0, end - time.monotonic()))


def _try(call: Callable[[], object]) -> None:
    with suppress(Exception):
        call()
