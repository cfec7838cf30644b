"""The part of a restore after the processes are back, and stopped: their devices, then their GPU memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot import restored_processes
from gpusnap.runtime_shim.snapshot.devices import remap
from gpusnap.runtime_shim.snapshot.devices.nvidia_hooks import rerun
from gpusnap.runtime_shim.snapshot.devices.remap import Remap
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_watch
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import resume
from gpusnap.runtime_shim.snapshot.loading.prefetch import PrefetchedPages
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.restore_job import RestoreJob
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
        restored_processes.check_all_there(job.record.processes, by_inner, job.images)
    suspended = [by_inner[each.pid] for each in job.record.processes if each.pid in by_inner]
    others = [process for process in members if process not in suspended]
    if driver.plugin is not None:
        restored_processes.check_came_back(driver, suspended)
        restored_processes.check_none_forgotten(driver, others)
        return
    restored_processes.check_none_forgotten(driver, others)  # first: no other process has continued
    gone_on = _fill(job, driver, container, suspended, by_inner)
    restored_processes.check_came_back(
        driver, restored_processes.drop_ended(suspended, gone_on, container.pid)
    )


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
    pairs = {
        by_inner[wanted.pid].pid: job.remap.list_pairs(uuid for uuid, _ in wanted.gpus)
        for wanted in job.record.processes
        if wanted.pid in by_inner
    }
    gone_on: set[int] = set()
    with job.transaction.step("fill"):
        # CRIU restores them stopped. They must be stopped even if it once does not.
        stop(pids, timeout=job.settings.nvidia.lock_timeout)
        if job.prefetch is not None:
            job.prefetch.deliver({inner: process.pid for inner, process in by_inner.items()})
    with job.transaction.step("driver restore"):
        right = partial(_check_process, job, gone_on)
        try:
            resume(driver, pids, PrefetchedPages(job.prefetch), pairs=pairs, right=right)
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
