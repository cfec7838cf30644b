"""The paths in a store, and its lock, for all parts of it. store.py draws the tree."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DiskError, ReadOnlyStore, StoreError, disk_error, reason
from gpusnap.oci.base.files import UNFINISHED
from gpusnap.oci.base.locks import lock_exclusively
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.layout.layout import Layout

BLOBS = ("blobs", "sha256")
PRECIOUS = "precious"
COMPLETE = "complete"
# The prefix of directories that are being removed: nobody uses such a directory in staging/.
GONE = ".gone-"
CUT_OFF = compile_later(re.escape(UNFINISHED) + "[0-9a-f]{16}")
THREADS = 8
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class Tree:
    """A store by the path of its directory; `patience`: seconds to wait for its lock."""

    path: str
    patience: float

    @property
    def layout(self) -> Layout:
        return Layout(self.path)

    @property
    def known_chunks(self) -> str:
        """The path of the index of known chunks."""
        return os.path.join(self.path, "known.json")

    @property
    def staging(self) -> str:
        """The directory of all staging directories."""
        return os.path.join(self.path, "staging")

    @property
    def holds(self) -> str:
        """The directory of the files that readers lock."""
        return os.path.join(self.path, "holds")

    @contextmanager
    def hold_lock(self, what: str) -> Iterator[None]:
        """Hold the lock of the store, for a moment.

        Raises StoreBusy, ReadOnlyStore, and StoreError if there is no lock.
        """
        path = os.path.join(self.path, "lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_exclusively(path, patience=self.patience, what=what))
            except OSError as error:
                if error.errno == errno.EROFS:
                    raise self._make_read_only_error() from error
                raise StoreError(
                    f"{self.path} cannot be used as a store: its lock cannot be opened: {reason(error)}",
                    code="GPS-704",
                ) from error
            yield

    @contextmanager
    def explain_write_errors(self, what: str, size: int | None = None) -> Iterator[None]:
        """Convert an OSError, for `what`, of `size` bytes if that is known.

        Raises DiskFull, ReadOnlyStore, DiskError.
        """
        try:
            yield
        except OSError as error:
            if error.errno == errno.EROFS:
                raise self._make_read_only_error() from error
            raise disk_error(error, self.path, what, size) from error

    def _make_read_only_error(self) -> ReadOnlyStore:
        return ReadOnlyStore(f"the store {self.path} is read-only")


def link_error(error: OSError, path: str) -> StoreError | DiskError:
    """The error for a hard link that could not be made in the store at `path`."""
    if error.errno not in _NO_LINK:
        return disk_error(error, path, "a link of a blob", None)
    return StoreError(
        f"{path} cannot be a store: no hard link can be created in it ({reason(error)}); use one file "
        "system with hard links, such as ext4, XFS, Btrfs or tmpfs",
        code="GPS-704",
    )


def discard(path: str) -> None:
    """Remove a directory with its content; in threads, because each gigabyte takes 0.2 s.

    What cannot be removed stays, and the next gc tries again.
    """
    files: list[str] = []
    folders = [path]
    for folder in folders:
        try:
            with os.scandir(folder) as found:
                for each in found:
                    (folders if each.is_dir(follow_symlinks=False) else files).append(each.path)
        except OSError:
            continue
    run_for_each(files, _unlink, threads=min(THREADS, len(files)))
    for folder in reversed(folders):
        try:
            os.rmdir(folder)
        except OSError:
            continue


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
