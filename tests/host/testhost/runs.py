"""A record of each run, so that a run that was killed is cleared by the next.

    <runs>/.lock          held while a record is made or looked at
    <runs>/gpusnap-x      the cgroups of run gpusnap-x, one path a line

A run holds a lock on its record, and so does its init. The kernel drops the lock with the last of them, so a
record that can be locked belongs to a run that is over. The record is written before the groups are made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from . import cgroups
from .report import say


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is made if need be."""
    fd = _lock(path)
    try:
        yield
    finally:
        os.close(fd)


def _lock(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another one that holds {path}")
            fcntl.flock(fd, fcntl.LOCK_EX)
        # The one before may have removed the file, and then this is a lock on nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)


@contextlib.contextmanager
def registered(runs: Path) -> Iterator[tuple[str, list[cgroups.Hierarchy]]]:
    """A run of a new name, its cgroups made; they and the record are removed at the end."""
    runs.mkdir(parents=True, exist_ok=True)
    clear_stale(runs)
    all_hierarchies = cgroups.mounted()
    name = cgroups.PREFIX + secrets.token_hex(4)
    groups = [h.group(name) for h in all_hierarchies]
    with locked(runs / ".lock"):
        fd = os.open(runs / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, "".join(f"{group}\n" for group in groups).encode())
    try:
        cgroups.create(all_hierarchies, name)
        yield name, all_hierarchies
    finally:
        _close_run(runs / name, groups)
        os.close(fd)


def clear_stale(runs: Path) -> None:
    """Remove what runs that were killed have left."""
    with locked(runs / ".lock"):
        for record in runs.glob(cgroups.PREFIX + "*"):
            fd = os.open(record, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                say(f"clearing what the interrupted run {record.name} left")
                _close_run(record, [Path(line) for line in record.read_text().splitlines()])
            except BlockingIOError:
                continue
            finally:
                os.close(fd)


def _close_run(record: Path, groups: list[Path]) -> None:
    left = cgroups.remove(groups)
    for group in left:
        say(f"could not remove the cgroup {group}: processes are still in it; the next run tries again")
    if not left:
        record.unlink()
