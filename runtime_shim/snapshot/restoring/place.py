"""How the processes of a container are recognized before its runtime knows it.

The record of a restore (record.py) keeps it; recovery/incomplete_restore.py finds the processes by it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.process import proc


@dataclass(frozen=True, slots=True)
class Place:
    """How the processes of a container are recognized before the container exists."""

    group: str
    """Its cgroup: a path, or one component of paths."""
    beside: tuple[str, ...]
    """The cgroup of the gpusnap that restores it: hierarchy:path, of version 2 if there is one, else all."""
    device: str
    """major:minor of its root file system; empty if that is not known, and then no process is found.

    If a file system has no device of its own (overlay, tmpfs), the kernel gives its number to the next one at
    once.
    """
    root: str
    """The directory of that file system that is the root."""
    upper: str = ""
    """The upper directory of an overlay; otherwise, and in an earlier version's journal, empty."""
    fsid: int = 0
    """The ID of the file system in statfs(2), which is random for a tmpfs. 0 if it is not known.

    A mount's own number (statx(2), STATX_MNT_ID_UNIQUE) is useless: a container has a copy of the mount.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any], bundle: str, container: str) -> Place:
        """Make one for a container from its config.json."""
        linux, root = config.get("linux"), config.get("root")
        path = linux.get("cgroupsPath") if isinstance(linux, dict) else None
        rootfs = root.get("path") if isinstance(root, dict) else None
        device, within, upper, fsid = "", "", "", 0
        if isinstance(rootfs, str) and rootfs:
            path_here = os.path.realpath(os.path.join(bundle, rootfs))
            device, within, upper = _find_file_system(path_here)
            fsid = _read_fsid(path_here) if device else 0
        ours = proc.cgroups("self")
        beside = tuple(f"{name}:{ours[name]}" for name in ([""] if "" in ours else sorted(ours)))
        group = _parse_cgroups_path(path if isinstance(path, str) else "", container)
        return cls(group, beside, device, within, upper, fsid)

    @classmethod
    def from_json(cls, document: Any) -> Place:
        """Parse one. Raises KeyError, TypeError, ValueError."""
        beside = tuple(str(each) for each in document["beside"])
        device, root = str(document["device"]), str(document["root"])
        upper, fsid = str(document.get("upper", "")), int(document.get("fsid", 0))
        return cls(str(document["group"]), beside, device, root, upper, fsid)

    def contains(self, pid: int) -> bool:
        """Whether a process is in one of these cgroups."""
        groups = proc.cgroups(pid)
        if any(map(self._is_own, groups.values())):
            return True
        return bool(self.beside) and {*self.beside} <= {f"{name}:{path}" for name, path in groups.items()}

    def is_root_of(self, pid: int) -> bool:
        """Whether a process has this root."""
        if not self.device or proc.namespace(pid, "mnt") in ("", proc.namespace(os.getpid(), "mnt")):
            return False
        found = [mount for mount in proc.mounts(pid) if mount.destination == "/"]
        if not found or (found[-1].device, found[-1].root) != (self.device, self.root):
            return False
        if self.upper and found[-1].upper != self.upper:
            return False
        fsid = question_process.ask(pid, "its root", _read_fsid, f"/proc/{pid}/root") if self.fsid else 0
        return not fsid or fsid == self.fsid

    def _is_own(self, path: str) -> bool:
        if self.group.startswith("/"):
            return path == self.group or path.startswith(self.group + "/")
        return self.group in path.split("/")


def _parse_cgroups_path(path: str, container: str) -> str:
    """Interpret linux.cgroupsPath (runtime-spec, config-linux.md); for systemd slice:prefix:name."""
    if path.startswith("/"):
        return os.path.normpath(path)
    parts = path.split(":")
    if len(parts) == 3 and parts[2]:
        return f"{parts[1]}-{parts[2]}.scope" if parts[1] else f"{parts[2]}.scope"
    return os.path.basename(os.path.normpath(path)) if path else container


def _read_fsid(path: str) -> int:
    """Return the ID of the file system of a path from statfs(2); 0 if it cannot be read."""
    try:
        return os.statvfs(path).f_fsid
    except OSError:
        return 0


def _find_file_system(path: str) -> tuple[str, str, str]:
    """Return (device, path within it, upper directory) of a directory.

    All are empty if they cannot be determined, or if it is the host's root.
    """
    found = proc.find_mount(path)
    if found is None or path == "/":
        return "", "", ""
    below = os.path.relpath(path, found.destination)
    within = found.root if below == "." else f"{found.root.rstrip('/')}/{below}"
    return found.device, within, found.upper
