"""Whether what Podman will export of a container has room, asked before anything is done to it.

If Podman runs out of room while it exports, a container with --rm is gone: Podman removes it with its
checkpoint. All of it is an upper bound: what compresses, or is there from an earlier checkpoint, takes less.
"""

from __future__ import annotations

import os
from contextlib import suppress

from gpusnap.engines import podman
from gpusnap.runtime_shim.errors import GpusnapError, Refused, reason
from gpusnap.runtime_shim.gpu.nvidia import nvml
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container
from gpusnap.runtime_shim.units import human

# CRIU's images that hold no memory, and Podman's records.
_RECORDS = 4 << 20
_TMPFS = "tmpfs"
# Of Podman's own mount for /dev/shm (libpod, ShmDir), which this host sees, too.
_SHM = "/userdata/shm"


def check(found: podman.Container, folder: str, *, rootfs: bool, twice: bool, gpus: bool) -> None:
    """Raise Refused where the checkpoint of a running container may not fit into a folder.

    rootfs: with the files that it has changed. twice: the records that are made of the archive go there, too.
    gpus: so does the memory of its GPUs, for which the runtime does not look there.
    """
    need = memory(found, gpus=gpus) + (files(found, rootfs=rootfs) + _RECORDS) * (2 if twice else 1)
    try:
        place = os.statvfs(folder)
    except OSError as error:
        raise Refused(f"{folder} cannot be used: {reason(error)}") from error
    free = place.f_bavail * place.f_frsize
    if need > free:
        raise Refused(
            f"the checkpoint of {found.name} needs up to {human(need)} in {folder}, where {human(free)} "
            "are free",
            hint="make room there, for example with gpusnap rm and gpusnap gc",
            code="GPS-007",
        )


def memory(found: podman.Container, *, gpus: bool) -> int:
    """Bytes of memory that CRIU writes at most of its processes; with `gpus`, also what they have there."""
    pids: list[int] = []
    with suppress(GpusnapError):  # its runtime says what is wrong with it
        pids = [each.pid for each in container.processes(found.init, found.id)] if found.init else []
    size = sum(map(proc.memory, pids))
    if gpus and pids:
        with suppress(GpusnapError):  # there is no such GPU, or the runtime says what is wrong
            size += sum(sum(used.values()) for used in nvml.memory_used(pids).values())
    return size


def files(found: podman.Container, *, rootfs: bool) -> int:
    """Bytes of the files that are in its memory (tmpfs), and with `rootfs` of those that it has changed."""
    size = _in_memory(found) if found.init else 0
    return size + (_below(found.upper) if rootfs and found.upper else 0)


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


def _below(folder: str) -> int:
    size = 0
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has just gone
                status = os.lstat(os.path.join(at, name))
                size += min(status.st_size, status.st_blocks * 512)
    return size
