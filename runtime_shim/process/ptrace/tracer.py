"""Threads of a stopped process that run while all others stand.

The caller is inside a call of the driver's meanwhile, so a thread of ours is their tracer (a tracee belongs
to the thread that seized it). It polls: whatever stops one of its threads is answered within a millisecond or
two, and nothing that happens in the container can make it wait.

Others act on the same process at the same time. A SIGSTOP from the container (cpulimit sends them all day)
reaches a traced thread as a stop of its own: the thread goes on, the process stays stopped. A SIGCONT lets
every thread of the process run, and some of them need memory that the driver has taken away: the process is
stopped again at once. A thread that gets a fault in a moment that it was lent (`run_briefly`) stands at the
instruction, which it runs again when the process has its memory back. SIGKILL ends the tracing.
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
from dataclasses import field
from typing import Protocol

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace.positions import Position, position
from gpusnap.runtime_shim.process.ptrace.tracee import FAULTS, Tracee, state

# Seconds between two looks: short after something has happened.
_SOON, _LATEST = 0.0001, 0.002
# Looks without a pause after which a watched thread is not about to stop again.
_SPINS = 30
# Seconds between two looks whether the process still stands.
_GUARD = 0.005
# Seconds that a thread may take to stop to be looked at.
_GLANCE = 0.02
# Seconds that the tracer's thread may take to begin and to end: it waits for each of its threads.
_ENDING = 3 * ptrace.PATIENCE


class CallWatch(Protocol):
    """Who looks at the system calls of the first of the threads."""

    def begin(self, tracee: Tracee) -> None:
        """The thread is held, and about to run. Called in the tracer's thread, as all of these."""

    def see_call(self) -> None:
        """It stands at the entry or the exit of a system call. What this raises ends the watching."""

    def note_failure(self, error: Exception) -> None:
        """The watching has ended early; the thread runs on without stops."""


@dataclass
class _Errand:
    """Threads that are to run for a moment; or one of ours that is to be looked at (0 seconds)."""

    tids: tuple[int, ...]
    seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    found: Position | None = None


class Tracer:
    """Lets some threads of a process run, and no other, from `start` to `stop_threads`.

    A context manager does both. `guard`: the process stands, and is stopped again where somebody sends it a
    SIGCONT; else whoever stops it is let have his way, and only these threads run on. `exit_kill`: the
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
        """Of these, the ones that have not ended."""
        self.stops = 0
        """How often one of them has stopped: a sign that they get on."""
        self.stopped_again = 0
        """How often somebody else had let the process go on."""
        self._watch, self._guard, self._exit_kill = watch, guard, exit_kill
        self._tracees: dict[int, Tracee] = {}
        self._errands: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        self._wake, self._started = threading.Event(), threading.Event()
        self._over = False
        self._process = -1
        """A pidfd where it is guarded: another process may have its PID once it has ended."""
        self._refusal: OSError | GpusnapError | None = None
        self._failure: OSError | None = None
        self.lost = ""
        """Why it lets none of them run any more, long before its end."""
        self._thread = threading.Thread(target=self._run, name=f"gpusnap-tracer-{pid}", daemon=True)

    def __enter__(self) -> Tracer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_threads()

    def start(self) -> None:
        """Have the threads run. Raises OSError where one cannot be traced; none is then."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error
        try:
            ready = self._started.wait(_ENDING)
        except BaseException:  # a signal's: nobody would end it
            self.stop_threads()
            raise
        if not ready:
            self._over = True
            raise TimeoutError(errno.ETIMEDOUT, f"process {self.pid} could not be traced in time")
        if self._refusal is not None:
            self._thread.join()
            raise self._refusal

    def stop_threads(self) -> None:
        """Have them stand again, and return when they do. Raises OSError where one does not."""
        self._over = True
        self._wake.set()
        deadline = time.monotonic() + _ENDING
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._thread.join(deadline - time.monotonic())
            except BaseException:  # a signal's; the threads must stand all the same
                self._thread.join(max(0.0, deadline - time.monotonic()))
                raise
        if self._thread.is_alive():
            raise TimeoutError(errno.ETIMEDOUT, f"a thread of process {self.pid} does not stop")
        if self._failure is not None:
            raise self._failure

    def run_briefly(self, tids: Iterable[int], seconds: float) -> None:
        """Let other threads of the process run for so long, and return when they stand again.

        One that has ended, or cannot be traced, is left out.
        """
        self._have_done(_Errand(tuple(tids), seconds))

    def glance(self, tid: int) -> Position | None:
        """Where one of the threads is that it lets run: it stops for that. None where it does not at once."""
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
            with suppress(OSError):  # it is closed all the same (close(2))
                os.close(descriptor)

    def _take(self) -> None:
        for tid in self.tids:
            self._tracees[tid] = Tracee(self.pid, tid)
            if self._exit_kill:
                self._tracees[tid].set_options(ptrace.EXITKILL)
        if self._guard:  # now: no other process gets the PID of one with a traced thread
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
        """Let every thread that has stopped run on; whether there was one."""
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
        """Let the thread that is watched run on as fast as it makes system calls; it stops at each twice."""
        end, quiet = time.monotonic() + _LATEST, 0
        while quiet < _SPINS and time.monotonic() < end:
            quiet = 0 if self._answer_stops() else quiet + 1

    def _answer(self, tid: int, stop: ptrace.Stop) -> None:
        if stop.is_at_call and self._watch is not None:
            try:
                self._watch.see_call()
            except ProcessLookupError:
                return  # the next look says so
            except Exception as error:  # whatever it is, the thread's own work goes on
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
        """Stop the process where somebody has let it go on."""
        if any(state(self.pid, tid) in "RSD" for tid in self._list_untraced()):
            self.stopped_again += 1
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGSTOP)

    def _list_untraced(self) -> Iterable[int]:
        """A thread that nobody traces: the main one, if it can be. None where all are traced."""
        # Where the main thread has ended and others live on, it says nothing.
        if self.pid not in self._tracees and state(self.pid, self.pid) not in "ZX":
            return (self.pid,)
        with suppress(OSError):
            return [tid for tid in map(int, os.listdir(f"/proc/{self.pid}/task")) if tid not in self._tracees]
        return ()

    def _run_errand(self, errand: _Errand) -> None:
        """Take more threads, let them run, and let them stand where they are."""
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
        except TimeoutError:  # where it stops later, that is answered then
            return None
        found = position(self.pid, tid)
        self._answer(tid, stop)
        return found

    def _forget(self, tid: int) -> None:
        """It has ended, and was reaped just now: nobody can wait for it again."""
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
                        del runs[tid]  # it stands at the instruction, which it runs again when it goes on
                except OSError:
                    del runs[tid]
            self._wake.wait(_SOON)
        for tracee in runs.values():
            with suppress(OSError):
                tracee.to_rest()
                for fault in FAULTS:  # one that came just now
                    if tracee.to_signal(fault):
                        tracee.to_rest()

    def _continue_unless_faulted(self, tracee: Tracee, stop: ptrace.Stop) -> bool:
        """Let a thread that was lent go on after a stop, unless that was for a fault."""
        if stop.delivers in FAULTS:
            return True
        tracee.answer(stop)
        return False

    def _release(self) -> None:
        """Bring each to rest and be its tracer no longer. Raises what the last of them raised."""
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
