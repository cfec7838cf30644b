"""Locks between processes and threads: flock(2) on a file or a directory, released when the owner dies.

Each call opens the file anew, so two threads exclude each other like two processes. If a file may be removed
while a process waits for its lock, the process must check it after it has the lock: `is_still_there`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.oci.base.errors import StoreBusy

_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


@contextmanager
def lock_exclusively(path: str, *, patience: float, what: str) -> Iterator[None]:
    """Hold the lock of the file `path`, created if it is missing, for `what`.

    Raises StoreBusy if it is not available within `patience` seconds, OSError if it cannot be opened.
    """
    lock = os.open(path, _FILE, 0o600)
    try:
        wait_for_lock(lock, path, fcntl.LOCK_EX, patience=patience, what=what)
        yield
    finally:
        unlock(lock)


def wait_for_lock(descriptor: int, path: str, kind: int, *, patience: float, what: str) -> None:
    """Lock the open file `path` for `what`; `kind` is LOCK_EX or LOCK_SH of `fcntl`.

    Raises StoreBusy if it is not available within `patience` seconds.
    """
    deadline, pause = time.monotonic() + patience, _FIRST_PAUSE
    while not _try_lock(descriptor, kind):
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreBusy(
                f"{what} waited {patience:g} s for {path}, which another process has locked; try again later"
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def try_exclusive(descriptor: int) -> bool:
    """Lock an open file or directory exclusively; False if another process has the lock."""
    return _try_lock(descriptor, fcntl.LOCK_EX)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_still_there(descriptor: int, path: str) -> bool:
    """Whether that open file or directory is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def unlock(descriptor: int) -> None:
    """Release a lock, even if a child has a copy of the descriptor, and close it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
