"""A container as the real runtime knows it, and all of its processes.

Only /proc shows which processes belong to a container, because a container may share any namespace and any
cgroup with its host, and with other containers: see neighbours.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.base.errors import ContainerError, RuntimeFailed, SettingsError, raise_as, reason
from gpusnap.runtime_shim.base.log import runtime_message
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime import cgroup_freezer, container_key, neighbours
from gpusnap.runtime_shim.runtime.child_process import run

# Seconds for the runtime to report the state of a container, which it reads from a file.
_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Container:
    """The state of a container (runtime-spec, State)."""

    id: str
    pid: int
    """The PID of its init, in gpusnap's PID namespace; 0 if it has none."""
    status: str
    """created, running, stopped, paused."""
    bundle: str
    annotations: dict[str, str]
    root: str = ""
    """The runtime's root, in which the ID is unique; empty if it was not asked."""

    @property
    def key(self) -> str:
        """Its name in gpusnap's own files."""
        return container_key.key(self.root, self.id)


def find(command: Sequence[str], container_id: str, *, root: str = "") -> Container:
    """Ask the real runtime for a container's state; `command` is the runtime with its global options.

    `root`: for Container.root. Raises ContainerError if the runtime does not know it, RuntimeFailed where
    it does not answer.
    """
    done = run([*command, "state", container_id], seconds=_PATIENCE)
    if done.code != 0:
        said = runtime_message("", done.err) or f"exit code {done.code}"
        raise ContainerError(f"the state of container {container_id} cannot be read: {_reword(said)}")
    try:
        state = parse_json(done.out)
        return Container(
            id=str(state["id"]),
            pid=int(state.get("pid") or 0),
            status=str(state["status"]),
            bundle=str(state["bundle"]),
            annotations={str(k): str(v) for k, v in (state.get("annotations") or {}).items()},
            root=root,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeFailed(
            f"{command[0]} state printed no container state: {error!r}", code="GPS-231"
        ) from error


def _reword(text: str) -> str:
    """Change a message that contains the text of ENOENT: Podman replaces such messages (base/errors.py)."""
    lowered = text.lower()
    if "no such file or directory" in lowered or "not exist" in lowered:
        return "there is no such container"
    return text


def processes(init: int, container_id: str) -> tuple[proc.Process, ...]:
    """Return every process of the container whose init is `init`, ordered by PID, without zombies.

    These are the processes in its own cgroup, those in its PID namespace that belong to no other container,
    and their descendants. From now on, a signal to one of them reaches no later process with its PID
    (process/pidfd.py).

    Empty if it has no init: a runtime then reports 0, which is the parent of everything that a host runs.
    """
    if init <= 0:
        return ()
    found = _list_listed(neighbours.find(init, container_id, _own_cgroup(init, container_id)).members)
    pidfd.remember((process.pid, process.start) for process in found)
    return found


def list_beside(init: int, container_id: str) -> tuple[proc.Process, ...]:
    """Return processes of other containers that would end with this one, or that descend from its init.

    They joined its PID namespace: when its PID 1 ends, the kernel kills all processes in it.
    """
    if init <= 0:
        return ()
    return _list_listed(neighbours.find(init, container_id, _own_cgroup(init, container_id)).neighbours)


def list_left_out(init: int, members: Iterable[proc.Process]) -> tuple[proc.Process, ...]:
    """Return members that do not descend from init: the PID 1 of a shared PID namespace has adopted them."""
    known = {process.pid: process for process in members}
    return tuple(known[pid] for pid in neighbours.find_orphans(init, known))


def is_descendant(pid: int, init: int) -> bool:
    """Whether a process is init or a descendant of it."""
    seen = set()
    while pid and pid != init and pid not in seen:
        seen.add(pid)
        pid = proc.parent(pid)
    return pid == init


def _list_listed(pids: Iterable[int]) -> tuple[proc.Process, ...]:
    found = (proc.process(pid) for pid in sorted(pids))
    return tuple(process for process in found if process is not None)


def inner_pids(init: int, members: Iterable[proc.Process]) -> dict[int, int]:
    """Return the PID of each process in the namespace of the container's init, which a restore restores."""
    first = proc.process(init)
    depth = len(first.ns_pids) - 1 if first is not None else 0
    return {member.pid: member.ns_pids[min(depth, len(member.ns_pids) - 1)] for member in members}


def gather(init: int, container_id: str, members: Iterable[proc.Process]) -> None:
    """Move those members that are outside the container's cgroup (version 2) into init's.

    crun 1.26 and later restores only init into it when CRIU ignores cgroups; the others would run without
    limits. Raises ContainerError.
    """
    group = _own_cgroup(init, container_id)
    tops = _list_mounted()
    if group is None or group[0] or not tops:
        return
    for member in members:
        if neighbours.is_inside(member.pid, group):
            continue
        try:
            with open(f"{tops[0]}{proc.cgroups(init)['']}/cgroup.procs", "w", encoding="ascii") as file:
                file.write(str(member.pid))
        except (OSError, KeyError) as error:
            if not proc.is_running(member.pid):
                continue
            said = reason(error) if isinstance(error, OSError) else "init has exited"
            raise ContainerError(
                f"process {member.pid} ({member.comm}) cannot be moved into its container's cgroup: {said}"
            ) from error


def find_freezer(container: Container) -> str | None:
    """Return the directory of the cgroup (version 2) that froze a container, as `frozen_group`."""
    found = (frozen_group(container.pid, name) for name in _names(container))
    return next((group for group in found if group is not None), None)


def list_freezable(container: Container) -> tuple[str, ...]:
    """Return the directories of the cgroups with one of which a runtime would freeze only this container.

    As in `frozen_group`. Empty if the runtimes use version 1, with version 2 beside it only in name: they
    look for version 2 in one place.
    """
    if neighbours.UNIFIED not in _list_mounted():
        return ()
    return next(
        filter(None, (_groups(container.pid, name, neighbours.UNIFIED) for name in _names(container))), ()
    )


def _names(container: Container) -> Iterator[str]:
    """Yield its ID, and the name of its cgroup in its configuration.

    containerd restores under another name with the old name's cgroupsPath.
    """
    yield container.id
    try:
        linux = bundle_config(container.bundle).get("linux")
    except ContainerError:
        return
    path = linux.get("cgroupsPath") if isinstance(linux, dict) else ""
    # A path, or slice:prefix:name for systemd's driver.
    name = re.split("[/:]", path)[-1] if isinstance(path, str) else ""
    if name:
        yield name


def frozen_group(pid: int, container_id: str) -> str | None:
    """Return the directory of the cgroup (version 2) that froze the container of a process; None if none did.

    It is the container's own, or a cgroup between that and the process, because crun makes one within it.
    """
    tops = _list_mounted()
    return next(filter(cgroup_freezer.is_frozen, _groups(pid, container_id, tops[0])), None) if tops else None


def list_in_cgroup(path: str) -> tuple[proc.Process, ...]:
    """Return the processes in the cgroup (version 2) with that path and in those below it, by PID.

    Without processes that are about to end. Raises GpusnapError.
    """
    tops = _list_mounted()
    pids = set(cgroup_freezer.members(f"{tops[0].rstrip('/')}{path}")) if tops else set()
    return _list_listed(pid for pid in pids if not proc.is_dying(pid))


def cgroup_folder(pid: int) -> str | None:
    """Return the directory of the cgroup (version 2) of a process; None if there is none.

    A cgroup outside gpusnap's cgroup namespace has none: the kernel writes it as /.. (cgroup_namespaces(7)).
    """
    tops, path = _list_mounted(), proc.cgroups(pid).get("")
    if not tops or path is None or f"{path}/".startswith("/../"):
        return None
    return f"{tops[0].rstrip('/')}{path}".rstrip("/")


def _list_mounted() -> list[str]:
    """Return where version 2 of the cgroups is mounted."""
    return [mount.destination for mount in proc.mounts("self") if mount.kind == "cgroup2"]


def _groups(pid: int, name: str, top: str) -> tuple[str, ...]:
    """Return the directories of the cgroup (version 2) of that name, and of those between it and the process.

    `top`: where version 2 is mounted.
    """
    group = _own_cgroup(pid, name)
    if group is None or group[0]:
        return ()
    below = os.path.relpath(proc.cgroups(pid).get("", group[1]), group[1])
    names = [] if below == "." else below.split("/")
    own = f"{top.rstrip('/')}{group[1]}"
    return tuple("/".join([own, *names[:depth]]) for depth in range(len(names) + 1))


def _own_cgroup(init: int, container_id: str) -> tuple[str, str] | None:
    """Return (hierarchy, path) of the cgroup that was made for the container; None if it has none of its own.

    It is recognized by the container's ID in its name, as all engines set it (libpod-ID,
    cri-containerd-ID.scope, ID). A cgroup that merely is not gpusnap's (podman --cgroups=disabled) may
    contain unrelated processes. Init may be further down, as with systemd.
    """
    own = re.compile(rf"(?:.*[-:])?{re.escape(container_id)}(?:\.scope)?")
    # Version 2 first: its key is empty.
    for hierarchy, path in sorted(proc.cgroups(init).items()):
        names = path.split("/")
        for depth, name in enumerate(names):
            if own.fullmatch(name):
                return hierarchy, "/".join(names[: depth + 1])
    return None


def has_own_v1_freezer(init: int, container_id: str) -> bool:
    """Whether the container's cgroup is one of version 1, with a freezer.

    Beside version 2, a restore by CRIU leaves such groups as well, and nobody uses them. In version 1, a
    process that was stopped by a signal cannot be seized once it is frozen (seen on Linux 6.18: CRIU under
    runc hangs in ptrace_attach, and only a thaw ends that); with version 2 it can.
    """
    group = _own_cgroup(init, container_id)
    path = next((p for h, p in proc.cgroups(init).items() if "freezer" in h.split(",")), "")
    return group is not None and group[0] != "" and container_id in path


def bundle_config(bundle: str) -> dict[str, Any]:
    """Read the config.json of a bundle. Raises ContainerError."""
    path = os.path.join(bundle, "config.json")
    try:
        with raise_as(ContainerError, f"{path} cannot be read"), open(path, "rb") as file:
            config = parse_json(file.read())
    except ValueError as error:
        raise ContainerError(f"{path} is not JSON: {error}", code="GPS-231") from error
    if not isinstance(config, dict):
        raise ContainerError(f"{path} is not an OCI configuration", code="GPS-231")
    return config


def bundle_namespaces(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return linux.namespaces of a configuration, without invalid entries."""
    linux = config.get("linux")
    found = linux.get("namespaces") if isinstance(linux, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def bundle_annotations(config: dict[str, Any]) -> dict[str, str]:
    """Return its annotations. Raises SettingsError if they are not a map of strings."""
    annotations = config.get("annotations") or {}
    if not isinstance(annotations, dict) or not all(isinstance(v, str) for v in annotations.values()):
        raise SettingsError("the container's annotations are not a map of strings", code="GPS-231")
    return annotations
