"""The freezer of a cgroup of version 2 (Documentation/admin-guide/cgroup-v2.rst, cgroup.freeze)."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

from gpusnap.oci.base.files import is_folder
from gpusnap.runtime_shim.base.errors import GpusnapError, reason

GONE = (errno.ENOENT, errno.ENODEV)
"""The cgroup was removed: all its processes have ended. ENODEV: its file was open (fs/kernfs/file.c)."""
# Seconds until all processes are frozen. None continues to run user code once the kernel has the request, so
# the wait is only for those that check whether the container is paused.
_FREEZING = 2.0


def freeze(group: str) -> None:
    """Freeze all processes in a cgroup (its directory) and below; see `settle`. Raises GpusnapError."""
    _write(group, "1", "frozen")


def thaw(group: str) -> None:
    """Thaw them. Raises GpusnapError."""
    _write(group, "0", "thawed")


def is_frozen(group: str) -> bool:
    """Whether somebody has frozen it; False if it is gone. Raises GpusnapError."""
    return _read(group, "cgroup.freeze").strip() == "1"


def is_standing(group: str) -> bool:
    """Whether all its processes are frozen, by it or by a cgroup above it. Raises GpusnapError."""
    return "frozen 1" in _read(group, "cgroup.events").splitlines()


def is_gone(group: str) -> bool:
    """Whether the cgroup was removed, so that it has no processes. Raises GpusnapError."""
    try:
        return not is_folder(group)
    except OSError as error:
        raise _make_unreadable_error(group, error) from error


def settle(group: str) -> None:
    """Wait until all processes are frozen that can be. Raises GpusnapError."""
    deadline = time.monotonic() + _FREEZING
    while "frozen 0" in _read(group, "cgroup.events").splitlines() and time.monotonic() < deadline:
        time.sleep(0.001)


def members(group: str) -> Iterator[int]:
    """Yield the PIDs in a cgroup and those below it, except those that gpusnap's PID namespace does not see.

    Raises GpusnapError if one cannot be read: a missed process would continue to run.
    """
    for folder in _with_inner(group):
        yield from [int(line) for line in _read(folder, "cgroup.procs").splitlines() if int(line)]


def _with_inner(group: str) -> Iterator[str]:
    """Yield a cgroup's directory and those below it. Raises GpusnapError if one cannot be listed."""
    waiting = [group]
    for folder in waiting:
        try:
            with os.scandir(folder) as entries:
                waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno in GONE:
                continue
            raise _make_unreadable_error(folder, error) from error
        yield folder


def _make_unreadable_error(folder: str, error: OSError) -> GpusnapError:
    return GpusnapError(f"the cgroup {folder} cannot be read: {reason(error)}", hint="try again")


def _write(group: str, text: str, how: str) -> None:
    try:
        with open(f"{group}/cgroup.freeze", "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        if error.errno in GONE:
            return  # all have ended
        raise GpusnapError(
            f"the cgroup {group} cannot be {how}: {reason(error)}", hint="check that gpusnap may write there"
        ) from error


def _read(group: str, name: str) -> str:
    try:
        with open(f"{group}/{name}", encoding="ascii") as file:
            return file.read()
    except OSError as error:
        if error.errno in GONE:
            return ""
        raise _make_unreadable_error(group, error) from error
