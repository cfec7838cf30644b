"""The root that the command sees: the tree below, what is written above it in memory.

Everything is mounted in a mount namespace of the run's own, and goes with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import kernel
from .cgroups import Hierarchy
from .report import HostError

# Memory-backed and empty in each run. Podman's and containerd's layers are overlays, and an overlay's upper
# directory cannot lie on another overlay.
MEMORY = ("/run", "/tmp", "/var/tmp", "/var/lib/containers", "/var/lib/containerd")
# There where the kernel has huge pages for tmpfs (Documentation/admin-guide/mm/transhuge.rst).
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
# name: (mode, major, minor), as in Documentation/admin-guide/devices.txt of the kernel
NODES = {
    "null": (0o666, 1, 3), "zero": (0o666, 1, 5), "full": (0o666, 1, 7), "random": (0o666, 1, 8),
    "urandom": (0o666, 1, 9), "tty": (0o666, 5, 0), "fuse": (0o666, 10, 229), "net/tun": (0o666, 10, 200),
}  # fmt: skip
LINKS = {
    "ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2", "core": "/proc/kcore",
}  # fmt: skip
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1  # <linux/sockios.h>, <linux/if.h>


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or directory of this machine that the run shall see."""

    source: str
    target: str
    read_only: bool

    @classmethod
    def parse(cls, text: str) -> Bind:
        """SRC:DST[:ro]."""
        source, _, rest = text.partition(":")
        target, _, option = rest.partition(":")
        if not source or not target.startswith("/") or option not in ("", "ro", "rw"):
            raise HostError(f"--bind {text!r} is not SRC:DST or SRC:DST:ro with an absolute DST")
        if not os.path.exists(source):
            raise HostError(f"--bind {text!r}: {source} does not exist")
        return cls(os.path.realpath(source), target, option == "ro")


def assemble(
    tree: Path, scratch: Path, binds: list[Bind], all_hierarchies: list[Hierarchy], *, cgroup: str
) -> None:
    """Mount the root at `scratch`, an empty directory, and pivot into it."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    root = _overlay(tree, scratch)
    kernel.mount("proc", f"{root}/proc", "proc")
    kernel.mount("sysfs", f"{root}/sys", "sysfs")
    for target in MEMORY:
        os.makedirs(root + target, exist_ok=True)
        mode = "mode=1777" if "tmp" in target else "mode=755"
        # softgpu's device memory is in /run, and every tick reads and writes all of it.
        huge = ",huge=within_size" if target == "/run" and os.path.exists(HUGE_PAGES) else ""
        kernel.mount("tmpfs", root + target, "tmpfs", data=mode + huge)
    os.makedirs(f"{root}/run/lock", exist_ok=True)
    _devices(f"{root}/dev")
    _cgroups(f"{root}/sys/fs/cgroup", all_hierarchies, cgroup)
    for wanted in binds:
        _bind(root, wanted)
    kernel.pivot_root(root)


def _overlay(tree: Path, scratch: Path) -> str:
    kernel.mount("tmpfs", str(scratch), "tmpfs", data="mode=755")
    for name in ("upper", "work", "root"):
        os.mkdir(scratch / name)
    root = f"{scratch}/root"
    # xino=on: CRIU finds the file behind a mapping by its device number, which without it is not the mount's
    # when upper and lower lie on different file systems.
    data = f"lowerdir={tree},upperdir={scratch}/upper,workdir={scratch}/work,xino=on"
    try:
        kernel.mount("overlay", root, "overlay", data=data)
    except OSError as error:
        raise HostError(
            f"cannot mount an overlay over {tree}: {error.strerror}",
            "The kernel needs overlayfs, and the cache a file system that may lie below one:"
            " ext4, xfs, btrfs. Set GPUSNAP_CACHE to a directory on one",
        ) from error
    return root


def _devices(dev: str) -> None:
    """A /dev of the run's own: tests make GPU nodes in it."""
    kernel.mount("tmpfs", dev, "tmpfs", flags=kernel.MS_NOSUID, data="mode=755")
    for name in ("pts", "shm", "mqueue", "net"):
        os.mkdir(f"{dev}/{name}")
    kernel.mount("devpts", f"{dev}/pts", "devpts", data="newinstance,ptmxmode=0666,mode=620,gid=5")
    kernel.mount("tmpfs", f"{dev}/shm", "tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, data="mode=1777")
    kernel.mount("mqueue", f"{dev}/mqueue", "mqueue")
    for name, (mode, major, minor) in NODES.items():
        os.mknod(f"{dev}/{name}", stat.S_IFCHR | mode, os.makedev(major, minor))
        os.chmod(f"{dev}/{name}", mode)  # the umask has had its say
    with suppress(FileNotFoundError):  # its minor number is any; there from Linux 6.1 on
        os.mknod(f"{dev}/userfaultfd", stat.S_IFCHR | 0o600, os.stat("/dev/userfaultfd").st_rdev)
    for name, target in LINKS.items():
        os.symlink(target, f"{dev}/{name}")


def _cgroups(top: str, all_hierarchies: list[Hierarchy], cgroup: str) -> None:
    """/sys/fs/cgroup: cgroup v2 alone, or as a hybrid host has it."""
    v1 = [h for h in all_hierarchies if not h.v2]
    if cgroup == "v2" or (cgroup == "native" and not v1):
        kernel.mount("cgroup2", top, "cgroup2")
        return
    if not v1:
        raise HostError("this machine has no cgroup v1 controllers mounted", "Use --cgroup v2")
    kernel.mount("tmpfs", top, "tmpfs", data="mode=755")
    for hierarchy in all_hierarchies:
        target = f"{top}/{hierarchy.name}"
        os.mkdir(target)
        if hierarchy.v2:
            kernel.mount("cgroup2", target, "cgroup2")
        else:
            kernel.mount("cgroup", target, "cgroup", data=hierarchy.options)


def _bind(root: str, wanted: Bind) -> None:
    target = root + wanted.target
    try:
        if os.path.isdir(wanted.source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "a"):
                pass
        kernel.bind(wanted.source, target, read_only=wanted.read_only)
    except OSError as error:
        raise HostError(f"cannot bind {wanted.source} to {wanted.target}: {error}") from error


def loopback_up() -> None:
    """Set `lo` up; a new network namespace has it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))


def thaw_all() -> None:
    """Thaw what is frozen in the run's v1 freezer: such a process could not die with the run."""
    freezer = Path("/sys/fs/cgroup/freezer")
    for state in freezer.rglob("freezer.state"):
        try:
            state.write_text("THAWED")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EINVAL):
                raise
