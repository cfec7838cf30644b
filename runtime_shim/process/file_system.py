"""Identifies the file system of a path, to tell later whether it is mounted there again."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.process import proc

_BY_UUID = "/dev/disk/by-uuid"
# Their f_fsid comes from the UUID on the disk (linux, ext4_statfs, btrfs_statfs). That of XFS is the device.
_WITH_FSID = ("ext2", "ext3", "ext4", "btrfs")
# What is in them ends with their last mount, so the number of the device identifies them until then.
_IN_RAM = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The file system that holds a path."""

    mount: str
    """Where it is mounted."""
    identity: str
    """What it is: the same if it is mounted again, on every boot; empty if unknown."""
    by_uuid: str = ""
    """The same with the UUID on its disk, if the kernel derives a number in `identity` from that.

    Another kernel may derive another number. Empty if unknown.
    """

    def is_same(self, recorded: FileSystem) -> bool:
        """Whether a recorded one is mounted here. A record without an identity names the place alone."""
        if recorded.mount != self.mount:
            return False
        if recorded.by_uuid and self.by_uuid:
            return recorded.by_uuid == self.by_uuid
        return not (recorded.identity and self.identity) or recorded.identity == self.identity


def find_file_system(path: str) -> FileSystem:
    """Return the file system of a path, whether or not the path exists.

    No server of a file system is asked, as it may not answer: all is from mountinfo and local disks. The
    number of a device (st_dev) would not do: Btrfs, NFS and others get a new one with each mount, and a bind
    mount has that of its source.
    """
    mount = proc.find_mount(os.path.realpath(path))
    if mount is None:
        return FileSystem("/", "")
    uuid = _find_uuid(mount.source) if mount.kind in _WITH_FSID else ""
    return FileSystem(
        mount.destination, _identify(mount, _name(mount)), _identify(mount, uuid) if uuid else ""
    )


def is_in_ram(identity: str) -> bool:
    """Whether what is in the file system is gone after a reboot."""
    return identity.startswith(tuple(f"{kind} " for kind in _IN_RAM))


def _identify(mount: proc.Mount, name: str) -> str:
    """Return the kind, the name or UUID, and the directory of it that is mounted."""
    return " ".join((mount.kind, name, mount.root))


def _name(mount: proc.Mount) -> str:
    if mount.kind in _IN_RAM:
        return mount.device
    if mount.kind == "overlay":  # the source is any word
        return mount.upper or mount.device
    if mount.kind in _WITH_FSID:
        with suppress(OSError):
            return f"{os.statvfs(mount.destination).f_fsid:016x}"
    return _find_uuid(mount.source) or mount.source


def _find_uuid(source: str) -> str:
    """Return the UUID of the file system on a block device; "" for another source, and without udev(7).

    The name of a device, such as /dev/sdb1, may be another one's after the next boot.
    """
    with suppress(OSError):
        status = os.stat(source) if source.startswith("/dev/") else None
        if status is not None and stat.S_ISBLK(status.st_mode):
            for name in sorted(os.listdir(_BY_UUID)):
                with suppress(OSError):
                    if os.stat(os.path.join(_BY_UUID, name)).st_rdev == status.st_rdev:
                        return name
    return ""
