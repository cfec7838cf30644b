"""Checks that a checkpoint or a restore has room, in memory and on disk.

If there is not enough room, Refused says how much is needed, where, and what to do about it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.runtime_shim.base.errors import Refused, raise_as, suggest_room
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.process import mount_namespace, proc
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.settings import Memory

# A process's heap grows by about 150 MiB at its first checkpoint (seen with driver 580).
_HEAP_GROWTH = 150 << 20


def check_memory(
    gpu_bytes: Mapping[int, int], init: int, settings: Memory | None = None, *, reserved: int = 0
) -> None:
    """Refuse unless the GPUs' memory fits beside what runs: on the host and within the cgroups' limits.

    `gpu_bytes`: by PID. If the driver puts the memory into the process itself, the container's limit counts
    it. If gpusnap keeps it in files in RAM, gpusnap's own limit counts it. Above a limit, the kernel would
    kill the process. With `settings`, gpusnap's own limit is checked for the memory that it would keep.
    `reserved`: bytes that others have claimed.
    """
    need = measure_in_processes(gpu_bytes)
    _check_fits_on_host(need, "must move to", reserved)
    _check_fits(need, "must move to", "the container's memory limit", _limit(init))
    _check_own_cgroup(need, "must move to", settings)


def measure_in_processes(gpu_bytes: Mapping[int, int]) -> int:
    """Return the RAM that processes need when the driver suspends them; `gpu_bytes`: by PID."""
    return sum(gpu_bytes.values()) + _HEAP_GROWTH * len(gpu_bytes)


def check_memory_to_restore(record: Manifest, settings: Memory, *, reserved: int = 0) -> None:
    """Refuse unless the memory that is not in CRIU's images fits beside what runs on this host.

    `reserved`: as for `check_memory`.
    """
    need = measure_beside_images(record)
    _check_fits_on_host(need, "must pass through", reserved)
    _check_own_cgroup(need, "must pass through", settings)


def has_memory_for_images(record: Manifest, settings: Memory, *, reserved: int = 0) -> bool:
    """Whether CRIU's images that are in chunks fit into RAM for a restore.

    They must fit beside the GPUs' memory and what CRIU makes of the images, on this host and within the limit
    of gpusnap's cgroup. They do not if memory.ceiling limits gpusnap's memory, or if files in RAM would not
    outlive gpusnap. `reserved`: as for `check_memory`.
    """
    if settings.ceiling or not mount_namespace.is_lasting():
        return False
    need = measure_beside_images(record) + 2 * sum(each.table.size for each in record.files)
    return all(free is None or need <= free for free in (_measure_left(reserved), _limit(os.getpid())))


def measure_room(reserved: int) -> int | None:
    """Return how much more GPU memory of a process fits into RAM; None if this host does not report it.

    On this host and within the limit of gpusnap's cgroup. `reserved`: as for `check_memory`.
    """
    left = [free for free in (_measure_left(reserved), _limit(os.getpid())) if free is not None]
    return max(0, min(left) - _HEAP_GROWTH) if left else None


def would_evict(tables: Sequence[Table]) -> bool:
    """Whether the blobs of these tables would evict other files from the page cache of this host.

    They would if unused memory is not enough for the blobs and for what is made of them.
    """
    need = sum(blob.size for blob in descriptors(tables)) + sum(table.size for table in tables)
    unused = proc.unused_memory()
    return unused is not None and unused < need


def measure_beside_images(record: Manifest) -> int:
    """Return the bytes of memory that are not in CRIU's images."""
    return sum(region.table.size for process in record.processes for region in process.regions)


def _check_own_cgroup(need: int, how: str, settings: Memory | None) -> None:
    """Refuse unless files in RAM fit into gpusnap's cgroup; above memory.ceiling there are none."""
    if settings is not None and settings.pages != "criu":
        least = min(need, settings.ceiling or need)
        where = "the memory limit of gpusnap's own cgroup"
        _check_fits(
            least, how, where, _limit(os.getpid()), hint=f"raise {where}, or set memory.ceiling below it"
        )


def _check_fits_on_host(need: int, how: str, reserved: int) -> None:
    """`reserved`: as for `check_memory`."""
    free = _measure_available()
    left = None if free is None else max(0, free - reserved)
    others = reserved > 0 and free is not None and need <= free
    hint = f"other checkpoints and restores are about to take {human(reserved)}: try again when they are done"
    _check_fits(need, how, "this host", left, hint=hint if others else "")


def _check_fits(need: int, how: str, where: str, free: int | None, *, hint: str = "") -> None:
    if free is not None and need > free:
        raise Refused(
            f"{human(need)} of GPU memory {how} RAM, but {where} leaves only {human(free)}",
            hint=hint or ("free some memory" if where == "this host" else f"raise {where}"),
            code="GPS-216",
        )


def check_disk(
    image_path: str,
    gpu_bytes: int,
    processes: Sequence[proc.Process],
    make_room: Callable[[int], object] = id,
    *,
    place: str = "",
) -> None:
    """Refuse unless the image fits on its disk. Resident memory is the upper bound of CRIU's part.

    `make_room` may free that many bytes there, and is called before this refuses. `place`: a store, if the
    GPUs' memory goes there; CRIU's images are then cut into chunks there, too, before they leave the image.
    """
    resident = sum(proc.memory(process.pid) for process in processes)
    need = resident + gpu_bytes
    if place not in ("", image_path):
        if os.stat(place).st_dev == os.stat(image_path).st_dev:
            need += resident
        else:
            _check_fits_there(place, need)
            need = resident
    if need > _free(image_path):
        make_room(need)
    _check_fits_there(image_path, need)


def _check_fits_there(folder: str, need: int) -> None:
    free = _free(folder)
    if need > free:
        raise Refused(
            f"the checkpoint needs up to {human(need)} in {folder}, but only {human(free)} is free",
            hint=suggest_room(folder),
            code="GPS-007",
        )


def _free(folder: str) -> int:
    with raise_as(Refused, f"the checkpoint's directory {folder} cannot be used"):
        place = os.statvfs(folder)
    return place.f_bavail * place.f_frsize


def _measure_available() -> int | None:
    """Return the available memory of this host; None if it is not reported."""
    return proc.available_memory() or None


def _measure_left(reserved: int) -> int | None:
    """The same, minus the reserved bytes."""
    free = _measure_available()
    return None if free is None else max(0, free - reserved)


def _limit(init: int) -> int | None:
    """Return the bytes left below a process's tightest memory limit; None without one (cgroup v2, v1)."""
    groups = proc.cgroups(init)
    left: list[int] = []
    for mount in proc.mounts("self"):
        if mount.kind == "cgroup2":
            path, names = groups.get(""), ("memory.max", "memory.current", "inactive_file")
        elif mount.kind == "cgroup" and any("memory" in name.split(",") for name in groups):
            path = next(p for name, p in groups.items() if "memory" in name.split(","))
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # From inside another cgroup namespace, the path may begin with /..: this process cannot read that.
        if path is not None and not path.startswith("/.."):
            inside = path.removeprefix(mount.root) if mount.root != "/" else path
            left += _list_left_below(mount.destination, inside.strip("/"), names)
    return min(left, default=None)


def _list_left_below(top: str, path: str, names: tuple[str, str, str]) -> list[int]:
    """Return what each cgroup from `path` up to `top` leaves; `names`: limit, use, what it can drop."""
    found = []
    while True:
        folder = os.path.join(top, path)
        limit, used = _number(f"{folder}/{names[0]}"), _number(f"{folder}/{names[1]}")
        if limit is not None and used is not None:
            found.append(max(0, limit - used + (_number(f"{folder}/memory.stat", names[2]) or 0)))
        if not path:
            return found
        path = path.rpartition("/")[0]


def _number(path: str, key: str = "") -> int | None:
    """Read a number from a cgroup's file, or the one after `key`; None for "max" and without the file."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
    except OSError:
        return None
    if key:
        text = next((line.split()[1] for line in text.splitlines() if line.startswith(key + " ")), "")
    return int(text) if text.strip().isdigit() else None
