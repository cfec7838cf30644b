"""A running container, paused for CRIU's dump alone, at a moment when no process waits in vfork(2).

The runtimes have CRIU freeze the container's cgroup and seize what is in it. Where that comes upon a process
that waits for its child to begin a program, the dump fails after CRIU's timeout (vforks.py). A shell that
starts programs all day is in that state for some percent of the time. So the container is paused before the
dump, by the runtime itself, since that is the group which it names to CRIU; where a process waits it goes on
for a moment, and is paused again. A container whose processes all stand already is left alone.

A killed gpusnap leaves it paused: the journal says so (<container>.paused), and `recover` lets it go on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

from runtime_shim import container as containers
from runtime_shim import freezer, journal, proc, vforks
from runtime_shim.invoke import control

__all__ = ["Lull", "put_right"]

# Seconds that it goes on where a process waits; longer each time, and no two the same, since what starts
# programs may do it at regular intervals.
_FIRST, _LONGEST = 0.001, 0.05


class Lull:
    """The pause of one container; nothing where it cannot be paused by a cgroup (version 2) of its own."""

    def __init__(
        self, container: containers.Container, command: Sequence[str], members: Callable[[], Iterable[int]]
    ) -> None:
        """`command` is the real runtime with its global options; `members` gives the container's PIDs."""
        self._container, self._command, self._members = container, command, members
        self._group: str | None = None
        self._noted = False

    def wanted(self) -> bool:
        """Whether it is of use: some process may run, and nobody else has paused the container."""
        if all(map(proc.still, self._members())):
            return False
        return containers.has_freezer(self._container) and containers.frozen_by(self._container) is None

    def begin(self, *, timeout: float) -> None:
        """Pause it, within so many seconds. May be called again after `end`.

        Raises GpusnapError where some process waits all the time; the container goes on.
        """
        self._note("")
        done = control([*self._command, "pause", self._container.id])
        self._group = containers.frozen_by(self._container)
        if self._group is None:
            # As CRIU finds it, then; a freezer of version 1 may be what it has been paused by.
            if done.code == 0:
                control([*self._command, "resume", self._container.id])
            self.end()
            return
        self._note(self._group)
        try:
            self._wait(self._group, timeout)
        except BaseException:
            self.end()
            raise

    def _wait(self, group: str, timeout: float) -> None:
        deadline, longest = time.monotonic() + timeout, _FIRST
        while True:
            freezer.settle(group)
            found = next(vforks.waiting(self._members()), None)
            if found is None:
                return
            if time.monotonic() > deadline:
                raise vforks.too_long(found, timeout)
            freezer.thaw(group)
            time.sleep(random.uniform(_FIRST / 2, longest))
            longest = min(longest * 2, _LONGEST)
            freezer.freeze(group)

    def end(self) -> None:
        """Let it go on. May be called again, and without `begin`."""
        if self._group is not None:
            freezer.thaw(self._group)
            self._group = None
        if self._noted:
            journal.drop(self._container.id, journal.PAUSED)
            self._noted = False

    def _note(self, group: str) -> None:
        init = proc.process(self._container.pid)
        lull = (init.pid, init.start) if init is not None else (0, 0)
        pause = journal.Pause(journal.owner(), group, False, (), lull=lull)
        journal.note_pause(self._container.id, pause)
        self._noted = True


def put_right(entry: journal.Entry) -> None:
    """Let a container go on that a killed gpusnap had paused for its dump. Raises GpusnapError."""
    pause = entry.paused
    if pause is None or pause.lull is None:
        return
    group = pause.group or None
    if group is None and proc.same(*pause.lull):
        group = containers.frozen_group(pause.lull[0], entry.container)
    if group is not None:
        freezer.thaw(group)
