"""The images of the open files of a container (volumes.py): their format, and how they are restored.

IMAGE is a line of JSON, {"version": 1, "entries": […]}, and then the data of all files. It has the files of
volumes. ROOT_IMAGE, in the same format, has those of the container's own file system; a gpusnap that does not
know it restores the container with the files that the engine has read.

An image may come from anybody. Its files are written only to the new container's own emptyDirs, /dev/shm and
root, no link is followed there, and nothing gets a setuid bit. An existing file is replaced by a new one, so
that another container of the pod keeps the file that it has open.

If /dev/shm is shared with the host or with another container, a file that is there and has the same content
stays, so that those who share it still do. One with other content is replaced only if nobody has it open: the
restored processes would no longer share it with the others, or would take a stranger's file for their own.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import IO, Any

from gpusnap.oci.base.dataclass import asdict, dataclass
from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused, raise_as, reason

IMAGE, ROOT_IMAGE = "gpusnap-volumes.img", "gpusnap-root.img"
BLOCK = 8 << 20
FILE, DIRECTORY, FIFO = "file", "directory", "fifo"
KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFIFO: FIFO}

_VERSION = 1
_LONGEST_HEADER = 64 << 20
_MOST = 1 << 18
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Existing(Enum):
    """What is done with a file that is there already."""

    REPLACE = "replace"
    KEEP_SAME = "keep the same"
    """Replace it if it has other content; leave it, and every directory, as it is otherwise."""
    KEEP_USED = "keep the same or used"
    """The same, and raise Refused if it has other content and is in use."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the files of a volume are written."""

    path: str
    """A directory of this host."""
    existing: Existing


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in an image. Its extents contain data, the rest is holes."""

    volume: str
    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    extents: tuple[tuple[int, int], ...]
    """Offset and length."""


def header(entries: Sequence[Entry]) -> bytes:
    """Return the image's first line. Raises ImageError if no restore would read so many."""
    document = {"version": _VERSION, "entries": [asdict(entry) for entry in entries]}
    line = json.dumps(document).encode() + b"\n"
    if len(entries) > _MOST or len(line) > _LONGEST_HEADER:
        raise ImageError(
            f"the container has {len(entries)} files in /dev/shm and its volumes; a checkpoint that leaves "
            f"it running includes at most {_MOST}",
            hint="remove some, or checkpoint it without --leave-running",
        )
    return line


def list_entries(image_path: str, name: str) -> tuple[Entry, ...]:
    """Return what an image has; nothing without an image. Raises ImageError."""
    with _open_image(os.path.join(image_path, name)) as opened:
        return tuple(opened[1]) if opened is not None else ()


def put_back(image_path: str, name: str, targets: Mapping[str, Target], mounted: Collection[str]) -> None:
    """Write the files of an image into the new container's volumes; without an image, do nothing.

    `name`: of the image. `targets`: by the volumes' destinations. `mounted`: the destinations of all bind
    mounts, whose content gpusnap does not restore without a target. Raises Refused if the container has no
    mount where a volume was, or if another file is in use there; ImageError.
    """
    with _open_image(os.path.join(image_path, name)) as opened:
        if opened is None:
            return
        image, entries = opened
        for entry in entries:
            target = targets.get(entry.volume)
            if target is None and entry.volume not in mounted:
                raise Refused(
                    f"the checkpoint has {entry.volume}/{entry.path} open, in a volume of its pod, but "
                    f"the new container has nothing mounted at {entry.volume}",
                    hint="give the new pod the volumes of the old one",
                )
            place = target.path if target is not None else entry.volume
            with raise_as(
                ImageError,
                f"{os.path.join(entry.volume, entry.path)} cannot be copied to the new container",
                hint=f"check that {place} has free space, and that the checkpoint is complete",
            ):
                if target is None:
                    _skip(image, entry)
                else:
                    _put(target, entry, image)


@contextmanager
def _open_image(path: str) -> Iterator[tuple[IO[bytes], list[Entry]] | None]:
    """Open an image, and parse its first line; None without an image. Raises ImageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {reason(error)}") from error
    with open(descriptor, "rb") as image:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ImageError(f"{path} is not a regular file", hint="make a new checkpoint", code="GPS-601")
        yield image, _entries(image, path)


def _entries(image: IO[bytes], path: str) -> list[Entry]:
    """Parse the image's first line. Raises ImageError."""
    broken = ImageError(
        f"{path} is damaged, or was not written by gpusnap", hint="make a new checkpoint", code="GPS-601"
    )
    try:
        line = image.readline(_LONGEST_HEADER)
        document = parse_json(line)
        if not line.endswith(b"\n") or document["version"] != _VERSION or len(document["entries"]) > _MOST:
            raise broken
        return [_parse_entry(each) for each in document["entries"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise broken from None


def _parse_entry(each: Any) -> Entry:
    """An entry of the JSON. Raises ValueError, KeyError, TypeError."""
    mode, uid, gid, size = numbers = [each[name] for name in ("mode", "uid", "gid", "size")]
    extents = tuple((offset, length) for offset, length in each["extents"])
    volume, path, kind = (each[name] for name in ("volume", "path", "kind"))
    every = [*numbers, *(number for extent in extents for number in extent)]
    right = (
        all(type(number) is int and 0 <= number < 1 << 62 for number in every)
        and max(uid, gid) < (1 << 32) - 1  # chown(2) would leave the owner unchanged for that value
        and isinstance(volume, str)
        and isinstance(path, str)
        and not any(name in ("", ".", "..") or "\0" in name for name in path.split("/"))
        and kind in KINDS.values()
        and (kind == FILE or not extents)
        and all(offset + length <= size for offset, length in extents)
    )
    if not right:
        raise ValueError
    return Entry(volume, path, kind, mode, uid, gid, size, extents)


def _put(target: Target, entry: Entry, image: IO[bytes]) -> None:
    """Create one file of a volume from its entry. Raises OSError, Refused."""
    *above, name = entry.path.split("/")
    folder = os.open(target.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in above:
            inner = os.open(part, _FOLDER_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = inner
        if entry.kind == DIRECTORY:
            _put_directory(folder, name, entry, target.existing)
        elif entry.kind == FIFO:
            _put_fifo(folder, name, entry)
        else:
            _put_file(folder, name, entry, image, target.existing)
    finally:
        os.close(folder)


def _put_directory(folder: int, name: str, entry: Entry, existing: Existing) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=folder)
    except FileExistsError:
        if existing is not Existing.REPLACE:
            return
    descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=folder)
    try:
        _set_owner(descriptor, entry, 0o1777)
    finally:
        os.close(descriptor)


def _put_fifo(folder: int, name: str, entry: Entry) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISFIFO(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return
    os.mkfifo(name, entry.mode & 0o777, dir_fd=folder)
    os.chown(name, entry.uid, entry.gid, dir_fd=folder, follow_symlinks=False)


def _put_file(folder: int, name: str, entry: Entry, image: IO[bytes], existing: Existing) -> None:
    if existing is Existing.KEEP_USED:
        _put_shared_file(folder, name, entry, image)
        return
    new = f".gpusnap-{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(new, dir_fd=folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(new, flags, 0o600, dir_fd=folder)
    try:
        _fill(descriptor, entry, image)
        if existing is Existing.KEEP_SAME and _is_same(folder, name, descriptor):
            os.unlink(new, dir_fd=folder)
        else:
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except (OSError, GpusnapError):
        with suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)


def _put_shared_file(folder: int, name: str, entry: Entry, image: IO[bytes]) -> None:
    """The file has no name until it is complete: if this process is killed, no memory of the host is left."""
    descriptor = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        _fill(descriptor, entry, image)
        if not _is_there(folder, name, descriptor, entry):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(descriptor)


def _fill(descriptor: int, entry: Entry, image: IO[bytes]) -> None:
    os.ftruncate(descriptor, entry.size)
    with open(descriptor, "wb", closefd=False) as file:
        for offset, length in entry.extents:
            file.seek(offset)
            for begin in range(0, length, BLOCK):
                data = image.read(min(BLOCK, length - begin))
                if len(data) < min(BLOCK, length - begin):
                    raise ImageError(
                        f"the image of open files ends within {os.path.join(entry.volume, entry.path)}",
                        hint="make a new checkpoint",
                        code="GPS-601",
                    )
                file.write(data)
    _set_owner(descriptor, entry, 0o777)


def _is_there(folder: int, name: str, new: int, entry: Entry) -> bool:
    """Whether a file has the content of the new one already. Raises Refused if another one is in use."""
    try:
        there = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(there).st_mode):
            raise _make_other_error(entry, "is not a regular file")
        if _have_same_content(there, new):
            return True
        if _is_open_elsewhere(there):
            raise _make_other_error(entry, "has other content, and a process of this host has it open")
        return False
    finally:
        os.close(there)


def _make_other_error(entry: Entry, what: str) -> Refused:
    return Refused(
        f"the checkpoint has {entry.volume}/{entry.path} open, in memory that is shared with this host or "
        f"with another container; the file that is there now {what}",
        hint="end the programs that use it, or restore the container on another host",
        code="GPS-527",
    )


def _is_same(folder: int, name: str, new: int) -> bool:
    """Whether there is a regular file with the content of the new one."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        there = os.open(name, flags, dir_fd=folder)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(there).st_mode) and _have_same_content(there, new)
    finally:
        os.close(there)


def _have_same_content(one: int, other: int) -> bool:
    size = os.fstat(one).st_size
    if size != os.fstat(other).st_size:
        return False
    return all(os.pread(one, BLOCK, at) == os.pread(other, BLOCK, at) for at in range(0, size, BLOCK))


def _is_open_elsewhere(descriptor: int) -> bool:
    """Whether a file that is open for reading here is open or mapped elsewhere: then there is no lease.

    fcntl(2), F_SETLEASE. Without leases, such as on another file system, it is taken for open.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def _set_owner(descriptor: int, entry: Entry, allowed: int) -> None:
    os.fchown(descriptor, entry.uid, entry.gid)
    os.fchmod(descriptor, entry.mode & allowed)


def _skip(image: IO[bytes], entry: Entry) -> None:
    image.seek(sum(length for _, length in entry.extents), os.SEEK_CUR)
