"""All checks of one container, in the order of the report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from gpusnap.doctor.base import free_space
from gpusnap.doctor.base.check import Ask, Check, make_refused, ok, run_checks, warning
from gpusnap.doctor.base.subject import Subject
from gpusnap.doctor.container_checks import (
    duration,
    files,
    gpu_use,
    kubernetes,
    mounts,
    podman,
    sockets,
)
from gpusnap.doctor.container_checks.files import OpenFile
from gpusnap.doctor.container_checks.gpu_use import Use
from gpusnap.doctor.host_checks import cdi
from gpusnap.operations.disk_space import volume_sizes
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu.api.device_files import nvidia_majors
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.nvidia.driver_files import is_driver_file
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.proc import Process
from gpusnap.runtime_shim.runtime.criu import external_mounts as criu_mounts
from gpusnap.runtime_shim.snapshot.gpu_processes.choose_driver import choose_driver
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.records import suspensions


def checks(of: Subject, driver: Driver | None) -> tuple[Check, ...]:
    """Check what would prevent a checkpoint of the container, and how long one is likely to take."""
    used: Use = {}
    found: list[Check] = [*_container(of)]
    if driver is None:
        found.append(ok("GPU processes", "this host has no GPU driver, so no process has GPU state"))
    elif (asleep := suspensions.find_by_container(of.container.id)) is not None:
        says = (
            f"the container is suspended, and its {human(asleep.gpu_memory)} of GPU memory are in RAM or the "
            "store"
        )
        found.append(ok("GPU processes", f"{says}; a checkpoint copies it from there, without the GPU"))
    elif of.container.status == "paused":
        says = (
            "the container is paused, so its processes do not respond to the GPU's driver; a checkpoint "
            "thaws it for that, doctor does not"
        )
        found.append(warning("GPU processes", says, "unpause it, then run gpusnap doctor again"))
    else:
        try:
            driver = choose_driver(driver, of.container, of.settings)
            driver.host()  # first: a child process asks, which can be left behind if a GPU does not respond
            driver.open()
            used, states = gpu_use.use(driver, of.processes)
        except GpusnapError as error:
            found.append(make_refused("GPU processes", error))
        else:
            found += run_checks(_list_gpu_checks(of, driver, used, states))
    opened = files.list_open_files(of.processes)
    return (*found, *run_checks(_list_criu_checks(of, opened, used)))


def _container(of: Subject) -> Iterator[Check]:
    facts: dict[str, Any] = {
        "id": of.container.id,
        "engine": of.engine,
        "status": of.container.status,
        "processes": len(of.processes),
    }
    if of.objection is not None:
        yield make_refused("container", of.objection, **facts)
    elif not of.processes:
        yield warning("container", f"{of.name} has no process", "start it", **facts)
    else:
        count = len(of.processes)
        says = f"{of.name} ({of.engine}, {of.container.id[:12]}) is {of.container.status}, processes: {count}"
        yield ok("container", says, **facts)


def _list_gpu_checks(
    of: Subject, driver: Driver, used: Use, states: dict[Process, ProcessState]
) -> Iterator[Ask]:
    yield "GPU processes", lambda: gpu_use.list_use(used)
    yield (
        "GPU state",
        lambda: gpu_use.check_refusals(of, driver, used, states)
        if used or driver.nodes(of.container.pid)
        else (),
    )


def _list_criu_checks(of: Subject, opened: tuple[OpenFile, ...], used: Use) -> Iterator[Ask]:
    settings, container, processes = of.settings, of.container, of.processes
    majors = nvidia_majors()[1]

    def ours(path: str, major: int) -> bool:
        return major in majors or path.startswith(("/dev/nvidia", "/dev/dri/", "/dev/kfd"))

    spaces = {process.pid: proc.namespace(process.pid, "ipc") for process in processes}
    own = proc.namespace(os.getpid(), "ipc")
    limit = settings.criu.ghost_limit
    yield "exec sessions", lambda: _sessions(of)
    yield "kernel files", lambda: files.check_anonymous(opened)
    yield "open devices", lambda: files.check_character_devices(opened, ours)
    yield "deleted files", lambda: files.check_deleted(processes, opened, limit)
    yield "pod's volumes", lambda: kubernetes.open_files(of.config, processes, limit)
    yield "System V memory", lambda: files.check_shared_memory(processes, spaces, own)
    yield "file locks", lambda: files.check_locks(opened, driver=cdi.list_mounted())
    yield "inotify", lambda: files.check_watches(opened)
    yield "sockets", lambda: sockets.check_protocols(opened)
    yield "TCP connections", lambda: sockets.check_connections(opened, closed=settings.criu.tcp_close)
    yield "mounts", lambda: mounts.check(proc.mounts(container.pid), of.config, _drivers(of))
    sizes = volume_sizes(of.volumes)
    if of.engine == "Podman":
        yield "volumes", lambda: podman.check_volumes(sizes)
        yield "Podman's options", lambda: podman.check_options(of.unrestored)
    yield "duration", lambda: _duration(of, used, sum(sizes.values()))


def _sessions(of: Subject) -> Iterator[Check]:
    found = preflight.list_sessions(of.container, of.processes)
    facts = {"processes": [{"pid": each.pid, "command": each.comm} for each in found]}
    if found:
        names = ", ".join(f"{each.pid} ({each.comm})" for each in found)
        says = f"exec started a process in the container: {names}; a checkpoint does not include it"
        yield warning(
            "exec sessions", says, "start what must be included from the container's own command", **facts
        )
    else:
        yield ok("exec sessions", "all processes descend from the container's init", **facts)


def _drivers(of: Subject) -> set[str]:
    """Return the driver's mounts that gpusnap declares, and its other files, which CRIU must know too."""
    declared, _ = criu_mounts.list_undeclared(of.container.pid, of.config)
    every = {mount.destination for mount in proc.mounts(of.container.pid)}
    return {mount.destination for mount in declared} | {path for path in every if is_driver_file(path)}


def _duration(of: Subject, used: Use, in_volumes: int) -> Iterator[Check]:
    settings, place = of.settings, gpu_use.find_image_folder(of)
    if settings.memory.pages == "store":
        place = settings.store.path
    resident = sum(proc.memory(process.pid) for process in of.processes)
    before = duration.list_earlier(settings.store.path, of.container.id)
    disk = None if free_space.in_memory(place) else free_space.speed(place)
    asleep = suspensions.find_by_container(of.container.id)
    gpu = asleep.gpu_memory if asleep is not None else sum(each.used for each in used.values())
    for check in duration.check(of.container.id, gpu, resident, before, disk, volumes=in_volumes):
        yield check
        yield from kubernetes.check_probes(of.container.annotations, check.facts["high"])
