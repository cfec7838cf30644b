"""Which processes belong to a container, and which to the containers beside it.

Containers may share a PID namespace: `podman run --pid container:a`, `podman pod create --share pid`, and
shareProcessNamespace of Kubernetes. Then

- the namespace's PID 1 is the init of one of them, or of the pod's pause container. A process that has lost
  its parent becomes a child of that PID 1, whichever container it is in.
- when that PID 1 ends, the kernel kills everything in the namespace.

So neither the namespace nor parentage alone shows to which container a process belongs. Its cgroup does, if
the container has one of its own, and is checked first. The namespace counts only for the container whose init
is its PID 1. Parentage counts for processes that are in no other container's cgroup; a restore by crun 1.26
leaves processes like that.

A process outside the container's cgroup belongs to another container if it is

- in a cgroup that has another ID for a name;
- in another cgroup and another mount namespace at once;
- if cgroups do not show it (podman run --cgroups=disabled): in the mount namespace of a process that joined
  the PID namespace from outside and has other mounts than its init, unlike processes of `podman exec`; or
  below such a process.

A host may run thousands of processes, and one checkpoint looks for its own a dozen times. So a cgroup of
version 2 is asked for its processes, and the PID namespace of a process, which it keeps, is read once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.cgroup_freezer import GONE

Cgroup = tuple[str, str]
"""Hierarchy (version 2 has the empty one) and path."""

UNIFIED = "/sys/fs/cgroup"
"""Where crun and runc look for version 2 of the cgroups."""
# Cgroups below a container's that are asked one by one. There may be more of them than processes.
_MOST = 1000

# The PID namespaces of processes, by PID and start.
_spaces: dict[tuple[int, int], str] = {}

# The names that engines give a container's cgroup: libpod-ID, cri-containerd-ID.scope, crio-ID, ID.
_CONTAINER = compile_later(r"(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?")


@dataclass(frozen=True, slots=True)
class View:
    """The processes in and around a container at one moment, by PID."""

    members: frozenset[int]
    neighbours: frozenset[int]
    """Processes of other containers that are in its own PID namespace, or descend from its init."""


def find(init: int, container_id: str, group: Cgroup | None) -> View:
    """Find the processes of the container with init `init`; `group`: the cgroup made for it, if any."""
    known = proc.parents_by_start()
    parents = {pid: parent for (pid, _), parent in known.items()}
    within = _list_within(group, init, parents) if group is not None else set()
    space = _own_space(init)
    mates = {pid for pid, start in known if space and _find_space(pid, start) == space}
    came = {pid for pid in mates - within - {init} if parents[pid] not in mates}
    others = _Others(init, container_id, group, _with_own_mounts(came, init))
    neighbours = {pid for pid in mates - within - {init} if others.have(pid)}
    neighbours = proc.add_descendants(neighbours, parents, lambda pid: pid not in within and pid != init)
    members = {init} | within | (mates - neighbours)

    def belongs(pid: int) -> bool:
        if pid not in neighbours and others.have(pid):
            neighbours.add(pid)
        return pid not in neighbours

    members = proc.add_descendants(members, parents, belongs)
    return View(frozenset(members - {os.getpid()}), frozenset(neighbours - {os.getpid()}))


def find_orphans(init: int, members: Iterable[int]) -> tuple[int, ...]:
    """Return those members that lost their parent to a PID 1 that does not belong to their container.

    CRIU dumps a container by its tree from init on, and omits these.
    """
    space = proc.namespace(init, "pid")
    if not space or space == proc.namespace(os.getpid(), "pid"):
        return ()  # in the host's namespace they look like processes of podman exec
    return tuple(pid for pid in members if _is_first(_find_oldest(pid, init, space), init))


def is_inside(pid: int, group: Cgroup) -> bool:
    """Whether a process is in a cgroup, or below it."""
    hierarchy, path = group
    theirs = proc.cgroups(pid).get(hierarchy)
    return theirs is not None and _is_below(theirs, path)


def _list_within(group: Cgroup, init: int, pids: Collection[int]) -> set[int]:
    """Return those of the processes that are in a cgroup, or below it, as init is."""
    found = _read_cgroup(group[1]) if not group[0] else None
    if found is None or init not in found:  # version 1, or another part of the tree is mounted there
        return {pid for pid in pids if is_inside(pid, group)}
    return found.intersection(pids)


def _read_cgroup(path: str) -> set[int] | None:
    """Return the PIDs in a cgroup of version 2 and below; None if it does not say.

    It is read down from the top, and then up again: a process that moves within it meanwhile is found.
    """
    directories = [f"{UNIFIED}{path}"]
    for directory in directories:
        if len(directories) > _MOST:
            return None
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno in GONE:
                continue
            return None
        directories += [f"{directory}/{name}" for name in names]
    found: set[int] = set()
    for directory in (*directories, *reversed(directories)):
        try:
            with open(f"{directory}/cgroup.procs", "rb") as file:
                found.update(map(int, file.read().split()))
        except OSError as error:
            if error.errno not in GONE:  # EOPNOTSUPP: of a threaded one (cgroups(7))
                return None
    return found


def _find_space(pid: int, start: int) -> str:
    """Return the PID namespace of a process; empty if it is gone."""
    found = _spaces.get((pid, start)) or proc.namespace(pid, "pid")
    if found:
        _spaces[pid, start] = found
    return found


def _own_space(init: int) -> str:
    """Return the PID namespace whose PID 1 the init is; empty if it is in another's."""
    process = proc.process(init)
    if process is None or len(process.ns_pids) < 2 or process.ns_pids[-1] != 1:
        return ""
    space = proc.namespace(init, "pid")
    return "" if space == proc.namespace(os.getpid(), "pid") else space


def _with_own_mounts(came: Iterable[int], init: int) -> set[int]:
    """Return those processes from outside the PID namespace that are inits of other containers."""
    own = proc.namespace(init, "mnt")
    return {pid for pid in came if own and proc.namespace(pid, "mnt") not in ("", own)}


def _find_oldest(pid: int, init: int, space: str) -> int:
    """Return the oldest ancestor of a process in its PID namespace, or itself; `init` if it is one."""
    while pid != init:
        parent = proc.parent(pid)
        if not parent or proc.namespace(parent, "pid") != space:
            break
        pid = parent
    return pid


def _is_first(pid: int, init: int) -> bool:
    process = proc.process(pid) if pid != init else None
    return process is not None and process.ns_pids[-1] == 1


class _Others:
    """What is known of the containers beside one."""

    def __init__(self, init: int, container_id: str, group: Cgroup | None, inits: Collection[int]) -> None:
        """`inits`: of containers that joined its PID namespace."""
        groups = proc.cgroups(init)
        self._id, self._group, self._inits = container_id, group, inits
        self._hierarchy = group[0] if group is not None else min(groups, default="")
        self._path = groups.get(self._hierarchy, "/")
        self._ours = proc.cgroups(os.getpid()).get(self._hierarchy, "/")
        self._mounts = proc.namespace(init, "mnt")
        self._theirs = {proc.namespace(pid, "mnt") for pid in inits}

    def have(self, pid: int) -> bool:
        """Whether a process belongs to another container."""
        if pid in self._inits:
            return True
        if self._group is not None and is_inside(pid, self._group):
            return False
        mounts, apart = proc.namespace(pid, "mnt"), self._split_apart(pid)
        if apart and self._mounts and mounts not in ("", self._mounts):
            return True
        return mounts in self._theirs or self._is_named(apart)

    def _split_apart(self, pid: int) -> Sequence[str]:
        """Return the names of a process's cgroup, from where its path leaves that of the container's.

        Empty if it does not leave it; and in gpusnap's own cgroup, where a runtime that gpusnap calls leaves
        processes that it restores.
        """
        path = proc.cgroups(pid).get(self._hierarchy)
        if path is None or _is_below(self._path, path) or _is_below(self._ours, path):
            return ()
        ours, theirs = self._path.split("/"), path.split("/")
        return theirs[len(os.path.commonprefix([ours, theirs])) :]

    def _is_named(self, names: Iterable[str]) -> bool:
        """Whether one of these cgroups has the ID of another container for a name."""
        return any(match[1] != self._id for match in filter(None, map(_CONTAINER.fullmatch, names)))


def _is_below(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent.rstrip("/") + "/")
