"""The GPU state of a container's processes: suspended together, resumed together.

`resume` goes by the state that the driver reports and not by what we believe we did, so it is right after a
failure at any point, and may be called twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from runtime_shim import proc
from runtime_shim.errors import GpusnapError, Interrupted, Refused
from runtime_shim.gpu import holders
from runtime_shim.gpu.driver import Driver, Host, ProcessState
from runtime_shim.gpu.errors import GpuError
from runtime_shim.gpu.together import at_once

__all__ = ["InCriu", "Pages", "Record", "idle_holders", "record", "resume", "users"]

# A restore can fail for a passing reason, such as another process that just has the memory; giving up would
# leave the work suspended, so it is tried a few times.
_ATTEMPTS = 4
_PAUSE = 0.5


class Pages(Protocol):
    """Where the GPUs' memory goes while a process is suspended: the seam between the driver and CRIU."""

    name: str
    """What the manifest calls it."""

    def take(self, pids: Sequence[int]) -> None:
        """Carry the suspended processes' GPU memory away, before CRIU dumps them."""

    def give_back(self, pids: Sequence[int]) -> None:
        """Put it back before the driver restores them: after a dump, a failure, or CRIU's restore."""


class InCriu:
    """It stays in the process, and CRIU dumps and restores it with the rest."""

    name = "criu"

    def take(self, pids: Sequence[int]) -> None:
        """Nothing to carry."""

    def give_back(self, pids: Sequence[int]) -> None:
        """Nothing was carried away."""


@dataclass(frozen=True, slots=True)
class Record:
    """What was known of a GPU process before it was suspended and let go of its GPUs."""

    process: proc.Process
    inner_pid: int
    """Its PID as the container's init sees it."""
    gpus: tuple[tuple[str, int], ...]
    """(UUID, bytes used) of every GPU that it could see."""

    @property
    def used(self) -> int:
        """Bytes of GPU memory, over all GPUs."""
        return sum(used for _, used in self.gpus)


def users(driver: Driver, processes: Iterable[proc.Process]) -> dict[proc.Process, ProcessState]:
    """The processes that have GPU state, with it. Raises Refused for one that is stopped."""
    by_pid = {process.pid: process for process in processes}
    found = {}
    for pid in holders(driver, by_pid):
        state = _state(driver, by_pid[pid])
        if state is not None:
            found[by_pid[pid]] = state
    return found


def idle_holders(driver: Driver, processes: Iterable[proc.Process]) -> dict[proc.Process, tuple[str, ...]]:
    """The processes that have a GPU's device files open or mapped, but no GPU state; with those files.

    Raises Refused for one that is stopped.
    """
    found = {}
    for process in processes:
        files = driver.handles(process.pid)
        if files and _state(driver, process) is None and proc.running(process.pid):
            found[process] = files
    return found


def _state(driver: Driver, process: proc.Process) -> ProcessState | None:
    """Its GPU state. NVIDIA's driver waits for a stopped process without end, so that one is not asked."""
    if proc.stopped(process.pid):
        raise Refused(
            f"process {process.pid} ({process.comm}) is stopped, and cannot answer the GPU's driver",
            hint="let it go on first (SIGCONT, or unpause the container)",
        )
    return driver.state(process.pid)


def record(
    driver: Driver, host: Host, fresh: Sequence[proc.Process], inner: Mapping[int, int]
) -> list[Record]:
    """What the manifest says of processes that still run on their GPUs; `inner` as `container.inner_pids`.

    Where the driver does not tell a process' share (NVML in some virtual machines), the GPU's whole use
    stands in for it: an upper bound, as pre-flight needs it.
    """
    used = driver.memory_used([process.pid for process in fresh])
    whole = {gpu.uuid: gpu.memory_used for gpu in host.gpus}
    records = []
    for process in fresh:
        own = used.get(process.pid)
        gpus = {
            uuid: (whole.get(uuid, 0) if own is None else own.get(uuid, 0))
            for uuid in driver.visible(process.pid)
        }
        records.append(Record(process, inner[process.pid], tuple(gpus.items())))
    return records


def resume(
    driver: Driver, pids: Iterable[int], pages: Pages, *, pairs: Sequence[tuple[str, str]] = ()
) -> None:
    """Restore every suspended process, then unlock every locked one; all at once, those that died left out.

    `pairs` of (old UUID, new UUID). Raises a GpuError after everything that could be resumed has been.
    """
    alive = [pid for pid in pids if proc.running(pid)]
    failure: GpusnapError | None = None
    for attempt in range(_ATTEMPTS):
        waiting = _those(driver, alive, ProcessState.CHECKPOINTED)
        if not waiting:
            failure = None
            break
        if attempt:
            time.sleep(_PAUSE * attempt)
        failure = _failed(partial(_restore, driver, waiting, pages, pairs))
    locked = _those(driver, alive, ProcessState.LOCKED)
    failure = _failed(lambda: at_once(driver.unlock, locked).raise_first()) or failure
    if failure is not None:
        raise failure


def _those(driver: Driver, pids: Iterable[int], wanted: ProcessState) -> list[int]:
    """Those in a state, and those whose state cannot be read: the step on them will say why."""

    def there(pid: int) -> bool:
        try:
            return driver.state(pid) is wanted
        except GpuError:
            return True

    return [pid for pid in pids if there(pid)]


def _restore(driver: Driver, pids: Sequence[int], pages: Pages, pairs: Sequence[tuple[str, str]]) -> None:
    pages.give_back(pids)
    at_once(lambda pid: driver.restore(pid, pairs), pids).raise_first()


def _failed(action: Callable[[], object]) -> GpusnapError | None:
    try:
        action()
    except Interrupted:
        raise
    except GpusnapError as error:
        return error
    return None
