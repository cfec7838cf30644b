"""Take a running container off its GPUs: the driver puts their memory into files in RAM.

    inspect → pause (the engine) → hold → lock → driver checkpoint → pages → freeze

The container stays, paused as its engine has it, so that its name, network and files are as they were. Within
the frozen cgroup its GPU processes are stopped too: whoever thaws it without gpusnap lets run what needs no
GPU, and nothing that misses its memory. Until the last step each is undone when a later one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim import question_process, state_files
from gpusnap.runtime_shim.errors import GpusnapError, Refused
from gpusnap.runtime_shim.gpu import holders
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest import GpuRecord
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, Globals
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.memory import ram
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, SuspendedProcess, Suspension
from gpusnap.runtime_shim.snapshot.suspend import inherited_handles
from gpusnap.runtime_shim.snapshot.suspend.gpu_state import users
from gpusnap.runtime_shim.snapshot.suspend.job import Job, suspend_all, thaw
from gpusnap.runtime_shim.transaction import Step, Transaction, held_signals, interruptible, or_recover


@dataclass(frozen=True, slots=True)
class Engine:
    """Who runs the container: its name there, and how it is paused and let go on."""

    kind: str
    """podman, or containerd."""
    name: str
    namespace: str
    pause: Callable[[], object]
    go_on: Callable[[], object]


def suspend(
    container: containers.Container,
    real: RealRuntime,
    settings: Settings,
    driver: Driver,
    engine: Engine,
    *,
    room: Callable[[int], object] = int,
) -> tuple[Suspension, Sequence[Step]]:
    """Suspend a running container that uses GPUs; what is on file of it then, and how long each step took.

    `room` is told how many bytes of RAM it will take, before anything is changed, and may refuse. Raises a
    GpusnapError; the container then runs on, unless the error says otherwise.
    """
    question_process.start()
    with interruptible(), journal.held(container.key), Transaction() as transaction:
        pages = ram.staged_only(container.key, settings.memory)
        call = CheckpointCall(
            container_id=container.id,
            globals=Globals(root=container.root or None),
            image_path=journal.FOLDER,
            leave_running=True,
        )
        job = Job(call, real, settings, driver, container, transaction, pages, on_disk=False)
        with transaction.step("inspect"):
            room(_memory(job, _inspect(job, engine.name)))
        begun = _begun(job, engine)
        transaction.undo("forgetting the suspend", lambda: _forget(job))
        suspensions.write(begun)
        transaction.undo("letting the container go on", lambda: _go_on(job, begun, engine))
        with transaction.step("pause"):
            engine.pause()
        with transaction.step("look"):
            thaw(job)
            _look(job)
        suspend_all(job)
        done = _described(job, begun)
        with held_signals(), transaction.step("freeze"):
            assert job.paused is not None
            job.paused.freeze()
            if not done.lives:
                raise done.ended("suspended")
            suspensions.write(done)
            transaction.commit()
            pages.leave()
            if job.guard is not None:
                job.guard.end()
        inherited_handles.say(job.cleared)
        return done, tuple(transaction.steps)


def _inspect(job: Job, name: str) -> Sequence[int]:
    """What can refuse while the container runs. Nothing is changed. `name`: as its engine calls it.

    Returns the PIDs of the processes that may use a GPU.
    """
    container = job.container
    if suspensions.read(container.key) is not None:
        raise Refused(f"container {name} is suspended already", code="GPS-206")
    if journal.read(container.key) is not None:
        raise Refused(
            f"a gpusnap was killed while it was at work on container {container.id}",
            hint=f"gpusnap recover {container.id}",
            code="GPS-021",
        )
    if job.driver.plugin is not None:
        raise Refused(
            f"the GPUs of container {name} can be suspended only within a checkpoint, by CRIU's "
            f"plugin {job.driver.plugin.name}",
            hint="gpusnap checkpoint writes it to the store and frees its GPUs",
            code="GPS-206",
        )
    if not containers.freezable(container):
        raise Refused(
            f"container {name} has no cgroup (version 2) of its own, by which it could be paused",
            hint="run it with cgroups, on a host with cgroup v2 (systemd.unified_cgroup_hierarchy=1)",
            code="GPS-203",
        )
    ram.check_place()
    job.driver.open()
    job.host = job.driver.host()
    job.init = proc.process(container.pid)
    job.nodes = job.driver.nodes(container.pid)
    pids = holders(job.driver, [process.pid for process in job.processes()])
    if not pids:
        raise Refused(
            f"no process of container {name} uses a GPU",
            hint="podman pause or ctr task pause pauses it as it is",
            code="GPS-206",
        )
    return pids


def _memory(job: Job, pids: Sequence[int]) -> int:
    """Bytes of GPU memory that processes use now."""
    used = job.driver.memory_used(pids)
    return sum(sum(of.values()) for of in used.values())


def _look(job: Job) -> None:
    """What can refuse once the processes stand, and can be asked."""
    found = users(job.driver, job.processes(), job.held)
    preflight.states(found)
    if job.paused is None:
        raise GpusnapError(
            f"container {job.container.id} was paused, and its cgroup is not frozen",
            hint="try again; somebody may have unpaused it",
            code="GPS-203",
        )
    if not found:
        raise Refused(f"no process of container {job.container.id} uses a GPU", code="GPS-206")
    assert job.host is not None
    preflight.shared(list(found), job.settings.nvidia, job.host)


def _begun(job: Job, engine: Engine) -> Suspension:
    init = job.init
    return Suspension(
        key=job.container.key,
        name=engine.name,
        engine=engine.kind,
        namespace=engine.namespace,
        stage=Stage.SUSPENDING,
        owner=state_files.owner(),
        init=(init.pid, init.start) if init is not None else (0, 0),
        since=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        runtime=job.real.kind,
    )


def _described(job: Job, begun: Suspension) -> Suspension:
    """What a resume has to know of its GPUs and processes."""
    assert job.host is not None
    used: dict[str, int] = {node.gpu: 0 for node in job.nodes if node.gpu}
    for record in job.records.values():
        for uuid, size in record.gpus:
            used[uuid] = used.get(uuid, 0) + size
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


def _go_on(job: Job, begun: Suspension, engine: Engine) -> None:
    """Have the engine let the container go on, which it may not do before it is on file."""
    try:
        suspensions.write(replace(begun, stage=Stage.UNDONE))
    except GpusnapError:
        # A full /run, say. Without the file it may as well; where GPU state is missing, recover needs it.
        if job.suspended:
            raise
        suspensions.drop(begun.key)
    try:
        with or_recover(begun.container):
            engine.go_on()
    except GpusnapError as error:
        job.stuck = error
        raise


def _forget(job: Job) -> None:
    """The last undo: all runs again, so that nothing is to be recovered."""
    if job.suspended:
        return  # what could not be undone is `gpusnap recover`'s
    assert isinstance(job.pages, Chunks)
    job.pages.close()
    journal.remove(job.container.key)
    if job.stuck is None:  # else `gpusnap recover` is to have the engine let it go on
        suspensions.drop(job.container.key)
