"""Stops processes at a safe instant, and lets threads of them run while the others are stopped.

The driver's checkpoint takes away host memory that it had mapped into the process (pinned memory). A thread
that runs and reads it dies of SIGSEGV: on an H100, three of three JAX processes did within 3 s, and twelve
of twelve survived when only the driver's own thread ran. So a locked process is stopped by SIGSTOP before
the driver's checkpoint, and continued by SIGCONT after its restore. CRIU dumps a stopped process as stopped
and restores it stopped, so no thread runs in between either. For the driver's calls, only its thread runs, by
ptrace(2): CRIU's own CUDA plugin does the same.

If a process is completely stopped, NVIDIA's driver answers no call on it except
cuCheckpointProcessGetRestoreThreadId.

The driver's thread uses the C library of the process, and waits for a lock that a stopped thread holds. So
`settle` checks where the threads are, and lets those within fork, malloc, stdio or the loader run a little
further, while the driver has taken nothing yet (process/ptrace/positions.py). Locks that this does not find
are handled when they block the driver: snapshot/gpu_processes/driver_calls.py.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.base.errors import GpusnapError, reason
from gpusnap.runtime_shim.base.stop_signals import put_off_signals
from gpusnap.runtime_shim.gpu.api.errors import PermissionRefused
from gpusnap.runtime_shim.process import pidfd, proc

if TYPE_CHECKING:
    from gpusnap.runtime_shim.process.ptrace.populate import Backing, PopulateResult
    from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

# Seconds until a process that is not stopped gets another SIGSTOP: a SIGCONT has undone the first.
_AGAIN = 0.05
# Seconds between two checks of a guard.
_GUARD = 0.002
# Seconds for threads within the C library to leave it. Threads that hold no lock there (one that prints into
# a string all day looks the same) only cost this time.
_LEAVING = 1.0
# Seconds that a thread runs at first; doubled this number of times, then short again. A thread that takes
# such locks all the time is best stopped at many instants, but on a busy machine it takes a while until it
# runs.
_MOMENT, _TRIES = 0.0005, 5


def stop(pids: Iterable[int], *, timeout: float) -> None:
    """Stop processes, and wait until every thread of each is stopped; an ended process is skipped.

    If somebody continues one, it is stopped again. Raises GpusnapError after `timeout` seconds; the processes
    stay stopped in any case, until `go_on`.
    """
    pids = tuple(pids)
    _stop_moving(pids)
    _await_still(pids, timeout, again=True)


def wait_until_stopped(pids: Iterable[int], *, timeout: float) -> None:
    """Wait until every thread of processes that got a SIGSTOP is stopped, as `stop` does.

    Raises GpusnapError after `timeout` seconds.
    """
    _await_still(tuple(pids), timeout, again=False)


def _stop_moving(pids: Iterable[int]) -> None:
    for pid in [pid for pid in pids if not proc.is_still(pid)]:
        pidfd.send(pid, signal.SIGSTOP)


def _await_still(pids: tuple[int, ...], timeout: float, *, again: bool) -> None:
    begin = time.monotonic()
    deadline, sent, pause = begin + timeout, begin, 0.0005
    while moving := [pid for pid in pids if not proc.is_still(pid)]:
        now = time.monotonic()
        if now > deadline:
            raise GpusnapError(
                f"process {moving[0]} ({proc.comm(moving[0])}) did not stop within {timeout:g} s",
                hint="one of its threads is blocked in the kernel, for example on a file system; try "
                "again later",
                code="GPS-225",
            )
        if again and now - sent > _AGAIN:
            _stop_moving(moving)
            sent = now
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def go_on(pids: Iterable[int]) -> None:
    """Continue stopped processes; an ended process is skipped."""
    for pid in pids:
        pidfd.send(pid, signal.SIGCONT)


def settle(pids: Iterable[int], *, within: float = _LEAVING) -> None:
    """Move threads of stopped processes out of code that may hold a lock of the C library.

    Each such thread runs for a moment, alone, and again if necessary; at times all of them together with
    those that wait for a lock, because these may wait for one another. `within`: seconds for all; remaining
    threads then stay where they are. Raises PermissionRefused if a process cannot be traced.
    """
    from gpusnap.runtime_shim.process.ptrace import positions

    deadline = time.monotonic() + within
    waiting = list(pids)
    for attempt in itertools.count():
        moment = _MOMENT * 2 ** (attempt % _TRIES)
        waiting = [pid for pid in waiting if proc.is_running(pid) and positions.list_unsafe(pid)]
        if not waiting or time.monotonic() > deadline:
            return
        for pid in waiting:
            with run_several(pid, ()) as tracer:
                found = positions.list_unsafe(pid)
                if attempt % 3 == 2:
                    tracer.run_briefly({*found, *positions.list_waiting(pid)}, moment)
                    continue
                for tid in found:
                    if time.monotonic() < deadline:
                        tracer.run_briefly([tid], moment)


def drop_stops(pids: Iterable[int]) -> None:
    """Remove pending SIGSTOPs of stopped processes: CRIU takes one for an interruption.

    A program that sends them all day (cpulimit) also sends one to a stopped process, where it stays pending
    until the process continues. Raises PermissionRefused if a process cannot be traced.
    """
    from gpusnap.runtime_shim.process.ptrace.tracee import hold

    for pid in pids:
        if not proc.stop_pending(pid):
            continue
        try:
            with hold(pid, pid) as tracee:
                tracee.to_signal(signal.SIGSTOP)
                tracee.to_rest()
        except ProcessLookupError:
            continue
        except OSError as error:
            raise make_untraceable_error(pid, pid, error) from error


class Guard:
    """Keeps processes stopped that miss their GPU state, while nobody works on them.

    A program in the container may send them a SIGCONT at any moment (cpulimit, a shell), and their threads
    would run without memory that the driver has taken away. A thread of gpusnap checks every 2 ms.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = {*pids}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpusnap-guard", daemon=True)
        try:
            with put_off_signals():
                threads.start(self._thread)
        except BaseException:  # nobody else could end it, and it would stop again what is let run
            if self._thread.ident is not None:
                self.stop_watching()
            raise

    def release(self, pid: int) -> None:
        """No longer keep one of them stopped: it is about to continue."""
        with self._lock:
            self._pids.discard(pid)

    def stop_watching(self) -> None:
        """Stop checking. May be called again."""
        self._over.set()
        threads.join(self._thread)

    def _run(self) -> None:
        while not self._over.wait(_GUARD):
            for pid in tuple(self._pids):
                with self._lock, contextlib.suppress(GpusnapError):
                    if pid in self._pids and proc.has_gone_on(pid):
                        _stop_moving([pid])


@contextmanager
def run_only(pid: int, tid: int, *, exit_kill: bool = False) -> Iterator[Tracer]:
    """Let one thread of a stopped process run while the block does, and stop it again.

    The tracer is a thread of gpusnap. Meanwhile the thread gets no signals except those that it causes
    itself. `exit_kill`: the process ends with gpusnap, whatever ends that. Raises PermissionRefused if the
    thread cannot be traced.
    """
    with run_several(pid, [tid], exit_kill=exit_kill) as tracer:
        yield tracer


@contextmanager
def run_several(
    pid: int, tids: Iterable[int], *, guard: bool = True, exit_kill: bool = False
) -> Iterator[Tracer]:
    """Like `run_only`, for any number of threads; `guard` as for Tracer."""
    # Imported here, because a container without a GPU must not wait for it.
    from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

    tids = tuple(tids)
    tracer = Tracer(pid, tids, guard=guard, exit_kill=exit_kill)
    try:
        tracer.start()
    except OSError as error:
        raise make_untraceable_error(pid, tids[0] if tids else pid, error) from error
    try:
        yield tracer
    finally:
        _end(tracer)


@contextmanager
def run_populating(
    pid: int, tid: int, *, threads: int = 0, backing: Backing | None = None
) -> Iterator[PopulateResult]:
    """Like `run_only`, for the driver's checkpoint: populate the large mapping that the thread makes.

    With `backing`, files replace the mappings. `threads`: 0 for one per core.

    The result is complete when the block has ended. If nothing was done, it says why, and the driver's own
    method was used.
    """
    # Imported here: it takes 12 ms, and a container without a GPU must not wait for it.
    from gpusnap.runtime_shim.process.ptrace import populate

    stack = contextlib.ExitStack()
    try:
        done = stack.enter_context(populate.populate_mappings(pid, tid, threads=threads, backing=backing))
    except OSError as error:
        raise make_untraceable_error(pid, tid, error) from error
    try:
        yield done
    finally:
        try:
            stack.close()
        except OSError as error:
            raise _make_does_not_stop_error(pid, error) from error


def _end(tracer: Tracer) -> None:
    try:
        tracer.stop_threads()
    except OSError as error:
        raise _make_does_not_stop_error(tracer.pid, error) from error


def _make_does_not_stop_error(pid: int, error: OSError) -> GpusnapError:
    return GpusnapError(
        f"a thread of process {pid} ({proc.comm(pid)}) does not stop: {reason(error)}",
        hint="it is blocked in the kernel; check the kernel log, and run gpusnap recover when it has "
        "left the kernel",
        code="GPS-225",
    )


def make_untraceable_error(pid: int, tid: int, error: OSError) -> PermissionRefused:
    """The error if a thread cannot be traced."""
    return PermissionRefused(
        f"thread {tid} of process {pid} ({proc.comm(pid)}) cannot be traced: {reason(error)}",
        hint="quit the debugger that traces it, or check that gpusnap may use ptrace",
        pid=pid,
        code="GPS-226",
    )
