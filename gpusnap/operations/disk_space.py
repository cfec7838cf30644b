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
from gpusnap.runtime_shim.errors import MAKE_ROOM, GpusnapError, Refused, reason
from gpusnap.runtime_shim.gpu.nvidia import nvml
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container
from gpusnap.runtime_shim.units import human

# CRIU's images that hold no memory, and Podman's records.
_RECORDS = 4 << 20
_TMPFS = "tmpfs"
# Of a file in a tar: its header, one for what that cannot say, and what fills its last block.
_HEADERS = 3 * 512
# Of Podman's own mount for /dev/shm (libpod, ShmDir), which this host sees, too.
_SHM = "/userdata/shm"


def check(
    found: podman.Container, folder: str, *, rootfs: bool, volumes: bool, twice: bool, gpus: bool
) -> None:
    """Raise Refused where the checkpoint of a running container may not fit into a folder.

    rootfs: with the files that it has changed. volumes: with those in its named volumes, which Podman copies
    into its own storage first. twice: the records that are made of the archive go there, too. gpus: so does
    the memory of its GPUs; without it the runtime looks whether that has room, and the message alone counts
    it. The folder may be yet to be made.
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
        if not gpus:  # what the runtime would refuse next: CRIU's images are there twice for a moment
            need = max(need, 2 * memory(found, gpus=False)) + measure_gpu_memory(found)
        raise Refused(
            f"the checkpoint of {found.name} needs up to {human(need)} in {folder}{less}, but only "
            f"{human(free)} is free",
            hint=MAKE_ROOM,
            code="GPS-007",
        )


def need(found: podman.Container, *, volumes: bool) -> int:
    """Bytes that a checkpoint of a running container takes in a store at most."""
    in_volumes = sum(volume_sizes(found.volumes).values()) if volumes else 0
    return memory(found, gpus=True) + files(found, rootfs=True) + in_volumes + _RECORDS


def check_copy(blobs: Iterable[Descriptor], folder: str, *, there: Layout | None = None, what: str) -> None:
    """Raise Refused where a copy of blobs does not fit into a folder.

    there: what has some of them already, which take no room again. what: the copy, for the message.
    """
    needed = blobs if there is None else there.list_missing(blobs)
    sizes = {each.digest: each.size for each in needed}
    need = sum(sizes.values())
    if need > (free := free_bytes(folder)):
        raise Refused(
            f"{what} needs {human(need)} in {folder}, but only {human(free)} is free",
            hint=MAKE_ROOM,
            code="GPS-007",
        )


def check_archive(blobs: Iterable[Descriptor], path: str) -> None:
    """Raise Refused where an archive of blobs does not fit."""
    check_copy(blobs, os.path.dirname(os.path.abspath(path)), what=f"the archive {path}")


def volume_sizes(volumes: Mapping[str, str]) -> dict[str, int]:
    """Bytes of the files in each volume (name and folder), as a tar of them has it: holes count."""
    return {name: _measure_below(folder, holes=True) for name, folder in volumes.items() if folder}


def free_bytes(folder: str) -> int:
    """Bytes that may be written below a folder, which may be yet to be made. Raises Refused."""
    folder = _find_existing(folder)
    try:
        place = os.statvfs(folder)
    except OSError as error:
        raise Refused(f"{folder} cannot be used: {reason(error)}") from error
    return place.f_bavail * place.f_frsize


def _find_existing(folder: str) -> str:
    """A folder, or what there is of those above it."""
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def memory(found: podman.Container, *, gpus: bool) -> int:
    """Bytes of memory that CRIU writes at most of its processes; with `gpus`, also what they have there."""
    return sum(map(proc.memory, _pids(found))) + (measure_gpu_memory(found) if gpus else 0)


def measure_gpu_memory(found: podman.Container) -> int:
    """Bytes of GPU memory that its processes use; 0 where that cannot be told."""
    pids = _pids(found)
    with suppress(GpusnapError):  # there is no such GPU, or the runtime says what is wrong
        return sum(sum(used.values()) for used in nvml.memory_used(pids).values()) if pids else 0
    return 0


def _pids(found: podman.Container) -> list[int]:
    with suppress(GpusnapError):  # its runtime says what is wrong with it
        return [each.pid for each in container.processes(found.init, found.id)] if found.init else []
    return []


def files(found: podman.Container, *, rootfs: bool) -> int:
    """Bytes of the files that are in its memory (tmpfs), and with `rootfs` of those that it has changed."""
    size = _in_memory(found) if found.init else 0
    return size + (_measure_below(found.upper) if rootfs and found.upper else 0)


def _in_memory(found: podman.Container) -> int:
    """What the container's own file systems of that kind hold; those of this host are not in a checkpoint."""
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
            with suppress(OSError):  # it has just gone
                status = os.lstat(os.path.join(at, name))
                if status.st_nlink > 1:
                    if (status.st_dev, status.st_ino) in links:
                        continue
                    links.add((status.st_dev, status.st_ino))
                size += status.st_size + _HEADERS if holes else min(status.st_size, status.st_blocks * 512)
    return size
