"""Calls of the GPU driver on a process: all of them go through `call`.

NVIDIA's driver does the work in a thread of its own within the process, its restore thread. For a call on a
stopped process, that thread must run, and no other: the threads of the program may need memory that the
driver has taken away. Measured on an H100 (driver 580.159.04, PyTorch, ten tries):

- The restore thread alone is enough to report the state, to checkpoint and to restore. If no thread of the
  process may run, the driver waits forever. It returns the number of that thread without waiting.
- To lock, that thread alone is not enough: the driver waits longer than its own timeout. With the driver's
  second thread (cuda-EvtHandlr), an idle process was locked in 1.4 ms.
- If the process was stopped within a call of CUDA, that call must end first. Then the whole process runs
  until the driver has answered. It was locked 0.5 to 1.9 ms after the SIGCONT, and stopped again 1.0 to 3.0
  ms after it.

If its threads make no progress, others may run until they do (driver_watch.py). If nothing helps before the
deadline, the call fails. A process that is being locked, unlocked or checkpointed then runs as a whole, so
that the driver's call ends, and the caller undoes it. No call waits forever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from gpusnap.runtime_shim.base.deadlines import Answer
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.device_files import has_ended
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    DriverFailed,
    DriverNotReady,
    GpuError,
    IllegalState,
    LockTimeout,
    NotInitialized,
    ProcessGone,
)
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.gpu_processes.driver_watch import Watch, second_threads
from gpusnap.runtime_shim.stopping.stop import go_on, run_only, run_several, stop

if TYPE_CHECKING:
    from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

T = TypeVar("T")

# Seconds for an answer while only the driver's threads run: it takes 1.4 ms, or never comes.
_BRIEFLY = 0.2
# Seconds added to the driver's own deadline, which it keeps if the process runs.
_MARGIN = 5.0
# Seconds that a killed process may take to end.
_DYING = 0.2
# Seconds for a whole call. A driver takes one or two minutes for a whole GPU (docs/benchmarks.md); a thread
# that spins in a damaged process never ends.
_LONGEST = 900.0
# Seconds for a driver's call whose caller was killed: a large process takes up to a minute.
_UNDER_WAY = 300.0
# Seconds for the state of a process.
_SHORT = 30.0
# Seconds to stop a process.
_STOPPING = 10.0
# Seconds for an answer while the whole process runs.
_ALL_RUN = 10.0
# Seconds between two checks of the driver's threads; and until a thread that somebody has stopped is resumed.
_LOOK, _STANDING = 0.005, 0.02
# Most seconds for which one look at a sleeping thread counts.
_GLANCE = 0.05


class _Call(Generic[T]):
    """A call of the driver in a thread of its own, because it cannot be cancelled."""

    def __init__(self, operation: Callable[[], T]) -> None:
        self._operation = operation
        self._begun = False
        self._done = threading.Event()
        self._answer: Answer[T] | None = None

    @property
    def has_answered(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        return self._answer.error if self._answer is not None else None

    def begin(self) -> None:
        """Start the call, unless it was started before."""
        if self._begun:
            return
        try:
            threading.Thread(target=self._run, name="gpusnap-gpu-call", daemon=True).start()
        except RuntimeError as error:
            raise DriverFailed(
                f"a thread for a GPU driver call could not be started: {error}",
                hint="raise the limit on processes and threads for gpusnap (ulimit -u, pids.max)",
                code="GPS-003",
            ) from error
        self._begun = True

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def value(self) -> T:
        assert self._answer is not None
        return self._answer.value()

    def _run(self) -> None:
        self._answer = Answer(self._operation)
        self._done.set()


def call(
    driver: Driver,
    pid: int,
    operation: Callable[[], T],
    *,
    thread: Callable[[int, int], AbstractContextManager[Tracer]] | None = None,
    within: float = _LONGEST,
    may_run: bool = False,
    waits: Callable[[], bool] = bool,
    may_lack: bool = False,
) -> T:
    """Make a call of the driver (`operation`) on a process, running or stopped; return its result.

    A stopped process is stopped afterwards. If somebody stops the process meanwhile, the call still gets its
    answer. With `thread`, the process is stopped and kept so, and `thread(PID, TID)` lets the driver's thread
    run. `may_run`: if no answer comes, the whole process may run for a while, so that the call ends. `waits`:
    whether the thread waits for memory that is sure to come; that time does not count. `may_lack`: the
    process may have no GPU state, and NotInitialized is a valid answer.

    Raises what the operation raises; ProcessGone if the process ends; DriverNotReady if no answer comes
    within `within` seconds, or earlier if there is no progress; PermissionRefused if the thread cannot be
    traced.
    """
    with _detect_exit(pid, may_lack=may_lack):
        tid = driver.restore_thread(pid)
        answer = _Call(operation)
        if thread is not None:
            stop([pid], timeout=_STOPPING)
        elif not proc.is_thread_stopped(pid, tid) and _wait_while_running(answer, pid, tid, within):
            return answer.value()
        # Without `thread`, it may be somebody else's stop, and whoever made it may end it.
        lets_run = thread(pid, tid) if thread is not None else run_several(pid, [tid], guard=False)
        why = _run_threads(answer, pid, [tid], lets_run, within, waits)
        if answer.has_answered:
            return answer.value()
        if may_run:
            _run_all(answer, pid, stands=True, within=_ALL_RUN)
        raise _make_no_answer_error(pid, why)


def call_or_run(driver: Driver, pid: int, operation: Callable[[], object], *, timeout: float) -> bool:
    """Like `call`, for locks and unlocks; return whether the whole of a stopped process had to run.

    At first only the driver's two threads run. If no answer comes, or the answer is that work is in progress,
    the whole process runs until there is one, for at most `timeout` seconds. A stopped process is stopped
    afterwards.
    """
    with _detect_exit(pid):
        tid = driver.restore_thread(pid)
        answer = _Call(operation)
        if not proc.is_thread_stopped(pid, tid) and _wait_while_running(answer, pid, tid, timeout + _MARGIN):
            answer.value()
            return False
        stood = proc.is_still(pid)
        tids = [tid, *(each for each in second_threads(pid) if each != tid)]
        lets_run = run_several(pid, tids, guard=False)
        why = _run_threads(answer, pid, tids, lets_run, _BRIEFLY if stood else timeout + _MARGIN)
        if answer.has_answered and not (stood and isinstance(answer.error, LockTimeout)):
            answer.value()
            return False
        if answer.has_answered:
            answer = _Call(operation)
        _run_all(answer, pid, stands=stood, within=timeout + _MARGIN, stopping=timeout)
        if not answer.has_answered:
            raise _make_no_answer_error(pid, why)
        answer.value()
        return True


def state(driver: Driver, pid: int) -> ProcessState | None:
    """Return the state of a process, as `Driver.state`; None if it has no GPU state or has ended."""
    try:
        return call(driver, pid, lambda: driver.state(pid), within=_SHORT, may_lack=True)
    except (NotInitialized, ProcessGone):
        return None


def lock(driver: Driver, pid: int, *, timeout: float) -> bool:
    """Lock a process; return whether the whole of a stopped process had to run."""
    return call_or_run(driver, pid, lambda: driver.lock(pid, timeout=timeout), timeout=timeout)


def checkpoint(
    driver: Driver, pid: int, thread: Callable[[int, int], AbstractContextManager[Tracer]] = run_only
) -> None:
    """Make the driver take the GPU state of a locked process."""
    call(driver, pid, lambda: driver.checkpoint(pid), thread=thread, may_run=True)


def restore(
    driver: Driver,
    pid: int,
    pairs: Sequence[tuple[str, str]] = (),
    *,
    waits: Callable[[], bool] | None = None,
) -> None:
    """Make the driver restore the GPU state; `pairs` as for `Driver.restore`.

    With `waits`, as for `call`, memory of the process is still loading. The process then ends with gpusnap,
    because it must not continue with missing memory.
    """
    thread = partial(run_only, exit_kill=waits is not None)
    call(driver, pid, lambda: driver.restore(pid, pairs), thread=thread, waits=waits or bool)


def unlock(driver: Driver, pid: int) -> None:
    """Unlock a process. After a killed gpusnap, it may also become unlocked by itself meanwhile."""
    try:
        call_or_run(driver, pid, lambda: driver.unlock(pid), timeout=_ALL_RUN)
    except IllegalState:
        if state(driver, pid) is not ProcessState.RUNNING:
            raise


def let_finish(driver: Driver, pid: int, *, within: float = _UNDER_WAY, quiet: float = 1.0) -> None:
    """Let the driver's thread of a stopped process finish a call whose caller was killed.

    The driver does not report a call in progress. So the thread counts as done when it has slept for `quiet`
    seconds without running at all. After `within` seconds gpusnap stops waiting: the thread may wait for a
    lock that another, stopped thread holds.

    It may be stopped now and then together with its process (cpulimit), until the tracer continues it: if it
    does not sleep then, this does not show that it works.
    """
    with _detect_exit(pid):
        tid = driver.restore_thread(pid)
        now = time.monotonic()
        deadline, slept = now + within, 0.0
        with run_only(pid, tid) as tracer:
            _, seen = proc.activity(pid, tid)
            while now < deadline and slept < quiet and not tracer.lost:
                time.sleep(_LOOK)
                before, now = now, time.monotonic()
                does, ran = proc.activity(pid, tid)
                if ran != seen or does in "RD":
                    slept, seen = 0.0, ran
                elif does in "SXZ":
                    slept += min(now - before, _GLANCE)  # on a busy host nobody may have run for longer


def _wait_while_running(answer: _Call[T], pid: int, tid: int, within: float) -> bool:
    """Start the call on a running process and wait; return whether it answered before somebody stopped it."""
    answer.begin()
    deadline, since = time.monotonic() + within, 0.0
    while not answer.wait(_LOOK):
        now = time.monotonic()
        if not proc.is_thread_stopped(pid, tid):
            since = 0.0
        elif not since:
            since = now
        elif now - since > _STANDING:
            return False
        if now > deadline:
            raise _make_no_answer_error(pid, f"no response within {within:g} s")
    return True


def _run_threads(
    answer: _Call[T],
    pid: int,
    tids: Sequence[int],
    lets_run: AbstractContextManager[Tracer],
    within: float,
    waits: Callable[[], bool] = bool,
) -> str:
    """Let the driver's threads run until the answer comes; if none comes, return what they wait for."""
    with lets_run as tracer:
        answer.begin()
        watch, deadline = Watch(pid, tids, tracer), time.monotonic() + within
        why = ""
        while not why and not answer.wait(_LOOK):
            if waits():
                watch.begin_again()
                deadline = time.monotonic() + within
                continue
            with contextlib.suppress(GpusnapError):  # the kernel is short of memory: no news
                why = watch.look()
            if not why and tracer.lost:
                why = f"its thread cannot be resumed: {tracer.lost}"
            if not why and time.monotonic() > deadline:
                why = f"no response within {within:g} s"
    watch.tell()
    return why


def _run_all(answer: _Call[T], pid: int, *, stands: bool, within: float, stopping: float = _ALL_RUN) -> None:
    """Let the whole process run until the answer comes, within the time; stop it again if it was stopped."""
    if not stands:
        answer.wait(within)
        return
    go_on([pid])
    try:
        answer.begin()
        answer.wait(within)
    finally:
        stop([pid], timeout=stopping)


@contextlib.contextmanager
def _detect_exit(pid: int, *, may_lack: bool = False) -> Iterator[None]:
    """Raise ProcessGone if the process ends within the block, because the driver's own error is unclear then.

    With `may_lack`, a process without GPU state is waited for only if it is about to end.
    """
    try:
        yield
    except GpuError as error:
        lacks = may_lack and isinstance(error, NotInitialized) and not proc.is_dying(pid)
        if not isinstance(error, ProcessGone) and has_ended(pid, within=0 if lacks else _DYING):
            raise ProcessGone(f"process {pid} exited during a GPU driver call: {error}", pid=pid) from error
        raise


def _make_no_answer_error(pid: int, why: str) -> DriverNotReady:
    return DriverNotReady(
        f"the GPU driver does not respond for process {pid} ({proc.comm(pid)}): {why}",
        hint="try again; if the error persists, check with nvidia-smi that the driver works, and look "
        "for Xid lines in the kernel log",
        pid=pid,
    )
