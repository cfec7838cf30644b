"""The lock of a staging directory: flock(2) on the directory, and on a file in it.

Over NFS, and in most file systems of FUSE, another host sees the lock of a file, but not that of a directory
(linux, fs/nfs/dir.c: nfs_dir_operations has no flock). An earlier gpusnap only knows the directory's.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from gpusnap.oci.base.files import open_folder
from gpusnap.oci.base.locks import is_still_there, try_exclusive, unlock

_NAME = "lock"
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class StagingLock:
    """The lock of one staging directory, held until `release`."""

    def __init__(self, folder: int) -> None:
        """`folder`: the open directory."""
        self._folder = folder
        self._file: int | None = None

    def acquire(self, *, create: bool) -> bool:
        """Lock it; False if another process has it. create: make the file if it is missing.

        Raises OSError.
        """
        if not try_exclusive(self._folder):
            return False
        self._file = _open_file(self._folder, create=create)
        return self._file is None or try_exclusive(self._file)

    def is_of(self, path: str) -> bool:
        """Return whether the directory at `path` is the one that is locked."""
        if self._file is not None and not is_still_there(self._file, os.path.join(path, _NAME)):
            return False
        return is_still_there(self._folder, path)

    def release(self, removed: str = "") -> None:
        """Release it. `removed`: the path of the directory, if that was removed.

        Over NFS, a file that is removed keeps another name in its directory until it is closed.
        """
        if self._file is not None:
            unlock(self._file)
        unlock(self._folder)
        if removed:
            with suppress(OSError):
                os.rmdir(removed)


def try_to_lock(path: str, *, create: bool = False) -> StagingLock | None:
    """Lock the staging directory at `path`; None if another process has it.

    create: for a writer; the file is made if it is missing. Raises OSError.
    """
    lock = StagingLock(open_folder(path))
    try:
        if lock.acquire(create=create):
            return lock
    except BaseException:
        lock.release()
        raise
    lock.release()
    return None


def _open_file(folder: int, *, create: bool) -> int | None:
    """Open the file in a staging directory; None if it has none."""
    try:
        return os.open(_NAME, _FILE | (os.O_CREAT if create else 0), 0o600, dir_fd=folder)
    except FileNotFoundError:
        if create:
            raise
        return None  # of an earlier gpusnap, or its owner removes it
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            return None  # what a dead writer left can be taken over on a full disk, and listed on any
        raise
