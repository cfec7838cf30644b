"""Files of a host, or of a tree, for `gpusnap install`: reads their states, and writes each atomically.

A change is on disk before the next one begins. The files may be on several file systems, and after a loss of
power, an engine's configuration must not name a program that is not there: no container would start.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress

from gpusnap.oci.base.files import sync_folder
from gpusnap.runtime_shim.base.errors import GpusnapError, advise, reason

# Our files are smaller; a larger one is somebody else's, whatever its digest.
_LARGEST = 16 << 20


def join_root(root: str, path: str) -> str:
    """Return the path below `root` of a path of the host."""
    return path if root in ("", "/") else os.path.join(root, path.lstrip("/"))


def check_inside(root: str, path: str) -> None:
    """Raise GpusnapError if a link, such as an absolute one, leads the folder of a path out of the tree."""
    if root in ("", "/"):
        return
    place = join_root(root, path)
    top, folder = os.path.realpath(root), os.path.realpath(os.path.dirname(place))
    if os.path.commonpath((top, folder)) != top:
        raise GpusnapError(
            f"{place} is outside the tree {root}: a link in its path points to {folder}",
            hint="make that link relative, or work inside the tree with chroot",
        )


def state(path: str) -> str | None:
    """Return the state of a path; None if it does not exist, "other" if it is neither file nor link."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise GpusnapError(
            f"{path} cannot be inspected: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-005",
        ) from error
    if stat.S_ISLNK(found.st_mode):
        return f"link:{os.readlink(path)}"
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        return "other"
    try:
        with open(path, "rb") as file:
            return file_state(file.read(), stat.S_IMODE(found.st_mode))
    except OSError as error:
        raise GpusnapError(
            f"{path} cannot be read: {reason(error)}", hint=advise(error) or "run it as root", code="GPS-005"
        ) from error


def file_state(data: bytes, mode: int) -> str:
    """Return the state of a file with this content."""
    return f"sha256:{hashlib.sha256(data).hexdigest()} {mode:04o}"


def make_pending_name(path: str) -> str:
    """Return the name of a file while it is written: always the same, so that it is found after a kill."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.gpusnap-new")


def make_folder(path: str) -> None:
    """Make a folder and its parents, readable by everybody, whatever the umask. Raises OSError."""
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path))
    os.mkdir(path)
    os.chmod(path, 0o755)
    sync_folder(os.path.dirname(path))


def put_link(path: str, target: str) -> None:
    """Write a symbolic link. Raises OSError."""
    new = make_pending_name(path)
    with suppress(FileNotFoundError):
        os.unlink(new)
    os.symlink(target, new)
    os.replace(new, path)
    sync_folder(os.path.dirname(path))


def put_file(path: str, data: bytes, mode: int, *, sync: bool = True) -> None:
    """Write a file, and sync it and its name unless `sync` is false. Raises OSError."""
    new = make_pending_name(path)
    with suppress(FileNotFoundError):
        os.unlink(new)
    try:
        with open(new, "xb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
    if sync:
        sync_folder(os.path.dirname(path))


def unlink(path: str) -> None:
    """Remove a file, if it exists, for good. Raises GpusnapError."""
    try:
        os.unlink(path)
        sync_folder(os.path.dirname(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise GpusnapError(
            f"{path} cannot be removed: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-005",
        ) from error


def remove_folder(path: str) -> None:
    """Remove a folder, if it is empty."""
    # If it has files, or something is mounted there, it belongs to somebody else.
    with suppress(OSError):
        os.rmdir(path)
