"""Holds CRIU at the end of its dump while the GPU memory is still being written.

CRIU ends the processes when it has dumped them. Nothing may be missing by then: a full disk must not cost the
container. So CRIU waits before that (gate.py, post-dump), and the dump and the writing of the GPU memory take
as long as the longer of the two:

    this thread      writes the GPU memory ─────────────────────────→ allows the end ─┐
    a thread         the real runtime ─→ CRIU dumps ─→ waits ─────────────────────────┴→ the processes end
    another                                            └→ writes CRIU's images into chunks

If the writing fails, or is interrupted, CRIU is told so: it lets the processes go on, and its dump fails. The
same happens if gpusnap is killed. If the dump fails first, the writing ends at its next `check`.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.gate import POST_DUMP, Busy, Gate
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch

T = TypeVar("T")

# Seconds between two reports to the program that waits: it gives up after two minutes without one.
_REPORT = 1.0


class DumpEnded(Exception):
    """The dump has ended, so nothing more has to be written."""


class HeldDump:
    """One dump at a time that waits for its end to be allowed. Close it."""

    def __init__(self, launcher: str, *, criu: str = "") -> None:
        """`launcher`: the program that CRIU runs. `criu`: as for criu_version.

        Raises OSError and GpusnapError.
        """
        self._launcher = launcher
        self._folder = tempfile.mkdtemp(prefix=scratch_files.prefix("gate"), dir=scratch())
        self._lock = threading.Lock()
        self._running: Future[Any] = Future()
        self._ending: Future[object] | None = None
        self._at_end: Callable[[], object] = lambda: None
        self._decided, self._allowed = threading.Event(), False
        self._asked = self._told = self._waits = False
        self._written = threading.Event()
        """Set when CRIU has written its images and `at_end` is done, or when the dump has ended."""
        try:
            path = os.path.join(self._folder, "gate")
            self._gate = Gate(path, launcher, {POST_DUMP: self._hold}, criu=criu)
        except BaseException:
            self._end()
            raise
        try:
            self._works: Future[bool] = _start(self._gate.works)
        except BaseException:
            self._gate.close()
            self._end()
            raise

    @property
    def works(self) -> bool:
        """Whether this host's CRIU would ask before it ends the processes."""
        return self._works.result()

    @property
    def script(self) -> str:
        """The program for CRIU's configuration."""
        return self._launcher

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables for CRIU's environment."""
        return self._gate.environment

    @property
    def error(self) -> GpusnapError | None:
        """The reason if CRIU was not allowed to end the processes."""
        return self._gate.error

    @property
    def is_refused(self) -> bool:
        """Whether CRIU has asked and was not told yes: if the processes have ended, it did not end them."""
        return self._asked and not self._told

    @property
    def waits(self) -> bool:
        """Whether CRIU waits for the decision, however long that takes."""
        return self._waits and not self._decided.is_set()

    def run(
        self, dump: Callable[[], T], work: Callable[[], object], at_end: Callable[[], object]
    ) -> tuple[T, BaseException | None]:
        """Run `dump` in a thread, and `work` in this one; return what `dump` returns, and what `work` raises.

        CRIU may end the processes when `work` has returned. `at_end` is called in a thread when CRIU has
        written all images. Both call `check` from time to time. If `work` raises DumpEnded, the result of the
        dump says why.
        """
        self._gate.error = None
        self._at_end, self._allowed = at_end, False
        self._asked = self._told = False
        self._decided, self._written = threading.Event(), threading.Event()
        with self._lock:
            running = self._running = _start(dump)
        running.add_done_callback(lambda _: self._written.set())
        error: BaseException | None = None
        try:
            work()
            self._allowed = not running.done()  # a CRIU that still waits then is that of a failed dump
        except DumpEnded:
            pass
        except BaseException as raised:  # also a signal's: CRIU waits for the decision
            error = raised
        self._decided.set()
        try:
            return running.result(), error
        finally:
            self._allowed = False  # for a CRIU that outlives its runtime, and asks only now
            with self._lock:
                wait([self._ending] if self._ending is not None else [])
                self._ending = None

    def check(self) -> None:
        """Raise DumpEnded if the dump has ended, or its end was refused; in any thread."""
        if self._running.done() or (self._decided.is_set() and not self._allowed):
            raise DumpEnded

    def wait_until_written(self) -> None:
        """Wait until CRIU has written its images, and `at_end` is done. Raises DumpEnded."""
        self._written.wait()
        self.check()

    def _hold(self, _: int, busy: Busy) -> bool:
        """Wait for the decision; return whether CRIU may end the processes."""
        with self._lock:
            if self._running.done():
                return False
            self._asked = True
            ending = self._ending = _start(self._at_end)
        self._waits = True
        try:
            while not wait([ending], _REPORT).done:
                if self._decided.is_set() and not self._allowed:
                    return False
                busy()
            with suppress(DumpEnded):
                ending.result()
            self._written.set()
            while not self._decided.wait(_REPORT):
                busy()
        except OSError:
            return False  # nobody waits any more: the dump has failed
        finally:
            self._waits = False
        self._told = self._allowed and not self._running.done()
        return self._told

    def close(self) -> None:
        """Stop listening. A CRIU that still waits lets the processes go on."""
        self._decided.set()
        wait([self._works])
        self._gate.close()
        self._end()

    def _end(self) -> None:
        scratch_files.remove_folder(self._folder)


def _start(work: Callable[[], T]) -> Future[T]:
    """Run it in a thread of its own. Raises GpusnapError if there is none: then it is not run at all.

    A pool would have queued it by then, and run it when its next thread is free.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            done = work()
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(done)

    threads.start(threading.Thread(target=run, name="gpusnap-dump", daemon=True))
    return found


def hold(criu: str = "") -> HeldDump | None:
    """Return one for this host; None if CRIU cannot be made to wait, and the memory is written before.

    `criu`: the program, if the runtime's caller has named one.
    """
    launcher = locate.launcher()
    if not launcher:
        return None
    with suppress(OSError, GpusnapError, RuntimeError):
        return HeldDump(launcher, criu=criu)
    return None
