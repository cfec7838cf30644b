"""The part of a restore before the runtime is called: chooses GPUs and prepares files.

The container does not exist yet, so whatever can refuse does so here. Loading of the memory starts first,
because it takes longest.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Collection
from functools import partial
from typing import Any

from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.files import is_folder
from gpusnap.runtime_shim.base.errors import ImageError, raise_as, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.gpu.api.driver import Host
from gpusnap.runtime_shim.gpu.cdi import folders as cdi
from gpusnap.runtime_shim.gpu.nvidia.driver_files import DriverFiles, find_files
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.records.manifest import FOLDER, parse_time
from gpusnap.runtime_shim.runtime import bundle, loopback
from gpusnap.runtime_shim.runtime.criu import config as criu_config
from gpusnap.runtime_shim.runtime.criu import external_mounts as criu_mounts
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.images import image_process
from gpusnap.runtime_shim.runtime.criu.images.digests import Comparison
from gpusnap.runtime_shim.runtime.criu.images.overlay import view
from gpusnap.runtime_shim.runtime.criu.plugins import find as find_plugin
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.runtime.criu.version import find_named
from gpusnap.runtime_shim.runtime.podman import pod
from gpusnap.runtime_shim.snapshot.devices import remap
from gpusnap.runtime_shim.snapshot.devices.choose import choose, gpu_request, list_given
from gpusnap.runtime_shim.snapshot.loading import join
from gpusnap.runtime_shim.snapshot.loading.join import JoinedImages
from gpusnap.runtime_shim.snapshot.loading.prefetch import Prefetch
from gpusnap.runtime_shim.snapshot.loading.source import STORE, BlobSource, ImageRebuild
from gpusnap.runtime_shim.snapshot.memory import bulk_copy, transfer
from gpusnap.runtime_shim.snapshot.memory.destination import ImageDestination, StoreDestination
from gpusnap.runtime_shim.snapshot.preflight import addresses, space
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.records.reservations import RAM, GpuClaim, claim
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.restoring.job import RestoreJob

_WRITTEN = ("restore.log", "stats-restore")
"""Files that CRIU writes in the work directory (criu/log.c, criu/stats.c)."""


def plan(job: RestoreJob, config: dict[str, Any]) -> None:
    """Choose the GPUs and prepare what the runtime will read. The container does not exist yet."""
    replaced: dict[str, bytes] = {}
    folder = str(job.call.bundle_dir())
    namespaces = pod.find_namespaces(
        config, folder, job.call.container_id, checkpointed=parse_time(job.record.created)
    )
    reading = _start_reading(job)
    if job.driver is not None:
        job.driver.open()
        if job.plugin is not None:
            find_plugin(job.plugin, job.settings)
        # The memory of other restores is in their claims or in the inventory only if both are read under the
        # lock.
        room = job.room.enter_context(claim())
        host = job.driver.host()
        job.remap = remap.make(
            job.record,
            job.driver,
            host,
            _choose(job, host, room, list_given(job.driver, config)),
            config,
            known=lambda: _read_driver_files(host),
            keep_names=job.settings.keep_names,
        )
        replaced = remap.image(job.record, job.images, job.remap, config)
    job.written = image_process.check(job.images, job.record.host.architecture, job.record.sizes)
    call = criu_config.with_flags(job.call, job.real, job.settings.criu)
    if call.tcp_established and not call.tcp_close and not image_process.has_closed_connections(job.images):
        addresses.check(job.images, config)
    preflight.check_network_tool(job.real, config)
    job.compared = job.cleanup.enter_context(contextlib.closing(Comparison(job.images, job.record.images)))
    _clear_links(job)
    elsewhere: dict[str, str] = {}
    if reading is not None:
        reading.wait()
        elsewhere = dict(reading.paths)
        job.ahead = isinstance(reading, JoinedImages) and reading.are_from_load_process
    job.images = job.cleanup.enter_context(view(job.images, replaced, elsewhere, always=True))
    job.bulk = _begin_bulk_copy(job, config)
    criu_mounts.check_mounts(job.record.mounts, job.remap.mounts if job.remap is not None else None)
    edits = job.remap.edits if job.remap is not None else bundle.Edits()
    edits = replace(edits, hook=loopback.hook(job.real.kind, config), namespaces=namespaces)
    noted = partial(_record_config_change, job)
    undo = bundle.prepare(folder, config, edits, noted=noted)
    job.transaction.undo("restoring config.json", undo)


def _begin_bulk_copy(job: RestoreJob, config: dict[str, Any]) -> bulk_copy.BulkCopy | None:
    """Let gpusnap write a part of the processes' memory; CRIU writes all of it if RAM is limited."""
    memory = job.settings.memory
    if not memory.parallel_restore or memory.ceiling:
        return None
    named = find_named(job.call, job.real)
    options = job.settings.criu.options
    found = bulk_copy.begin(job.images, config, options, threads=memory.threads, criu=named)
    if found is not None:
        job.cleanup.callback(found.close)
    return found


def _start_reading(job: RestoreJob) -> ImageRebuild | JoinedImages | None:
    """Start to read the memory; return CRIU's images that are in chunks.

    Only CRIU waits for its images, and only the driver waits for the GPUs' memory.
    """
    memory = job.settings.memory
    images: ImageRebuild | JoinedImages | None = None
    has_regions = job.driver is not None and any(process.regions for process in job.record.processes)
    joined, is_stored = None, _is_in_store(job)
    if is_stored:
        joined = join.join(job.record, job.key, memory)
        if joined is not None:
            job.cleanup.callback(joined.close)
    job.joined_regions = joined is not None and bool(joined.regions)
    if has_regions and not job.joined_regions:
        space.check_memory_to_restore(job.record, memory)
    if is_stored:
        blob_source = job.blob_source = job.cleanup.enter_context(
            BlobSource.from_settings(job.record, job.images, job.settings.store)
        )
        job.save_progress(layouts=blob_source.folders)
        if job.record.files:
            where = blob_source.scratch or scratch()
            folder = tempfile.mkdtemp(prefix=scratch_files.prefix("images"), dir=where)
            job.cleanup.callback(scratch_files.remove_folder, folder)
            rebuild = partial(_rebuild, job, blob_source, folder)
            images = JoinedImages(joined, rebuild) if joined is not None and joined.files else rebuild()
            job.cleanup.callback(images.close)
    if has_regions:
        meter = job.blob_source.meter if job.blob_source is not None else None
        prefetch = Prefetch(job.images, job.record, memory, job.key, job.blob_source, images, joined, meter)
        job.prefetch = job.cleanup.enter_context(prefetch)
    elif joined is not None:
        joined.drop_areas()
    return images


def _is_in_store(job: RestoreJob) -> bool:
    """Return whether the memory is in a store, as that of a checkpoint that came there as an archive."""
    if job.record.pages == StoreDestination.kind:
        return True
    if job.record.pages != ImageDestination.kind or STORE not in os.environ:
        return False
    beside = os.path.join(job.images, FOLDER, "blobs")
    with raise_as(ImageError, f"{beside} cannot be read"):
        return not is_folder(beside)


def _rebuild(job: RestoreJob, blob_source: BlobSource, folder: str) -> ImageRebuild:
    """Start to build CRIU's images, in RAM if there is room, else in the directory."""
    memory = job.settings.memory
    return ImageRebuild(
        job.record.files,
        blob_source,
        folder,
        threads=memory.threads,
        ceiling=transfer.ceiling(memory),
        stage=tmpfs.Stage(job.key) if space.has_memory_for_images(job.record, memory) else None,
    )


def _clear_links(job: RestoreJob) -> None:
    """Remove symbolic links and FIFOs where CRIU and the runtime write files.

    An archive may contain some: they would follow the link as root, and wait for the FIFO. Raises ImageError.
    """
    for path in (*(os.path.join(job.work_path, name) for name in _WRITTEN), job.call.pid_file):
        try:
            if path and stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFLNK, stat.S_IFIFO):
                os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ImageError(
                f"{path}, which the restore has to write, is not a regular file: {reason(error)}",
                hint="do not restore from this checkpoint",
                code="GPS-604",
            ) from error


def _choose(
    job: RestoreJob, host: Host, room: GpuClaim, only: Collection[str] | None
) -> tuple[tuple[str, str], ...]:
    """Return the pairs of the plan; their memory is claimed until `job.room` is closed. Raises Refused."""
    request = gpu_request(job.call.gpu_map)
    chosen = choose(job.record, host, request, job.settings.gpu_map, room.reserved, given=only)
    if chosen.refusal:
        raise chosen.make_refusal()
    new = dict(chosen.pairs)
    taken = {new[gpu.uuid]: gpu.memory_used for gpu in job.record.gpus}
    if not job.joined_regions:  # otherwise the load process has claimed it
        taken[RAM] = space.measure_beside_images(job.record)
    room.record(taken)
    return chosen.pairs


def _read_driver_files(host: Host) -> DriverFiles:
    return find_files(cdi.load(report=lambda error: note(str(error), code=error.code)), host.driver_version)


def _record_config_change(job: RestoreJob, before: bytes, after: bytes) -> None:
    job.save_progress(**restore_record.describe_change(before, after))
