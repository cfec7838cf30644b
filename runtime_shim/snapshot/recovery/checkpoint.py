"""Repairs what a killed gpusnap left: stopped processes, with their GPU memory in files or in RAM.

gpusnap never touches the memory of a running process. If a process is stopped and its regions are still
mapped, gpusnap fills them from the layout (again, if necessary: the content is the same). Then the driver
restores the process and it continues. If CRIU had dumped and ended all processes, gpusnap completes the
checkpoint: it gives the manifest its name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.errors import BlobError
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, ManifestError
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.file_system import find_file_system
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.records import manifest, manifest_file
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.images import control_groups, digests
from gpusnap.runtime_shim.runtime.criu.images import directory as image
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.gpu_processes import dump_pause, paused_container
from gpusnap.runtime_shim.snapshot.memory import chunk_layout, suspended_memory, transfer
from gpusnap.runtime_shim.snapshot.memory.destination import (
    Destination,
    StoreDestination,
    is_in_image,
    reopen_destination,
)
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry, JournalProcess
from gpusnap.runtime_shim.snapshot.recovery import held_threads, network_lock
from gpusnap.runtime_shim.snapshot.recovery.bring_back import bring_back, list_alive

_SETTLING = 10.0  # seconds
_DYING = 60.0
"""Seconds for a process that was killed to end; its memory may be large."""


def recover(entry: Entry, driver: Driver, settings: Memory) -> str:
    """Resume the processes of an entry, and remove it; return what was done, in words.

    Raises GpusnapError, also if another gpusnap is working on that container. Processes that could be resumed
    run then, and the entry stays.
    """
    with journal.hold(entry.key):
        now = journal.read(entry.key)
        if now is None:
            return "another process has already repaired it"
        return _recover(now, driver, settings)


def sweep() -> None:
    """Free files in RAM without an entry: their gpusnap was killed in its last moments.

    Also remove the signal masks of threads that have ended since.
    """
    keys: list[str] = []
    with suppress(OSError):  # the next sweep frees it
        keys = stage.containers()
    for key in keys:
        with suppress(GpusnapError, OSError), journal.hold(key, patience=0):
            if key not in (*journal.list_noted("json"), *journal.list_noted("restore")):
                stage.remove(key)
    with suppress(GpusnapError):
        for key in journal.list_noted(journal.MASKS):
            with suppress(GpusnapError), journal.hold(key, patience=0):
                pass  # the holder of the lock removes them: process/ptrace/signal_masks.py
    with suppress(GpusnapError):
        paused_container.sweep()
    with suppress(OSError):  # a tmpfs that a killed `gpusnap restore` mounted, and nobody has used since
        stage.unmount_if_empty()


def _recover(entry: Entry, driver: Driver, settings: Memory) -> str:
    """Recover under the container's lock."""
    entry.check_not_at_work()
    scratch_files.let_end(entry.owner, entry.container, image=entry.image)
    entry = dump_pause.put_right(entry)
    pids = [process.pid for process in list_alive(entry)]
    paused = paused_container.reopen(entry, pids)
    if paused is None:
        said = _put_right(entry, driver, settings, None)
        journal.drop(entry.key, journal.PAUSED)
        return said
    try:
        paused.keep(pids)  # first, so that none of them continues without its memory, whatever fails
        paused.hold(pids, timeout=_SETTLING)
        return _put_right(entry, driver, settings, paused.let_go)
    finally:
        paused.freeze()


def _put_right(entry: Entry, driver: Driver, settings: Memory, let_go: Callable[[int], object] | None) -> str:
    """Resume the processes that exist; `let_go` as in `resume`."""
    if not entry.image and entry.processes:
        return _let_go_of_resumed(entry, driver, settings, let_go)
    if not entry.image:
        held_threads.unblock_signals(entry.key)
        what = "its pause" if entry.paused is not None else "a thread that was held"
        return f"only {what} needed repair"
    _wait_for_dying(entry)
    for process in list_alive(entry)[:1]:
        network_lock.remove_left_lock(process.pid, entry.key)
    there = bring_back(entry, driver, settings, let_go)
    goes_on = "continues to run" if let_go is None else "stays paused"
    _check_image_is_mounted(entry, runs=bool(there) or not entry.processes)
    if there:
        said = _describe_alive(there, paused=let_go is not None)
        if entry.left_stopped:
            said += "; gpusnap ls shows whether its checkpoint was stored before"
        if entry.left_stopped and not _is_shared(entry):
            Draft(entry.image).remove_manifest()
        # In a directory that is not the container's own, another one may have been dumped since.
        if entry.left_stopped or entry.container in entry.image:
            _take_back(entry, settings)
        else:
            _discard(entry, settings)
    elif entry.processes:
        said = _finish(entry, settings)
        if entry.left_stopped:
            said = "it was ended while it was frozen; gpusnap ls shows whether its checkpoint was stored"
    elif _has_manifest(entry, settings):
        said = f"it {goes_on}, and the checkpoint in {entry.image} is complete"
    else:
        _take_back(entry, settings)
        said = f"it {goes_on}, and its checkpoint failed"
    transfer.remove_staged(entry.key)
    scratch_files.sweep(entry.owner)
    journal.remove(entry.key)
    return said


def _check_image_is_mounted(entry: Entry, *, runs: bool) -> None:
    """Raise ImageError if the image's directory is missing or empty, but perhaps only for its file system.

    Without its images, the memory of a complete checkpoint looks like that of a failed one. The directory may
    be the mount point itself, or another of that name below it, and another file system may be mounted there.
    `runs`: whether the container runs.
    """
    mount = entry.file_system.mount
    if _has_files(entry.image) or find_file_system(entry.image).is_same(entry.file_system):
        return
    if not mount and manifest_file.has(entry.image):
        return  # an earlier version did not record it
    where = f"the file system that was mounted at {mount}" if mount else "its file system"
    raise ImageError(
        f"the checkpoint of container {entry.container} is kept: its directory {entry.image} is empty or "
        f"does not exist, but {where} may not be mounted",
        hint="mount it, then run gpusnap recover again; if the images were removed and the checkpoint is not "
        f"needed, run mkdir -p {entry.image} && touch {entry.image}/removed first"
        + ("; the container continues to run" if runs else ""),
        code="GPS-031",
    )


def _has_files(path: str) -> bool:
    with suppress(OSError), os.scandir(path) as found:
        return next(found, None) is not None
    return False


def _let_go_of_resumed(
    entry: Entry, driver: Driver, settings: Memory, let_go: Callable[[int], object] | None
) -> str:
    """Remove what a resume could not remove, if the container is no longer recorded as suspended."""
    there = bring_back(entry, driver, settings, let_go)
    suspended_memory.free(entry.key)
    if not there:
        return "it has exited, and nothing is left of it"
    return _describe_alive(there, paused=let_go is not None)


def _describe_alive(there: Sequence[JournalProcess], *, paused: bool) -> str:
    """Say which processes have their GPU state again, and whether they run.

    Only the engine resumes a container that it has paused. If its client was killed, nobody asks it to.
    """
    pids = " ".join(str(process.pid) for process in there)
    if not paused:
        return f"running: {pids}"
    return f"paused, as before: {pids}; its engine can resume it (podman unpause, ctr task resume)"


def _finish(entry: Entry, settings: Memory) -> str:
    """Complete a checkpoint whose processes have ended in the dump: only the manifest's name is missing."""
    draft = Draft(entry.image)
    try:
        record = draft.pending()
    except ManifestError:
        record = None  # interrupted while it was written, and so before the dump
    if record is not None and record.container != entry.container:
        _drop(entry, settings)
        return "no process is left, and its image now belongs to another container"
    dumped = manifest_file.has(entry.image, manifest.INVENTORY)
    if record is None and dumped and _has_manifest(entry, settings):
        return f"the checkpoint in {entry.image} is complete"
    # Before anything is removed: a disk that failed then may have lost some of them by now.
    why = journal.read_unsynced(entry.key)
    if why is not None and manifest_file.has(entry.image):
        raise ImageError(
            f"the images in {entry.image} were not flushed to disk ({why}), and may be incomplete",
            hint="check dmesg for disk errors. To use the images at your own risk, rename "
            f"{manifest.PENDING} in {entry.image}/{manifest.FOLDER} to {manifest.NAME}. To give up the "
            f"checkpoint, remove {entry.image}. Then run gpusnap recover again",
            code="GPS-515",
        )
    if record is None or not dumped:
        if not entry.left_stopped:  # else it was handed over, and goes with what Podman has exported
            _drop(entry, settings)
        return "no process is left"
    destination: Destination | None = None
    if record.pages != Pages.name:
        tables = [region.table for process in record.processes for region in process.regions]
        destination = reopen_destination(
            entry.layout, entry.image, entry.container, replace(settings, sync=True), tables
        )
        # Nobody knows how much of it reached the disk.
        chunk_layout.write_again(destination.layout, tables, where=entry.image)
        destination.commit(tables, kept=False)
    control_groups.thaw(entry.image)
    image.sync(entry.image, failed=partial(journal.note_unsynced, entry.key))
    record = replace(record, images=digests.take(entry.image, but=[each.name for each in record.files]))
    if destination is not None:
        destination.name(record)
    draft.finish(record)
    if destination is not None:
        destination.close(record)
    return f"the checkpoint in {entry.image} is complete"


def _has_manifest(entry: Entry, settings: Memory) -> bool:
    """Whether the image had its manifest when gpusnap was killed; the store then names its chunks, too.

    Also true if somebody has renamed the manifest by hand. Raises ImageError.
    """
    try:
        record = manifest_file.read(entry.image)
    except ManifestError:
        return False
    if record.container != entry.container:
        return False
    if record.pages == StoreDestination.kind and not is_in_image(entry.layout, entry.image):
        destination = reopen_destination(entry.layout, entry.image, entry.container, settings, record.tables)
        try:
            destination.name(record)
        except ImageError as error:
            if not isinstance(error.__cause__, BlobError):
                raise
            destination.discard(earlier=True)  # an earlier checkpoint's, whose chunks somebody has removed
            return False
        destination.close(record)
    return True


def _drop(entry: Entry, settings: Memory) -> None:
    """Remove what was written to a store for a failed checkpoint."""
    with suppress(ImageError):  # it uses space until gc removes it
        reopen_destination(entry.layout, entry.image, entry.container, settings).discard(earlier=True)


def _wait_for_dying(entry: Entry) -> None:
    """Wait for the end of processes that were killed. CRIU kills them when their dump is complete.

    One with much memory takes seconds to end, and must not be taken for one that continues to run. Raises
    GpusnapError.
    """
    end = time.monotonic() + _DYING
    while dying := [process.pid for process in list_alive(entry) if proc.is_dying(process.pid)]:
        if time.monotonic() > end:
            raise GpusnapError(
                f"process {dying[0]} was killed but does not exit",
                hint="run gpusnap recover again when it has ended",
                code="GPS-025",
            )
        time.sleep(0.05)


def _take_back(entry: Entry, settings: Memory) -> None:
    """Remove everything written for a checkpoint whose container was running again."""
    noted = journal.load(entry.key, journal.IMAGES)
    # Otherwise nothing was dumped. The manifest of an earlier checkpoint was removed before that was noted.
    if noted is not None and not _is_shared(entry) and not _has_any_manifest(entry):
        with suppress(ImageError, ValueError):
            if not image.clean(entry.image, image.EarlierImages.from_json(noted)):
                _drop(entry, settings)  # the pending manifest stays: by it, a restore refuses these images
                return
    _discard(entry, settings)


def _discard(entry: Entry, settings: Memory) -> None:
    """Remove the incomplete checkpoint, unless somebody else has begun one in the same directory."""
    if _is_shared(entry):
        _drop(entry, settings)
        return
    earlier = _has_any_manifest(entry)
    reopen_destination(entry.layout, entry.image, entry.container, settings).discard(earlier=earlier)
    Draft(entry.image).discard()


def _is_shared(entry: Entry) -> bool:
    """Whether somebody else has begun a checkpoint in the same directory, or may have."""
    unreadable: dict[str, GpusnapError] = {}  # such an entry may name the same directory
    others = [other for other in journal.entries(unreadable) if other.key != entry.key]
    return bool(unreadable) or any(other.image == entry.image for other in others)


def _has_any_manifest(entry: Entry) -> bool:
    return manifest_file.has(entry.image, manifest.FOLDER, manifest.NAME)
