"""A restore of a container whose checkpoint holds GPU state.

    plan → restore (the real runtime, CRIU) → driver restore → unlock

What can refuse does so before the runtime is called. After that a failure kills what was restored: there is
never half a container. The runtime runs as our child with descriptors 0 to 2 untouched, because CRIU gives
them to the container; its init becomes a child of whoever reaps for us (conmon, containerd's shim), as
without us. Only a restore that is killed leaves half a container; see recover_restore.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, field, replace
from functools import partial
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import replace_below
from gpusnap.runtime_shim.errors import (
    ContainerError,
    GpusnapError,
    ImageError,
    Refused,
    RuntimeFailed,
    reason,
    unforeseen,
)
from gpusnap.runtime_shim.gpu import find_driver
from gpusnap.runtime_shim.gpu.api.criu_plugin import Plugin
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.gpu.cdi import folders as cdi
from gpusnap.runtime_shim.gpu.nvidia.driver_files import Found, found
from gpusnap.runtime_shim.log import note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.records import manifest, manifest_file
from gpusnap.runtime_shim.runtime import bundle, container_key, loopback
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.command_line import RestoreCall
from gpusnap.runtime_shim.runtime.criu import config as criu_config
from gpusnap.runtime_shim.runtime.criu import external_mounts as criu_mounts
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.images import check as criu_images
from gpusnap.runtime_shim.runtime.criu.images import inventory, masked_paths, pycriu_package
from gpusnap.runtime_shim.runtime.criu.images.digests import Comparison
from gpusnap.runtime_shim.runtime.criu.images.overlay import view
from gpusnap.runtime_shim.runtime.criu.plugins import find as find_plugin
from gpusnap.runtime_shim.runtime.criu.plugins import injected
from gpusnap.runtime_shim.runtime.criu.run import Invoked, invoke, quiet
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot import (
    recover_restore,
    restore_record,
    restored_containers,
    restored_processes,
)
from gpusnap.runtime_shim.snapshot.devices import remap
from gpusnap.runtime_shim.snapshot.devices.choose import choose, driver_for, given, gpu_request
from gpusnap.runtime_shim.snapshot.devices.nvidia_hooks import rerun
from gpusnap.runtime_shim.snapshot.devices.remap import Remap
from gpusnap.runtime_shim.snapshot.devices.reservations import Room, claim
from gpusnap.runtime_shim.snapshot.foreground import Beside, pid_file
from gpusnap.runtime_shim.snapshot.memory import images_ahead, transfer
from gpusnap.runtime_shim.snapshot.memory.destination import StoreHome
from gpusnap.runtime_shim.snapshot.memory.images_ahead import Joined
from gpusnap.runtime_shim.snapshot.memory.prefetch import Arriving, Filling
from gpusnap.runtime_shim.snapshot.memory.source import Fetching, Rebuilding
from gpusnap.runtime_shim.snapshot.preflight import addresses, space
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.records import journal, volumes
from gpusnap.runtime_shim.snapshot.restore_record import Stage
from gpusnap.runtime_shim.snapshot.suspend import criu_plugin, driver_watch
from gpusnap.runtime_shim.snapshot.suspend.gpu_state import resume
from gpusnap.runtime_shim.stopping.stop import stop
from gpusnap.runtime_shim.transaction import (
    Transaction,
    held_signals,
    interruptible,
    or_recover,
    stop_if_asked,
)

TIMING = "gpusnap-restore.json"
"""In the work directory; as the manifest's timing."""
_WRITTEN = ("restore.log", "stats-restore")
"""By CRIU, in the work directory (criu/log.c, criu/stats.c)."""


@dataclass(slots=True)
class _Job:
    """One restore under way."""

    call: RestoreCall
    real: RealRuntime
    settings: Settings
    record: manifest.Manifest
    driver: Driver | None
    """None where no process has GPU state."""
    present: Driver | None
    """This host's first driver, whatever the checkpoint says of GPUs."""
    transaction: Transaction
    images: str
    """The image directory as the runtime is to read it."""
    held: ExitStack
    """Keeps every other gpusnap from the container until it runs."""
    room: ExitStack
    """Holds the GPUs' memory for us against other restores, until the driver has it."""
    cleanup: ExitStack
    remap: Remap | None = None
    filling: Filling | None = None
    """Memory that is not in CRIU's images, on its way."""
    compared: Comparison | None = None
    """CRIU's images, read by us while CRIU works."""
    fetching: Fetching | None = None
    """Where its chunks come from, if not from the image directory."""
    ahead: bool = False
    """CRIU's images that are in chunks came from the `gpusnap restore` that this is of."""
    entry: restore_record.Restore | None = None
    """What the journal says of this restore."""
    removed: bool = False
    """What was restored has been taken away again."""
    noting: threading.Lock = field(default_factory=threading.Lock)
    """For `_note` by several threads."""

    @property
    def key(self) -> str:
        """Of the container."""
        return container_key.key(
            container_key.root(self.call.globals.root, self.real.kind), self.call.container_id
        )

    @property
    def plugin(self) -> Plugin | None:
        """CRIU's plugin that brings the processes back, where that is not up to us."""
        return self.driver.plugin if self.driver is not None and self.record.processes else None


def restore(call: RestoreCall, real: RealRuntime, settings: Settings, config: dict[str, Any]) -> int:
    """Restore a container from an image that gpusnap made; returns the exit code of the real runtime.

    `config` is the bundle's config.json. The caller has the driver start meanwhile (gpu/opening.py).

    Raises a GpusnapError; no container is left then.
    """
    images = str(call.images(real.kind))
    found = find_driver()
    record = manifest_file.read(images)
    # Refuses where it is missing. Its import takes as long as to open a driver, and five times as long beside
    # the threads that bring the bytes.
    pycriu_package.load()
    driver = driver_for(record, criu_plugin.of_record(record, found))
    with (
        interruptible(),
        ExitStack() as held,
        ExitStack() as room,
        ExitStack() as cleanup,
        Transaction() as transaction,
    ):
        job = _Job(call, real, settings, record, driver, found, transaction, images, held, room, cleanup)
        with transaction.step("plan"):
            held.enter_context(journal.held(job.key))
            _absent(job)
            _nothing_waits(job)
            _begin(job, config)
            _plan(job, config)
        with transaction.step("volumes"):
            volumes.put_back(images, config)
        transaction.undo("removing the incomplete container", lambda: _kill(job))
        if call.detach:
            _restore_container(job)
            _finish(job)
            _commit(job)
            return 0
        return _in_foreground(job)


def _begin(job: _Job, config: dict[str, Any]) -> None:
    """Have it on file what to take away, should this be killed. There is no such container yet."""
    job.entry = restore_record.begun(job.call, job.real, job.record, config)
    job.transaction.undo("forgetting the restore", lambda: _forget(job))
    restore_record.write(job.entry)


def _note(job: _Job, **changed: Any) -> None:
    """Write down how far it has come. For any thread."""
    with job.noting:
        assert job.entry is not None
        entry = replace(job.entry, **changed)
        if entry != job.entry:
            restore_record.write(entry)
            job.entry = entry


def _config_changes(job: _Job, before: bytes, after: bytes) -> None:
    _note(job, **restore_record.changed(before, after))


def _drop_hook(job: _Job, container: containers.Container) -> None:
    """Take the hook for runc out of config.json; what recover compares the file with is on file before."""
    bundle.drop_hook(
        container.bundle,
        containers.bundle_config(container.bundle),
        noted=lambda _, after: _note(job, digest=restore_record.digest(after)),
    )


def _forget(job: _Job) -> None:
    """The last undo; what could not be removed is `gpusnap recover`'s."""
    if job.removed or (job.entry is not None and job.entry.stage is Stage.PREPARE):
        restore_record.forget(job.key)


def _commit(job: _Job) -> None:
    """The container runs, and nobody may take it away any more: what goes wrong from here on is only said."""
    job.transaction.commit()
    with job.transaction.step("let go"):
        if job.fetching is not None:
            _said(partial(_keep_fetched, job.fetching))
        _said(job.cleanup.close)
    assert job.entry is not None
    restore_record.came_up(job.entry)
    _said(partial(restore_record.forget, job.key))  # not before: who is killed until then leaves files
    _said(job.held.close)  # a checkpoint of it stages under the same name
    _say_timing(job)


def _said(let_go: Callable[[], object]) -> None:
    """An engine that is told of a failure takes the container away."""
    try:
        let_go()
    except Exception as error:
        found = error if isinstance(error, GpusnapError) else unforeseen(error)
        text = f"the container is restored, and what that took is not all removed: {found.sentence()}"
        note(text, code=found.code)


def _keep_fetched(fetching: Fetching) -> None:
    try:
        fetching.finish()
    except GpusnapError as error:
        note(f"what was fetched is not kept in the store: {error.sentence()}")


def _absent(job: _Job) -> None:
    """Refuse where there is such a container: the runtime would, and the undo must not remove that one."""
    command = restore_record.commands(job.call, job.real)
    try:
        found = containers.find(command, job.call.container_id)
    except ContainerError as error:
        if recover_restore.is_missing(error):
            return
        raise  # for all that we know it is there
    ends = recover_restore.deletion(command, found.id)
    if restored_containers.is_on_file(job.key, found.pid):
        ends = f"gpusnap recover {found.id}"
    raise Refused(
        f"there is a container {found.id} already, and it is {found.status}",
        hint="remove it, or restore under another name; if its engine does not know of it (the one that "
        f"restored it was killed): {ends}",
        code="GPS-508",
    )


def _nothing_waits(job: _Job) -> None:
    """Refuse where processes wait for memory that is staged under the same key: a restore would remove it."""
    entry = journal.read(job.key)
    waiting = [p.pid for p in entry.processes if proc.same(p.pid, p.start)] if entry is not None else []
    if waiting:
        container, pids = job.call.container_id, " ".join(map(str, waiting))
        raise Refused(
            f"a checkpoint of container {container} was cut off, and what it stopped still waits: {pids}",
            hint=f"gpusnap recover {container}",
            code="GPS-021",
        )


def _start_reading(job: _Job) -> Rebuilding | Joined | None:
    """Have the bytes come from now on; CRIU's images that are in chunks.

    Only CRIU waits for its images, and only the driver for the GPUs' memory.
    """
    memory = job.settings.memory
    images: Rebuilding | Joined | None = None
    if job.driver is not None and any(process.regions for process in job.record.processes):
        space.room_to_restore(job.record, memory)
    if job.record.pages == StoreHome.kind:
        fetching = job.fetching = job.cleanup.enter_context(
            Fetching.of(job.record, job.images, job.settings.store)
        )
        _note(job, layouts=fetching.folders)
        if job.record.files:
            where = fetching.scratch or scratch()
            folder = tempfile.mkdtemp(prefix=scratch_files.prefix("images"), dir=where)
            job.cleanup.callback(scratch_files.remove_folder, folder)
            rebuild = partial(_rebuild, job, fetching, folder)
            images = images_ahead.join(job.record.files, job.key, memory, rebuild) or rebuild()
            job.cleanup.callback(images.close)
    if job.driver is not None and any(process.regions for process in job.record.processes):
        filling = Filling(job.images, job.record, memory, job.key, job.fetching, images)
        job.filling = job.cleanup.enter_context(filling)
    return images


def _rebuild(job: _Job, fetching: Fetching, folder: str) -> Rebuilding:
    """Begin to put CRIU's images together, in RAM where there is room, else in the folder."""
    memory = job.settings.memory
    return Rebuilding(
        job.record.files,
        fetching,
        folder,
        threads=memory.threads,
        ceiling=transfer.ceiling(memory),
        stage=tmpfs.Stage(job.key) if space.room_for_images(job.record, memory) else None,
    )


def _plan(job: _Job, config: dict[str, Any]) -> None:
    """Choose the GPUs and prepare what the runtime will read. Nothing of the container is there yet."""
    replaced: dict[str, bytes] = {}
    coming = _start_reading(job)
    if job.driver is not None:
        job.driver.open()
        if job.plugin is not None:
            find_plugin(job.plugin, job.settings)
        # What other restores hold is in their claims or in the inventory only if it is read under the lock.
        room = job.room.enter_context(claim())
        host = job.driver.host()
        job.remap = remap.make(
            job.record,
            job.driver,
            host,
            _choose(job, host, room, given(job.driver, config)),
            config,
            known=lambda: _driver_files(host),
            keep_names=job.settings.keep_names,
        )
        replaced = remap.image(job.record, job.images, job.remap, config)
    criu_images.check(job.images, job.record.host.architecture, job.record.sizes)
    call = criu_config.with_flags(job.call, job.real, job.settings.criu)
    if call.tcp_established and not call.tcp_close and not inventory.has_closed_connections(job.images):
        addresses.check(job.images, config)
    preflight.network_tool(job.real, config)
    job.compared = job.cleanup.enter_context(contextlib.closing(Comparison(job.images, job.record.images)))
    _clear_links(job)
    elsewhere: dict[str, str] = {}
    if coming is not None:
        coming.result()
        elsewhere = dict(coming.paths)
        job.ahead = isinstance(coming, Joined) and coming.taken
    job.images = job.cleanup.enter_context(view(job.images, replaced, elsewhere, always=True))
    criu_mounts.checked(job.record.mounts, job.remap.mounts if job.remap is not None else None)
    edits = job.remap.edits if job.remap is not None else bundle.Edits()
    edits = replace(edits, hook=loopback.hook(job.real.kind, config))
    noted = partial(_config_changes, job)
    undo = bundle.prepare(str(job.call.bundle_dir()), config, edits, noted=noted)
    job.transaction.undo("putting config.json back", undo)


def _clear_links(job: _Job) -> None:
    """Take away links and FIFOs where CRIU and the runtime are to write files.

    An archive may have brought one there: they would follow the link as root, and wait for the FIFO. Raises
    ImageError.
    """
    for path in (*(os.path.join(_work_path(job), name) for name in _WRITTEN), job.call.pid_file):
        try:
            if path and stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFLNK, stat.S_IFIFO):
                os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ImageError(
                f"{path}, which the restore is to write, is no regular file: {reason(error)}",
                hint="do not restore from this checkpoint",
                code="GPS-604",
            ) from error


def _choose(job: _Job, host: Host, room: Room, only: Collection[str] | None) -> tuple[tuple[str, str], ...]:
    """The pairs of the plan, with their room claimed until `job.room` is closed. Raises Refused."""
    request = gpu_request(job.call.gpu_map)
    chosen = choose(job.record, host, request, job.settings.gpu_map, room.reserved, given=only)
    if chosen.refusal:
        raise chosen.refused()
    new = dict(chosen.pairs)
    room.take({new[gpu.uuid]: gpu.memory_used for gpu in job.record.gpus})
    return chosen.pairs


def _driver_files(host: Host) -> Found:
    return found(cdi.load(report=lambda error: note(str(error), code=error.code)), host.driver_version)


def _invoke(job: _Job, pid_file: str | None, started: Callable[[int], object] | None = None) -> Invoked:
    call = replace(job.call, pid_file=job.call.pid_file or pid_file)
    if job.images != str(call.images(job.real.kind)):
        # Both runtimes would put CRIU's log beside the images, and ours go away with the view.
        call = replace(
            call, work_path=call.work_path or str(call.images(job.real.kind)), image_path=job.images
        )
    call = criu_config.with_flags(call, job.real, job.settings.criu)
    images = str(job.call.images(job.real.kind))  # a view consists of links, which nobody follows below it
    call = replace(call, tcp_close=call.tcp_close or inventory.has_closed_connections(images))
    mounts = job.remap.mounts if job.remap else job.record.mounts
    mounts = (*mounts, *masked_paths.mounts(images, job.real.kind, call.globals.root))
    with injected(job.plugin, job.settings) as extra:
        text = criu_config.restore_text(extra.criu, mounts, drop_connections=call.tcp_close)
        return invoke(call, job.real, text, capture=False, started=started, environment=extra.environment)


def _work_path(job: _Job) -> str:
    """Where CRIU and the runtime write; an engine unpacks archives there."""
    return str(job.call.work() or job.call.images(job.real.kind))


def _criu_log(job: _Job) -> str:
    return os.path.join(_work_path(job), "restore.log")


def _error(job: _Job, done: Invoked) -> RuntimeFailed:
    said = done.because(_criu_log(job))
    return RuntimeFailed(
        f"{job.real.name} could not restore container {job.call.container_id}: {said}",
        hint="the checkpoint is unharmed",
        exit_code=done.code,
        code="GPS-502",
    )


def _restore_container(job: _Job) -> None:
    runtime = Beside(lambda started: _invoke(job, None, started), _criu_log(job))
    with job.transaction.step("restore"), held_signals():
        _note(job, stage=Stage.RESTORE)
        runtime.restored(None)
    done = runtime.result(job.real.name)
    if done.code != 0:
        raise _error(job, done)
    stop_if_asked()


def _finish(job: _Job) -> None:
    """What the runtime leaves undone: cgroups, and the GPUs."""
    container = containers.find(quiet(job.call, job.real), job.call.container_id)
    if not container.pid or not proc.running(container.pid):
        raise GpusnapError(
            f"container {container.id} ended as soon as it was restored",
            hint="its own log may say why",
            code="GPS-509",
        )
    init = proc.process(container.pid)
    _note(job, stage=Stage.SETTLE, init=(container.pid, init.start if init is not None else 0))
    _drop_hook(job, container)
    members = containers.processes(container.pid, container.id)
    containers.gather(container.pid, container.id, members)
    if job.compared is not None:
        with job.transaction.step("compare images"):
            job.compared.result()
    if job.driver is not None and job.remap is not None:
        _settle(job, container, job.remap, job.driver)
        _note(job, stage=Stage.GPUS, arriving=job.filling is not None and job.filling.arriving)
        _restore_gpus(job, job.driver, container, members)
    else:
        restored_processes.none_suspended(job.present, members)
    job.room.close()


def _say_timing(job: _Job) -> None:
    """Leave the steps' times beside the runtime's restore.log, for whoever wonders where they went."""
    document: dict[str, Any] = {
        "timing": [
            {"step": step.name, "start": round(step.start, 6), "seconds": round(step.seconds, 6)}
            for step in job.transaction.steps
        ]
    }
    if job.filling is not None:
        document["memory"] = asdict(job.filling.told)
    if job.fetching is not None:
        document["ahead"] = job.ahead
    with contextlib.suppress(OSError):
        replace_below(_work_path(job), TIMING, json.dumps(document).encode("ascii"), sync=False)


def _settle(job: _Job, container: containers.Container, found: Remap, driver: Driver) -> None:
    """What the restored namespaces need, while the GPU processes still stand."""
    with job.transaction.step("settle"):
        remap.settle(container.pid, found, driver)
        if found.moved_libraries and job.settings.hooks:
            rerun(containers.bundle_config(container.bundle), container, job.settings.hooks)


def _restore_gpus(
    job: _Job, driver: Driver, container: containers.Container, members: Sequence[proc.Process]
) -> None:
    """Give the restored processes their GPU memory back, and check that none was forgotten."""
    inner = containers.inner_pids(container.pid, members)
    by_inner = {inner[process.pid]: process for process in members}
    if driver.plugin is None:  # those of a plugin run since then, and may be done
        restored_processes.all_there(job.record.processes, by_inner, job.images)
    suspended = [by_inner[each.pid] for each in job.record.processes if each.pid in by_inner]
    others = [process for process in members if process not in suspended]
    if driver.plugin is not None:
        criu_plugin.came_back(driver, suspended)
        restored_processes.none_forgotten(driver, others)
        return
    restored_processes.none_forgotten(driver, others)  # first: no other one has gone on
    gone_on = _fill(job, driver, container, suspended, by_inner)
    criu_plugin.came_back(driver, restored_processes.without_ended(suspended, gone_on, container.pid))


def _fill(
    job: _Job,
    driver: Driver,
    container: containers.Container,
    suspended: Sequence[proc.Process],
    by_inner: Mapping[int, proc.Process],
) -> set[int]:
    """Put the memory of processes that stand in place, and have the driver restore them; who went on."""
    pids = [process.pid for process in suspended]
    assert job.remap is not None
    pairs = {
        by_inner[wanted.pid].pid: job.remap.of(uuid for uuid, _ in wanted.gpus)
        for wanted in job.record.processes
        if wanted.pid in by_inner
    }
    gone_on: set[int] = set()
    with job.transaction.step("fill"):
        # CRIU restores them stopped; should it ever not, they must be all the same.
        stop(pids, timeout=job.settings.nvidia.lock_timeout)
        if job.filling is not None:
            job.filling.deliver({inner: process.pid for inner, process in by_inner.items()})
    with job.transaction.step("driver restore"):
        right = partial(_right, job, gone_on)
        try:
            resume(driver, pids, Arriving(job.filling), pairs=pairs, right=right)
        except GpuError:
            # The driver's words for memory that is not what it was tell of the GPU, which is not to blame.
            if job.filling is not None:
                job.filling.right()
            raise
        if job.filling is not None:
            job.filling.right()  # where it failed, the processes were ended, and none of them is missed
        for text in driver_watch.take_notes():
            job.transaction.note(text)
    return gone_on


def _right(job: _Job, gone_on: set[int], pid: int) -> None:
    """Before a process goes on: its memory is what it was, and its own."""
    if job.filling is not None:
        job.filling.right()
        _note(job, arriving=False)
        transfer.own(job.key, pid)
    gone_on.add(pid)


def _kill(job: _Job) -> None:
    assert job.entry is not None
    with or_recover(job.call.container_id):
        recover_restore.remove(job.entry)
    job.removed = True


def _in_foreground(job: _Job) -> int:
    """Without --detach the runtime stays until the container ends; the GPUs come back meanwhile."""
    with pid_file(job.call) as path:
        runtime = Beside(lambda started: _invoke(job, path, started), _criu_log(job))
        with job.transaction.step("restore"), held_signals():
            _note(job, stage=Stage.RESTORE, pid_file=os.path.abspath(path))
            restored = runtime.restored(path)
        if restored:
            stop_if_asked()
            _finish(job)
            _commit(job)
        done = runtime.stand_for(job.real.name)
    if done.code != 0 and not job.transaction.committed:
        raise _error(job, done)
    return done.code
