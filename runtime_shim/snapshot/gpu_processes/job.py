"""The GPU processes of one checkpoint: finds, stops, suspends and resumes them; and pauses the container."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, make_unforeseen
from gpusnap.runtime_shim.base.log import say
from gpusnap.runtime_shim.base.transaction import Transaction, name_recover
from gpusnap.runtime_shim.gpu import holders, sum_by_gpu
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host, Node
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall
from gpusnap.runtime_shim.runtime.criu.images import directory as image
from gpusnap.runtime_shim.runtime.criu.run import make_quiet_command
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_watch, inherited_handles, paused_container
from gpusnap.runtime_shim.snapshot.gpu_processes.dump_pause import DumpPause
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import Record, find_users, record, resume, suspend
from gpusnap.runtime_shim.snapshot.gpu_processes.lock import lock
from gpusnap.runtime_shim.snapshot.memory import chunk_cache, transfer
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal, reservations
from gpusnap.runtime_shim.snapshot.records.reservations import RAM, STEP, GpuClaim, claim
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.records.volumes import Volume
from gpusnap.runtime_shim.stopping.stop import Guard, drop_stops, stop


@dataclass(slots=True)
class CheckpointJob:
    """One checkpoint in progress."""

    call: CheckpointCall
    real: RealRuntime
    settings: Settings
    driver: Driver
    container: containers.Container
    transaction: Transaction
    pages: Pages
    records: dict[int, Record] = field(default_factory=dict)
    """By PID, for every process that has been suspended, or is being suspended."""
    cleared: tuple[inherited_handles.ClearedProcess, ...] = ()
    """Processes whose inherited GPU files were replaced."""
    mounts: tuple[manifest.DriverMount, ...] = ()
    masters: bool = False
    volumes: tuple[Volume, ...] = ()
    """The volumes of its pod, whose open files go into the checkpoint."""
    nodes: tuple[Node, ...] = ()
    """The GPUs' device nodes in its /dev."""
    host: Host | None = None
    init: proc.Process | None = None
    """The container's init at the beginning."""
    record: manifest.Manifest | None = None
    """As of the last dump. Afterwards the container, and its PID namespace, may be gone."""
    suspended: bool = False
    """Whether processes may be stopped, or may wait for their memory."""
    paused: paused_container.PausedContainer | None = None
    """The pause, if somebody has paused the container."""
    stuck: GpusnapError | None = None
    """The error that prevented the end of gpusnap's own pause."""
    guard: Guard | None = None
    """Keeps the suspended processes stopped."""
    earlier: image.EarlierImages | None = None
    """The images in the same place before CRIU began to write. That loses an earlier checkpoint."""
    asleep: Suspension | None = None
    """Set if the container is suspended, and stays so: its GPU state is where the journal says."""
    remover: tuple[int, int] | None = None
    """PID and start time of the process for which it is left stopped after its dump."""
    podman: int = 0
    """The PID of the Podman that ordered the checkpoint; 0 if somebody else did, -1 if it has ended."""
    synced: float = 0.0
    """Since when its processes may have written what is not on disk (records/written_files.py)."""
    on_disk: bool = True
    """Whether it is written to a disk; a suspended container only goes to RAM."""
    end_early_claim: Callable[[], object] = lambda: None
    """Ends an earlier claim on the RAM for its processes, once that is claimed here; may be called again."""

    @property
    def image_path(self) -> str:
        return str(self.call.images())

    @property
    def runs_on(self) -> bool:
        """Whether the container continues after its dump, if it is not suspended."""
        return self.call.leave_running and self.remover is None

    @property
    def held(self) -> Collection[int]:
        """The processes of a paused container that gpusnap stopped."""
        return self.paused.held if self.paused is not None else ()

    def processes(self) -> tuple[proc.Process, ...]:
        return containers.processes(self.container.pid, self.container.id)


def thaw(job: CheckpointJob) -> None:
    """Stop the processes of a paused container, and thaw it, because frozen ones do not answer the driver."""
    if job.driver.plugin is not None:
        return  # CRIU thaws it if necessary
    if job.paused is None:
        job.paused = paused_container.find(job.container, job.real.kind)
        if job.paused is None:
            return
        job.transaction.undo("pausing the container again", job.paused.freeze)
    with job.transaction.step("hold"):
        pids = holders(job.driver, [process.pid for process in job.processes()])
        job.paused.hold(pids, timeout=job.settings.nvidia.lock_timeout)


def _freeze(job: CheckpointJob) -> None:
    """Freeze again what `thaw` has thawed."""
    if job.paused is not None:
        with job.transaction.step("freeze"):
            job.paused.freeze()


@contextmanager
def pause_for_dump(job: CheckpointJob) -> Iterator[DumpPause | None]:
    """Pause the container while the block dumps it, at a moment when CRIU can dump it; or freeze it again.

    Not with a plugin of CRIU, because the plugin needs running processes. Yields gpusnap's own pause.
    """
    if job.driver.plugin is None:
        drop_stops(job.records)
    if job.paused is not None:
        _leave_alone(job)
        _freeze(job)
        job.paused.check_nobody_waits()
    if job.paused is not None or job.driver.plugin is not None:
        yield None
        return
    pause = DumpPause(job.container, make_quiet_command(job.call, job.real))
    try:
        if job.remover is not None or pause.is_wanted():
            with job.transaction.step("pause container"):
                _begin_pause(job, pause)
        if job.remover is not None:
            pause.check_paused()
        _leave_alone(job)  # no process in the container can continue another one any more
        yield pause
    finally:
        try:
            if not pause.stays:
                pause.let_go_on()
        except (GpusnapError, OSError) as error:
            # Not raised: the dump may be done, and then it cannot be undone.
            job.stuck = GpusnapError(
                f"container {job.container.id} is still paused: {error}",
                hint=f"gpusnap recover {job.container.id}",
                code="GPS-027",
            )
            say(job.stuck.sentence())


def _begin_pause(job: CheckpointJob, pause: DumpPause) -> None:
    """Pause the container at a moment when every suspended process is stopped."""
    timeout = job.settings.nvidia.lock_timeout
    deadline = time.monotonic() + timeout
    pause.begin(timeout=timeout)
    while not all(
        proc.is_still(pid) and not proc.stop_pending(pid) for pid in job.records if proc.is_running(pid)
    ):
        # Somebody continued one at the last moment, and it is frozen while it runs or has another SIGSTOP.
        pause.let_go_on()
        check_all_suspended(job)
        drop_stops(job.records)
        if time.monotonic() > deadline:
            raise GpusnapError(
                "processes in the container keep stopping and continuing its GPU processes while they are "
                "suspended",
                hint="stop the program that sends them SIGSTOP and SIGCONT (such as cpulimit), then "
                "try again",
            )
        pause.begin(timeout=timeout)


def suspend_all(job: CheckpointJob) -> None:
    """Lock and checkpoint every GPU process; those that begin to use a GPU meanwhile in another round."""
    if job.driver.plugin is not None:
        _suspend_these(job, newcomers(job))  # CRIU asks its plugin about processes that come later
        return
    if not job.suspended:
        job.suspended = True
        job.transaction.undo("resuming the GPU processes", lambda: _undo_suspend(job))
    rounds = 0
    done = set(job.records)
    while fresh := newcomers(job):
        if rounds > job.settings.retries:
            raise make_starting_error(job)
        _suspend_these(job, fresh)
        rounds += 1
    if set(job.records) != done:
        with job.transaction.step("pages"):
            job.pages.take_out(list(job.records))
        for pid in set(job.records) - done:
            job.records[pid] = _limit_estimate(job.records[pid], job.pages.measure_taken(pid))


def make_starting_error(job: CheckpointJob) -> Refused:
    """The error if processes begin to use a GPU again and again."""
    return Refused(
        f"processes of container {job.container.id} keep starting to use a GPU",
        hint="try again when there is less activity",
    )


def _limit_estimate(item: Record, taken: int | None) -> Record:
    """Where the driver did not report its memory, what it took out is the most that a restore needs.

    0 is no bound there: the estimate of several processes is in the record of the first one.
    """
    if taken is None:
        return item
    bounds = ((uuid, min(used or taken, taken) if uuid in item.unknown else used) for uuid, used in item.gpus)
    return replace(item, gpus=tuple(bounds))


def _watch_over(job: CheckpointJob) -> None:
    """Keep the suspended processes stopped, whoever sends them a SIGCONT."""
    _leave_alone(job)
    job.guard = Guard(job.records)


def _leave_alone(job: CheckpointJob) -> None:
    if job.guard is not None:
        job.guard.stop_watching()
        job.guard = None


def _undo_suspend(job: CheckpointJob) -> None:
    with name_recover(job.container.id):
        resume_all(job)
    job.suspended = False


def resume_all(job: CheckpointJob) -> None:
    """Let the GPU processes run again; a paused container is thawed for that, and must be frozen later."""
    if job.stuck is not None:
        raise job.stuck  # the driver cannot work on a frozen process
    if job.driver.plugin is not None:
        return
    if job.paused is not None:
        thaw(job)
    let_go = job.paused.let_go if job.paused is not None else None
    _leave_alone(job)
    # Only those that were stopped. After a failed lock, all of them run, and must continue to run.
    job.guard = Guard([pid for pid in job.records if proc.is_still(pid)])
    needs, right = _list_needs(job), partial(_check_process, job)
    try:
        resume(job.driver, list(job.records), job.pages, needs=needs, right=right, let_go=let_go)
    finally:
        _leave_alone(job)
        _note_calls(job)


def _list_needs(job: CheckpointJob) -> dict[int, list[tuple[str, int]]]:
    """Return what the processes used, by PID, as far as the driver reported it."""
    return {
        pid: [(uuid, used) for uuid, used in each.gpus if uuid not in each.unknown]
        for pid, each in job.records.items()
    }


def _check_process(job: CheckpointJob, pid: int) -> None:
    """Check, before a process continues, that its memory is its own, and no longer keep it stopped."""
    transfer.replace_staged_memory(job.container.key, pid)
    reservations.release(job.container.key, pid)
    if job.guard is not None:
        job.guard.release(pid)


def newcomers(job: CheckpointJob) -> list[proc.Process]:
    """Return the GPU processes that have not been suspended.

    Raises Refused for a process that a dump would omit: `podman exec` may start one at any moment.
    """
    members = job.processes()
    found = list(find_users(job.driver, [each for each in members if each.pid not in job.records], job.held))
    if found:
        preflight.check_complete(job.container, members, found)
    return found


def check_all_suspended(job: CheckpointJob) -> None:
    """Check that every GPU process is stopped, and that none has ended, because the manifest lists them.

    A process that somebody else continued is stopped again. Raises GpusnapError.
    """
    if job.asleep is not None:
        return  # in a frozen cgroup, so none of them runs
    if job.driver.plugin is not None:  # they run, and may end, until CRIU stops them
        job.records = {pid: item for pid, item in job.records.items() if proc.is_running(pid)}
        return
    for pid, item in job.records.items():
        if not proc.is_same(pid, item.process.start):
            raise GpusnapError(
                f"GPU process {pid} ({item.process.comm}) exited before it could be dumped",
                hint="checkpoint the container again",
            )
    stop(job.records, timeout=job.settings.nvidia.lock_timeout)
    _watch_over(job)


def _suspend_these(job: CheckpointJob, fresh: Sequence[proc.Process]) -> None:
    """Suspend these processes, all at the same time."""
    assert job.host is not None
    inner = containers.inner_pids(job.container.pid, fresh)
    records = {r.process.pid: r for r in record(job.driver, job.host, fresh, inner)}
    all_bytes = sum(r.used for r in records.values()) + sum(r.used for r in job.records.values())
    used = {pid: r.used for pid, r in records.items()}
    plugin = job.driver.plugin
    filling: _Filling | None = None
    with ExitStack() as room:
        if plugin is None:
            # Two that check at the same time would both count the same free memory.
            claimed = room.enter_context(claim())
            others = claimed.reserved.get(RAM, 0)
            space.check_memory(used, job.container.pid, job.settings.memory, reserved=others)
            need = space.measure_in_processes(used)
            job.end_early_claim()
            claimed.record({RAM: need})
            filling = _Filling(claimed, need, job.pages)
        elif plugin.into_memory:
            space.check_memory(used, job.container.pid)
        _take_off(job, records, all_bytes, filling)


def _reserve(job: CheckpointJob, pid: int) -> None:
    """Keep other gpusnaps from giving away what a process used, until it has it again or has ended.

    One that is suspended does without: its GPUs are for others.
    """
    if job.on_disk:
        reservations.keep_for(job.container.key, pid, sum_by_gpu([_list_needs(job)[pid]]))


class _Filling:
    """The RAM that was claimed for processes, and that they fill while the driver suspends them."""

    def __init__(self, claimed: GpuClaim, need: int, pages: Pages) -> None:
        self._claimed, self._need, self._pages = claimed, need, pages
        self._before: dict[int, int] = {}
        self._told = 0

    def begin(self, pids: Iterable[int]) -> None:
        """The processes are stopped: what they use from now on was claimed."""
        self._before = {pid: proc.memory(pid) for pid in pids}

    def look(self) -> None:
        """Claim no longer what they have filled, because it is not free any more."""
        with suppress(GpusnapError):  # then all of it still counts
            filled = sum(
                # The driver's writing makes what was populated for it resident; it is not free before.
                max(proc.memory(pid) - before, self._pages.measure_populated(pid))
                for pid, before in self._before.items()
            )
            if filled - self._told >= STEP:
                self._told = filled
                self._claimed.change({RAM: max(0, self._need - filled)})


def _take_off(
    job: CheckpointJob, records: Mapping[int, Record], all_bytes: int, filling: _Filling | None
) -> None:
    """Make the driver take the GPU state of these. `all_bytes`: of GPU memory, with what it took before.

    `filling`: None with a plugin of CRIU.
    """
    if job.on_disk:
        space.check_disk(
            job.image_path,
            all_bytes,
            job.processes(),
            lambda need: _make_room(job, need),
            place=job.pages.place,
        )
    job.records |= records
    if filling is None:
        return  # CRIU calls its plugin for this
    job.pages.record_places(list(job.records))
    journal.note_needs(job.container.key, _list_needs(job))
    timeout = job.settings.nvidia.lock_timeout
    if job.paused is not None:
        job.paused.keep(records)
    with job.transaction.step("lock"):
        told = job.transaction.note
        for pid in lock(job.driver, records, timeout=timeout, held=job.held, tell=told):
            told(f"process {pid} was paused within a CUDA call, and ran until it ended")
    with job.transaction.step("driver checkpoint"):

        def standing() -> None:
            _stop_processes(job, timeout)
            filling.begin(records)

        try:
            suspend(
                job.driver,
                records,
                job.pages,
                timeout=timeout,
                standing=standing,
                taken=partial(_reserve, job),
                held=job.held,
                look=filling.look,
            )
        finally:
            _note_calls(job)
        _watch_over(job)


def _note_calls(job: CheckpointJob) -> None:
    for text in driver_watch.take_notes():
        job.transaction.note(text)


def _make_room(job: CheckpointJob, need: int) -> None:
    chunk_cache.make_room(job.settings.memory, job.image_path, need, container=job.container.id)


def _stop_processes(job: CheckpointJob, timeout: float) -> None:
    """Stop the GPU processes; nothing has been taken from them yet.

    They may have begun to share memory since the first check. What their children inherited is replaced now,
    while both can still be compared.
    """
    assert job.host is not None
    members = [item.process for item in job.records.values()]
    preflight.refuse_shared(members, job.settings.nvidia, job.host)
    job.cleared += inherited_handles.clear(
        job.driver, job.container.key, job.records, job.processes, timeout=timeout, held=job.held
    )


def resume_processes(job: CheckpointJob) -> GpusnapError | None:
    """Return the error that keeps processes from continuing; a container that was paused is so again."""
    try:
        failure = _catch_error(partial(resume_all, job))
    finally:
        frozen_again = _catch_error(partial(_freeze, job))
    return failure or frozen_again


def _catch_error(action: Callable[[], object]) -> GpusnapError | None:
    try:
        action()
    except GpusnapError as error:
        return error
    except Exception as error:  # any kind: the following steps must be done in any case
        return make_unforeseen(error)
    return None
