"""A checkpoint of a container that uses GPUs.

    inspect → prepare → lock → driver checkpoint → pages → write, dump [→ resume → write] → sync → manifest

Until CRIU has dumped the container, each step is undone if a later one fails: the GPU processes get their
memory back and run on, and written data is removed. After the dump without --leave-running there is no way
back, because the container is gone. So the GPU memory and the manifest are on disk by then, and the manifest
only has to be renamed. CRIU dumps while gpusnap writes the GPU memory, and then waits for it
(runtime/criu/held_dump.py). If it cannot be made to wait, the memory is written first.

A container that is already paused (containerd does this) is thawed for the driver's work, with its processes
stopped, and paused again for the dump and afterwards; see snapshot/gpu_processes/paused_container.py. A
running container is paused for the dump if necessary; see snapshot/gpu_processes/dump_pause.py.

For a suspended container (snapshot/suspended_containers/), the driver has already taken the GPU state.
gpusnap dumps the container as it is, writes its memory from where it is kept, and does not use the GPU. The
container stays suspended.

A container that Podman removes when it stops (--rm) may be left stopped after its dump until its checkpoint
is stored; see snapshot/left_stopped.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gpusnap.oci.base.dataclass import asdict, replace
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import (
    GpusnapError,
    ImageError,
    Interrupted,
    Refused,
    RuntimeFailed,
    make_unforeseen,
)
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.progress import reporter
from gpusnap.runtime_shim.base.transaction import (
    Transaction,
    allow_signals,
    hold_signals,
    make_interruptible,
    stop_if_asked,
)
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest, manifest_file
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, render
from gpusnap.runtime_shim.runtime.criu import config as criu_config
from gpusnap.runtime_shim.runtime.criu import descendants, held_dump, scratch_files
from gpusnap.runtime_shim.runtime.criu import external_mounts as criu_mounts
from gpusnap.runtime_shim.runtime.criu.held_dump import HeldDump
from gpusnap.runtime_shim.runtime.criu.images import control_groups, dev, digests
from gpusnap.runtime_shim.runtime.criu.images import directory as image
from gpusnap.runtime_shim.runtime.criu.plugins import inject
from gpusnap.runtime_shim.runtime.criu.run import Invocation, invoke
from gpusnap.runtime_shim.runtime.criu.version import find_named
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.runtime.podman import caller, dev_shm
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot import left_stopped
from gpusnap.runtime_shim.snapshot.describe import describe
from gpusnap.runtime_shim.snapshot.devices import bind_mounted_nodes, device_access, remap
from gpusnap.runtime_shim.snapshot.gpu_processes import inherited_handles, plugin_checkpoint
from gpusnap.runtime_shim.snapshot.gpu_processes.adopt import adopt
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import find_idle_holders, find_users
from gpusnap.runtime_shim.snapshot.gpu_processes.job import (
    CheckpointJob,
    check_all_suspended,
    make_starting_error,
    newcomers,
    pause_for_dump,
    resume_processes,
    suspend_all,
    thaw,
)
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.memory.handover import Recipient
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.memory.ram import SuspendedChunks
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.preflight import shared_gpus
from gpusnap.runtime_shim.snapshot.records import journal, volumes, written_files
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.recovery import network_lock

# Seconds between two looks whether a CRIU still waits.
_LOOK = 0.1


def checkpoint(
    call: CheckpointCall,
    real: RealRuntime,
    settings: Settings,
    driver: Driver,
    container: containers.Container,
    asleep: Suspension | None = None,
    recipient: Recipient | None = None,
    remover: tuple[int, int] | None = None,
) -> None:
    """Checkpoint a running container that was given GPUs, whether or not any process uses one now.

    For a suspended container, `asleep` is its record. `recipient`: to whom memory in a store is handed over.
    `remover`: PID and start time of the process for which it is left stopped after its dump.
    Raises GpusnapError: the container is then in the same state as before, unless the error says otherwise.
    """
    with make_interruptible():
        destination = _choose_destination(call, settings, container, recipient)
        ahead = not call.leave_running or remover is not None
        pages = _choose_pages(
            call, settings, driver, container, destination, asleep=asleep is not None, ahead=ahead
        )
        job = CheckpointJob(
            call, real, settings, driver, container, Transaction(), pages, asleep=asleep, remover=remover
        )
        job.podman = caller.find_podman(str(call.images()), container)
        with _name_whole_failure(job), _hold_dump(job) as held, job.transaction as transaction:
            with transaction.step("inspect"):
                caller.check_podman(job.podman)
                config = _inspect(job)
            draft = Draft(str(call.images()), sync=settings.memory.sync)
            with transaction.step("prepare"):
                _prepare(job, draft, config)
                if settings.memory.sync and job.runs_on:
                    written_files.prepare(container.pid)
                elif settings.memory.sync:
                    job.synced = written_files.sync_ahead(container.pid, job.processes)
            if asleep is None:
                suspend_all(job)
            else:
                adopt(job, asleep)
            # The dump cannot be undone once it has succeeded, so a signal must not interrupt what follows.
            with hold_signals():
                _dump(job, draft, held)
                if remover is None:  # otherwise it can be undone, as long as the container exists
                    transaction.commit()
                _finish_image(job, draft)
                if remover is not None:
                    journal.hand_over(container.key, remover)
                    transaction.commit()
            inherited_handles.say(job.cleared)


@contextlib.contextmanager
def _name_whole_failure(job: CheckpointJob) -> Iterator[None]:
    """Add a hint to an error if the container is as before and nothing of the checkpoint is left."""
    try:
        yield
    except Interrupted:
        raise
    except GpusnapError as error:
        undone = not job.transaction.committed and not job.transaction.failed
        as_before = (job.asleep is not None or job.paused is None) and _is_alive(job)
        if undone and as_before and not isinstance(error, Refused) and _describe_state(job) not in error.hint:
            error.add_hint(f"nothing of this checkpoint is left, and the container {_describe_state(job)}")
        raise


def _choose_pages(
    call: CheckpointCall,
    settings: Settings,
    driver: Driver,
    container: containers.Container,
    destination: StoreDestination | None,
    *,
    asleep: bool,
    ahead: bool,
) -> Pages:
    """Choose how the GPU memory is saved."""
    image_path, memory = str(call.images()), settings.memory
    if asleep:
        return SuspendedChunks(image_path, container.key, memory, container.bundle, destination=destination)
    if driver.plugin is not None:
        return plugin_checkpoint.make_pages(image_path, container, memory, destination)
    if memory.pages == Pages.name:
        return Pages(image_path, container.key, memory.threads)
    return Chunks(image_path, container.key, memory, container.bundle, destination=destination, ahead=ahead)


def _choose_destination(
    call: CheckpointCall,
    settings: Settings,
    container: containers.Container,
    recipient: Recipient | None,
) -> StoreDestination | None:
    """Return this host's store if the chunks go there, else None."""
    if settings.memory.pages != StoreDestination.kind:
        return None
    store, images = settings.store, str(call.images())
    return StoreDestination(
        store.path, images, container.id, settings.memory, read_rate=store.read_rate, recipient=recipient
    )


def _inspect(job: CheckpointJob) -> dict[str, Any]:
    """Check the container, and collect what the dump needs to know; return its config.json.

    Nothing is changed.
    """
    job.driver.open()
    job.host = job.driver.host()
    job.init = proc.process(job.container.pid)
    preflight.check_criu_library(job.real)
    preflight.check_pycriu()
    preflight.refuse_options(job.call, job.container)
    caller.refuse_to_remove(job.call, job.container)
    preflight.refuse_adopted(job.container)
    preflight.refuse_neighbours(job.call, job.container)
    config = containers.bundle_config(job.container.bundle)
    preflight.check_network_tool(job.real, config)
    job.nodes = job.driver.nodes(job.container.pid)
    job.mounts, job.masters = criu_mounts.list_undeclared(job.container.pid, config)
    criu_mounts.check_mounts(job.mounts)  # a restore would refuse these, so refuse them now
    job.volumes = volumes.find_to_copy(config, job.container.bundle, runs_on=job.runs_on)
    members = job.processes()
    of_pod = tuple(each for each in job.volumes if each.kind is volumes.Kind.POD)
    volumes.check(volumes.list_open(members, of_pod), job.settings.criu.ghost_limit)
    _refuse_unknown_devices(job, config)
    # Refuse now what the runtime does not accept; the dump would overwrite an earlier checkpoint.
    job.call = criu_config.with_flags(job.call, job.real, job.settings.criu)
    render(job.call, job.real)
    preflight.refuse_sockets(members, job.real, _connections(job))
    preflight.refuse_rings(members)
    if not any("external" in option for option in job.settings.criu.options):
        preflight.refuse_files_of_host(job.container.pid)
    plugin_checkpoint.refuse_impossible(job.driver, job.container, members, job.settings)
    if job.asleep is not None:
        if not job.call.leave_running:
            raise Refused(
                f"container {job.container.id} is suspended, and a checkpoint leaves it suspended",
                hint="give --leave-running, and remove the container afterwards",
                code="GPS-206",
            )
        return config  # the rest was checked before it was suspended; a frozen process cannot answer
    thaw(job)
    if job.remover is not None:
        left_stopped.check(job, _connections(job))
    preflight.refuse_leftover(lambda: inherited_handles.find_strangers(job.driver, job.processes(), job.held))
    if job.driver.plugin is not None:
        plugin_checkpoint.refuse_inherited(
            job.driver.plugin, lambda: find_idle_holders(job.driver, job.processes())
        )
    members = job.processes()  # those of now: a process may have started CUDA meanwhile
    found = find_users(job.driver, members, job.held)
    preflight.check_states(found)
    preflight.check_complete(job.container, members, list(found))
    preflight.refuse_shared(list(found), job.settings.nvidia, job.host)
    if job.call.leave_running and job.remover is None:
        shared_gpus.refuse_ranks_beside_others(job.driver, members, list(found), job.settings.nvidia)
    if job.driver.plugin is None and found:
        allow = partial(device_access.update, job.real, job.container)
        device_access.check(job.container.pid, job.container.id, job.nodes, allow)
    if left_out := preflight.list_sessions(job.container, members):
        names = ", ".join(f"{each.pid} ({each.comm})" for each in left_out)
        note(
            f"processes that exec started in the container are not in its checkpoint: process {names}",
            code="GPS-212",
        )
    return config


def _connections(job: CheckpointJob) -> criu_config.Connections:
    return criu_config.connections(job.call, job.real, job.settings.criu, job.container.annotations)


def _refuse_unknown_devices(job: CheckpointJob, config: dict[str, Any]) -> None:
    """Refuse a container with a device in /dev that a restore would not create, as its config lacks it."""
    known = {
        *dev.DEFAULT,
        *remap.iterate_given(config),
        *(("c", n.major, n.minor, n.path) for n in job.nodes),
    }
    for device in bind_mounted_nodes.device_nodes(job.container.pid):
        if device not in known:
            _, major, minor, path = device
            raise Refused(
                f"the container has a device {path} ({major}:{minor}) that is not in its configuration, "
                "so a restore would not create it",
                hint="remove it from the container, or add it with --device",
            )


def _prepare(job: CheckpointJob, draft: Draft, config: Mapping[str, Any]) -> None:
    """Prepare the image directory. An earlier checkpoint in it stays complete until the dump begins."""
    dev_shm.prepare(config, job.container.bundle, runs_on=job.runs_on)
    image.make(job.image_path)
    job.transaction.undo("removing the incomplete image", lambda: _discard(job))
    draft.begin()
    job.pages.prepare()


@contextlib.contextmanager
def _hold_dump(job: CheckpointJob) -> Iterator[HeldDump | None]:
    """Open what makes CRIU wait for the GPU memory; None if nothing is to be written before the dump ends."""
    wanted = not job.runs_on and job.asleep is None and isinstance(job.pages, Chunks)
    found = held_dump.hold(find_named(job.call, job.real)) if wanted else None
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def _write(job: CheckpointJob, check: Callable[[], None] = lambda: None) -> None:
    with job.transaction.step("write"):
        job.pages.write_durably(check)


def _dump(job: CheckpointJob, draft: Draft, held: HeldDump | None) -> None:
    """Make the real runtime dump the container. Repeat this if a process began to use a GPU meanwhile.

    If the container ends, its GPU memory is written before: a full disk must not cost the container.
    """
    attempt = 0
    while True:
        stop_if_asked()
        waits = held is not None and not job.runs_on and job.pages.records() is None and held.works
        if not job.runs_on and not waits:
            with allow_signals():
                _write(job)
        check_all_suspended(job)
        preflight.refuse_neighbours(job.call, job.container)  # one may have started meanwhile
        with job.transaction.step("write manifest"):
            job.record = _manifest(job)
            draft.prepare(job.record if job.pages.records() is not None else None)
            job.earlier = image.note_earlier(job.image_path)
            journal.write_document(job.container.key, journal.IMAGES, asdict(job.earlier))
            # The inventory of an earlier checkpoint would make a failed dump look successful.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(job.image_path, manifest.INVENTORY))
        with pause_for_dump(job) as pause:
            if job.volumes:
                with job.transaction.step("volumes"):
                    opened = volumes.list_open(job.processes(), job.volumes)
                    volumes.take(job.image_path, volumes.leave_out(opened, job.settings.criu.ghost_limit))
            else:
                volumes.take(job.image_path, ())  # removes those of an earlier checkpoint in the same place
            if not job.runs_on and not waits:
                _sync_written_files(job, stopped=True)
            caller.check_podman(job.podman)
            with job.transaction.step("dump"):
                failure = _write_and_dump(job, draft, held) if held and waits else _call_runtime(job)
            if failure is None and job.remover is not None:
                left_stopped.keep_paused(job, pause)
        if failure is None:
            return
        if job.stuck is not None:
            raise job.stuck from failure
        stop_if_asked()
        _clean(job)
        attempt += 1
        # In a paused container no process has run, so none began to use a GPU. CRIU's plugin handles those.
        final = job.paused is not None or job.driver.plugin is not None
        if final or not newcomers(job):
            raise failure
        if attempt > job.settings.retries:
            raise make_starting_error(job) from failure
        suspend_all(job)


def _write_and_dump(job: CheckpointJob, draft: Draft, held: HeldDump) -> GpusnapError | None:
    """Write the GPU memory while the real runtime dumps the container; return the error if there is no dump.

    Raises what prevented the writing: the container has not ended then.
    """

    def write() -> None:
        with allow_signals():
            _write(job, held.check)
            held.wait_until_written()
            # CRIU holds all processes, and the disk has no more of the GPU memory to write.
            _sync_written_files(job, stopped=True)
            # Once more, for the chunks of CRIU's images: an error of the disk must not cost the container.
            job.pages.write_durably(held.check)
        assert job.record is not None
        draft.prepare(_with_regions(job, job.record))
        caller.check_podman(job.podman)
        if job.remover is not None:
            left_stopped.check_remover(job.remover)
        stop_if_asked()

    def write_images() -> None:
        assert job.earlier is not None
        job.pages.write_images(held.check, but=image.list_earlier(job.image_path, job.earlier))

    failure, error = held.run(lambda: _call_runtime(job, held), write, write_images)
    if failure is None:
        # Also if that CRIU has not asked. The rest is written now: an error of the writing comes again.
        return None
    if error is not None:
        raise error
    return held.error or failure


def _call_runtime(job: CheckpointJob, held: HeldDump | None = None) -> GpusnapError | None:
    """Call the real runtime once; return the error if there is no dump.

    `held`: what CRIU is to ask before it ends the processes.
    """
    plugin = job.driver.plugin if job.records else None
    with inject(plugin, job.settings, processes=len(job.records)) as extra:
        text = criu_config.dump_text(
            extra.criu,
            job.mounts,
            masters=job.masters,
            skip_in_flight=extra.criu.skip_in_flight or job.call.tcp_skip_in_flight,
            drop_connections=_connections(job) is criu_config.Connections.DROPPED,
            script=held.script if held is not None else "",
        )
        environment = {**extra.environment, **(held.environment if held is not None else {})}
        with descendants.continue_stopped():
            done = invoke(job.call, job.real, text, capture=True, environment=environment)
            if done.code != 0:
                # A runtime that was killed leaves its CRIU, which still holds the processes, and freezes a
                # paused container again at its end (criu/seize.c, freezer_restore_state).
                _let_criu_end(job, held)
    if done.code != 0 and job.init is not None:
        network_lock.remove_left_lock(job.init.pid, job.container.key)
    dumped = _has(job, manifest.INVENTORY)
    refused = held is not None and held.is_refused
    if done.code != 0 and dumped and not refused and not _is_alive(job):
        # CRIU kills the processes only when all of them are on disk. Whatever failed afterwards, the images
        # are all that is left of the container, and must not be removed.
        note(f"{_dump_error(job, done)}, but only after the dump; the checkpoint is complete", code="GPS-504")
        return None
    if done.code != 0:
        return _dump_error(job, done)
    if not dumped:
        return ImageError(
            f"{job.real.name} reported success, but wrote no {manifest.INVENTORY} to {job.image_path}",
            code="GPS-503",
        )
    return None


def _let_criu_end(job: CheckpointJob, held: HeldDump | None) -> None:
    """Wait for the CRIU of a runtime that was killed; as long as it takes, if it waits for the GPU memory."""
    owner = state_files.owner()
    while held is not None and held.waits and scratch_files.children(owner, job.image_path):
        time.sleep(_LOOK)
    scratch_files.let_end(owner, job.container.id, image=job.image_path)


def _describe_state(job: CheckpointJob) -> str:
    """Return what a container does after a checkpoint that changed nothing."""
    return "continues to run" if job.asleep is None else "stays suspended"


def _is_alive(job: CheckpointJob) -> bool:
    """Whether the container's init is still the same process, and is not ending.

    CRIU does not wait for its end.
    """
    init = job.init
    return init is not None and proc.is_still_running(init.pid, init.start)


def _dump_error(job: CheckpointJob, done: Invocation) -> RuntimeFailed:
    said = done.explain(os.path.join(job.call.work() or job.image_path, "dump.log"))
    return RuntimeFailed(
        f"{job.real.name} could not dump container {job.container.id}: {said}",
        hint=f"the container {_describe_state(job)}",
        exit_code=done.code,
        code="GPS-501",
    )


def _sync_written_files(job: CheckpointJob, *, stopped: bool) -> None:
    """Sync what the processes have written to files that the checkpoint does not contain."""
    if job.settings.memory.sync:
        with job.transaction.step("files"):
            written_files.sync(job.container.pid, job.processes, job.synced, stopped=stopped)


def _finish_image(job: CheckpointJob, draft: Draft) -> None:
    """After the dump: resume the container if it shall run on, make the image durable, write its manifest."""
    assert job.record is not None
    failure = _resume(job) if job.runs_on and job.asleep is None else None
    try:
        if job.runs_on:
            if failure is None:  # else `gpusnap recover` may try again
                job.pages.record_places(())
            _write(job)
            _sync_written_files(job, stopped=False)
        with job.transaction.step("sync"):
            assert job.earlier is not None
            image.drop_earlier(job.image_path, job.earlier)
            files = job.pages.commit(kept=job.runs_on)
            control_groups.thaw(job.image_path)
            images = _sync(job, but=[each.name for each in files])
        record = replace(_finish_manifest(job, job.record), files=files, images=images)
        if job.remover is not None:
            left_stopped.check_remover(job.remover)
        with job.transaction.step("name"):
            job.pages.finish(record, partial(draft.finish, record))
    except Exception as error:
        if job.remover is not None:
            raise  # everything is undone
        # Of any kind: the container has ended or is still stopped, and the user must be told.
        known = error if isinstance(error, GpusnapError) else make_unforeseen(error)
        _not_written(job, known, failure)
        if known is error:
            raise
        raise known from error
    if failure is not None:
        failure.add_hint(
            f"the checkpoint in {job.image_path} is complete; run gpusnap recover {job.container.id} to "
            "resume the processes that are still stopped, or kill the container and restore it from this "
            f"checkpoint (Podman: podman container restore {job.container.id[:12]})",
        )
        raise failure
    if job.remover is not None:
        return  # the files in RAM and the journal bring it back, if its checkpoint cannot be stored
    job.pages.close()
    journal.drop(job.container.key, journal.IMAGES)
    if job.asleep is not None:
        return
    journal.remove(job.container.key)
    if job.paused is not None:
        job.paused.forget()


def _resume(job: CheckpointJob) -> GpusnapError | None:
    """Let the processes run on after the dump; return the error if some of them do not."""
    with job.transaction.step("resume"):
        failure = resume_processes(job)
    if failure is None:
        reporter.note_resumed()
    return failure


def _finish_manifest(job: CheckpointJob, record: manifest.Manifest) -> manifest.Manifest:
    """Complete the manifest with what is known since the dump; the processes may have ended by now."""
    return replace(
        _with_regions(job, record),
        timing=tuple(job.transaction.steps),
        written=job.pages.written,
        peak_memory=proc.peak_memory(),
    )


def _with_regions(job: CheckpointJob, record: manifest.Manifest) -> manifest.Manifest:
    """Return the manifest with the places of the GPU memory, which may have been written since."""
    regions = job.pages.records() or {}
    processes = tuple(
        replace(process, regions=regions.get(pid, ()))
        for process, (pid, _) in zip(record.processes, sorted(job.records.items()), strict=True)
    )
    return replace(record, processes=processes)


def _not_written(job: CheckpointJob, error: GpusnapError, failure: GpusnapError | None) -> None:
    """Handle a failure after the dump: discard the image if the container runs on, else keep all of it."""
    if failure is not None:
        error.add_hint(failure.sentence())
    elif job.runs_on:
        try:
            job.suspended = False
            _discard(job)
            error.add_hint(f"the container {_describe_state(job)}")
        except GpusnapError as other:
            error.add_hint(other.sentence())
    else:
        error.add_hint(f"the container is dumped: run gpusnap recover {job.container.id} to try again")


def _manifest(job: CheckpointJob) -> manifest.Manifest:
    assert job.host is not None
    return describe(
        job.container,
        job.real,
        job.host,
        list(job.records.values()),
        nodes=job.nodes,
        mounts=job.mounts,
        regions=job.pages.records() or {},
        pages=job.pages.name,
        neutralised=inherited_handles.records(job.cleared, job.container.pid),
        timing=job.transaction.steps,
        plugin=job.driver.plugin.name if job.driver.plugin is not None else "",
    )


def _has(job: CheckpointJob, *names: str) -> bool:
    """Whether a file is in the image directory. If this cannot be determined, True: then nothing is lost."""
    try:
        return manifest_file.has(job.image_path, *names)
    except ImageError as error:
        note(error.sentence())
        return True


def _clean(job: CheckpointJob) -> None:
    """Remove what a failed dump wrote, so that nothing looks like a checkpoint."""
    job.pages.forget_images()
    Draft(job.image_path).discard()
    if job.earlier is not None:
        image.clean(job.image_path, job.earlier)
    journal.drop(job.container.key, journal.IMAGES)


def _discard(job: CheckpointJob) -> None:
    """Discard a failed checkpoint, except for what processes still need."""
    whole = _has(job, manifest.FOLDER, manifest.NAME)
    # An earlier checkpoint in the same place may use the same chunks.
    job.pages.discard(layout=not whole, suspended=job.suspended)
    # The stage is removed by now: without the journal, gpusnap could not find it.
    if not job.suspended and job.asleep is None:
        journal.remove(job.container.key)
    _clean(job)


def _sync(job: CheckpointJob, *, but: Collection[str]) -> tuple[manifest.ImageRecord, ...]:
    """Sync the images except `but`; return their digests, computed while the disk works."""
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(digests.take, job.image_path, but=but)
        if job.settings.memory.sync:
            image.sync(job.image_path, but=but, failed=partial(journal.note_unsynced, job.container.key))
        return taken.result()
