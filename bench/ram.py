"""The RAM that a measured step takes of the whole machine, as the kernel counts it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LOOK = 0.02  # seconds between two looks
_MEMINFO = Path("/proc/meminfo")


@dataclass(slots=True)
class Peak:
    """The most RAM in use at once during a step, in bytes beyond what was in use before it.

    Everything on the machine counts: the container's own memory, files in RAM, gpusnap, CRIU. The page cache
    does not: the kernel gives it back (MemAvailable, proc_meminfo(5)).
    """

    size: int = 0


def available() -> int:
    """Return the bytes that the kernel could still give to programs."""
    line = next(each for each in _MEMINFO.read_text("ascii").splitlines() if each.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


@contextmanager
def watch() -> Iterator[Peak]:
    """Watch the RAM while the block runs."""
    found, before, ended = Peak(), available(), threading.Event()

    def look() -> None:
        while True:
            found.size = max(found.size, before - available())
            if ended.wait(_LOOK):
                return

    watcher = threading.Thread(target=look, name="ram", daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
