"""Open files in a container's mounts that the engine does not keep as they were at the dump.

After a restore, the mounts of a pod's container are those of the new pod. CRIU opens files by the paths that
it saw at the dump, but an emptyDir, or the /dev/shm of the pod's sandbox, is empty then ("Can't open file").
So while all processes are stopped, gpusnap copies files, directories and FIFOs in such mounts: those that a
process has open, mapped or as its working directory, and the directories above them. They go into an image
beside CRIU's. A restore writes them before CRIU opens them; see volume_image.py. Files that no process has
open are omitted, as in every checkpoint that kubelet requests.

Podman's own copy of /dev/shm is wrong if the container continues, or if it shares /dev/shm with others
(runtime/podman/dev_shm.py). So gpusnap copies all files in the container's own, if it continues, and the open
ones in a shared one.

If the container continues, the engine reads its own file system later than the dump, too. By then a file may
be gone, or newer than the memory of the process that writes it, which a database would take for damage. So
gpusnap copies the files there that a process can write to, as far as `take` has room for them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from io import FileIO
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import write_all
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import ImageError, Refused, raise_as
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.process import open_files, proc
from gpusnap.runtime_shim.records.cri_layout import OF_CRI
from gpusnap.runtime_shim.runtime.bundle import binds
from gpusnap.runtime_shim.runtime.container_files import directory
from gpusnap.runtime_shim.runtime.podman import dev_shm
from gpusnap.runtime_shim.snapshot.records import volume_image
from gpusnap.runtime_shim.snapshot.records.volume_image import (
    FILE,
    IMAGE,
    KINDS,
    ROOT_IMAGE,
    Entry,
    Existing,
    Target,
    header,
)

_OF_CRIO = "io.kubernetes.cri-o.ContainerType"
"""An annotation of every container of CRI-O's (cri-o, pkg/annotations)."""
# kubelet's directories (kubernetes, pkg/volume/emptydir and pkg/volume/util/subpath).
_EMPTY_DIR = compile_later(r"/.*/volumes/kubernetes\.io~empty-dir/[^/]+")
_SUBPATH = compile_later(r"(/.*)/volume-subpaths/([^/]+)/[^/]+/\d+")
# containerd (internal/cri/server, getSandboxDevShm) and CRI-O (server/sandbox_run_linux.go, setupShm).
_SHM = compile_later(r"/.*/(?:sandboxes/[^/]+|userdata)/shm")
_AT = "/dev/shm"
ROOT = "/"
"""The destination of the container's own file system."""
_OVERLAYS = ("overlay", "fuse.fuse-overlayfs")

_DELETED = " (deleted)"
_PIECE = 1 << 20  # bytes per request


class Kind(Enum):
    """Whose content a mount has."""

    POD = "of a pod"
    """An emptyDir or the sandbox's /dev/shm: it ends with the pod."""
    OWN = "of the container"
    """The /dev/shm that Podman makes for one container."""
    SHARED = "shared"
    """The /dev/shm of the host, or of another container of Podman's."""
    ROOT = "root"
    """The container's own file system."""


_EXISTING = {Kind.SHARED: Existing.KEEP_USED}


@dataclass(frozen=True, slots=True)
class Volume:
    """A mount whose open files gpusnap copies."""

    destination: str
    source: str
    kind: Kind = Kind.POD


@dataclass(frozen=True, slots=True)
class OpenVolumeFile:
    """A file of a volume that a process has open or mapped, a directory above one, or one of all there."""

    volume: str
    """The mount's destination."""
    path: str
    """Below the volume."""
    link: str
    """The path with which it can be opened, such as in /proc; empty for a directory above."""
    process: proc.Process
    info: os.stat_result
    of_container: bool = True
    """Whether `link` leads into the container, where a file system may not answer."""

    @property
    def size(self) -> int:
        """The bytes that it takes in an image."""
        return self.info.st_blocks * 512 if stat.S_ISREG(self.info.st_mode) else 0


def find(config: Mapping[str, Any], bundle: str) -> tuple[Volume, ...]:
    """Return the emptyDirs of a pod, and the /dev/shm of a pod, of Podman's or of the host."""
    annotations = config.get("annotations")
    names = set(annotations) if isinstance(annotations, dict) else set()
    in_pod, of_podman = bool({OF_CRI, _OF_CRIO} & names), dev_shm.is_of_podman(config)
    found = []
    for mount in binds(config):
        destination, source = mount.get("destination"), mount.get("source")
        if not isinstance(destination, str) or not isinstance(source, str):
            continue
        destination, source = os.path.normpath(destination), os.path.normpath(source)
        if in_pod and _is_of_pod(destination, source):
            found.append(Volume(destination, source))
        elif destination == _AT and source == _AT:
            found.append(Volume(destination, source, Kind.SHARED))
        elif of_podman and destination == _AT and _SHM.fullmatch(source):
            own = dev_shm.is_own(source, bundle)
            found.append(Volume(destination, source, Kind.OWN if own else Kind.SHARED))
    return tuple(found)


def find_root_path(config: Mapping[str, Any], bundle: str) -> str:
    """Return where the container's root is on this host; empty if its configuration does not say."""
    root = config.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    return os.path.realpath(os.path.join(bundle, path)) if isinstance(path, str) and path else ""


def find_root(config: Mapping[str, Any], bundle: str) -> Volume | None:
    """Return the file system that the engine has made for this container; None if it is no overlay.

    A root that is an ordinary directory (`podman run --rootfs`) may be used by others, and no checkpoint has
    it.
    """
    path = find_root_path(config, bundle)
    own = any(each.destination == path and each.kind in _OVERLAYS for each in proc.mounts("self"))
    return Volume(ROOT, path, Kind.ROOT) if own else None


def find_to_copy(config: Mapping[str, Any], bundle: str, *, runs_on: bool) -> tuple[Volume, ...]:
    """Return those that gpusnap copies for a checkpoint; `runs_on`: the container continues after it."""
    found = find(config, bundle)
    if not runs_on:
        return tuple(each for each in found if each.kind is not Kind.OWN)
    root = find_root(config, bundle)
    return found if root is None else (*found, root)


def _is_of_pod(destination: str, source: str) -> bool:
    if _EMPTY_DIR.fullmatch(source):
        return True
    if match := _SUBPATH.fullmatch(source):  # of any kind of volume; its name says which
        return os.path.isdir(f"{match[1]}/volumes/kubernetes.io~empty-dir/{match[2]}")
    return destination == _AT and bool(_SHM.fullmatch(source))


def list_open(processes: Iterable[proc.Process], volumes: Sequence[Volume]) -> tuple[OpenVolumeFile, ...]:
    """Return what processes have open or mapped in volumes, each file once, after the directories above it.

    Of the container's own /dev/shm, return everything that is there.

    CRIU saves a deleted file itself, but needs its directory. Raises Refused for a deleted file of a pod that
    has another name, because CRIU would look for that name in the new volume; Unanswered if something that
    does not answer is mounted there.
    """
    found: dict[tuple[str, str], OpenVolumeFile] = {}
    members, own = tuple(processes), [volume for volume in volumes if volume.kind is Kind.OWN]
    others = tuple(volume for volume in volumes if volume not in own)
    for process in members if others else ():
        for key, each in question_process.ask(
            process.pid, "its files in volumes", _list_open_by, process, others
        ).items():
            found.setdefault(key, each)
    for volume in own if members else ():
        _add_all(found, members[0], volume)
    known = (each for each in found.values() if stat.S_IFMT(each.info.st_mode) in KINDS and each.path)
    return tuple(sorted(known, key=lambda each: (each.volume, each.path.split("/"))))


def _add_all(found: dict[tuple[str, str], OpenVolumeFile], process: proc.Process, volume: Volume) -> None:
    """Add what is in a directory of this host; `process` is one of the container's, for messages."""
    for folder, inner, names in os.walk(volume.source):
        for name in (*inner, *names):
            link = f"{folder}/{name}"
            path = link.removeprefix(f"{volume.source}/")
            with suppress(OSError):  # it was removed
                info = os.lstat(link)
                found[volume.destination, path] = OpenVolumeFile(
                    volume.destination, path, link, process, info, of_container=False
                )


def _list_open_by(process: proc.Process, volumes: Sequence[Volume]) -> dict[tuple[str, str], OpenVolumeFile]:
    """By volume and path within it."""
    found: dict[tuple[str, str], OpenVolumeFile] = {}
    mounts = {mount.destination for mount in proc.mounts(process.pid)}
    for each in open_files.list_open(process.pid):
        volume, path = _place(each.path, mounts, volumes)
        if not volume:
            continue
        kind = next(at.kind for at in volumes if at.destination == volume)
        with suppress(OSError):  # it was closed, or the process has ended
            info = os.stat(each.link)
            if kind is Kind.ROOT and not _can_change(each, info):
                continue
            if not _is_deleted(process.pid, each.path, info):
                found.setdefault((volume, path), OpenVolumeFile(volume, path, each.link, process, info))
            elif kind is Kind.POD and info.st_nlink and stat.S_ISREG(info.st_mode):
                raise _make_renamed_error(process, each.path)
        _add_directories(found, process, volume, path)
    for name in proc.unix_sockets(process.pid):  # CRIU binds them anew, in their directory
        _add_directories(found, process, *_place(os.path.normpath(name), mounts, volumes))
    return found


def _can_change(file: open_files.OpenFile, info: os.stat_result) -> bool:
    """Whether it is a directory, or a file that the process can write to. Raises OSError.

    What is only read, such as libraries and weights, may be gigabytes, and seldom changes.
    """
    return stat.S_ISDIR(info.st_mode) or (stat.S_ISREG(info.st_mode) and file.is_writable())


def _place(target: str, mounts: Iterable[str], volumes: Sequence[Volume]) -> tuple[str, str]:
    """Return the volume's destination and the path within it; empty if the file is in none."""
    above = [each for each in mounts if target == each or target.startswith(each.rstrip("/") + "/")]
    mount = max(above, key=len, default="")
    if not any(volume.destination == mount for volume in volumes):
        return "", ""
    return mount, target[len(mount) :].strip("/")


def _is_deleted(pid: int, target: str, info: os.stat_result) -> bool:
    """Whether the file no longer has its name. The kernel's suffix for that may also be part of a name."""
    if not target.endswith(_DELETED):
        return False
    folder, _, name = target.rpartition("/")
    try:
        with directory(pid, folder) as above:
            return not os.path.samestat(os.stat(name, dir_fd=above, follow_symlinks=False), info)
    except OSError:
        return True


def _make_renamed_error(process: proc.Process, target: str) -> Refused:
    return Refused(
        f"process {process.pid} ({process.comm}) has {target.removesuffix(_DELETED)} open, a file in a "
        "volume of its pod; this name was removed while the file has another one, so a new pod would not "
        "have it",
        hint="close it, or keep it in a persistent volume or in the container's own file system",
    )


def _add_directories(
    found: dict[tuple[str, str], OpenVolumeFile], process: proc.Process, volume: str, path: str
) -> None:
    while path := os.path.dirname(path):
        if (volume, path) in found:
            return
        with suppress(OSError), directory(process.pid, os.path.join(volume, path)) as folder:
            found[volume, path] = OpenVolumeFile(volume, path, "", process, os.fstat(folder))


def check(found: Iterable[OpenVolumeFile], limit: int) -> None:
    """Raise Refused for a file of a pod with more than `limit` bytes. Podman has no limit."""
    large = max(found, key=lambda each: each.size, default=None)
    if large is not None and large.size > limit:
        process = large.process
        raise Refused(
            f"process {process.pid} ({process.comm}) has {large.volume}/{large.path} of "
            f"{human(large.size)} open, in a volume that is removed with its pod; a checkpoint includes "
            f"such files up to {human(limit)}",
            hint=f"raise criu.ghost-limit above {human(large.size)}, in the settings or as an annotation, or "
            "keep the file in a persistent volume",
        )


def leave_out(found: Iterable[OpenVolumeFile], limit: int) -> tuple[OpenVolumeFile, ...]:
    """Return what can be copied while the container is stopped: up to `limit` bytes of its own file system.

    The smallest files first: a large one is more often a log or a download than a database. A note names a
    file that is left to the engine.
    """
    files = tuple(found)
    total, left = 0, []
    for each in sorted(files, key=lambda each: each.size):
        if each.volume == ROOT:
            total += each.size
            if total > limit:
                left.append(each)
    if not left:
        return files
    largest = left[-1]
    more = f", and {len(left) - 1} more of its files," if len(left) > 1 else ""
    note(
        f"/{largest.path} of the container{more} can be newer in the checkpoint than its memory: process "
        f"{largest.process.pid} ({largest.process.comm}) has it open for writing, and it has "
        f"{human(largest.size)}; the container is stopped only while {human(limit)} are copied",
        code="GPS-530",
    )
    return tuple(each for each in files if each not in left)


def take(image_path: str, found: Sequence[OpenVolumeFile]) -> None:
    """Copy the files into the image directory; without files, write nothing. Raises ImageError."""
    _write_image(os.path.join(image_path, IMAGE), [each for each in found if each.volume != ROOT])
    _write_image(os.path.join(image_path, ROOT_IMAGE), [each for each in found if each.volume == ROOT])


def _write_image(path: str, found: Sequence[OpenVolumeFile]) -> None:
    with raise_as(
        ImageError,
        f"the open files of the container cannot be copied to {path}",
        hint="check that there is free space",
    ):
        with suppress(FileNotFoundError):
            os.unlink(path)  # of an earlier checkpoint
        if not found:
            return
        entries = [_entry(each) for each in found]
        text = header(entries)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as image:
            image.write(text)
            image.flush()
            for each, entry in zip(found, entries, strict=True):
                _copy_out(each, entry, image.fileno())


def list_restored(image_path: str, config: Mapping[str, Any], bundle: str) -> frozenset[str]:
    """Return the files in the container's own file system that `put_back` will write: their paths there."""
    entries = volume_image.list_entries(image_path, ROOT_IMAGE)
    if not entries or find_root(config, bundle) is None:
        return frozenset()
    return frozenset(f"/{each.path}" for each in entries if each.kind == FILE and each.volume == ROOT)


def put_back(image_path: str, config: Mapping[str, Any], bundle: str) -> None:
    """Write the files of `take` into the volumes of a new container, by its configuration.

    Raises Refused if it has no mount where a volume was, or if another file is in use there; ImageError.
    """
    mounted = {os.path.normpath(str(mount.get("destination"))) for mount in binds(config)}
    targets = {
        each.destination: Target(each.source, _EXISTING.get(each.kind, Existing.REPLACE))
        for each in find(config, bundle)
    }
    volume_image.put_back(image_path, IMAGE, targets, mounted)
    if volume_image.list_entries(image_path, ROOT_IMAGE) and (root := find_root(config, bundle)):
        volume_image.put_back(image_path, ROOT_IMAGE, {ROOT: Target(root.source, Existing.KEEP_SAME)}, ())


def _entry(each: OpenVolumeFile) -> Entry:
    kind, size, extents = KINDS[stat.S_IFMT(each.info.st_mode)], 0, tuple[tuple[int, int], ...]()
    if kind == FILE:
        if each.of_container:
            size, extents = question_process.ask(each.process.pid, each.link, _measure, each)
        else:
            size, extents = _measure(each)
    info = each.info
    mode = stat.S_IMODE(info.st_mode)
    return Entry(each.volume, each.path, kind, mode, info.st_uid, info.st_gid, size, extents)


def _measure(each: OpenVolumeFile) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return size and extents of a file."""
    with _open_file(each) as file:
        size = os.fstat(file.fileno()).st_size
        return size, tuple(_extents(file.fileno(), size))


def _open_file(each: OpenVolumeFile) -> FileIO:
    """Open the file itself, whatever its name is now. Raises OSError if the process opened another one."""
    file = FileIO(os.open(each.link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not os.path.samestat(os.fstat(file.fileno()), each.info):
        file.close()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return file


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the extents in which a file has data (lseek(2), SEEK_DATA)."""
    at = 0
    while at < size:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # ENXIO: a hole to the end
            return
        end = min(os.lseek(descriptor, at, os.SEEK_HOLE), size)
        yield at, end - at
        at = end


def _copy_out(each: OpenVolumeFile, entry: Entry, image: int) -> None:
    if not entry.extents:
        return
    with nullcontext() if each.of_container else _open_file(each) as file:
        for offset, length in entry.extents:
            at, end = offset, offset + length
            while at < end:
                size = min(_PIECE, end - at)
                done = (
                    os.sendfile(image, file.fileno(), at, size) if file else _ask_for(each, at, size, image)
                )
                if not done:
                    raise ImageError(
                        f"{each.volume}/{each.path} was truncated while it was being copied",
                        hint="checkpoint the container again",
                    )
                at += done


def _ask_for(each: OpenVolumeFile, offset: int, size: int, image: int) -> int:
    """Copy a piece that another process reads; return how many bytes that were."""
    piece = question_process.ask(each.process.pid, each.link, _piece, each, offset, size)
    write_all(image, piece)
    return len(piece)


def _piece(each: OpenVolumeFile, offset: int, size: int) -> bytes:
    with _open_file(each) as file:
        return os.pread(file.fileno(), size, offset)
