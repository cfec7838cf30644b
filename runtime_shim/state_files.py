"""Small state files below /run, which a killed gpusnap leaves for the next one.

    FOLDER/         0700; gone after a reboot, as are the processes that its files name
        NAME        0600, JSON; complete or absent (a tmpfs needs no fsync)
        NAME.new    being written; `remove` also removes what a killed writer left
        LOCK        locked (flock) while something is changed, and removed by its owner

`write_durably`, `remove_durably` and `boot` are for files elsewhere that must survive a reboot, with the same
functions.

A file names its owner by PID and start time (`owner`), so proc.is_same shows whether that is alive. No link
is followed, and a FIFO is never waited for. The module that writes the files decides which may be swept.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpusnap.oci.base.files import read_below, replace_below, sync_folder
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.locks import is_still_there, try_exclusive, unlock
from gpusnap.runtime_shim.process import proc

_PAUSE = 0.005
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def owner(pid: int | None = None) -> tuple[int, int]:
    """Return PID and start time of a process, this one by default; 0 if /proc does not show the time."""
    pid = os.getpid() if pid is None else pid
    found = proc.process(pid)
    return pid, found.start if found is not None else 0


def make_folder(path: str, *, sync: bool = False) -> None:
    """Make a directory and its parent, each 0700 whatever the umask; with `sync`, on disk. Raises OSError."""
    for folder in (os.path.dirname(path), path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if sync:  # also one that exists: `lock`, or a process that was killed, may have made it
            sync_folder(os.path.dirname(folder))


def read(path: str, *, limit: int) -> Any:
    """Read a file. Raises OSError, and ValueError for one that is larger, or not JSON."""
    return parse_json(read_below(*os.path.split(path), limit=limit))


def write(path: str, data: bytes) -> None:
    """Replace a file; its directory is made if it is missing. Raises OSError."""
    make_folder(os.path.dirname(path))
    try:
        with open(os.open(path + ".new", _NEW, 0o600), "wb") as file:
            file.write(data)
        os.replace(path + ".new", path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path + ".new")
        raise


def write_durably(path: str, data: bytes) -> None:
    """Like `write`, and synced to disk when this returns. Raises OSError."""
    folder, name = os.path.split(path)
    make_folder(folder, sync=True)
    replace_below(folder, name, data)


def boot() -> str:
    """Return the ID of this boot: PIDs and start times belong to one. See random(4)."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def remove(path: str) -> None:
    """Remove a file, if it exists, and what a killed writer left of it. Raises OSError."""
    for each in (path + ".new", path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


def remove_durably(path: str) -> None:
    """Like `remove`, for a file of `write_durably`; it does not come back after a crash. Raises OSError."""
    remove(path)
    with contextlib.suppress(FileNotFoundError):
        sync_folder(os.path.dirname(path))


@contextmanager
def lock(
    path: str, *, patience: float, busy: Callable[[], Exception], failed: Callable[[OSError], Exception]
) -> Iterator[None]:
    """Hold a lock while the block runs; its directory is made if it is missing.

    Polls, because flock(2) has no deadline. Raises the result of `busy` if another process has it for longer
    than `patience` (seconds), and that of `failed` if the file cannot be used.
    """
    deadline = time.monotonic() + patience
    try:
        make_folder(os.path.dirname(path))
        while (lock := _try_lock(path)) is None:
            if time.monotonic() >= deadline:
                raise busy()
            time.sleep(_PAUSE)
    except OSError as error:
        raise failed(error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        # It is closed in any case (close(2)), and the lock is released with it.
        with contextlib.suppress(OSError):
            unlock(lock)


def _try_lock(path: str) -> int | None:
    """Return the descriptor of the lock if it was free; None if another process has it."""
    while True:
        lock = os.open(path, _LOCK, 0o600)
        try:
            ours = try_exclusive(lock)
            if ours and is_still_there(lock, path):
                return lock
        except BaseException:
            os.close(lock)
            raise
        if not ours:
            os.close(lock)
            return None
        unlock(lock)  # its previous owner has removed it since
