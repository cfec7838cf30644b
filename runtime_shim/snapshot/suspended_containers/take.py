"""Takes the GPU state of a container that its engine has paused."""

from __future__ import annotations

from gpusnap.oci.base.dataclass import replace
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.base.transaction import Transaction, hold_signals
from gpusnap.runtime_shim.gpu import sum_by_gpu
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.records.manifest import GpuRecord
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, Globals
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.gpu_processes import inherited_handles
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import find_users
from gpusnap.runtime_shim.snapshot.gpu_processes.job import CheckpointJob, suspend_all, thaw
from gpusnap.runtime_shim.snapshot.memory import ram
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, SuspendedProcess, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers.preflight import InitialState


def job_of(
    container: containers.Container,
    real: RealRuntime,
    settings: Settings,
    driver: Driver,
    transaction: Transaction,
    seen: InitialState,
) -> CheckpointJob:
    """Return the job for a container that is not dumped, and of which nothing is written to a disk."""
    call = CheckpointCall(
        container_id=container.id,
        globals=Globals(root=container.root or None),
        image_path=journal.FOLDER,
        leave_running=True,
    )
    pages = ram.create_staged(container.key, settings.memory)
    job = CheckpointJob(call, real, settings, driver, container, transaction, pages, on_disk=False)
    job.host, job.init, job.nodes = seen.host, seen.init, tuple(seen.nodes)
    return job


def take_gpu_state(job: CheckpointJob, begun: Suspension) -> Suspension:
    """Make the driver take the GPU state of a paused container; return its new record.

    `begun`: the record before. The job's transaction is committed at the end. Raises a GpusnapError; nothing
    is committed then.
    """
    transaction = job.transaction
    with transaction.step("look"):
        thaw(job)
        _check(job)
    suspend_all(job)
    done = _describe(job, begun)
    with hold_signals(), transaction.step("freeze"):
        assert job.paused is not None
        job.paused.freeze()
        if not done.is_alive:
            raise done.make_ended_error("suspended")
        suspensions.write(done)
        transaction.commit()
        assert isinstance(job.pages, Chunks)
        job.pages.leave()
        if job.guard is not None:
            job.guard.stop_watching()
    inherited_handles.say(job.cleared)
    return done


def _check(job: CheckpointJob) -> None:
    """Check what can refuse and can only be checked once the processes are stopped."""
    found = find_users(job.driver, job.processes(), job.held)
    preflight.check_states(found)
    if job.paused is None:
        raise GpusnapError(
            f"container {job.container.id} was paused, but its cgroup is not frozen",
            hint="try again; another program may have unpaused it",
            code="GPS-203",
        )
    if not found:
        raise Refused(f"no process of container {job.container.id} uses a GPU", code="GPS-206")
    assert job.host is not None
    preflight.refuse_shared(list(found), job.settings.nvidia, job.host)


def _describe(job: CheckpointJob, begun: Suspension) -> Suspension:
    """Return the record with what a resume needs to know of its GPUs and processes."""
    assert job.host is not None
    used = {node.gpu: 0 for node in job.nodes if node.gpu}
    used |= sum_by_gpu(record.gpus for record in job.records.values())
    return replace(
        begun,
        stage=Stage.SUSPENDED,
        driver_version=job.host.driver_version,
        gpus=tuple(
            GpuRecord(
                g.uuid, g.minor, g.index, g.model, g.compute_capability, g.memory_total, used[g.uuid], g.pci
            )
            for g in job.host.gpus
            if g.uuid in used
        ),
        processes=tuple(
            SuspendedProcess(pid, each.process.start, each.inner_pid, each.gpus)
            for pid, each in sorted(job.records.items())
        ),
    )
