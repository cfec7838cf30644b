"""Checks that can refuse a suspend while the container runs. Nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import Refused, advise, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu import estimate_used, holders
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host, Node
from gpusnap.runtime_shim.process import mount_namespace, proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.records import journal, suspensions


@dataclass(frozen=True, slots=True)
class InitialState:
    """A container and its host before anything is changed."""

    host: Host
    init: proc.Process | None
    """The container's first process."""
    nodes: Sequence[Node]
    """The GPUs' device nodes in its /dev."""
    memory: int
    """Bytes of GPU memory that its processes used; at most, if the driver does not report it."""


def inspect(container: containers.Container, driver: Driver, name: str) -> InitialState:
    """Inspect a container before a suspend. `name`: its name in its engine.

    Raises Refused if it cannot be suspended; GpusnapError.
    """
    if suspensions.read(container.key) is not None:
        raise Refused(
            f"container {name} is already suspended", hint=f"gpusnap resume {name} resumes it", code="GPS-206"
        )
    if journal.read(container.key) is not None:
        raise Refused(
            f"gpusnap was killed while it was working on container {container.id}",
            hint=f"gpusnap recover {container.id}",
            code="GPS-021",
        )
    if driver.plugin is not None:
        raise Refused(
            f"the GPUs of container {name} can be suspended only within a checkpoint, by CRIU's "
            f"plugin {driver.plugin.name}",
            hint="gpusnap checkpoint writes it to the store and frees its GPUs",
            code="GPS-206",
        )
    if not containers.list_freezable(container):
        raise Refused(
            f"container {name} does not have its own version 2 cgroup, which is needed to pause it",
            hint="run it with cgroups, on a host with cgroup v2 (systemd.unified_cgroup_hierarchy=1)",
            code="GPS-203",
        )
    check_place()
    driver.open()
    host = driver.host()
    init = proc.process(container.pid)
    nodes = driver.nodes(container.pid)
    members = containers.processes(container.pid, container.id)
    pids = holders(driver, [process.pid for process in members])
    if not pids:
        raise Refused(
            f"no process of container {name} uses a GPU",
            hint="podman pause or ctr task pause can pause it",
            code="GPS-206",
        )
    used = driver.memory_used(pids)
    estimate = sum(sum(of.values()) for of in estimate_used(used, host).values())
    if any(None in of.values() for of in used.values()):
        note(
            f"the driver does not report how much GPU memory container {name} uses; gpusnap counts "
            f"{human(estimate)} of RAM for it, all that may be its own on its GPUs",
            code="GPS-216",
        )
    return InitialState(host, init, nodes, estimate)


def check_place() -> None:
    """Refuse if files in RAM would not outlive gpusnap, or if this host could write them to swap."""
    if not mount_namespace.is_lasting():
        raise Refused(
            "gpusnap runs in its own mount namespace, and its files in RAM would disappear with that",
            hint="run it in the host's mount namespace: in a systemd unit, without PrivateTmp=, "
            "ProtectSystem= and the like",
            code="GPS-216",
        )
    try:
        swapped = tmpfs.can_be_swapped()
    except OSError as error:
        lack = advise(error)
        raise Refused(
            f"cannot determine whether suspended GPU memory would be swapped: {reason(error)}",
            hint=lack or "run gpusnap as root",
            code="" if lack else "GPS-005",
        ) from error
    if swapped:
        raise Refused(
            "this host has swap, but its kernel (before Linux 6.4) cannot exclude GPU memory in RAM from "
            "swapping",
            hint="disable swap (swapoff -a), or use a newer kernel",
            code="GPS-216",
        )
