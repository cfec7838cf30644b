"""What can go wrong with the files of a checkpoint, as a tree of exceptions.

    OciError
    ├── DigestError      a text is no digest, or one of an algorithm that is not read here
    ├── LayoutError      a folder is no OCI image layout, or one of its documents is not what the spec says
    │   └── BlobError    a blob is missing, is no plain file, or has another size or digest
    ├── ChunkError       a table of chunks, or a chunk in it, cannot be right
    ├── CeilingError     the memory allowed is too little for one worker
    ├── DiskError        a file cannot be written, or its folder cannot be used
    │   └── DiskFull     … for want of room
    └── Cancelled        the caller asked for an end

A message is one sentence. It avoids the words of ENOENT, EACCES and EPERM, which Podman replaces.
"""

from __future__ import annotations

import errno
import os

__all__ = [
    "BlobError",
    "Cancelled",
    "CeilingError",
    "ChunkError",
    "DigestError",
    "DiskError",
    "DiskFull",
    "LayoutError",
    "OciError",
    "binary_size",
    "disk_error",
    "reason",
]


class OciError(Exception):
    """The base of all errors of the files of a checkpoint; the message is a sentence."""


class DigestError(OciError):
    """A text that is no digest, or one whose algorithm is not read here."""


class LayoutError(OciError):
    """A folder that is no OCI image layout, or a document in it that does not follow the spec."""


class BlobError(LayoutError):
    """A blob that is missing, is no plain file, or has another size or digest than it should."""


class ChunkError(OciError):
    """A table of chunks, or a chunk in it, that cannot be right."""


class CeilingError(OciError):
    """The memory that is allowed does not hold the buffers of one worker."""


class DiskError(OciError):
    """A file that cannot be written, or a folder that cannot be used."""


class DiskFull(DiskError):
    """A file that did not fit: the disk, a quota or the limit on the size of files."""


class Cancelled(OciError):
    """The caller asked for an end before all was done."""


_REWORDED = {
    errno.ENOENT: "it does not exist",
    errno.EACCES: "access is refused",
    errno.EPERM: "it is not allowed",
    errno.ELOOP: "it is a link, which is not followed",
}
_NO_ROOM = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full to its quota",
    errno.EFBIG: "takes no file that large",
}


def reason(error: OSError) -> str:
    """The errno of `error` in words that Podman shows as they are."""
    number = error.errno or 0
    return _REWORDED.get(number) or os.strerror(number)


def binary_size(size: int) -> str:
    """Bytes as people read them: "16.0 MiB"."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{size} B" if unit == "B" else f"{number:.1f} {unit}"


def disk_error(error: OSError, folder: str, what: str, size: int) -> DiskError:
    """The error for `what`, of `size` bytes, that could not be written in `folder`."""
    words = _NO_ROOM.get(error.errno or 0)
    if words is None:
        return DiskError(f"{what} of {binary_size(size)} cannot be written in {folder}: {reason(error)}")
    try:
        room = os.statvfs(folder)
        free = f", {binary_size(room.f_bavail * room.f_frsize)} are free"
    except OSError:
        free = ""
    return DiskFull(f"{folder} {words}: {what} of {binary_size(size)} did not fit{free}")
