"""A checkpoint of a container that uses GPUs.

    inspect → prepare → lock → driver checkpoint → pages → [write →] dump [→ resume → write] → sync → manifest

Until CRIU has dumped the container each step is undone when a later one fails: the GPU processes get their
memory back and run on, and what was written is taken away. After the dump there is no way back without
--leave-running, because the container is gone; so the manifest is on disk by then, and only has to be
renamed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from runtime_shim import container as containers
from runtime_shim import image, inside, journal, keep, leftover, manifest, preflight, proc, remap, transfer
from runtime_shim.argv import CheckpointCall, render
from runtime_shim.chunk_home import StoreHome
from runtime_shim.criu import config as criu_config
from runtime_shim.criu import dev
from runtime_shim.criu import mounts as criu_mounts
from runtime_shim.description import describe
from runtime_shim.draft import Draft
from runtime_shim.errors import GpusnapError, ImageError, Refused, RuntimeFailed
from runtime_shim.gpu.driver import Driver, Host
from runtime_shim.gpu.nodes import Node
from runtime_shim.gpu.together import at_once
from runtime_shim.invoke import Invoked, invoke
from runtime_shim.log import note
from runtime_shim.pages import Chunks
from runtime_shim.real import RealRuntime
from runtime_shim.settings import Settings
from runtime_shim.suspension import InCriu, Pages, Record, record, resume, suspend, users
from runtime_shim.transaction import Transaction, held_signals, interruptible, stop_if_asked

__all__ = ["checkpoint"]


@dataclass(slots=True)
class _Job:
    """One checkpoint under way."""

    call: CheckpointCall
    real: RealRuntime
    settings: Settings
    driver: Driver
    container: containers.Container
    transaction: Transaction
    pages: Pages
    records: dict[int, Record] = field(default_factory=dict)
    """By PID, of every process that has been, or is being, suspended."""
    cleared: tuple[leftover.Cleared, ...] = ()
    """Processes that held GPU files which they had inherited."""
    mounts: tuple[manifest.DriverMount, ...] = ()
    masters: bool = False
    nodes: tuple[Node, ...] = ()
    """The GPUs' device nodes in its /dev."""
    host: Host | None = None
    init: proc.Process | None = None
    """The container's init, as it was at first."""
    record: manifest.Manifest | None = None
    """As of the last dump: afterwards the container, and its PID namespace, may be gone."""
    suspended: bool = False
    """Whether processes may stand, or wait for their memory."""
    dumping: int | None = None
    """When CRIU began to write (st_mtime_ns); an earlier checkpoint in the same place is no more since."""

    @property
    def image_path(self) -> str:
        return str(self.call.images())

    def processes(self) -> tuple[proc.Process, ...]:
        return containers.processes(self.container.pid, self.container.id)


def checkpoint(
    call: CheckpointCall,
    real: RealRuntime,
    settings: Settings,
    driver: Driver,
    container: containers.Container,
) -> None:
    """Checkpoint a running container that was given GPUs; whether any process uses one now does not matter.

    Raises a GpusnapError; the container then runs on as if nobody had asked, unless the error says otherwise.
    """
    with interruptible(), Transaction() as transaction:
        job = _Job(call, real, settings, driver, container, transaction, _pages(call, settings, container))
        with transaction.step("inspect"):
            _inspect(job)
        draft = Draft(str(call.images()), sync=settings.memory.sync)
        with transaction.step("prepare"):
            _prepare(job, draft)
        _suspend(job)
        if not call.leave_running:
            _write(job)  # before the dump: a disk that fills up must not cost the container
        # Once the dump has succeeded there is no way back, and no moment at which a signal may stop us.
        with held_signals():
            _dump(job, draft)
            transaction.commit()
            _complete(job, draft)
        leftover.say(job.cleared)


def _pages(call: CheckpointCall, settings: Settings, container: containers.Container) -> Pages:
    """The way that the GPUs' memory takes."""
    image_path, memory = str(call.images()), settings.memory
    if memory.pages == InCriu.name:
        return InCriu(image_path, container.id, memory.threads)
    home = None
    if memory.pages == StoreHome.kind:
        home = StoreHome(settings.store.path, image_path, container.id, memory)
    return Chunks(image_path, container.id, memory, container.bundle, home=home, ahead=not call.leave_running)


def _inspect(job: _Job) -> None:
    """Pre-flight, and what the dump has to know of the container. Nothing is changed."""
    job.driver.open()
    job.host = job.driver.host()
    job.init = proc.process(job.container.pid)
    preflight.call(job.call, job.container)
    config = containers.bundle_config(job.container.bundle)
    job.nodes = job.driver.nodes(job.container.pid)
    job.mounts, job.masters = criu_mounts.undeclared(job.container.pid, config)
    criu_mounts.checked(job.mounts)  # what a restore would refuse is refused now
    _known_devices(job, config)
    # What the runtime does not take is refused now; the dump would overwrite an earlier checkpoint.
    job.call = criu_config.with_flags(job.call, job.real, job.settings.criu)
    render(job.call, job.real)
    preflight.leftover(lambda: leftover.strangers(job.driver, job.processes()))
    found = users(job.driver, job.processes())
    preflight.states(found)
    preflight.nccl(list(found), job.settings.nvidia)


def _known_devices(job: _Job, config: dict[str, Any]) -> None:
    """Refuse where /dev holds a device that a restore would not bring back, as nothing gives it."""
    known = {*dev.DEFAULT, *remap.given(config), *(("c", n.major, n.minor, n.path) for n in job.nodes)}
    for device in inside.device_nodes(job.container.pid):
        if device not in known:
            _, major, minor, path = device
            raise Refused(
                f"the container has a device {path} ({major}:{minor}) that its configuration does not give "
                "it, and a restore would not bring it back",
                hint="remove it from the container, or give it with --device",
            )


def _prepare(job: _Job, draft: Draft) -> None:
    """Make the image directory ours. An earlier checkpoint in it stays whole until the dump begins."""
    image.make(job.image_path)
    job.transaction.undo("removing the incomplete image", lambda: _discard(job))
    draft.begin()
    job.pages.prepare()


def _suspend(job: _Job) -> None:
    """Lock and checkpoint every GPU process; those that begin to use a GPU meanwhile in another round."""
    if not job.suspended:
        job.suspended = True
        job.transaction.undo("resuming the GPU processes", lambda: _undo_suspend(job))
    rounds = 0
    done = set(job.records)
    while fresh := _newcomers(job):
        if rounds > job.settings.retries:
            raise Refused(
                f"processes of container {job.container.id} keep starting to use a GPU",
                hint="try again when it is quieter",
            )
        _suspend_these(job, fresh)
        rounds += 1
    if set(job.records) != done:
        with job.transaction.step("pages"):
            job.pages.take(list(job.records))


def _write(job: _Job) -> None:
    with job.transaction.step("write"):
        job.pages.ready()


def _undo_suspend(job: _Job) -> None:
    _resume(job)
    job.suspended = False


def _resume(job: _Job) -> None:
    own = partial(transfer.own, job.container.id)
    resume(job.driver, list(job.records), job.pages, right=own)


def _newcomers(job: _Job) -> list[proc.Process]:
    """The GPU processes that have not been suspended."""
    return list(users(job.driver, (p for p in job.processes() if p.pid not in job.records)))


def _all_suspended(job: _Job) -> None:
    """A process that has ended, or was let go on by somebody else, must not get into the manifest."""
    for pid, item in job.records.items():
        if not (proc.running(pid) and proc.still(pid)):
            raise GpusnapError(
                f"GPU process {pid} ({item.process.comm}) ended or was let go on before it could be dumped",
                hint="checkpoint the container again",
            )


def _suspend_these(job: _Job, fresh: Sequence[proc.Process]) -> None:
    """Suspend these processes, all at once."""
    assert job.host is not None
    inner = containers.inner_pids(job.container.pid, fresh)
    records = {r.process.pid: r for r in record(job.driver, job.host, fresh, inner)}
    all_bytes = sum(r.used for r in records.values()) + sum(r.used for r in job.records.values())
    used = {pid: r.used for pid, r in records.items()}
    preflight.room_in_memory(used, job.container.pid, job.settings.memory)
    preflight.room_on_disk(
        job.image_path,
        all_bytes,
        job.processes(),
        lambda need: _make_room(job, need),
        place=job.pages.place,
    )
    job.records |= records
    job.pages.note(list(job.records))
    timeout = job.settings.nvidia.lock_timeout
    with job.transaction.step("lock"):
        at_once(lambda pid: job.driver.lock(pid, timeout=timeout), records).raise_first()
    with job.transaction.step("driver checkpoint"):
        suspend(job.driver, records, job.pages, timeout=timeout, standing=lambda: _clear(job, timeout))
        for pid, why in job.pages.notes().items():
            if pid in records:
                job.transaction.note(f"process {pid}: {why}")


def _make_room(job: _Job, need: int) -> None:
    keep.make_room(job.settings.memory, job.image_path, need, container=job.container.id)


def _clear(job: _Job, timeout: float) -> None:
    """Take from the GPU processes' children what they inherited, while both can still be compared."""
    job.cleared += leftover.clear(job.driver, job.container.id, job.records, job.processes, timeout=timeout)


def _dump(job: _Job, draft: Draft) -> None:
    """Have the real runtime dump the container, again where a process began to use a GPU in between."""
    attempt = 0
    while True:
        stop_if_asked()
        _all_suspended(job)
        with job.transaction.step("write manifest"):
            job.record = _manifest(job)
            draft.prepare(job.record if job.pages.records() is not None else None)
            job.dumping = draft.written_at()
            # An earlier checkpoint's would tell of a dump that was none.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(job.image_path, image.INVENTORY))
        with job.transaction.step("dump"):
            failure = _runtime_checkpoint(job)
        if failure is None:
            return
        stop_if_asked()
        _clean(job)
        attempt += 1
        if not _newcomers(job) or attempt > job.settings.retries:
            raise failure
        _suspend(job)
        if not job.call.leave_running:
            _write(job)


def _runtime_checkpoint(job: _Job) -> GpusnapError | None:
    """One call of the real runtime; the error instead of a dump."""
    criu = job.settings.criu
    text = criu_config.dump_text(criu, job.mounts, masters=job.masters)
    done = invoke(job.call, job.real, text, capture=True)
    dumped = os.path.exists(os.path.join(job.image_path, image.INVENTORY))
    if done.code != 0 and dumped and not _alive(job):
        # CRIU ends the processes only when all of them are on disk: whatever failed then, the images are all
        # that is left of the container, and must not be cleaned away.
        note(f"{_dump_error(job, done)}, but only after the dump; the checkpoint is whole")
        return None
    if done.code != 0:
        return _dump_error(job, done)
    if not dumped:
        return ImageError(
            f"{job.real.name} reported a checkpoint, but wrote no {image.INVENTORY} to {job.image_path}"
        )
    return None


def _alive(job: _Job) -> bool:
    """Whether the container's init is still the process that it was; CRIU does not wait for its end."""
    init = job.init
    return init is not None and proc.same(init.pid, init.start) and not proc.dying(init.pid)


def _dump_error(job: _Job, done: Invoked) -> RuntimeFailed:
    said = done.because(os.path.join(job.call.work() or job.image_path, "dump.log"))
    return RuntimeFailed(
        f"{job.real.name} could not dump container {job.container.id}: {said}",
        hint="the container runs on",
        exit_code=done.code,
    )


def _complete(job: _Job, draft: Draft) -> None:
    """After the dump: resume what shall run on, make the image durable, and name it a checkpoint."""
    assert job.record is not None
    failure: GpusnapError | None = None
    if job.call.leave_running:
        with job.transaction.step("resume"):
            failure = _resumed(job)
    try:
        if job.call.leave_running:
            if failure is None:  # else `gpusnap recover` may try again
                job.pages.resumed()
            _write(job)
        with job.transaction.step("sync"):
            job.pages.commit(kept=job.call.leave_running)
            files = job.pages.images()
            _sync(job, but=[each.name for each in files])
        record = replace(_finished(job, job.record), files=files)
        with job.transaction.step("name"):
            job.pages.named(record)
        better = draft.finish(record)
        with job.transaction.step("let go"):
            job.pages.whole(record if better else None)
    except GpusnapError as error:
        _not_written(job, error, failure)
        raise
    if failure is not None:
        _add(failure, f"the checkpoint in {job.image_path} is whole and can be restored")
        raise failure
    job.pages.close()
    journal.remove(job.container.id)


def _finished(job: _Job, record: manifest.Manifest) -> manifest.Manifest:
    """The manifest with what has become known since the dump; the processes may be gone by now."""
    regions = job.pages.records() or {}
    processes = tuple(
        replace(process, regions=regions.get(pid, ()))
        for process, (pid, _) in zip(record.processes, sorted(job.records.items()), strict=True)
    )
    return replace(
        record,
        processes=processes,
        timing=tuple(job.transaction.steps),
        written=job.pages.written(),
        peak_memory=proc.peak_memory(),
    )


def _not_written(job: _Job, error: GpusnapError, failure: GpusnapError | None) -> None:
    """The dump is done, but not the rest: of a container that runs on nothing is kept, of another all."""
    if failure is not None:
        _add(error, failure.sentence())
    elif job.call.leave_running:
        try:
            job.suspended = False
            _discard(job)
            _add(error, "the container runs on")
        except GpusnapError as other:
            _add(error, other.sentence())
    else:
        _add(error, f"the container is dumped: gpusnap recover {job.container.id} tries again")


def _resumed(job: _Job) -> GpusnapError | None:
    try:
        _resume(job)
    except GpusnapError as error:
        return error
    return None


def _add(error: GpusnapError, hint: str) -> None:
    error.hint = "; ".join(filter(None, [error.hint, hint]))


def _manifest(job: _Job) -> manifest.Manifest:
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
        neutralised=leftover.records(job.cleared, job.container.pid),
        timing=job.transaction.steps,
    )


def _clean(job: _Job) -> None:
    """Remove what a failed dump wrote, so that nothing looks like a checkpoint."""
    Draft(job.image_path).discard()
    if job.dumping is not None:
        image.clean(job.image_path, since=job.dumping)


def _discard(job: _Job) -> None:
    """The checkpoint came to nothing; what processes still need of it stays."""
    whole = os.path.exists(os.path.join(job.image_path, manifest.FOLDER, manifest.NAME))
    # An earlier one in the same place may consist of the same chunks.
    job.pages.discard(layout=not whole)
    if not job.suspended:  # what is staged has gone by now: nobody would find it without the journal
        journal.remove(job.container.id)
    _clean(job)


def _sync(job: _Job, *, but: Collection[str]) -> None:
    if job.settings.memory.sync:
        image.sync(job.image_path, but=but)
