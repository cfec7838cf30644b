"""The signals that ask gpusnap to stop: SIGINT (Ctrl-C), SIGTERM and SIGHUP.

`gpusnap` lets the last two raise what Python raises for the first, a KeyboardInterrupt: code that undoes
something after Ctrl-C does so for all three. While Podman or a transaction is at work, they have handlers of
their own (gpusnap.engines.podman_work, gpusnap.runtime_shim.base.transaction). The first signal determines
the exit status: 128 plus its number, as in a shell.

Where Python swallows exceptions, no handler may raise, as the signal would be lost: within an object's
`__del__`, within callbacks of weak references, and in the cleanup of a generator that is deleted
(docs.python.org, reference/datamodel, `object.__del__`; cpython, Objects/genobject.c, `_PyGen_Finalize`).
Python's own code for imports is such a callback, and takes locks outside of a `try`, so that a thread that
imports would wait forever (cpython, Lib/importlib/_bootstrap.py, `_get_module_lock`). Such a signal is sent
again a moment later.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from gpusnap.runtime_shim.base.errors import Interrupted

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds within which a second signal belongs to the first. When a terminal is closed, the kernel and the
# shell each send SIGHUP (setsid(2), bash(1)): the second must not interrupt the cleanup after the first.
_SAME = 1.0
_IMPORTS = "<frozen importlib._bootstrap>"
# Where the standard library has callbacks of weak references: these files, and a function of its thread pool.
_CALLBACKS = ("/weakref.py", "/_weakrefset.py")
_SWALLOWING = ("__del__", "weakref_cb")
# Exceptions that are being handled, one within the other, among which that of a deleted generator is sought.
_DEPTH = 10
# Seconds until a signal is sent again that came where it would be lost, and for how long that is done: the
# main thread may wait there for another thread's import.
_AGAIN, _AT_MOST = 0.02, 5.0


class _First:
    """The first signal while `raise_interrupts` handles them: 0 before it comes, None outside of that."""

    number: int | None = None


def note_signal(number: int) -> None:
    """Note a signal."""
    if _First.number == 0:
        _First.number = number


def find_first() -> int:
    """Return the first signal; SIGINT if none was noted."""
    return _First.number or signal.SIGINT


def make_interrupted(*, hint: str = "") -> Interrupted:
    """Return the error for the KeyboardInterrupt of such a signal."""
    number = find_first()
    said = "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}"
    return Interrupted(said, hint=hint)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object], numbers: Sequence[signal.Signals] = STOPPING
) -> Iterator[None]:
    """Handle these signals by `handler` while the block runs, except those that are ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads get no signals
        return
    put_off_since = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal put_off_since
        now = time.monotonic()
        if _would_be_lost(frame):
            put_off_since = put_off_since or now
            if now - put_off_since < _AT_MOST and _send_again(number):
                return
        put_off_since = 0.0
        handler(number, frame)

    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def put_off_signals() -> Iterator[None]:
    """Run the block to its end; a signal that came meanwhile is handled then, as it would have been."""
    came: list[int] = []
    try:
        with handle_signals(lambda number, _: came.append(number)):
            yield
    finally:
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def _would_be_lost(frame: FrameType | None) -> bool:
    """Whether Python would swallow what a handler raises in this frame."""
    if frame is not None and frame.f_code.co_filename == _IMPORTS:
        return True
    while frame is not None:
        if frame.f_code.co_name in _SWALLOWING or frame.f_code.co_filename.endswith(_CALLBACKS):
            return True
        frame = frame.f_back
    error = sys.exc_info()[1]
    for _ in range(_DEPTH):
        if error is None:
            return False
        if isinstance(error, GeneratorExit):
            return True
        error = error.__context__
    return False


def _send_again(number: int) -> bool:
    """Send this process a signal a moment later; return whether that will happen."""
    process = os.getpid()

    def send() -> None:
        time.sleep(_AGAIN)
        os.kill(process, number)

    try:
        _thread.start_new_thread(send, ())
    except RuntimeError:  # no thread can be started
        return False
    return True


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt while the block runs, unless they are ignored (nohup).

    SIGINT does so anyway, but is lost where Python swallows exceptions. Only the main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _First.number = 0
    last = -_SAME

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal last
        note_signal(number)
        now = time.monotonic()
        before, last = last, now
        if now - before >= _SAME:
            raise KeyboardInterrupt

    try:
        with (
            handle_signals(stop, (signal.SIGTERM, signal.SIGHUP)),
            handle_signals(signal.default_int_handler, (signal.SIGINT,)),
        ):
            yield
    finally:
        _First.number = None
