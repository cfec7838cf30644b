"""Threads of a stopped process that run while all others are stopped.

The caller is in a call of the driver meanwhile, so a thread of gpusnap is their tracer (a tracee belongs to
the thread that seized it). It polls: a stop of one of its threads is answered within a millisecond or two,
and nothing in the container can make it wait.

Others act on the same process at the same time. A SIGSTOP from the container (cpulimit sends them all day)
reaches a traced thread as a stop of its own: the thread continues, the process stays stopped. A SIGCONT lets
every thread of the process run, and some of them need memory that the driver has taken away: the process is
stopped again at once. If a thread gets a fault while `run_briefly` lets it run, it stops at the instruction,
and runs it again when the process has its memory back. SIGKILL ends the tracing.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.stop_signals import put_off_signals
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace.positions import Position, position
from gpusnap.runtime_shim.process.ptrace.tracee import FAULTS, Tracee, state

# Seconds between two polls: short after something has happened.
_SOON, _LATEST = 0.0001, 0.002
# Polls without a pause, after which a watched thread is not about to stop again.
_SPINS = 30
# Seconds between two checks that the process is still stopped.
_GUARD = 0.005
# Seconds for a thread to stop for an examination.
_GLANCE = 0.02
# Seconds for the tracer's thread to begin and to end: it waits for each of its threads.
_ENDING = 3 * ptrace.PATIENCE


class CallWatch(Protocol):
    """An object that watches the system calls of the first thread."""

    def begin(self, tracee: Tracee) -> None:
        """The thread is held, and about to run. Called in the tracer's thread, as all of these."""

    def see_call(self) -> None:
        """It is at the entry or the exit of a system call. An exception ends the watching."""

    def note_failure(self, error: Exception) -> None:
        """The watching has ended early; the thread continues without stops."""


@dataclass(slots=True)
class _Errand:
    """A request to run threads for a moment, or to examine a traced one (0 seconds)."""

    tids: tuple[int, ...]
    seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    found: Position | None = None


class Tracer:
    """Lets some threads of a process run, and no others, from `start` to `stop_threads`.

    A context manager calls both. `guard`: the process is stopped, and is stopped again if somebody sends it a
    SIGCONT; otherwise others may stop and continue it, and only these threads always run. `exit_kill`: the
    process is killed if gpusnap ends meanwhile.
    """

    def __init__(
        self,
        pid: int,
        tids: Iterable[int],
        *,
        watch: CallWatch | None = None,
        guard: bool = True,
        exit_kill: bool = False,
    ) -> None:
        self.pid, self.tids = pid, tuple(tids)
        self.traced = {*self.tids}
        """The threads of these that have not ended."""
        self.stops = 0
        """How often one of them has stopped: a sign of progress."""
        self.stopped_again = 0
        """How often somebody else had continued the process."""
        self._watch, self._guard, self._exit_kill = watch, guard, exit_kill
        self._tracees: dict[int, Tracee] = {}
        self._errands: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        self._wake, self._started = threading.Event(), threading.Event()
        self._over = False
        self._process = -1
        """A pidfd if it is guarded: another process may get its PID once it has ended."""
        self._refusal: OSError | GpusnapError | None = None
        self._failure: OSError | None = None
        self.lost = ""
        """Why it no longer lets any of them run, before its end."""
        self._thread = threading.Thread(target=self._run, name=f"gpusnap-tracer-{pid}", daemon=True)

    def __enter__(self) -> Tracer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_threads()

    def start(self) -> None:
        """Let the threads run. Raises OSError if one cannot be traced; none is then.

        A signal for gpusnap waits meanwhile, as in `stop_threads`: nobody would end the tracer otherwise, and
        its threads would not get their masks back.
        """
        try:
            with put_off_signals():
                self._start()
        except TimeoutError:  # nor would it end in time; it ends as soon as it can
            raise
        except BaseException:
            with suppress(OSError):
                self.stop_threads()
            raise

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error
        if not self._started.wait(_ENDING):
            self._over = True
            raise TimeoutError(errno.ETIMEDOUT, f"process {self.pid} could not be traced in time")
        if self._refusal is not None:
            raise self._refusal

    def stop_threads(self) -> None:
        """Stop the threads again, and return when they are stopped. Raises OSError if one does not stop."""
        with put_off_signals():
            self._over = True
            self._wake.set()
            if self._thread.is_alive():
                self._thread.join(_ENDING)
            if self._thread.is_alive():
                raise TimeoutError(errno.ETIMEDOUT, f"a thread of process {self.pid} does not stop")
            if self._failure is not None:
                raise self._failure

    def run_briefly(self, tids: Iterable[int], seconds: float) -> None:
        """Let other threads of the process run for a time, and return when they are stopped again.

        A thread that has ended, or cannot be traced, is omitted.
        """
        self._have_done(_Errand(tuple(tids), seconds))

    def glance(self, tid: int) -> Position | None:
        """Return where a running traced thread is: it stops for that. None if it does not stop at once."""
        errand = _Errand((tid,), 0.0)
        self._have_done(errand)
        return errand.found

    def _have_done(self, errand: _Errand) -> None:
        self._errands.put(errand)
        self._wake.set()
        deadline = time.monotonic() + errand.seconds + _ENDING
        while not errand.done.wait(0.05):
            if not self._thread.is_alive() or time.monotonic() > deadline:
                return

    def _run(self) -> None:
        try:
            self._take()
        except (OSError, GpusnapError) as error:
            self._refusal = error
            with suppress(OSError):
                self._release()
            self._close()
            self._started.set()
            return
        self._started.set()
        try:
            self._loop()
        except (OSError, GpusnapError) as error:
            self.lost = str(error)
        finally:
            try:
                self._release()
            except OSError as error:
                self._failure = error
            self._close()

    def _close(self) -> None:
        descriptor, self._process = self._process, -1
        if descriptor >= 0:
            with suppress(OSError):  # it is closed in any case (close(2))
                os.close(descriptor)

    def _take(self) -> None:
        for tid in self.tids:
            self._tracees[tid] = Tracee(self.pid, tid)
            if self._exit_kill:
                self._tracees[tid].set_options(ptrace.EXITKILL)
        if self._guard:  # now: while a thread is traced, no other process gets the PID
            self._process = os.pidfd_open(self.pid)
        if self._watch is not None:
            try:
                self._watch.begin(self._tracees[self.tids[0]])
            except (OSError, GpusnapError) as error:
                self._drop_watch(error)
        for tid, tracee in self._tracees.items():
            with suppress(ProcessLookupError):
                tracee.go(to_call=self._see_call(tid))

    def _loop(self) -> None:
        pause, guarded = _SOON, 0.0
        while not self._over:
            busy = self._answer_stops()
            if busy and self._watch is not None:
                self._answer_calls()
            with suppress(queue.Empty):
                self._run_errand(self._errands.get_nowait())
                busy = True
            lives = self._tracees or not self.tids
            if self._guard and lives and time.monotonic() - guarded > _GUARD:
                self._stop_again()
                guarded = time.monotonic()
            pause = _SOON if busy else min(pause * 1.5, _LATEST)
            if self._wake.wait(pause):
                self._wake.clear()

    def _answer_stops(self) -> bool:
        """Continue every thread that has stopped; return whether there was one."""
        busy = False
        for tid in tuple(self._tracees):
            try:
                stop = ptrace.poll_stop(tid)
            except ProcessLookupError:
                self._forget(tid)
                continue
            if stop is not None:
                busy = True
                self.stops += 1
                self._answer(tid, stop)
        return busy

    def _answer_calls(self) -> None:
        """Continue the watched thread as fast as it makes system calls; it stops twice at each."""
        end, quiet = time.monotonic() + _LATEST, 0
        while quiet < _SPINS and time.monotonic() < end:
            quiet = 0 if self._answer_stops() else quiet + 1

    def _answer(self, tid: int, stop: ptrace.Stop) -> None:
        if stop.is_at_call and self._watch is not None:
            try:
                self._watch.see_call()
            except ProcessLookupError:
                return  # the next poll reports it
            except Exception as error:  # of any kind: the thread's own work continues
                self._drop_watch(error)
        with suppress(ProcessLookupError):
            self._tracees[tid].answer(stop, to_call=self._see_call(tid))

    def _see_call(self, tid: int) -> bool:
        return self._watch is not None and tid == self.tids[0]

    def _drop_watch(self, error: Exception) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.note_failure(error)

    def _stop_again(self) -> None:
        """Stop the process if somebody has continued it."""
        if any(state(self.pid, tid) in "RSD" for tid in self._list_untraced()):
            self.stopped_again += 1
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGSTOP)

    def _list_untraced(self) -> Iterable[int]:
        """Return a thread that is not traced: the main one, if possible. None if all are traced."""
        # If the main thread has ended and others live, its state says nothing.
        if self.pid not in self._tracees and state(self.pid, self.pid) not in "ZX":
            return (self.pid,)
        with suppress(OSError):
            return [tid for tid in map(int, os.listdir(f"/proc/{self.pid}/task")) if tid not in self._tracees]
        return ()

    def _run_errand(self, errand: _Errand) -> None:
        """Seize more threads, let them run, and stop them where they are."""
        lent: dict[int, Tracee] = {}
        try:
            if not errand.seconds:
                errand.found = self._glance_at(errand.tids[0])
                return
            for tid in errand.tids:
                if tid not in self._tracees:
                    with suppress(OSError):  # it has ended, or another tracer has it
                        lent[tid] = Tracee(self.pid, tid)
            self._lend(lent, errand.seconds)
        finally:
            for tracee in lent.values():
                with suppress(OSError):
                    tracee.let_go()
            errand.done.set()

    def _glance_at(self, tid: int) -> Position | None:
        if tid not in self._tracees:
            return None
        with suppress(ProcessLookupError):
            ptrace.interrupt(tid)
        try:
            stop = ptrace.wait(tid, within=_GLANCE)
        except ProcessLookupError:
            self._forget(tid)
            return None
        except TimeoutError:  # if it stops later, that stop is answered then
            return None
        found = position(self.pid, tid)
        self._answer(tid, stop)
        return found

    def _forget(self, tid: int) -> None:
        """It has ended and was reaped just now, so nobody can wait for it again."""
        self._tracees.pop(tid).forget()
        self.traced.discard(tid)

    def _lend(self, lent: Mapping[int, Tracee], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        runs = dict(lent)
        for tracee in lent.values():
            with suppress(OSError):
                tracee.go()
        while runs and time.monotonic() < deadline and not self._over:
            self._answer_stops()
            for tid, tracee in tuple(runs.items()):
                try:
                    if (stop := ptrace.poll_stop(tid)) is not None and self._continue_unless_faulted(
                        tracee, stop
                    ):
                        del runs[tid]  # it stops at the instruction, and runs it again when it continues
                except OSError:
                    del runs[tid]
            self._wake.wait(_SOON)
        for tracee in runs.values():
            with suppress(OSError):
                tracee.to_rest()
                for fault in FAULTS:  # a fault that came just now
                    if tracee.to_signal(fault):
                        tracee.to_rest()

    def _continue_unless_faulted(self, tracee: Tracee, stop: ptrace.Stop) -> bool:
        """Continue a thread of `run_briefly` after a stop, unless it stopped for a fault."""
        if stop.delivers in FAULTS:
            return True
        tracee.answer(stop)
        return False

    def _release(self) -> None:
        """Bring each thread to rest and stop tracing it. Raises the last error."""
        failure: OSError | None = None
        for tid in self.tids:
            if (tracee := self._tracees.pop(tid, None)) is None:
                continue
            try:
                try:
                    tracee.to_rest()
                finally:
                    tracee.let_go()
            except ProcessLookupError:
                self.traced.discard(tid)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
