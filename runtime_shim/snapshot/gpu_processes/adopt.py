"""Checkpoints a suspended container: uses the memory that the driver delivered at the suspend."""

from __future__ import annotations

from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.gpu_processes import paused_container
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import Record
from gpusnap.runtime_shim.snapshot.gpu_processes.job import CheckpointJob
from gpusnap.runtime_shim.snapshot.memory.ram import SuspendedChunks
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension


def adopt(job: CheckpointJob, asleep: Suspension) -> None:
    """Use what a suspend took from the container, instead of taking it now.

    Raises Refused, GpusnapError.
    """
    entry = journal.read(job.container.key)
    assert entry is not None
    assert isinstance(job.pages, SuspendedChunks)
    pids = [each.pid for each in asleep.processes]
    job.paused = paused_container.reopen(entry, pids)
    if job.paused is None:
        raise Refused(
            f"the suspended container {job.container.id} was unpaused by another program, without its GPU "
            "memory",
            hint=f"gpusnap resume {asleep.name}",
            code="GPS-206",
        )
    job.paused.keep(pids)
    for each in asleep.processes:
        found = proc.process(each.pid)
        if found is None or found.start != each.start:
            raise GpusnapError(
                f"process {each.pid} of the suspended container {job.container.id} has exited",
                hint="its GPU memory is lost; restore the container from a checkpoint",
                code="GPS-026",
            )
        job.records[each.pid] = Record(found, each.inner_pid, each.gpus)
    job.transaction.undo("pausing the container again", job.paused.freeze)
    with job.transaction.step("adopt"):
        job.pages.adopt(entry)
        # They have a pending SIGSTOP after an earlier checkpoint by CRIU, and it is removed before the dump.
        # A frozen process cannot be traced for that.
        job.paused.hold(pids, timeout=job.settings.nvidia.lock_timeout)
