"""Resumes processes whose GPU state the driver has taken, according to the journal.

gpusnap never touches the memory of a running process. If a process is stopped and its regions are still
mapped, gpusnap fills them from the layout (again, if necessary: the content is the same) or from files in
RAM. Then the driver restores the process and it continues.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType

from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import GpusnapError, reason
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.process.memory import maps as regions
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.process.memory.maps import Region
from gpusnap.runtime_shim.process.memory.tmpfs import Area
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls
from gpusnap.runtime_shim.snapshot.gpu_processes.driver_calls import let_finish
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import Needs, Pairs, is_suspended, resume
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.records import journal, reservations
from gpusnap.runtime_shim.snapshot.records.journal import Entry, JournalProcess
from gpusnap.runtime_shim.snapshot.recovery import held_threads
from gpusnap.runtime_shim.stopping.stop import Guard, go_on, stop

_SETTLING = 10.0  # seconds


def bring_back(
    entry: Entry,
    driver: Driver,
    settings: Memory,
    let_go: Callable[[int], object] | None,
    *,
    check: Callable[[], object] = tuple,
    pairs: Mapping[int, Pairs] = MappingProxyType({}),
    needs: Mapping[int, Needs] = MappingProxyType({}),
    loaded: Mapping[int, Sequence[Area]] = MappingProxyType({}),
    interrupt: Callable[[], object] = tuple,
    cut_off: bool = True,
) -> tuple[JournalProcess, ...]:
    """Let the living GPU processes of an entry run with their GPU state; return them.

    `let_go`, `pairs` and `needs`: as in `gpu_state.resume`. `loaded`: files with everything that the layout
    has of a process, by PID. `interrupt`: as for `transfer.fill`; none of them has its GPU state back then.
    `cut_off`: a gpusnap was killed that may have been working on the processes, so the driver may still be
    working, and other processes may be stopped because of it. `check` may refuse before any of them gets GPU
    state back, and may ask for the host's GPUs: the driver's thread of a process that was stopped in the
    middle of its work may hold what is needed for the answer, until it has ended that work. Raises
    GpusnapError after doing everything that could be done.
    """
    held_threads.unblock_signals(entry.key)
    if cut_off:
        _let_idle_go_on(entry, let_go)
    there = tuple(process for process in list_alive(entry) if not process.idle)
    if not there:
        return ()
    driver.open()
    _settle(there)
    stopped = [process for process in there if proc.is_still(process.pid)]
    for process in stopped:
        _give_thread_back(entry, process)
    pids = [process.pid for process in stopped]
    guard = Guard(pids)
    try:
        if cut_off:
            run_at_once(partial(let_finish, driver), pids).raise_first()
        check()
        stopped += _list_astray(driver, [process for process in there if process not in stopped])
        lacking = _give_back(
            entry, [p for p in stopped if is_suspended(driver, p.pid)], settings, loaded, interrupt
        )
        pids = [process.pid for process in there if process.pid not in lacking]
        right = partial(_check_process, entry, guard)
        needs = needs or _find_needs(entry, driver, there)
        resume(driver, pids, Pages(), pairs=pairs, needs=needs, right=right, let_go=let_go)
    finally:
        guard.stop_watching()
    for error in lacking.values():
        raise error
    return there


def _find_needs(entry: Entry, driver: Driver, there: Iterable[JournalProcess]) -> dict[int, Needs]:
    """Return what processes need on their GPUs: what they used, or at least what was taken out of them.

    The latter, for a process with one GPU, is all that an earlier version recorded.
    """
    needs: dict[int, Needs] = {}
    noted: dict[tuple[int, int], list[tuple[str, int]]] = {}
    with suppress(GpusnapError):
        noted = journal.read_needs(entry.key)
    for process in there:
        if used := noted.get((process.pid, process.start)):
            needs[process.pid] = used
            continue
        with suppress(GpusnapError):
            visible = driver.list_visible(process.pid)
            if len(visible) == 1:
                staged = sum(each.size for each in process.staged)
                stored = sum(region.table.size for region in process.regions)
                needs[process.pid] = [(visible[0], max(staged, stored))]
    return needs


def _check_process(entry: Entry, guard: Guard, pid: int) -> None:
    """Check, before a process continues, that its memory is its own, and no longer keep it stopped."""
    transfer.replace_staged_memory(entry.key, pid)
    reservations.release(entry.key, pid)
    guard.release(pid)


def _give_back(
    entry: Entry,
    processes: Sequence[JournalProcess],
    settings: Memory,
    loaded: Mapping[int, Sequence[Area]],
    interrupt: Callable[[], object] = tuple,
) -> dict[int, GpusnapError]:
    """Fill the regions of suspended processes: from the layout, or from files in RAM.

    Return the errors, by PID.
    """
    # An exiting process has lost its mappings before it is a zombie.
    unmapped = [p.pid for p in processes if not _is_mapped(p)]
    lost = {pid: _make_missing_error(pid) for pid in unmapped if not proc.is_dying(pid)}
    there = [process for process in processes if process.pid not in unmapped]
    layout = {
        p.pid: [(Region(r.start, r.table.size), r.table) for r in p.regions]
        for p in there
        if p.pid not in loaded
    }
    if any(layout.values()):
        transfer.fill(Layout(entry.layout), layout, settings, interrupt=interrupt)
    staged: dict[int, list[Area]] = {}
    for process in there:
        try:
            staged[process.pid] = [Area(each.path, each.start, each.size) for each in process.staged]
        except OSError as error:
            gone = error.errno == errno.ENOENT
            lost[process.pid] = GpusnapError(
                f"the GPU memory of process {process.pid} cannot be read: {reason(error)}",
                hint="if that file was removed, the memory is lost: restore the container from a checkpoint"
                if gone
                else f"run gpusnap recover {entry.container} to try again",
                code="GPS-026" if gone else "GPS-027",
            )
    given = {pid: [*loaded.get(pid, ()), *areas] for pid, areas in staged.items()}
    lost |= transfer.map_areas(entry.key, {pid: areas for pid, areas in given.items() if areas})
    for area in (area for areas in staged.values() for area in areas):
        area.close()
    return lost


def _make_missing_error(pid: int) -> GpusnapError:
    """The error if the memory is missing: the driver would read zeros, or something else."""
    return GpusnapError(
        f"process {pid} no longer has a mapping where its GPU memory was",
        hint="kill it, and restore its container from a checkpoint",
        code="GPS-026",
    )


def _list_astray(driver: Driver, running: Sequence[JournalProcess]) -> list[JournalProcess]:
    """Return processes that somebody continued without their GPU state; they are stopped again."""
    away = [p for p in running if p.regions or p.staged]
    found = [p for p in away if driver_calls.state(driver, p.pid) is ProcessState.CHECKPOINTED]
    stop([process.pid for process in found], timeout=_SETTLING)
    return found


def _let_idle_go_on(entry: Entry, let_go: Callable[[int], object] | None) -> None:
    """Continue processes without GPU state, which were only stopped, perhaps in a system call for gpusnap."""
    idle = [process for process in list_alive(entry) if process.idle]
    _settle(idle)
    for process in idle:
        if proc.is_still(process.pid):
            _give_thread_back(entry, process)
    for process in idle:
        if let_go is not None:
            let_go(process.pid)
        else:
            go_on([process.pid])


def _settle(there: Sequence[JournalProcess]) -> None:
    """Wait until all threads of the stopped processes are stopped.

    gpusnap may have been killed during a call of the driver. The driver's thread in the process then stops as
    soon as the kernel handles it. Until then it is not known whether the process is stopped.
    """
    deadline = time.monotonic() + _SETTLING
    while time.monotonic() < deadline and any(
        proc.is_stopped(process.pid) and not proc.is_still(process.pid) for process in there
    ):
        time.sleep(0.01)


def list_alive(entry: Entry) -> tuple[JournalProcess, ...]:
    """Return the processes of an entry that still exist."""
    pidfd.remember((process.pid, process.start) for process in entry.processes)
    return tuple(process for process in entry.processes if proc.is_same(process.pid, process.start))


def _is_mapped(process: JournalProcess) -> bool:
    """Whether memory is mapped at the addresses of all its regions: the driver's restore unmaps it."""
    try:
        mapped = regions.mappings(process.pid)
    except TimeoutError as error:
        raise GpusnapError(
            f"the memory of process {process.pid} cannot be inspected: {error.strerror}",
            hint="it is blocked on a file system that does not respond: end the process, or fix that "
            "file system, then try again",
            code="GPS-225",
        ) from error
    except OSError:
        return False
    layout = [(region.start, region.table.size) for region in process.regions]
    staged = [(region.start, region.size) for region in process.staged]
    return all(_is_covered(start, size, mapped) for start, size in (*layout, *staged))


def _is_covered(start: int, size: int, mapped: Sequence[regions.Mapping]) -> bool:
    """Whether all of the range is mapped, plain or staged; the kernel may list it in several pieces."""
    at = start
    ours = [m for m in mapped if m.is_plain or m.name.startswith(stage.FOLDER + "/")]
    for each in sorted(ours, key=lambda m: m.start):
        if each.start <= at < each.end:
            at = each.end
    return at >= start + size


def _give_thread_back(entry: Entry, process: JournalProcess) -> None:
    if process.thread is None:
        return
    held_threads.give_registers_back(entry.key, process.pid, process.thread)
