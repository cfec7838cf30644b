"""AMD's device files that a process holds, from /proc: /dev/kfd, and the render nodes of its GPUs.

A file is recognized by its device number, whatever its name is in the container. All vendors share DRM's
major, so a render node is recognized by the minors that the caller knows to be AMD's. If the kernel denies
access, PermissionRefused is raised, because "holds nothing" would be a guess.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.gpu.api import device_files
from gpusnap.runtime_shim.gpu.api.driver import HeldFiles

KFD = "/dev/kfd"
DRM_MAJOR = 226  # Documentation/admin-guide/devices.txt

Number = tuple[int, int]
"""Major and minor."""


def kfd_number(node: str = KFD) -> Number | None:
    """Return KFD's device number, which the kernel assigns anew on each host; None if there is none."""
    major = next((major for name, major in device_files.character_drivers() if name == "kfd"), None)
    if major is not None:
        return major, 0
    try:
        found = os.stat(node)
    except OSError:
        return None
    return _number(found)


def list_held(pid: int, ours: Collection[Number]) -> HeldFiles:
    """Return files with one of the device numbers `ours`, by descriptor and by address. Raises GpuError."""
    opened = tuple(sorted((number, path) for number, path, device in _iterate_opened(pid) if device in ours))
    return HeldFiles(opened, tuple(entry for entry, device in _iterate_mapped(pid) if device in ours))


def list_held_numbers(pid: int) -> frozenset[Number]:
    """Return the numbers of all character devices that the process has open or mapped. Raises GpuError."""
    return frozenset(
        {device for *_, device in _iterate_opened(pid)} | {device for _, device in _iterate_mapped(pid)}
    )


def numbers_in_dev(pid: int) -> frozenset[Number]:
    """Return the device numbers in the process's own /dev and /dev/dri; no symbolic link is followed."""
    found: set[Number] = set()
    for folder in ("dev", "dev/dri"):
        place = f"/proc/{pid}/root/{folder}"
        try:
            numbers = question_process.ask(pid, place, _list_numbers_in, place)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                device_files.gone_or_raise(error, pid)
            continue
        found.update(number for number in numbers if number is not None)
    return frozenset(found)


def _list_numbers_in(place: str) -> list[Number | None]:
    if os.path.islink(place):
        return []
    with os.scandir(place) as entries:
        return [_number(entry.stat(follow_symlinks=False)) for entry in entries]


def _iterate_opened(pid: int) -> Iterator[tuple[int, str, Number]]:
    for number, path, found in device_files.iterate_opened(pid):
        if isinstance(found, OSError):
            if _is_refused(found, pid):
                return
        elif (device := _number(found)) is not None:
            yield number, path.removesuffix(device_files.DELETED), device


def _is_refused(error: OSError, pid: int) -> bool:
    """Whether access is denied because the process has ended. Raises GpuError if it has not."""
    if error.errno not in (errno.EACCES, errno.EPERM):
        return False
    device_files.gone_or_raise(error, pid)
    return True


def _iterate_mapped(pid: int) -> Iterator[tuple[tuple[int, int, str], Number]]:
    """Yield mappings of device files: (start, end, path) and the number."""
    spans = {
        device_files.make_link(pid, start, end): (start, end, path.removesuffix(device_files.DELETED))
        for start, end, path in device_files.mappings(pid)
        if path.startswith("/dev/")
    }
    for link, found in question_process.stat_files(pid, spans).items():
        if isinstance(found, OSError):
            _is_refused(found, pid)
        elif (device := _number(found)) is not None:
            yield spans[link], device


def _number(found: os.stat_result) -> Number | None:
    if not stat.S_ISCHR(found.st_mode):
        return None
    return os.major(found.st_rdev), os.minor(found.st_rdev)
