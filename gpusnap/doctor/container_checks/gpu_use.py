"""A container's use of GPUs, and every reason for which gpusnap itself would refuse its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpusnap.doctor.base.check import Check, Verdict, make_refused, ok, plural
from gpusnap.doctor.base.sources import free
from gpusnap.doctor.base.subject import Subject
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.process.proc import Process
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall
from gpusnap.runtime_shim.runtime.criu import external_mounts as criu_mounts
from gpusnap.runtime_shim.runtime.criu.images import dev
from gpusnap.runtime_shim.snapshot.devices import bind_mounted_nodes, remap
from gpusnap.runtime_shim.snapshot.gpu_processes import inherited_handles, plugin_checkpoint
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import Record, find_users, record
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.preflight import shared_gpus, space

Use = Mapping[Process, Record]
"""The GPUs of each process that has GPU state, with its bytes there."""

# The namespace of the CRI plugin's tasks, and containerd's root, below which it writes a checkpoint.
_CRI, _CRI_FOLDER = "k8s.io", "/var/lib/containerd"


def use(driver: Driver, processes: Sequence[Process]) -> tuple[Use, dict[Process, ProcessState]]:
    """Return bytes and state of each process with GPU state, as a checkpoint counts them: suspension.record.

    Raises Refused for one that is stopped.
    """
    states = find_users(driver, processes)
    if not states:
        return {}, states
    inner = {process.pid: process.ns_pids[-1] for process in states}
    records = record(driver, driver.host(), list(states), inner)
    return {each.process: each for each in records}, states


def list_use(used: Use) -> Iterator[Check]:
    """List each GPU process with its bytes."""
    if not used:
        yield ok("GPU processes", "no process has GPU state", processes=[])
        return
    records = [
        {
            "pid": process.pid,
            "command": process.comm,
            "bytes": each.used,
            "gpus": {uuid: size for uuid, size in each.gpus if size},
        }
        for process, each in used.items()
    ]
    names = ", ".join(f"{process.pid} ({process.comm}) {human(each.used)}" for process, each in used.items())
    total = sum(each.used for each in used.values())
    count = plural(len(used), "process")
    has = "has" if len(used) == 1 else "have"
    yield ok(
        "GPU processes", f"{count} {has} {human(total)} on GPUs: {names}", processes=records, bytes=total
    )


def check_refusals(
    of: Subject, driver: Driver, used: Use, states: Mapping[Process, ProcessState]
) -> Iterator[Check]:
    """Report each refusal of the pre-flight checks separately, in its own words; changes nothing."""
    for each in _list_checks(of, driver, used, states):
        try:
            each.ask()
        except GpusnapError as error:
            if each.but:
                todo = error.hint.partition("; if you are sure")[0]
                yield Check(each.name, Verdict.WARNING, f"{error}; {each.but}", todo, code=error.code)
            else:
                yield make_refused(each.name, error)
        else:
            if each.fine:
                yield ok(each.name, each.fine)


@dataclass(frozen=True, slots=True)
class _Asked:
    name: str
    fine: str
    """The text if it does not refuse."""
    ask: Callable[[], object]
    but: str = ""
    """Why its refusal is only a warning."""


def _list_checks(
    of: Subject, driver: Driver, used: Use, states: Mapping[Process, ProcessState]
) -> tuple[_Asked, ...]:
    settings, container = of.settings, of.container
    call = CheckpointCall(container_id=container.id)
    gpu_bytes = {process.pid: each.used for process, each in used.items()}
    store = settings.store.path if settings.memory.pages == StoreDestination.kind else ""
    looking = replace(settings.nvidia, allow_nccl=False)
    return (
        _Asked("container", "", lambda: preflight.refuse_options(call, container)),
        _Asked("other containers", "", lambda: preflight.refuse_adopted(container)),
        _Asked("standard streams", "", lambda: preflight.refuse_files_of_host(container.pid)),
        _Asked(
            "other containers",
            "no process of another container would be killed with this one",
            lambda: preflight.refuse_neighbours(call, container),
            "a checkpoint with --leave-running does not kill them",
        ),
        _Asked("whole", "", lambda: preflight.check_complete(container, of.processes, list(states))),
        _Asked("GPU state", "all GPU processes are running", lambda: preflight.check_states(states)),
        _Asked(
            "left-over handles",
            "no process has GPU files open without using the GPU",
            lambda: preflight.refuse_leftover(lambda: inherited_handles.find_strangers(driver, of.processes)),
        ),
        _Asked(
            "shared GPU memory",
            "no GPU memory is shared in a way that cannot be restored (NCCL, CUDA IPC)",
            lambda: preflight.refuse_shared(list(used), looking, driver.host()),
            "allowed by nvidia.allow-nccl" if settings.nvidia.allow_nccl else "",
        ),
        _Asked(
            "shared GPUs",
            "",
            lambda: shared_gpus.refuse_ranks_beside_others(driver, of.processes, list(used), looking),
            "a checkpoint without --leave-running is possible",
        ),
        _Asked(
            "CRIU plugin",
            "",
            lambda: plugin_checkpoint.refuse_impossible(driver, container, of.processes, settings),
        ),
        _Asked(
            "RAM",
            f"{human(sum(gpu_bytes.values()))} of GPU memory fit into the available RAM",
            lambda: _memory(gpu_bytes, of, driver),
        ),
        _Asked(
            "disk",
            "there is room for the checkpoint",
            lambda: _check_disk(of, sum(gpu_bytes.values()), store),
            "" if of.engine == "Podman" else "containerd may use another directory",
        ),
        _Asked("driver's mounts", "the driver's mounts can be restored", lambda: _mounts(of)),
        _Asked(
            "devices",
            "all devices in its /dev are in its configuration",
            lambda: refuse_strange_devices(of, driver),
        ),
    )


def _check_disk(of: Subject, gpu_bytes: int, store: str) -> None:
    """Check that it fits into the settings' folder and, for Podman's, into that of `gpusnap checkpoint`."""
    images = _find_existing(find_image_folder(of))
    space.check_disk(images, gpu_bytes, of.processes, place=_find_existing(store))
    if of.engine == "Podman" and not store:
        space.check_disk(images, gpu_bytes, of.processes, place=_find_existing(of.settings.store.path))


def _memory(gpu_bytes: Mapping[int, int], of: Subject, driver: Driver) -> None:
    plugin = driver.plugin
    if plugin is None or plugin.into_memory:
        staged = of.settings.memory if plugin is None else None
        space.check_memory(gpu_bytes, of.container.pid, staged)


def find_image_folder(of: Subject) -> str:
    """Return the folder for a checkpoint's images: Podman's own; for containerd's, the most common one.

    `ctr task checkpoint --image-path` sets any other; without it, containerd makes one in TMPDIR.
    """
    if of.engine == "Podman":
        return of.container.bundle
    if os.path.basename(os.path.dirname(of.container.bundle)) == _CRI:
        return _CRI_FOLDER
    return os.environ.get("TMPDIR") or "/tmp"


def _find_existing(folder: str) -> str:
    """Return the folder, or the nearest parent that exists."""
    return free(folder)[0] if folder else ""


def _mounts(of: Subject) -> None:
    found, _ = criu_mounts.list_undeclared(of.container.pid, of.config)
    criu_mounts.check_mounts(found)


def refuse_strange_devices(of: Subject, driver: Driver, *, devices: Sequence[Any] | None = None) -> None:
    """Raise Refused if /dev has a device that is not in the configuration, as a checkpoint does."""
    nodes = driver.nodes(of.container.pid)
    known = {*dev.DEFAULT, *remap.iterate_given(of.config), *(("c", n.major, n.minor, n.path) for n in nodes)}
    for device in bind_mounted_nodes.device_nodes(of.container.pid) if devices is None else devices:
        if device not in known:
            _, major, minor, path = device
            raise Refused(
                f"the container has a device {path} ({major}:{minor}) that is not in its configuration, "
                "so a restore would not create it",
                hint="remove it from the container, or add it with --device",
            )
