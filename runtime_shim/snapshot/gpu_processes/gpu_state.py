"""The GPU state of a container's processes: suspended together, resumed together.

`resume` uses the state that the driver reports, not what gpusnap did before. So it is right after a failure
at any point, and may be called twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Interrupted, Refused
from gpusnap.runtime_shim.base.units import format_shortage
from gpusnap.runtime_shim.gpu import estimate_used, holders
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    DriverFailed,
    GpuOutOfMemory,
    NotInitialized,
    PermissionRefused,
)
from gpusnap.runtime_shim.gpu.api.parallel import Outcome, run_at_once
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls, driver_watch
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.stopping.stop import go_on, settle, stop

if TYPE_CHECKING:
    from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

# A restore can fail for a temporary reason, and giving up would leave the container suspended: so it is tried
# several times, except after GpuOutOfMemory (see _wait_for_room).
_ATTEMPTS = 4
# Seconds to wait for memory that another process has taken on a GPU meanwhile, and between looks at it.
_ROOM, _LOOK = 10.0, 0.2
# The part of a GPU's memory that a restore of one process needs beyond what the process used. Measured on a
# GPU of 140 GiB: 9 MiB are enough and 3 are not, for 2 and for 60 GiB (driver 580.159; docs/benchmarks.md).
_SPARE = 1 / 1024
# How often gpusnap asks a driver that no longer knows a process, and the seconds in between.
_ASKED, _BETWEEN = 4, 0.4
_PAUSE = 0.5
# Seconds until a stopped process counts as permanently stopped.
_STOPPED = 1.0
# Seconds to stop a process that somebody continued without its GPU state.
_STOPPING = 10.0


Pairs = Sequence[tuple[str, str]]
"""(old UUID, new UUID) of a process that moves."""
Needs = Sequence[tuple[str, int]]
"""(UUID, bytes) that must be free on a GPU."""


@dataclass(frozen=True, slots=True)
class Record:
    """A GPU process as it was before its suspend."""

    process: proc.Process
    inner_pid: int
    """Its PID in the namespace of the container's init."""
    gpus: tuple[tuple[str, int], ...]
    """(UUID, bytes used) of every GPU that it could see."""
    unknown: frozenset[str] = frozenset()
    """The UUIDs of those on which the driver does not report its bytes. All such processes together use at
    most what their records say together."""

    @property
    def used(self) -> int:
        """Bytes of GPU memory, on all GPUs together."""
        return sum(used for _, used in self.gpus)


def find_users(
    driver: Driver, processes: Iterable[proc.Process], held: Collection[int] = ()
) -> dict[proc.Process, ProcessState]:
    """Return the processes that have GPU state, with that state.

    Raises Refused for a stopped process, unless gpusnap stopped it (`held`).
    """
    by_pid = {process.pid: process for process in processes}
    found = {}
    for pid in holders(driver, by_pid):
        state = _state(driver, by_pid[pid], held)
        if state is not None:
            found[by_pid[pid]] = state
    return found


def find_idle_holders(
    driver: Driver, processes: Iterable[proc.Process], held: Collection[int] = ()
) -> dict[proc.Process, tuple[str, ...]]:
    """Return the processes that have a GPU's device files open or mapped, but no GPU state; with those files.

    Raises Refused for a stopped process, as `users`.
    """
    found = {}
    for process in processes:
        files = driver.list_handles(process.pid)
        if files and _state(driver, process, held) is None and not proc.is_dying(process.pid):
            found[process] = files
    return found


def _state(driver: Driver, process: proc.Process, held: Collection[int]) -> ProcessState | None:
    """Return its GPU state. Raises Refused if somebody else has stopped it: it cannot be checkpointed so."""
    # It does not matter for a plugin of CRIU that needs no answer from the processes.
    asks = driver.plugin is None or driver.plugin.running
    if asks and process.pid not in held and not _is_running(process.pid):
        raise Refused(
            f"process {process.pid} ({process.comm}) is stopped, so it cannot respond to the GPU's driver",
            hint="run gpusnap resume if its container is suspended, gpusnap recover if gpusnap was "
            "killed; otherwise send SIGCONT or unpause it first",
            code="GPS-207",
        )
    if driver.plugin is not None:
        return driver.state(process.pid)
    return driver_calls.state(driver, process.pid)


def _is_running(pid: int) -> bool:
    """Whether a process runs at least at times: cpulimit stops and continues a process all the time."""
    deadline = time.monotonic() + _STOPPED
    while proc.is_stopped(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def record(
    driver: Driver, host: Host, fresh: Sequence[proc.Process], inner: Mapping[int, int]
) -> list[Record]:
    """Return the manifest's records of processes that still use GPUs; `inner` as `container.inner_pids`.

    If the driver does not list a process (NVML in some virtual machines), the record has the whole use of the
    GPU instead: an upper bound, as pre-flight needs. `estimate_used` has that of a process that is listed.
    """
    reported = driver.memory_used([process.pid for process in fresh])
    used = estimate_used(reported, host)
    whole = {gpu.uuid: gpu.memory_used for gpu in host.gpus}
    records = []
    for process in fresh:
        own = used.get(process.pid)
        gpus = {
            uuid: (whole.get(uuid, 0) if own is None else own.get(uuid, 0))
            for uuid in driver.list_visible(process.pid)
        }
        shares = reported.get(process.pid)
        unknown = frozenset(
            uuid for uuid, bound in gpus.items() if (bound if shares is None else shares.get(uuid, 0) is None)
        )
        records.append(Record(process, inner[process.pid], tuple(gpus.items()), unknown))
    return records


def suspend(
    driver: Driver,
    pids: Collection[int],
    pages: Pages,
    *,
    timeout: float,
    standing: Callable[[], object] = tuple,
    taken: Callable[[int], object] = int,
    held: Collection[int] = (),
    look: Callable[[], object] | None = None,
) -> None:
    """Stop locked processes, and make the driver take their GPU state, all at the same time.

    `timeout`: seconds for the stop. `standing` is called after the stop, `taken` with the PID of each process
    whose GPU state has been taken, and `look` several times a second while the driver works. Processes in
    `held` were stopped before, and are stopped after a failure, too. Raises GpusnapError; `resume` undoes
    whatever was done.
    """
    try:
        stop(pids, timeout=timeout)
        settle(pids)
    except GpusnapError:
        # Partly stopped, they would keep the driver waiting. Nothing has been taken from them yet.
        go_on(pid for pid in pids if pid not in held)
        raise
    standing()
    run_at_once(partial(_suspend, driver, pages, held, taken), pids, look=look).raise_first()


def _suspend(
    driver: Driver, pages: Pages, held: Collection[int], taken: Callable[[int], object], pid: int
) -> None:
    @contextmanager
    def lent(pid: int, tid: int) -> Iterator[Tracer]:
        with pages.run_driver_thread(pid, tid) as done:
            assert done.tracer is not None
            yield done.tracer
        if done.why_not:
            driver_watch.add_note(f"process {pid}: {done.why_not}")

    try:
        driver_calls.checkpoint(driver, pid, lent)
    except PermissionRefused:
        if pid not in held:
            go_on([pid])  # its driver's thread cannot be traced, nor could an undo trace it
        raise
    taken(pid)


def is_suspended(driver: Driver, pid: int) -> bool:
    """Whether the driver has taken the GPU state of a stopped process."""
    return driver_calls.state(driver, pid) is ProcessState.CHECKPOINTED


def map_needs(used: Mapping[int, Needs], pairs: Iterable[tuple[str, str]]) -> dict[int, Needs]:
    """Return what processes that used this, by PID, need on the GPUs to which they move."""
    new = dict(pairs)
    return {pid: [(new.get(uuid, uuid), size) for uuid, size in each] for pid, each in used.items()}


def resume(
    driver: Driver,
    pids: Iterable[int],
    pages: Pages,
    *,
    pairs: Mapping[int, Pairs] = MappingProxyType({}),
    needs: Mapping[int, Needs] = MappingProxyType({}),
    right: Callable[[int], object] = int,
    let_go: Callable[[int], object] | None = None,
) -> None:
    """Restore every suspended process, let it continue, and unlock it; all at once, without ended ones.

    `pairs`: (old UUID, new UUID) by PID, for processes that move to other GPUs. `needs`: (UUID, bytes) by PID
    that must be free on a GPU before the driver is asked, where that is known. `right` is called with the
    PID after the driver's restore of each process; if it raises an exception, the process does not continue.
    With `let_go`, stopped processes are unlocked and stay stopped: it is called with the PID instead of a
    SIGCONT. Raises a GpusnapError after everything that could be resumed has been. A process that the driver
    could not restore stays stopped, because its threads would miss what the driver took from them.
    """
    alive = [pid for pid in pids if proc.is_running(pid)]
    waiting, failure = alive, None
    lost: dict[int, GpusnapError] = {}
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE * attempt)
        lacking = pages.give_back(waiting)
        ready = [pid for pid in waiting if pid not in lacking]
        look = pages.check_signals
        crowded = _wait_for_room(driver, needs, ready, 0 if attempt else _ROOM, look)
        ready = [pid for pid in ready if pid not in crowded]
        bring_back = partial(_bring_back, driver, pages, pairs, right, let_go)
        outcome = run_at_once(bring_back, ready, look=look)
        # There is nothing to restore for a process that has ended meanwhile.
        errors = {
            pid: error
            for pid, error in (*lacking.items(), *crowded.items(), *outcome.errors.items())
            if not proc.is_dying(pid)
        }
        lost |= {
            pid: error
            for pid, error in errors.items()
            if pid in outcome.errors and isinstance(error, GpuOutOfMemory)
        }
        waiting = [pid for pid in errors if pid not in lost]
        failure = _catch_error(Outcome(outcome.results, lost | errors).raise_first)
        if not lacking and all(isinstance(errors[pid], ImageError) for pid in waiting):
            break  # wrong memory does not become right
    # A process that continued may have been stopped again by somebody else. Its state shows whether it is
    # locked.
    held = {*waiting, *lost}
    gone_on = [pid for pid in alive if (let_go is None and pid not in held) or not proc.is_still(pid)]
    locked = _select_in_state(driver, gone_on, ProcessState.LOCKED)
    failure = (
        _catch_error(lambda: run_at_once(partial(driver_calls.unlock, driver), locked).raise_first())
        or failure
    )
    if failure is not None:
        raise failure


def _wait_for_room(
    driver: Driver,
    needs: Mapping[int, Needs],
    pids: Sequence[int],
    seconds: float,
    look: Callable[[], object],
) -> dict[int, GpusnapError]:
    """Wait until GPUs have the free memory for suspended processes; return the errors of the others.

    The driver is not asked for those. After a restore that failed for lack of memory, NVIDIA's driver cannot
    restore a process any more, even if there is enough (github.com/NVIDIA/cuda-checkpoint/issues/44; measured
    with driver 580.159). What cannot be determined here, the driver reports when it is asked.
    """

    def is_taken(pid: int) -> bool:
        try:
            return is_suspended(driver, pid)
        except GpusnapError:
            return False

    wanted = {pid: needs[pid] for pid in pids if needs.get(pid)}
    if not _find_crowded(driver, wanted):
        return {}
    wanted = {pid: each for pid, each in wanted.items() if is_taken(pid)}
    deadline = time.monotonic() + seconds
    while (found := _find_crowded(driver, wanted)) and time.monotonic() < deadline:
        look()
        time.sleep(_LOOK)
    return found


def _find_crowded(driver: Driver, wanted: Mapping[int, Needs]) -> dict[int, GpusnapError]:
    """Return the errors of the processes that want more memory of a GPU, all together, than it has free."""
    errors: dict[int, GpusnapError] = {}
    try:
        gpus = driver.host().gpus if wanted else ()
    except GpusnapError:
        return errors
    for gpu in gpus:
        spare = int(gpu.memory_total * _SPARE)
        here = {
            pid: sum(size + spare for uuid, size in each if uuid == gpu.uuid and size)
            for pid, each in wanted.items()
        }
        need, free = sum(here.values()), max(0, gpu.memory_total - gpu.memory_used)
        if need > free:
            errors |= {
                pid: GpuOutOfMemory(
                    f"GPU {gpu.index} has not enough free memory for the container to continue "
                    f"({format_shortage(free, need)}): another process has taken it meanwhile",
                    hint="free memory there; nvidia-smi shows who uses it",
                    pid=pid,
                )
                for pid, size in here.items()
                if size
            }
    return errors


def _bring_back(
    driver: Driver,
    pages: Pages,
    pairs: Mapping[int, Pairs],
    right: Callable[[int], object],
    let_go: Callable[[int], object] | None,
    pid: int,
) -> None:
    """Restore one process if it is suspended, and let it continue."""
    if not proc.is_still(pid):
        # Somebody has continued it, or the kernel has not yet stopped it again after CRIU released it.
        if _read_state_again(driver, pid) is not ProcessState.CHECKPOINTED:
            if let_go is None:
                go_on([pid])  # gpusnap may be about to stop it
            return
        stop([pid], timeout=_STOPPING)
    state = _read_state_again(driver, pid)
    if state is None:
        if proc.is_dying(pid):
            return  # it has ended, and has not continued
        raise NotInitialized(
            f"the GPU driver does not know process {pid} ({proc.comm(pid)}), whose GPU state it had saved",
            hint="check with nvidia-smi that the driver works",
            pid=pid,
        )
    if state is ProcessState.FAILED:
        raise DriverFailed(
            f"the GPU state of process {pid} ({proc.comm(pid)}) can no longer be restored: the driver has "
            "discarded it",
            hint="kill the process, and restore its container from a checkpoint",
            pid=pid,
            code="GPS-026",
        )
    if state is ProcessState.CHECKPOINTED:
        waits = partial(pages.is_waiting, pid) if pages.is_loading else None
        driver_calls.restore(driver, pid, pairs.get(pid, ()), waits=waits)
    right(pid)
    if let_go is not None:
        if _read_state_again(driver, pid) is ProcessState.LOCKED:
            driver_calls.unlock(driver, pid)
        let_go(pid)
    else:
        go_on([pid])


def _read_state_again(driver: Driver, pid: int) -> ProcessState | None:
    """Read the state of a process that had one; None if it has ended, or if the driver repeatedly says so.

    A driver that is short of memory or descriptors for a moment does not find the process in /proc.
    """
    for attempt in range(_ASKED):
        if attempt:
            time.sleep(_BETWEEN)
        state = driver_calls.state(driver, pid)
        if state is not None or proc.is_dying(pid):
            return state
    return None


def _select_in_state(driver: Driver, pids: Iterable[int], wanted: ProcessState) -> list[int]:
    """Return those in a state, and those whose state cannot be read: the next step on them reports why."""

    def there(pid: int) -> bool:
        try:
            return _read_state_again(driver, pid) is wanted
        except GpusnapError:
            return True

    return [pid for pid in pids if there(pid)]


def _catch_error(action: Callable[[], object]) -> GpusnapError | None:
    try:
        action()
    except Interrupted:
        raise
    except GpusnapError as error:
        return error
    return None
