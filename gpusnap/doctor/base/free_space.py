"""Free space: on disk and in RAM, compared with GPU memory, and the speed of the disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence

from gpusnap.doctor.base.check import Check, ok, warning
from gpusnap.doctor.base.sources import free, join_root, text, toml
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu.api.driver import Gpu
from gpusnap.runtime_shim.process import proc

PODMANS_LIMIT = 240.0
"""Seconds that Podman waits for a restore (libpod/define/runtime.go, ContainerCreateTimeout)."""
_MOST = 128 << 20
_PIECE = 4 << 20
_SYNCED = 32 << 20
_SECONDS = 0.3
_STORAGE = ("/usr/share/containers/storage.conf", "/etc/containers/storage.conf")
_GRAPH_ROOT = "/var/lib/containers/storage"


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of a disk, in bytes per second."""

    write: float
    """To the disk itself: synced."""
    read: float


def graph_root(root: str = "/") -> str:
    """Return Podman's folder for containers, by containers-storage.conf(5); it has its checkpoints, too."""
    found = _GRAPH_ROOT
    for path in _STORAGE:
        value = toml(root, path).get("storage", {}).get("graphroot")
        found = value if isinstance(value, str) and value.startswith("/") else found
    return found


def check_disks(gpus: Sequence[Gpu], store: str, graph: str, root: str = "/") -> Iterator[Check]:
    """Compare free space in the store and in Podman's storage with the memory of the largest GPU."""
    need = max((gpu.memory_total for gpu in gpus), default=0)
    for name, path in (("store", store), ("Podman's storage", graph)):
        _, left, size = free(join_root(root, path))
        facts = {"path": path, "free": left, "size": size, "largest_gpu": need}
        if left < need:
            yield warning(
                f"disk, {name}",
                f"{path} has {human(left)} free, but a container may use a GPU with {human(need)}",
                "free some space there, or use a larger disk"
                + (" (store.path in the settings)" if path == store else " (graphroot in storage.conf)"),
                **facts,
            )
        else:
            yield ok(f"disk, {name}", f"{human(left)} are free in {path}", **facts)


def check_memory(gpus: Sequence[Gpu], root: str = "/") -> Iterator[Check]:
    """Check RAM: a GPU's memory is moved there before it is written to the disk."""
    info = dict(
        line.split(":", 1) for line in (text(root, "/proc/meminfo") or "").splitlines() if ":" in line
    )
    total, left = (int(info.get(name, "0").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    largest = max((gpu.memory_total for gpu in gpus), default=0)
    every = sum(gpu.memory_total for gpu in gpus)
    facts = {"total": total, "available": left, "largest_gpu": largest, "all_gpus": every}
    has = f"{human(left)} of {human(total)} RAM are available"
    if left < largest:
        yield warning(
            "RAM",
            f"{has}, but a container that uses all of a GPU with {human(largest)} cannot be checkpointed: "
            "while a process is suspended, its GPU memory is in RAM",
            "free some memory, or add more RAM",
            **facts,
        )
    elif left < every:
        says = f"{has}: enough for one full GPU ({human(largest)}), but not for all ({human(every)}) at once"
        yield ok("RAM", says, **facts)
    else:
        yield ok("RAM", f"{has}" + (f" for {human(every)} of GPU memory" if every else ""), **facts)


def check_unpacking(gpus: Sequence[Gpu], root: str = "/", folder: str = "/tmp") -> Iterator[Check]:
    """Check the folder to which containerd unpacks a checkpoint for a restore (os.MkdirTemp)."""
    largest = max((gpu.memory_total for gpu in gpus), default=0)
    _, left, size = free(join_root(root, folder))
    facts = {"path": folder, "free": left, "size": size, "largest_gpu": largest}
    if left < largest:
        yield warning(
            "disk, containerd",
            f"{folder}, where containerd unpacks a checkpoint before a restore, has {human(left)} free, "
            f"but a container may use a GPU with {human(largest)}",
            "set TMPDIR in containerd's unit to a directory on a larger disk",
            **facts,
        )
    else:
        yield ok("disk, containerd", f"{human(left)} are free in {folder}", **facts)


def speed(folder: str, *, most: int = _MOST) -> Speed | None:
    """Measure writing and reading with a file without a name, for at most _SECONDS each; None if impossible.

    The kernel takes it away with its descriptor, also when we are killed (open(2), O_TMPFILE).
    """
    block = os.urandom(_PIECE)
    try:
        place, left, _ = free(folder)
        if left < 4 * most:
            return None
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            begin, written = time.monotonic(), 0
            while written < most and time.monotonic() - begin < _SECONDS:
                written += file.write(block)
                if not written % _SYNCED:
                    os.fdatasync(file.fileno())
            os.fdatasync(file.fileno())
            write = written / max(time.monotonic() - begin, 1e-6)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin, done = time.monotonic(), 0
            while (data := file.read(_PIECE)) and time.monotonic() - begin < _SECONDS:
                done += len(data)
            return Speed(write, done / max(time.monotonic() - begin, 1e-6)) if done else None
    except OSError:
        return None


def in_memory(folder: str) -> bool:
    """Return whether a folder, or the parent of a new one, is on a tmpfs, whose speed is irrelevant."""
    device = os.stat(free(folder)[0]).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    return any(each.device == name and each.kind in ("tmpfs", "ramfs") for each in proc.mounts("self"))


def check_podmans_limit(gpus: Sequence[Gpu], found: Speed | None, folder: str) -> Iterator[Check]:
    """Check whether the largest GPU's memory can be read in the time that Podman waits for a restore."""
    if found is None or not gpus:
        return
    largest = max(gpu.memory_total for gpu in gpus)
    every = sum(gpu.memory_total for gpu in gpus)
    needs = largest / found.read
    facts = {"read": found.read, "write": found.write, "seconds": needs, "seconds_all": every / found.read}
    rates = f"the disk of {folder} writes {human(int(found.write))}/s and reads {human(int(found.read))}/s"
    if needs > PODMANS_LIMIT:
        fits = human(int(found.read * PODMANS_LIMIT))
        yield warning(
            "Podman's limit",
            f"{rates}: a full GPU ({human(largest)}) takes {needs:.0f} s, but Podman aborts a restore "
            f"after {PODMANS_LIMIT:.0f} s (enough for about {fits})",
            "keep checkpoints on a faster disk",
            **facts,
        )
    else:
        says = f"{rates}: a full GPU ({human(largest)}) takes {needs:.0f} of the {PODMANS_LIMIT:.0f} s"
        yield ok("Podman's limit", f"{says} that Podman waits for a restore", **facts)
