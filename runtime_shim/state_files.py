"""Small files of state below /run: what a gpusnap that is killed leaves for the next one to find.

    FOLDER/         0700; gone with the next boot, as the processes are that its files name
        NAME        0600, JSON; there as a whole or not at all (a tmpfs needs no fsync)
        NAME.new    being written; `remove` takes away what a killed writer left
        LOCK        held (flock) while something is changed, and removed by who has it

`write_durably` and `boot` are for files elsewhere that shall outlive the boot, with the same functions.

A file names its owner by PID and start time (`owner`), so proc.is_same tells whether that is alive. No link
is followed, and a FIFO is never waited for. What may be swept the module knows whose files they are.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpusnap.oci.base.files import read_below, replace_below
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.locks import is_still_there, try_exclusive, unlock
from gpusnap.runtime_shim.process import proc

_PAUSE = 0.005
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def owner(pid: int | None = None) -> tuple[int, int]:
    """PID and start time of a process, this one by default; the time is 0 where /proc does not show it."""
    pid = os.getpid() if pid is None else pid
    found = proc.process(pid)
    return pid, found.start if found is not None else 0


def make_folder(path: str) -> None:
    """Make a folder and the one that it is in, each 0700 whatever the umask. Raises OSError."""
    for folder in (os.path.dirname(path), path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def read(path: str, *, limit: int) -> Any:
    """What a file says. Raises OSError, and ValueError for one that is larger, or no JSON."""
    return parse_json(read_below(*os.path.split(path), limit=limit))


def write(path: str, data: bytes) -> None:
    """Put a file in the place of an earlier one, its folder made where it is missing. Raises OSError."""
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
    """As `write`, and on disk when this returns. Raises OSError."""
    folder, name = os.path.split(path)
    make_folder(folder)
    replace_below(folder, name, data)


def boot() -> str:
    """The ID of this boot: PIDs and start times are of one. See random(4)."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def remove(path: str) -> None:
    """Remove a file, where it is there, and what a killed writer left of it. Raises OSError."""
    for each in (path + ".new", path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)


@contextmanager
def lock(
    path: str, *, patience: float, busy: Callable[[], Exception], failed: Callable[[OSError], Exception]
) -> Iterator[None]:
    """Keep others from what a lock is for while the block runs; its folder is made where it is missing.

    Polls, as flock(2) has no deadline: raises what `busy` gives where another process has it for longer than
    `patience` (seconds), and what `failed` gives where the file cannot be used.
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
        # It is closed all the same (close(2)), and with it the lock is gone.
        with contextlib.suppress(OSError):
            unlock(lock)


def _try_lock(path: str) -> int | None:
    """The descriptor of a lock that is ours by now; None where it is another's."""
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
        unlock(lock)  # whoever had it has removed it since
