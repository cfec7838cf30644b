"""The part of a restore after the processes are back, and stopped: their devices, then their GPU memory.

The processes are checked against the manifest: none is missing, and none is unlisted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.records.manifest import GpuProcess
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.devices import remap
from gpusnap.runtime_shim.snapshot.devices.nvidia_hooks import rerun
from gpusnap.runtime_shim.snapshot.devices.remap import Remap
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls, driver_watch
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import map_needs, resume
from gpusnap.runtime_shim.snapshot.loading.prefetch import PrefetchedPages
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.restoring.job import RestoreJob
from gpusnap.runtime_shim.stopping.stop import stop


def settle(job: RestoreJob, container: containers.Container, found: Remap, driver: Driver) -> None:
    """Prepare the restored namespaces while the GPU processes are still stopped."""
    with job.transaction.step("settle"):
        remap.settle(container.pid, found, driver)
        if found.moved_libraries and job.settings.hooks:
            rerun(containers.bundle_config(container.bundle), container, job.settings.hooks)


def restore_gpus(
    job: RestoreJob, driver: Driver, container: containers.Container, members: Sequence[proc.Process]
) -> None:
    """Restore the GPU memory of the restored processes, and check that none was forgotten."""
    inner = containers.inner_pids(container.pid, members)
    by_inner = {inner[process.pid]: process for process in members}
    if driver.plugin is None:  # with a plugin they already run, and may have ended
        _check_all_there(job.record.processes, by_inner, job.images)
    suspended = [by_inner[each.pid] for each in job.record.processes if each.pid in by_inner]
    others = [process for process in members if process not in suspended]
    if driver.plugin is not None:
        _check_came_back(driver, suspended)
        _check_none_forgotten(driver, others)
        return
    _check_none_forgotten(driver, others)  # first: no other process has continued
    gone_on = _fill(job, driver, container, suspended, by_inner)
    _check_came_back(driver, _drop_ended(suspended, gone_on, container.pid))


def _fill(
    job: RestoreJob,
    driver: Driver,
    container: containers.Container,
    suspended: Sequence[proc.Process],
    by_inner: Mapping[int, proc.Process],
) -> set[int]:
    """Map the memory of stopped processes, and make the driver restore them; return those that continued."""
    pids = [process.pid for process in suspended]
    assert job.remap is not None
    recorded = {by_inner[each.pid].pid: each for each in job.record.processes if each.pid in by_inner}
    pairs = {pid: job.remap.list_pairs(uuid for uuid, _ in each.gpus) for pid, each in recorded.items()}
    needs = map_needs({pid: each.gpus for pid, each in recorded.items()}, job.remap.pairs)
    gone_on: set[int] = set()
    with job.transaction.step("fill"):
        # CRIU restores them stopped. They must be stopped even if it once does not.
        stop(pids, timeout=job.settings.nvidia.lock_timeout)
        if job.prefetch is not None:
            job.prefetch.deliver({inner: process.pid for inner, process in by_inner.items()})
    with job.transaction.step("driver restore"):
        right = partial(_check_process, job, gone_on)
        try:
            resume(driver, pids, PrefetchedPages(job.prefetch), pairs=pairs, needs=needs, right=right)
        except GpuError:
            # If memory is wrong, the driver's message is about the GPU, which is not the cause.
            if job.prefetch is not None:
                job.prefetch.wait_checked()
            raise
        if job.prefetch is not None:
            job.prefetch.wait_checked()  # if it failed, it has killed the processes
        for text in driver_watch.take_notes():
            job.transaction.note(text)
    return gone_on


def _check_process(job: RestoreJob, gone_on: set[int], pid: int) -> None:
    """Check, before a process continues, that its memory is right, and its own."""
    if job.prefetch is not None:
        job.prefetch.wait_checked()
        job.save_progress(arriving=False)
        transfer.replace_staged_memory(job.key, pid)
    gone_on.add(pid)


def _check_all_there(wanted: Iterable[GpuProcess], there: Collection[int], images: str) -> None:
    """Check that the processes of the manifest are `there`, by PID in the container.

    A process that CRIU restored from `images` and that has ended since is only reported. Raises GpusnapError
    for one that was never in the dump.
    """
    for process in wanted:
        if process.pid in there:
            continue
        if not manifest_file.has(images, f"core-{process.pid}.img"):
            raise GpusnapError(
                f"process {process.pid} ({process.name}) of the checkpoint was not restored: it is not in "
                "CRIU's images",
                hint="it was not dumped, or the checkpoint was modified; restore another one",
            )
        note(
            f"process {process.pid} ({process.name}) exited before its GPU state could be restored; the "
            "rest of the container continues to run",
            code="GPS-511",
        )


def _drop_ended(processes: Sequence[proc.Process], gone_on: Collection[int], init: int) -> list[proc.Process]:
    """Return the processes that still exist; those that ended after they continued are only reported.

    Without its init there is no container.
    """
    left = []
    for process in processes:
        if process.pid == init or process.pid not in gone_on or proc.is_running(process.pid):
            left.append(process)
            continue
        note(
            f"process {process.pid} ({process.comm}) exited as soon as it ran again; the rest of the "
            "container continues to run",
            code="GPS-511",
        )
    return left


def check_none_suspended(driver: Driver | None, processes: Iterable[proc.Process]) -> None:
    """Like `_check_none_forgotten`, if the manifest has no GPU. `driver`: this host's, if any."""
    if driver is None:
        return
    try:
        driver.open()
    except GpuError:
        return  # a driver without the checkpoint API has suspended none
    _check_none_forgotten(driver, processes)


def _check_none_forgotten(driver: Driver, processes: Iterable[proc.Process]) -> None:
    """Check that no process is suspended that the manifest does not list. Raises GpusnapError."""
    for process in processes:
        native = driver.plugin is None
        state = driver_calls.state(driver, process.pid) if native else driver.state(process.pid)
        if state is not None and state is not ProcessState.RUNNING:
            raise GpusnapError(
                f"process {process.pid} ({process.comm}) was restored with its GPU state "
                f"{state.name.lower()}, but the checkpoint's manifest does not list it",
                hint="the checkpoint was modified after it was made; restore another one",
                code="GPS-604",
            )


def _check_came_back(driver: Driver, processes: Iterable[proc.Process]) -> None:
    """Check that the restored processes have their GPU state again. Raises GpusnapError.

    If a plugin restored it, CRIU has already checked that, and the processes run. One may have ended, or have
    closed its GPU, but none may still be suspended.
    """
    for process in processes:
        state = driver.state(process.pid) if proc.is_running(process.pid) else None
        if state is None and driver.plugin is not None:
            continue
        if state is not ProcessState.RUNNING:
            raise GpusnapError(
                f"process {process.pid} ({process.comm}) was not restored with its GPU state",
                hint="its own log may say why",
                code="GPS-509",
            )
