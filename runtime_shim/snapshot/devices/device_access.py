"""Checks that a container may open its GPUs' device nodes, and allows it again.

The kernel runs the programs of a cgroup when a process opens a device node (Linux,
Documentation/admin-guide/cgroup-v2.rst, Device controller), but not while the process has it open. So a
container can lose its GPUs while its processes continue to use them. `podman update` gives crun rules that
forbid all devices, instead of those from --device, and keeps them in config.json; a daemon-reload of systemd
removes the nodes, too. A GPU's driver opens the nodes again when it restores GPU state, and then fails. So
gpusnap checks the rules before it takes GPU state, and before it restores it after a while. In between,
Podman holds the container's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gpusnap.oci.base.files import exists
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, RuntimeFailed, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import cgroup_freezer
from gpusnap.runtime_shim.runtime import container as containers

if TYPE_CHECKING:
    from gpusnap.runtime_shim.runtime.identify import RealRuntime

Update = Callable[[Sequence[Node]], Sequence[Node]]
"""Makes a container's runtime allow what its configuration gives it; returns which nodes: see `update`."""

_SECONDS = 30.0  # for the runtime
_MEMBERS = os.O_WRONLY | os.O_CLOEXEC


def check(pid: int, container: str, nodes: Sequence[Node], allow: Update) -> None:
    """Check that the container of a process, which is not frozen, may open these nodes of its /dev.

    These are the nodes that its configuration gives it, and those that it has open. Nodes that it has lost
    are allowed again, and reported. Raises Refused if that is impossible.
    """
    lost, why = _give_back(pid, container, nodes, allow)
    if lost:
        raise Refused(
            f"container {container} may no longer open {_paths(lost)}, so the GPU's driver cannot restore "
            f"its GPU state{f': {why}' if why else ''}",
            hint="see gpusnap explain GPS-217 for what removes access to device nodes",
            code="GPS-217",
        )


def update(real: RealRuntime, container: containers.Container, nodes: Sequence[Node]) -> Sequence[Node]:
    """Make a container's runtime allow again what its config.json allows; return which of `nodes` it is.

    If it gives none of them, nothing is done: they are in its /dev, but were never its own. The limits of its
    other resources stay. Raises GpusnapError.
    """
    import json  # rarely needed
    import tempfile

    from gpusnap.runtime_shim.runtime import bundle
    from gpusnap.runtime_shim.runtime.child_process import run
    from gpusnap.runtime_shim.runtime.command_line import Globals, render_globals
    from gpusnap.runtime_shim.runtime.criu import scratch_files

    config = containers.bundle_config(container.bundle)
    rules = bundle.device_rules(config)
    given = [node for node in nodes if {"r", "w"} <= {*bundle.access(rules, "c", node.major, node.minor)}]
    if not given:
        return ()
    command = render_globals(Globals(root=container.root or None), real)
    prefix = scratch_files.prefix("devices")
    with tempfile.NamedTemporaryFile(prefix=prefix, dir=scratch_files.scratch(), mode="w") as file:
        json.dump({"devices": rules}, file)
        file.flush()
        done = run([*command, "update", "--resources", file.name, container.id], seconds=_SECONDS)
    if done.code != 0:
        said = done.err.strip().rpartition("\n")[2]
        raise RuntimeFailed(f"{real.name} update failed: {said}", code="GPS-217")
    return given


def _give_back(pid: int, container: str, nodes: Sequence[Node], allow: Update) -> tuple[Sequence[Node], str]:
    """Allow lost nodes again; return those that are still lost, and why."""
    denied, why = _list_denied(pid, nodes), ""
    if not denied:
        return (), ""
    lost = denied
    try:
        lost = allow(denied)
    except (GpusnapError, OSError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
    # NVIDIA's hook gives nodes that config.json does not list: a process that has one open was allowed it.
    others = [node for node in denied if node not in lost]
    still = [*_list_denied(pid, lost), *_open(pid, others)]
    if lost and not still:
        note(
            f"container {container} could no longer open {_paths(lost)}, as after podman update; access "
            "was restored",
            code="GPS-217",
        )
    return still, why


def _paths(nodes: Sequence[Node]) -> str:
    return ", ".join(node.path for node in nodes)


def _list_denied(pid: int, nodes: Sequence[Node]) -> Sequence[Node]:
    """Return those that a process in the cgroup of `pid` may not open; none if this cannot be determined."""
    group, own = containers.cgroup_folder(pid), containers.cgroup_folder(os.getpid())
    if group is None or own is None or group == own or not nodes:
        return ()
    with suppress(GpusnapError, OSError):
        if not cgroup_freezer.is_standing(group):  # a process that enters a frozen one is frozen as well
            by_path = {f"/proc/{pid}/root{node.path}": node for node in nodes}
            denied = question_process.ask(pid, "its device nodes", _ask, group, own, [*by_path])
            return [by_path[path] for path in denied]
    return ()


def _open(pid: int, nodes: Sequence[Node]) -> Sequence[Node]:
    """Return those that a process in the cgroup of `pid` has open."""
    group, held = containers.cgroup_folder(pid), set[str]()
    if group is not None and nodes:
        with suppress(GpusnapError):
            for member in cgroup_freezer.members(group):
                held.update(target for _, target in proc.open_files(member))
    return [node for node in nodes if node.path in held]


def _ask(group: str, own: str, paths: Sequence[str]) -> list[str]:
    """Return, in a child, which of these nodes a process of that cgroup may not open, without opening any."""
    there = [path for path in paths if exists(path)]
    # The way back first: a child that stays there is frozen with the container, and seized by CRIU.
    back = os.open(f"{own}/cgroup.procs", _MEMBERS)
    try:
        _enter(group)
        try:
            return [path for path in there if not os.access(path, os.R_OK | os.W_OK)]
        finally:
            os.write(back, b"0")
    finally:
        os.close(back)


def _enter(group: str) -> None:
    members = os.open(f"{group}/cgroup.procs", _MEMBERS)
    try:
        os.write(members, b"0")
    finally:
        os.close(members)
