"""The freezer of a cgroup of version 2 (Documentation/admin-guide/cgroup-v2.rst, cgroup.freeze)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from gpusnap.runtime_shim.errors import GpusnapError, reason

__all__ = ["freeze", "frozen", "members", "settle", "thaw"]

# Seconds until all are frozen. None runs on from the moment that the kernel was told, so that the wait is
# only for whoever looks whether the container is paused.
_FREEZING = 2.0


def freeze(group: str) -> None:
    """Freeze all processes in a cgroup, given by its folder, and below; see `settle`. Raises GpusnapError."""
    _write(group, "1", "frozen")


def thaw(group: str) -> None:
    """Have them run on. Raises GpusnapError."""
    _write(group, "0", "thawed")


def frozen(group: str) -> bool:
    """Whether somebody has it frozen."""
    return _read(group, "cgroup.freeze").strip() == "1"


def settle(group: str) -> None:
    """Wait until all are frozen that can be."""
    deadline = time.monotonic() + _FREEZING
    while "frozen 0" in _read(group, "cgroup.events").splitlines() and time.monotonic() < deadline:
        time.sleep(0.001)


def members(group: str) -> Iterator[int]:
    """PIDs in a cgroup and those below it; one that our PID namespace does not see has 0."""
    for folder, _, _ in os.walk(group):
        with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs", encoding="ascii") as file:
            yield from (int(line) for line in file if int(line))


def _write(group: str, text: str, how: str) -> None:
    try:
        with open(f"{group}/cgroup.freeze", "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        if not os.path.isdir(group):
            return  # all have ended
        raise GpusnapError(
            f"the cgroup {group} cannot be {how}: {reason(error)}", hint="see that gpusnap may write there"
        ) from error


def _read(group: str, name: str) -> str:
    try:
        with open(f"{group}/{name}", encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
