"""Finds processes that a signal has stopped for too long, for a caller that looks now and then."""

from __future__ import annotations

import time
from collections.abc import Iterable

from gpusnap.runtime_shim.process import pidfd, proc


class StoppedProcesses:
    """Since when each of some processes is stopped; for one thread."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the time for which a process may be stopped."""
        self._seconds = seconds
        self.since: dict[tuple[int, int], float] = {}
        """Seconds of time.monotonic(), by PID and start time."""

    def find_long(self, stopped: Iterable[proc.Process]) -> list[int]:
        """Return the PIDs of those that were stopped at every look for that long, for `pidfd.send`.

        `stopped`: all that are stopped at this moment. Raises GpusnapError, OSError.
        """
        found, now = [(each.pid, each.start) for each in stopped], time.monotonic()
        self.since = {each: self.since.get(each, now) for each in found}
        pidfd.remember(found)
        return [pid for (pid, _), since in self.since.items() if now - since >= self._seconds]
