"""Checks that there is room for Podman's export of a container, before anything is done to it.

If Podman runs out of room while it exports, a container with --rm is lost, because Podman removes it with its
checkpoint. All figures are upper bounds: data that compresses, or that an earlier checkpoint has, takes less.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from gpusnap.engines import podman
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, reason, suggest_room
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu.nvidia import nvml
from gpusnap.runtime_shim.gpu.nvidia.driver import ask_nvml
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container

# CRIU's images that contain no memory, and Podman's records.
_RECORDS = 4 << 20
_TMPFS = "tmpfs"
# For each file in a tar: its header, an extended header, and the padding of its last block.
_HEADERS = 3 * 512
# Podman's own mount for /dev/shm (libpod, ShmDir), which is also mounted on this host.
_SHM = "/userdata/shm"


def check(
    found: podman.Container, folder: str, *, rootfs: bool, volumes: bool, twice: bool, gpus: bool
) -> None:
    """Raise Refused if the checkpoint of a running container may not fit into a folder.

    rootfs: the checkpoint includes the files that the container has changed. volumes: it includes the files
    in its named volumes, which Podman first copies into its own storage. twice: the records that are made of
    the archive are written to the folder, too. gpus: GPU memory is written there, too; without it, the
    runtime checks the room for that, and only the message counts it. The folder may not exist yet.
    """
    in_volumes = sum(volume_sizes(found.volumes).values()) if volumes else 0
    in_records = files(found, rootfs=rootfs) + in_volumes + _RECORDS
    need = memory(found, gpus=gpus) + in_records * (2 if twice else 1)
    less = f", {human(in_volumes)} of it for volumes, which --ignore-volumes excludes" if in_volumes else ""
    own = os.path.dirname(found.checkpoint_path) or folder
    if in_volumes and os.path.isdir(own):
        if os.stat(own).st_dev == os.stat(_find_existing(folder)).st_dev:
            need += in_volumes
        elif in_volumes > (free := free_bytes(own)):
            raise Refused(
                f"Podman needs up to {human(in_volumes)} in {own} to copy the volumes of {found.name}, "
                f"but only {human(free)} is free",
                hint="free some space there, or give --ignore-volumes to exclude the volumes",
                code="GPS-007",
            )
    if need > (free := free_bytes(folder)):
        if not gpus:  # what the runtime would refuse next: for a moment, CRIU's images exist twice
            need = max(need, 2 * memory(found, gpus=False)) + measure_gpu_memory(found)
        raise Refused(
            f"the checkpoint of {found.name} needs up to {human(need)} in {folder}{less}, but only "
            f"{human(free)} is free",
            hint=suggest_room(folder),
            code="GPS-007",
        )


def need(found: podman.Container, *, volumes: bool) -> int:
    """Return at most how many bytes a checkpoint of a running container takes in a store."""
    in_volumes = sum(volume_sizes(found.volumes).values()) if volumes else 0
    return memory(found, gpus=True) + files(found, rootfs=True) + in_volumes + _RECORDS


def check_copy(blobs: Iterable[Descriptor], folder: str, *, there: Layout | None = None, what: str) -> None:
    """Raise Refused if a copy of blobs does not fit into a folder.

    there: a layout that already has some of them, which take no more room. what: the copy, for the message.
    """
    needed = blobs if there is None else there.list_missing(blobs)
    sizes = {each.digest: each.size for each in needed}
    need = sum(sizes.values())
    if need > (free := free_bytes(folder)):
        raise Refused(
            f"{what} needs {human(need)} in {folder}, but only {human(free)} is free",
            hint=suggest_room(folder),
            code="GPS-007",
        )


def check_archive(blobs: Iterable[Descriptor], path: str) -> None:
    """Raise Refused if an archive of blobs does not fit."""
    check_copy(blobs, os.path.dirname(os.path.abspath(path)), what=f"the archive {path}")


def volume_sizes(volumes: Mapping[str, str]) -> dict[str, int]:
    """Return bytes of the files in each volume (name to folder) as a tar stores them: holes count."""
    return {name: _measure_below(folder, holes=True) for name, folder in volumes.items() if folder}


def free_bytes(folder: str) -> int:
    """Return how many bytes may be written below a folder, which may not exist yet. Raises Refused."""
    folder = _find_existing(folder)
    try:
        place = os.statvfs(folder)
    except OSError as error:
        raise Refused(f"{folder} cannot be used: {reason(error)}") from error
    return place.f_bavail * place.f_frsize


def _find_existing(folder: str) -> str:
    """Return the folder, or the nearest parent of it that exists."""
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def memory(found: podman.Container, *, gpus: bool) -> int:
    """Return at most how many bytes of its processes' memory CRIU writes; with `gpus`, also GPU memory."""
    return sum(map(proc.memory, _pids(found))) + (measure_gpu_memory(found) if gpus else 0)


def measure_gpu_memory(found: podman.Container) -> int:
    """Return how many bytes of GPU memory its processes use; 0 if that is unknown."""
    pids = _pids(found)
    with suppress(GpusnapError):  # this host has no such GPU, or the runtime reports the error
        used = ask_nvml(nvml.memory_used, pids) if pids else {}
        return sum(size or 0 for of in used.values() for size in of.values())
    return 0


def _pids(found: podman.Container) -> list[int]:
    with suppress(GpusnapError):  # the runtime reports the error
        return [each.pid for each in container.processes(found.init, found.id)] if found.init else []
    return []


def files(found: podman.Container, *, rootfs: bool) -> int:
    """Return bytes of the files on its tmpfs mounts, and with `rootfs` of those that it has changed."""
    size = _in_memory(found) if found.init else 0
    return size + (_measure_below(found.upper) if rootfs and found.upper else 0)


def _in_memory(found: podman.Container) -> int:
    """Return bytes on the container's own tmpfs mounts; the host's are not part of a checkpoint."""
    ours = {mount.device: mount.destination for mount in proc.mounts("self") if mount.kind == _TMPFS}
    seen: set[str] = set()
    size = 0
    for mount in proc.mounts(found.init):
        host = ours.get(mount.device, _SHM)
        if mount.kind != _TMPFS or mount.root != "/" or mount.device in seen or not host.endswith(_SHM):
            continue
        seen.add(mount.device)
        with suppress(OSError):
            place = os.statvfs(f"{proc.PROC}/{found.init}/root{mount.destination}")
            size += (place.f_blocks - place.f_bfree) * place.f_frsize
    return size


def _measure_below(folder: str, *, holes: bool = False) -> int:
    size = 0
    links: set[tuple[int, int]] = set()
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it was just removed
                status = os.lstat(os.path.join(at, name))
                if status.st_nlink > 1:
                    if (status.st_dev, status.st_ino) in links:
                        continue
                    links.add((status.st_dev, status.st_ino))
                size += status.st_size + _HEADERS if holes else min(status.st_size, status.st_blocks * 512)
    return size
