"""Where things lie in a store, and its lock: what all parts of it share. store.py draws the tree."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DiskError, StoreError, disk_error, reason
from gpusnap.oci.base.files import UNFINISHED, open_folder
from gpusnap.oci.base.locks import lock_exclusively
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.layout.layout import Layout

BLOBS = ("blobs", "sha256")
PRECIOUS = "precious"
# What is on its way out: a folder of that name in staging/ is of no use to anybody.
GONE = ".gone-"
CUT_OFF = compile_later(re.escape(UNFINISHED) + "[0-9a-f]{16}")
THREADS = 8
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class Tree:
    """A store by the path of its folder; `patience` is how many seconds its lock is waited for."""

    path: str
    patience: float

    @property
    def layout(self) -> Layout:
        """The layout that the store is."""
        return Layout(self.path)

    @property
    def known_chunks(self) -> str:
        """The index of known chunks."""
        return os.path.join(self.path, "known.json")

    @property
    def staging(self) -> str:
        """The folder of all stagings."""
        return os.path.join(self.path, "staging")

    @property
    def holds(self) -> str:
        """The folder of the files that readers lock."""
        return os.path.join(self.path, "holds")

    @contextmanager
    def hold_lock(self, what: str) -> Iterator[None]:
        """Have the lock of the store, for a moment. Raises StoreBusy, and StoreError where there is none."""
        path = os.path.join(self.path, "lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_exclusively(path, patience=self.patience, what=what))
            except OSError as error:
                raise StoreError(
                    f"{self.path} cannot be used as a store: its lock cannot be opened: {reason(error)}",
                    code="GPS-704",
                ) from error
            yield

    @contextmanager
    def explain_write_errors(self, what: str, size: int | None = None) -> Iterator[None]:
        """An OSError within is DiskFull or DiskError, for `what`, of `size` bytes where that is known."""
        try:
            yield
        except OSError as error:
            raise disk_error(error, self.path, what, size) from error


def link_error(error: OSError, path: str) -> StoreError | DiskError:
    """The error for a hard link that could not be made in the store at `path`."""
    if error.errno not in _NO_LINK:
        return disk_error(error, path, "a link of a blob", None)
    return StoreError(
        f"{path} cannot be a store: no hard link can be created in it ({reason(error)}); use one file "
        "system with hard links, such as ext4, XFS, Btrfs or tmpfs",
        code="GPS-704",
    )


@contextmanager
def open_nested_folder(*names: str) -> Iterator[int]:
    """A descriptor of the folder `names`, each within the one before. Raises OSError."""
    folder = open_folder(*names)
    try:
        yield folder
    finally:
        os.close(folder)


def discard(path: str) -> None:
    """Remove a folder of files and folders; in threads, as each gigabyte takes 0.2 s.

    What cannot be removed stays, and is tried again by the next gc.
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
