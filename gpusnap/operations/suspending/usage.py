"""`gpusnap ps`: lists the containers that use GPUs, or used some until they were suspended."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from gpusnap.engines import podman_objects
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.operations.driver import needed_driver
from gpusnap.operations.suspending import targets
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu import holders
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import THERE, Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers.sweep import sweep

CUT_OFF = "cut off"
"""The state of a container whose gpusnap was killed."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """A container's use of GPUs, and what is stored for it. Sizes are in bytes."""

    name: str
    container_id: str
    engine: str
    """podman, or containerd."""
    state: str
    """running, paused, suspended; suspending, resuming and checkpointing while that takes place; cut off if a
    checkpoint, a suspend or a resume was killed, and `gpusnap recover` finishes or undoes it."""
    gpus: tuple[int, ...]
    """Their numbers in nvidia-smi; for a suspended container, those that it was on."""
    gpu_memory: int
    """In use now; for a suspended container, what it will need."""
    ram: int
    """The part of its GPU memory in RAM."""
    stored: int
    """The part of its GPU memory in the store."""
    since: str
    """When it was started or suspended: UTC, in ISO 8601."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A container as its engine describes it."""

    name: str
    container_id: str
    engine: str
    paused: bool
    init: int


def usages() -> tuple[Usage, ...]:
    """Return all of them, by name. Raises GpusnapError if there is no driver."""
    sweep()
    driver = needed_driver()
    # A record may be left of a container that has ended, while somebody has its lock.
    asleep = [each for each in suspensions.find() if each.is_alive]
    keys = {each.container for each in asleep}
    there = list(_list_running())
    # A suspended container may have been renamed since.
    names = {each.container_id: each.name for each in there if each.engine == "podman"}
    found = [_measure_suspended(replace(each, name=names.get(each.container, each.name))) for each in asleep]
    running = [each for each in there if each.container_id not in keys]
    return tuple(
        sorted([*found, *_measure_running(driver, running)], key=lambda each: (each.name, each.engine))
    )


def measure_kept(found: Suspension) -> tuple[int, int]:
    """Return how many bytes of a suspended container's GPU memory are in RAM, and in the store."""
    ram = stored = 0
    with suppress(OSError):
        ram = sum(tmpfs.sizes(found.key).values())
    with suppress(GpusnapError):
        entry = journal.read(found.key)
        for process in entry.processes if entry is not None else ():
            stored += sum(region.table.size for region in process.regions)
    return ram, stored


def _measure_suspended(found: Suspension) -> Usage:
    ram, stored = measure_kept(found)
    gpus = tuple(gpu.index for gpu in found.gpus if gpu.memory_used) or tuple(g.index for g in found.gpus)
    return Usage(
        found.name,
        found.container,
        found.engine,
        _name_stage(found),
        gpus,
        found.gpu_memory,
        ram,
        stored,
        found.since,
    )


def _name_stage(found: Suspension) -> str:
    """Return the state of a suspended container in words."""
    if found.stage is Stage.SUSPENDED:
        return "suspended"
    if not found.at_work:
        return CUT_OFF
    return "suspending" if found.stage in THERE else "resuming"


def map_running(driver: Driver) -> Mapping[str, Mapping[str, int]]:
    """Return bytes of GPU memory by container name and GPU UUID, for running containers only.

    Paused and suspended ones are omitted. Raises GpusnapError.
    """
    asleep = {each.container for each in suspensions.find()}
    there = [each for each in _list_running() if not each.paused and each.container_id not in asleep]
    return {each.name: used for each, used in _measure_used(driver, there)}


def _measure_used(
    driver: Driver, running: Sequence[_Running]
) -> Iterator[tuple[_Running, Mapping[str, int]]]:
    """Yield bytes by GPU UUID for each container that uses a GPU."""
    members = {
        each.container_id: [process.pid for process in containers.processes(each.init, each.container_id)]
        for each in running
    }
    users = {name: holders(driver, pids) for name, pids in members.items()}
    used = driver.memory_used([pid for pids in users.values() for pid in pids])
    for each in running:
        pids = users[each.container_id]
        if not pids:
            continue
        sizes: dict[str, int] = {}
        for pid in pids:
            for uuid, size in used.get(pid, {}).items():
                sizes[uuid] = sizes.get(uuid, 0) + (size or 0)
        yield each, {uuid: size for uuid, size in sizes.items() if size}


def _measure_running(driver: Driver, running: Sequence[_Running]) -> Iterator[Usage]:
    index = {gpu.uuid: gpu.index for gpu in driver.host().gpus}
    under_way: dict[str, bool] = {}
    with suppress(GpusnapError):
        under_way = {entry.container: entry.at_work for entry in journal.entries()}
    for each, sizes in _measure_used(driver, running):
        yield Usage(
            each.name,
            each.container_id,
            each.engine,
            _state(each, under_way),
            tuple(sorted(index[uuid] for uuid in sizes if uuid in index)),
            sum(sizes.values()),
            0,
            0,
            _read_start_time(each.init),
        )


def _state(each: _Running, under_way: Mapping[str, bool]) -> str:
    if each.container_id in under_way:
        return "checkpointing" if under_way[each.container_id] else CUT_OFF
    return "paused" if each.paused else "running"


def _list_running() -> Iterator[_Running]:
    """Yield Podman's containers, if Podman is installed, and containerd's tasks."""
    with suppress(GpusnapError):
        for each in podman_objects.with_processes():
            yield _Running(each.name, each.id, "podman", each.paused, each.pid)
    for namespace, task, init in targets.tasks():
        name = task if namespace == "default" else f"{namespace}/{task}"
        yield _Running(name, task, "containerd", _is_frozen(init, task), init)


def _is_frozen(init: int, container_id: str) -> bool:
    try:
        return containers.frozen_group(init, container_id) is not None
    except GpusnapError:
        return False


def _read_start_time(init: int) -> str:
    """Return when a process was started; empty if /proc does not say."""
    found = proc.process(init)
    with suppress(OSError, ValueError, StopIteration), open("/proc/stat", encoding="ascii") as file:
        boot = int(next(line for line in file if line.startswith("btime ")).split()[1])
        if found is not None:
            began = datetime.fromtimestamp(boot + found.start / _TICKS, UTC)
            return began.isoformat(timespec="seconds").replace("+00:00", "Z")
    return ""
