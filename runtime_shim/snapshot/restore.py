"""Restores a container whose checkpoint contains GPU state.

    plan → volumes → restore (the real runtime, CRIU) → compare images → settle → fill → driver restore

Everything that can refuse does so before the runtime is called. After that, a failure kills what was
restored, so that no incomplete container remains. The runtime runs as a child of gpusnap with descriptors 0
to 2 untouched, because CRIU gives them to the container. As without gpusnap, the container's init becomes a
child of the reaper (conmon, containerd's shim). Only a killed restore leaves an incomplete container; see
recovery/restore.py.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from gpusnap.oci.base.dataclass import asdict, replace
from gpusnap.oci.base.files import replace_below
from gpusnap.runtime_shim.base.errors import (
    ContainerError,
    GpusnapError,
    Refused,
    RuntimeFailed,
    make_unforeseen,
)
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.transaction import (
    Transaction,
    hold_signals,
    make_interruptible,
    name_recover,
    stop_if_asked,
)
from gpusnap.runtime_shim.gpu import find_driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.runtime import bundle
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.command_line import RestoreCall
from gpusnap.runtime_shim.runtime.criu import config as criu_config
from gpusnap.runtime_shim.runtime.criu.images import image_process
from gpusnap.runtime_shim.runtime.criu.plugins import inject
from gpusnap.runtime_shim.runtime.criu.run import Invocation, invoke, make_quiet_command
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.devices.choose import choose_driver, driver_for
from gpusnap.runtime_shim.snapshot.loading.source import BlobSource
from gpusnap.runtime_shim.snapshot.records import journal, volumes
from gpusnap.runtime_shim.snapshot.recovery import restore as recover_restore
from gpusnap.runtime_shim.snapshot.recovery import restored_containers
from gpusnap.runtime_shim.snapshot.restoring import grown_files
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.restoring.foreground import RuntimeThread, pid_file
from gpusnap.runtime_shim.snapshot.restoring.gpus import check_none_suspended, restore_gpus, settle
from gpusnap.runtime_shim.snapshot.restoring.job import RestoreJob
from gpusnap.runtime_shim.snapshot.restoring.plan import plan
from gpusnap.runtime_shim.snapshot.restoring.record import Stage

_FEW = 3  # processes that a message names
TIMING = "gpusnap-restore.json"
"""The name of the file in the work directory with the times of the steps, like the manifest's timing."""


def restore(call: RestoreCall, real: RealRuntime, settings: Settings, config: dict[str, Any]) -> int:
    """Restore a container from an image that gpusnap made; return the exit code of the real runtime.

    `config`: the bundle's config.json. The caller starts the driver meanwhile (gpu.open_driver).

    Raises a GpusnapError; no container is left then.
    """
    images = str(call.images(real.kind))
    found = find_driver()
    record = manifest_file.read(images)
    driver = driver_for(record, choose_driver(record, found))
    with (
        make_interruptible(),
        ExitStack() as held,
        ExitStack() as room,
        ExitStack() as cleanup,
        Transaction() as transaction,
    ):
        job = RestoreJob(
            call, real, settings, record, driver, found, transaction, images, held, room, cleanup
        )
        with transaction.step("plan"):
            held.enter_context(journal.hold(job.key))
            _refuse_existing(job)
            _refuse_waiting(job)
            _begin(job, config)
            _refuse_used_cgroup(job)
            plan(job, config)
        with transaction.step("volumes"):
            _prepare_files(job, config)
        transaction.undo("removing the incomplete container", lambda: _kill(job))
        if call.detach:
            _restore_container(job)
            _finish(job)
            _commit(job)
            return 0
        return _run_in_foreground(job)


def _prepare_files(job: RestoreJob, config: dict[str, Any]) -> None:
    """Bring the files that processes had open to where CRIU looks for them, as they were."""
    folder = str(job.call.bundle_dir())
    found: tuple[grown_files.OtherSize, ...] = ()
    images = str(job.call.images(job.real.kind))
    if job.written:
        what = "the files that the container had open for writing"
        kept = volumes.list_restored(images, config, folder)
        found = image_process.ask(what, grown_files.find, job.written, kept, config, folder)
    grown_files.check(found, may_cut=job.settings.criu.cut_files)
    volumes.put_back(images, config, folder)
    if cut := grown_files.cut(found):
        more = f", and {len(cut) - 1} more of its files" if len(cut) > 1 else ""
        note(
            f"{cut[0]} of the container{more} had grown since the checkpoint, and is cut to its size then",
            code="GPS-529",
        )


def _begin(job: RestoreJob, config: dict[str, Any]) -> None:
    """Record what to remove if this process is killed. There is no such container yet."""
    job.entry = restore_record.make_record(job.call, job.real, job.record, config)
    job.transaction.undo("forgetting the restore", lambda: _forget(job))
    restore_record.write(job.entry)


def _drop_hook(job: RestoreJob, container: containers.Container) -> None:
    """Remove the hook for runc from config.json; `recover` knows the changed file from the record."""
    bundle.drop_hook(
        container.bundle,
        containers.bundle_config(container.bundle),
        noted=lambda _, after: job.save_progress(digest=restore_record.digest(after)),
    )


def _forget(job: RestoreJob) -> None:
    """The last undo; `gpusnap recover` removes what could not be removed."""
    if job.removed or (job.entry is not None and job.entry.stage is Stage.PREPARE):
        restore_record.forget(job.key)


def _commit(job: RestoreJob) -> None:
    """The container runs, and must not be removed any more: later errors are only reported."""
    stop_if_asked()  # for a signal that the last step took for the failure of something else
    job.transaction.commit()
    with job.transaction.step("let go"):
        if job.blob_source is not None:
            _report_errors(partial(_commit_fetched, job.blob_source))
        _report_errors(job.cleanup.close)
    assert job.entry is not None
    restore_record.record_start(job.entry)
    _report_errors(
        partial(restore_record.forget, job.key)
    )  # not before, because a kill until then leaves files
    _report_errors(job.held.close)  # a checkpoint of it uses the same names for its files
    _write_timing(job)


def _report_errors(let_go: Callable[[], object]) -> None:
    """Report an error, and do not raise it: an engine that gets an error removes the container."""
    try:
        let_go()
    except Exception as error:
        found = error if isinstance(error, GpusnapError) else make_unforeseen(error)
        text = f"the container is restored, but some temporary files could not be removed: {found.sentence()}"
        note(text, code=found.code)


def _commit_fetched(blob_source: BlobSource) -> None:
    try:
        blob_source.finish()
    except GpusnapError as error:
        note(f"the fetched chunks cannot be kept in the store: {error.sentence()}")


def _refuse_existing(job: RestoreJob) -> None:
    """Refuse if such a container exists: the runtime would refuse, and the undo must not remove it."""
    command = restore_record.commands(job.call, job.real)
    try:
        found = containers.find(command, job.call.container_id)
    except ContainerError as error:
        if recover_restore.is_missing(error):
            return
        raise  # it may exist
    ends = recover_restore.deletion(command, found.id)
    if restored_containers.is_on_file(job.key, found.pid):
        ends = f"gpusnap recover {found.id}"
    raise Refused(
        f"the container {found.id} already exists, and it is {found.status}",
        hint="remove it, or restore under another name; if its engine does not know it (because the "
        f"engine was killed during the restore): {ends}",
        code="GPS-508",
    )


def _refuse_used_cgroup(job: RestoreJob) -> None:
    """Refuse if another container is in the cgroup, or is being restored into it.

    `ctr container restore` under another name keeps the cgroup of the checkpointed container. Whatever ends
    all processes of the one then ends the other, too, such as `crun delete --force` after a failed restore.
    Only a path is the same cgroup for everybody. Restores at the same time may both be refused.
    """
    assert job.entry is not None
    assert job.entry.place is not None
    group = job.entry.place.group
    if not group.strip("/") or not group.startswith("/"):
        return
    others = [each for each in restore_record.entries({}) if each.key != job.key and each.at_work]
    names = [f"container {each.container}" for each in others if each.place and each.place.group == group]
    names += [f"process {each.pid} ({each.comm})" for each in containers.list_in_cgroup(group)]
    if names:
        raise Refused(
            f"the cgroup {group}, which is also that of container {job.call.container_id}, is used by "
            f"{', '.join(names[:_FEW])}: what ends one of two containers in a cgroup may end both",
            hint="remove the container there, or wait until its own restore has ended; if no engine knows "
            "it, run gpusnap recover",
            code="GPS-526",
        )


def _refuse_waiting(job: RestoreJob) -> None:
    """Refuse if processes wait for memory in RAM under the same key: a restore would remove it."""
    entry = journal.read(job.key)
    waiting = [p.pid for p in entry.processes if proc.is_same(p.pid, p.start)] if entry is not None else []
    if waiting:
        container, pids = job.call.container_id, " ".join(map(str, waiting))
        raise Refused(
            f"a checkpoint of container {container} was interrupted, and the processes that it stopped "
            f"still wait: {pids}",
            hint=f"gpusnap recover {container}",
            code="GPS-021",
        )


def _invoke(
    job: RestoreJob, pid_file: str | None, started: Callable[[int], object] | None = None
) -> Invocation:
    call = replace(job.call, pid_file=job.call.pid_file or pid_file)
    if job.images != str(call.images(job.real.kind)):
        # Both runtimes would write CRIU's log beside the images, in a view that is removed.
        call = replace(
            call, work_path=call.work_path or str(call.images(job.real.kind)), image_path=job.images
        )
    call = criu_config.with_flags(call, job.real, job.settings.criu)
    images = str(job.call.images(job.real.kind))  # a view consists of links, and none is followed below it
    call = replace(call, tcp_close=call.tcp_close or image_process.has_closed_connections(images))
    mounts = job.remap.mounts if job.remap else job.record.mounts
    mounts = (*mounts, *image_process.list_masked_paths(images, job.real.kind, call.globals.root))
    script, gate = job.bulk.offer() if job.bulk is not None else ("", {})
    with inject(job.plugin, job.settings) as extra:
        text = criu_config.restore_text(extra.criu, mounts, drop_connections=call.tcp_close, script=script)
        environment = {**extra.environment, **gate}
        return invoke(call, job.real, text, capture=False, started=started, environment=environment)


def _make_error(job: RestoreJob, done: Invocation) -> GpusnapError:
    if job.bulk is not None and job.bulk.error is not None:
        return job.bulk.error  # CRIU failed for this reason
    said = done.explain(job.criu_log)
    return RuntimeFailed(
        f"{job.real.name} could not restore container {job.call.container_id}: {said}",
        hint="the checkpoint is unharmed",
        exit_code=done.code,
        code="GPS-502",
    )


def _restore_container(job: RestoreJob) -> None:
    runtime = RuntimeThread(lambda started: _invoke(job, None, started), job.criu_log)
    with job.transaction.step("restore"), hold_signals():
        job.save_progress(stage=Stage.RESTORE)
        runtime.wait_until_restored(None)
    done = runtime.result(job.real.name)
    if done.code != 0:
        raise _make_error(job, done)
    stop_if_asked()


def _finish(job: RestoreJob) -> None:
    """Do what the runtime does not: cgroups, and the GPUs."""
    if job.bulk is not None:
        job.bulk.check()
    container = containers.find(make_quiet_command(job.call, job.real), job.call.container_id)
    if not container.pid or not proc.is_running(container.pid):
        raise GpusnapError(
            f"container {container.id} exited as soon as it was restored",
            hint="its own log may say why",
            code="GPS-509",
        )
    init = proc.process(container.pid)
    job.save_progress(stage=Stage.SETTLE, init=(container.pid, init.start if init is not None else 0))
    _drop_hook(job, container)
    members = containers.processes(container.pid, container.id)
    containers.gather(container.pid, container.id, members)
    if job.compared is not None:
        with job.transaction.step("compare images"):
            job.compared.result()
    if job.driver is not None and job.remap is not None:
        settle(job, container, job.remap, job.driver)
        job.save_progress(stage=Stage.GPUS, arriving=job.prefetch is not None and job.prefetch.is_loading)
        restore_gpus(job, job.driver, container, members)
    else:
        check_none_suspended(job.present, members)
    job.room.close()


def _write_timing(job: RestoreJob) -> None:
    """Write the steps' times beside the runtime's restore.log."""
    document: dict[str, Any] = {
        "timing": [
            {"step": step.name, "start": round(step.start, 6), "seconds": round(step.seconds, 6)}
            for step in job.transaction.steps
        ]
    }
    if job.prefetch is not None:
        document["memory"] = asdict(job.prefetch.waits_so_far)
    if job.blob_source is not None:
        document["ahead"] = job.ahead
    if job.bulk is not None:
        document["copied"] = asdict(job.bulk.totals)
    with contextlib.suppress(OSError):
        replace_below(job.work_path, TIMING, json.dumps(document).encode("ascii"), sync=False)


def _kill(job: RestoreJob) -> None:
    assert job.entry is not None
    with name_recover(job.call.container_id):
        recover_restore.remove(job.entry)
    job.removed = True


def _run_in_foreground(job: RestoreJob) -> int:
    """Without --detach, run the runtime until the container ends, and restore the GPUs meanwhile."""
    with pid_file(job.call) as path:
        runtime = RuntimeThread(lambda started: _invoke(job, path, started), job.criu_log)
        with job.transaction.step("restore"), hold_signals():
            job.save_progress(stage=Stage.RESTORE, pid_file=os.path.abspath(path))
            restored = runtime.wait_until_restored(path)
        if restored:
            stop_if_asked()
            _finish(job)
            _commit(job)
        done = runtime.stand_for(job.real.name)
    if done.code != 0 and not job.transaction.committed:
        raise _make_error(job, done)
    return done.code
