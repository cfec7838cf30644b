"""Asks the kernel about a process, with a deadline, because it may never answer.

A process can make the kernel wait for somebody else: for the server of a file system in user space (FUSE)
whose file it has open or mapped, and so also for its own mm->mmap_lock, which /proc/PID/cmdline and environ
need. Any user can have such a file system. The wait ends only when the server answers, or by SIGKILL. So the
question is asked in a thread that can be left behind; it ends with this process.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.base.errors import GpusnapError

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds. The kernel answers within microseconds; a busy host's disk, within a few seconds."""


def wait_for_end(descriptor: int, seconds: float) -> bool:
    """Wait at most `seconds` until the process of a pidfd has ended, all its threads; return whether it has.

    Such a descriptor is readable from then on (pidfd_open(2)).
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Answer(Generic[T]):
    """The result of a question: its value, or its exception."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._value: list[T] = []
        self.error: BaseException | None = None
        try:
            self._value.append(question())
        except BaseException as error:
            self.error = error

    def value(self) -> T:
        """Raises what the question raised."""
        if self.error is not None:
            raise self.error
        return self._value[0]


class _Thread:
    """A thread that answers one question after another, until one is not answered in time."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer[Any]] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="gpusnap-question", daemon=True)
        threads.start(self.thread)

    def ask(self, question: Callable[[], T], within: float) -> Answer[T]:
        """Raises Empty after `within` seconds."""
        self._questions.put(question)
        return self._answers.get(timeout=within)

    def end(self) -> None:
        """Let it end after the current question has been answered."""
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            self._answers.put(Answer(question))


_idle: deque[_Thread] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads


def ask(question: Callable[[], T], what: str, *, within: float = PATIENCE, always: bool = False) -> T:
    """Return the result of the question, asked in another thread of this process.

    Raises what it raises; TimeoutError, whose filename is `what`, after `within` seconds; GpusnapError if no
    thread can be started. `always`: then ask in this thread, without a deadline.
    """
    try:
        thread = _idle.pop()
    except IndexError:
        try:
            thread = _Thread()
        except GpusnapError:
            if not always:
                raise
            return question()
    try:
        answer = thread.ask(question, within)
    except Empty:
        thread.end()
        raise TimeoutError(errno.ETIMEDOUT, f"the kernel did not respond within {within:g} s", what) from None
    except BaseException:  # from a signal
        thread.end()
        raise
    _idle.append(thread)
    return answer.value()


def read_lines(path: str) -> list[str]:
    """Return the lines of a file of /proc. Raises OSError if it is gone, and as `ask`."""

    def content() -> bytes:
        with open(path, "rb") as file:
            return file.read()

    # Not splitlines: a name may contain other line separators, but no newline.
    return [line for line in ask(content, path).decode("utf-8", "surrogateescape").split("\n") if line]
