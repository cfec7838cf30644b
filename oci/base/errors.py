"""What can go wrong with the files of a checkpoint, as a tree of exceptions.

    OciError
    ├── DigestError      a text is no digest, or one of an algorithm that is not read here
    ├── LayoutError      a folder is no OCI image layout, or one of its documents is not what the spec says
    │   ├── BlobError    a blob is missing, is no plain file, or has another size or digest
    │   └── NotACheckpoint   what is there is something else, and as far as is known it is whole
    │       └── EngineImage  … a checkpoint as an ordinary image, which an engine restores
    ├── ChunkError       a table of chunks, or a chunk in it, cannot be right
    ├── StoreError       a store cannot be used as it is, or not for what was asked
    │   ├── NotThere     nothing in it has that name or digest
    │   ├── Ambiguous    a name, or the beginning of a digest, stands for several
    │   └── StoreBusy    another process has what is needed, and did not let go of it in time
    │       └── StagingBusy  … the staging of that name
    ├── ArchiveError     an archive cannot be read, is cut short, or does not hold what was asked for
    ├── CeilingError     the memory allowed is too little for one worker
    ├── DiskError        a file cannot be written, or its folder cannot be used
    │   ├── DiskFull     … for want of room
    │   └── ReadOnlyStore … a store on a file system that is mounted read-only
    ├── RegistryError    a registry, or the name of something in one, is not what the spec says
    │   ├── Unauthorized what a registry or its token service wants is not had, or not accepted
    │   ├── NotInRegistry what was asked for is not in it
    │   ├── Unreachable  … after all attempts: how many there were, and why the last one broke
    │   └── Rejected     the registry refuses a request, in its own words
    │       └── NotARegistry … it answers with what no registry says
    ├── Stalled          a file system or a server was silent for too long
    └── Cancelled        the caller asked for an end

A message is one sentence; `code`, such as GPS-601, identifies it in docs/errors.md. It avoids the texts of
ENOENT, EACCES and EPERM, which Podman replaces.
"""

from __future__ import annotations

import errno
import os


class OciError(Exception):
    """The base of all errors of the files of a checkpoint; the message is a sentence."""

    code: str = ""
    """Such as GPS-601; empty if docs/errors.md says no more than the sentence."""

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        if code:
            self.code = code


class DigestError(OciError):
    """A text that is no digest, or one whose algorithm is not read here."""

    code = "GPS-601"


class LayoutError(OciError):
    """A folder that is no OCI image layout, or a document in it that does not follow the spec."""

    code = "GPS-601"


class BlobError(LayoutError):
    """A blob that is missing, is no plain file, or has another size or digest than it should."""


class NotACheckpoint(LayoutError):
    """Something other than a checkpoint of gpusnap; nothing says that it is damaged."""

    code = "GPS-605"


class EngineImage(NotACheckpoint):
    """A checkpoint as an ordinary image of `engine`: "podman" or "cri". `manifest` is its digest."""

    code = "GPS-606"

    def __init__(self, message: str, *, code: str = "", engine: str = "", manifest: str = "") -> None:
        super().__init__(message, code=code)
        self.engine = engine
        self.manifest = manifest


class ChunkError(OciError):
    """A table of chunks, or a chunk in it, that cannot be right."""

    code = "GPS-601"


class StoreError(OciError):
    """A store that cannot be used as it is, or not for the requested purpose."""


class NotThere(StoreError):
    """Nothing in the store has that name or digest."""

    code = "GPS-701"


class Ambiguous(StoreError):
    """A name, or the start of a digest, that matches several."""


class StoreBusy(StoreError):
    """Another process holds a lock, and did not release it in time."""

    code = "GPS-703"


class StagingBusy(StoreBusy):
    """A staging directory whose owner is alive."""


class ArchiveError(OciError):
    """An archive that cannot be read, is cut short, or does not hold what was asked for."""

    code = "GPS-601"


class BrokenArchive(ArchiveError):
    """An archive that is damaged or cut short."""


class NotAnArchive(ArchiveError):
    """A file that does not begin like an archive: something else, not a damaged one."""

    code = "GPS-605"


class CeilingError(OciError):
    """The allowed memory is too small for the buffers of one worker."""


class DiskError(OciError):
    """A file that cannot be written, or a folder that cannot be used."""


class DiskFull(DiskError):
    """A file that did not fit: the disk, a quota or the limit on the size of files."""

    code = "GPS-007"

    def __init__(self, message: str = "", *, code: str = "", folder: str = "") -> None:
        """`folder`: where it did not fit; the store, if it is a staging directory; "" if unknown."""
        super().__init__(message, code=code)
        self.folder = folder
        self.removing = False
        """Whether it was needed to remove something."""


class ReadOnlyStore(DiskError):
    """A store on a file system that is mounted read-only: it can be read, but not changed."""

    code = "GPS-704"


class RegistryError(OciError):
    """An answer of a registry, or the name of something in one, that is not what the spec says."""


class Unauthorized(RegistryError):
    """Credentials that cannot be had, or that a registry or its token service does not accept."""

    code = "GPS-801"


class NotInRegistry(RegistryError):
    """A repository, a manifest or a blob that the registry does not have."""

    code = "GPS-802"


class Unreachable(RegistryError):
    """A registry that could not be reached: every attempt failed, or its certificate is not trusted."""

    code = "GPS-803"


class Rejected(RegistryError):
    """A request that the registry refuses; `says` is its own code for it, such as "DIGEST_INVALID"."""

    code = "GPS-806"

    def __init__(self, message: str, *, code: str = "", status: int = 0, says: str = "") -> None:
        super().__init__(message, code=code)
        self.status = status
        self.says = says


class NotARegistry(Rejected):
    """A host whose answers are not those of a registry: a web page, or an impossible status."""

    code = "GPS-808"


class Stalled(OciError):
    """Nothing arrived for longer than the caller waits; what it waits for may never respond."""

    code = "GPS-512"


class Cancelled(OciError):
    """The caller cancelled the operation before it was complete."""


_REWORDED = {
    errno.ENOENT: "it does not exist",
    errno.EACCES: "access is refused",
    errno.EPERM: "it is not allowed",
    errno.ELOOP: "it is a symbolic link, which is not followed",
}
# The directory of a store in which a writer has one of its own, whose name tells a user nothing.
_STAGING = "staging"
_NO_ROOM = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full to its quota",
    errno.EFBIG: "does not allow files of that size",
}


def reason(error: OSError) -> str:
    """Return a text for the errno of `error` that Podman does not replace; without errno its own text."""
    if not error.errno:
        return str(error) or os.strerror(0)
    return _REWORDED.get(error.errno) or os.strerror(error.errno)


def binary_size(size: int) -> str:
    """Bytes as people read them: "16.0 MiB"."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{size} B" if unit == "B" else f"{number:.1f} {unit}"


def disk_error(error: OSError, folder: str, what: str, size: int | None) -> DiskError:
    """Return the error for `what`, of `size` bytes if known, that could not be written in `folder`."""
    if size is not None:
        what = f"{what} of {binary_size(size)}"
    words = _NO_ROOM.get(error.errno or 0)
    if words is None:
        return DiskError(f"{what} cannot be written in {folder}: {reason(error)}")
    above, name = os.path.split(os.path.dirname(folder))
    place = above if name == _STAGING else folder
    try:
        room = os.statvfs(folder)
        free = f", {binary_size(room.f_bavail * room.f_frsize)} are free"
    except OSError:
        free = ""
    return DiskFull(f"the file system of {place} {words}: {what} did not fit{free}", folder=place)
