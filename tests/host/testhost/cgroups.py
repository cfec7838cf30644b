"""The control groups of one run: one group in every hierarchy, removed after it.

Two kinds of host are known: cgroup v2 alone, and v1 controllers mounted beside v2 (hybrid). The run's
cgroup namespace is rooted at its groups, so what is inside sees itself at the top:

    v2          <mount>/gpusnap-x/            chooses which controllers the run has; see WANTED
                <mount>/gpusnap-x/host/       the namespace's root
                <mount>/gpusnap-x/host/init/  the processes of the run, since v2 wants them in leaves
    each v1     <own group>/gpusnap-x/        below our own group, so that our limits hold for the run
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from . import kernel
from .report import HostError

PREFIX = "gpusnap-"
ROOT, LEAF = "host", "host/init"
REMOVE_DEADLINE_S = 10.0
# The controllers that container engines set limits with. The others of a hybrid host's v2 are kept away: crun
# refuses to run where v2 has any beside v1, and whoever ran crun before has switched on all there are.
WANTED = frozenset({"cpu", "cpuset", "io", "memory", "pids"})


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted cgroup hierarchy. `options` is what mounts it again; empty for v2."""

    mount_point: Path
    options: str
    own: Path  # the group of this process, as a directory

    @property
    def v2(self) -> bool:
        return not self.options

    @property
    def name(self) -> str:
        """The directory it has under /sys/fs/cgroup by convention."""
        return "unified" if self.v2 else self.options.removeprefix("none,name=")

    def group(self, run: str) -> Path:
        # v2: below the root of the mount. Our own group holds processes, so it can give no controllers away.
        return (self.mount_point if self.v2 else self.own) / run


def hierarchies(mountinfo: str, own_groups: str) -> list[Hierarchy]:
    """The mounted hierarchies, from the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    own = {}
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own[frozenset(controllers.split(",")) if controllers else frozenset()] = path
    found: dict[frozenset[str], Hierarchy] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, mount_point = left.split()[3:5]
        kind, _, super_options = right.split()[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        for key, path in own.items():
            matches = not key if kind == "cgroup2" else bool(key) and key <= set(super_options.split(","))
            if matches and key not in found:
                options = ",".join("none," + c if c.startswith("name=") else c for c in sorted(key))
                below = os.path.relpath(path, root)
                if below.startswith(".."):  # our group is outside of what is mounted here
                    below = "."
                found[key] = Hierarchy(Path(mount_point), options, Path(mount_point) / below)
    return list(found.values())


def mounted() -> list[Hierarchy]:
    """The hierarchies mounted on this machine."""
    return hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def create(all_hierarchies: list[Hierarchy], run: str) -> None:
    """Make the groups of `run`."""
    for hierarchy in all_hierarchies:
        group = hierarchy.group(run)
        try:
            group.mkdir()
        except OSError as error:
            raise HostError(
                f"cannot make the cgroup {group}: {error.strerror}",
                "The test host needs root and a writable cgroup file system",
            ) from error
        if hierarchy.v2:
            (group / LEAF).mkdir(parents=True)
            _enable_controllers(hierarchy.mount_point)
            _enable_controllers(group)
        elif "cpuset" in hierarchy.options.split(","):
            # A new v1 cpuset is empty, and a process cannot enter it before it has CPUs and memory nodes.
            for name in ("cpuset.cpus", "cpuset.mems"):
                (group / name).write_text((group.parent / name).read_text())
            # CRIU makes such groups below ours, and fills a child before its parent.
            (group / "cgroup.clone_children").write_text("1")


def _enable_controllers(group: Path) -> None:
    """Give the children of `group` those of WANTED that it has; what cannot be given is done without.

    At the root of a host this is usually done already. It is not undone after the run: another one may have
    come to rely on it.
    """
    for controller in WANTED.intersection((group / "cgroup.controllers").read_text().split()):
        try:
            (group / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError as error:
            # EBUSY: processes in the group, as in a container that was given no leaf of its own.
            if error.errno not in (errno.EBUSY, errno.EINVAL, errno.ENOENT, errno.EOPNOTSUPP):
                raise


def enter(all_hierarchies: list[Hierarchy], run: str) -> None:
    """Move this process into the groups of `run`, and make them the root of its cgroup namespace."""
    for hierarchy in all_hierarchies:
        group = hierarchy.group(run)
        ((group / ROOT if hierarchy.v2 else group) / "cgroup.procs").write_text("0")
    kernel.unshare(kernel.CLONE_NEWCGROUP)
    for hierarchy in all_hierarchies:
        if hierarchy.v2:
            # Into the leaf only now: the namespace's root is where the process was when it was made. And
            # controllers only now: a group that gives them to its children takes no process.
            (hierarchy.group(run) / LEAF / "cgroup.procs").write_text("0")
            _enable_controllers(hierarchy.group(run) / ROOT)


def remove(groups: list[Path], *, deadline_s: float = REMOVE_DEADLINE_S) -> list[Path]:
    """Remove `groups` and those below them, and return what could not be removed.

    Their processes are dead or dying. A frozen process of a v1 hierarchy cannot die, so all are thawed.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        for group in groups:
            thaw(group)
        left = [group for group in groups if not _remove_tree(group)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _remove_tree(group: Path) -> bool:
    """Whether `group` is gone. Only directories can be removed in a cgroup file system, children first."""
    try:
        for directory, _, _ in os.walk(group, topdown=False):
            os.rmdir(directory)
    except FileNotFoundError:
        pass  # removed by its owner meanwhile
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
    return not group.exists()


def thaw(group: Path) -> None:
    """Thaw the v1 freezer groups at and below `group`, if it is of that hierarchy."""
    if not (group / "freezer.state").exists() and not list(group.glob("*/freezer.state")):
        return
    for state in group.rglob("freezer.state"):
        try:
            state.write_text("THAWED")
        except OSError:  # the group went away
            continue
