"""Locks between processes and threads: flock(2) on a file or a folder, let go of when its owner dies.

Each call opens the file anew, so two threads exclude one another as two processes do. A file that may be
removed while somebody waits for its lock has to be looked at again once the lock is had: `is_still_there`.
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
    """Have the lock of the file `path`, made where it is missing, for `what`.

    Raises StoreBusy where it is not had within `patience` seconds, OSError where it cannot be opened.
    """
    lock = os.open(path, _FILE, 0o600)
    try:
        deadline, pause = time.monotonic() + patience, _FIRST_PAUSE
        while not try_exclusive(lock):
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreBusy(
                    f"{what} waited {patience:g} s for {path}, which another process has locked; try "
                    "again later"
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        yield
    finally:
        unlock(lock)


def try_exclusive(descriptor: int) -> bool:
    """Lock an open file or folder for oneself alone; False where somebody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_still_there(descriptor: int, path: str) -> bool:
    """Whether that open file or folder is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def unlock(descriptor: int) -> None:
    """Let go of a lock, also where a child has a copy of the descriptor, and close it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
