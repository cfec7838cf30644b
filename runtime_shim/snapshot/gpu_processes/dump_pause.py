"""Pauses a running container for CRIU's dump alone, when no process waits in vfork(2).

The runtimes have CRIU freeze the container's cgroup and seize its processes. If a process waits for its child
to begin a program, the dump fails after CRIU's timeout (stopping/vfork.py). A shell that starts programs all
day is in that state for some percent of the time. So the runtime itself pauses the container before the dump,
since it names that group to CRIU. If a process waits, the container continues for a moment, and is paused
again. If all processes are already stopped, the container is left alone.

A killed gpusnap leaves it paused: the journal says so (<container>.paused), and `recover` lets it go on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import cgroup_freezer
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu.run import control
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.stopping import vfork
from gpusnap.runtime_shim.transaction import stop_if_asked

# Seconds that it goes on where a process waits; longer each time, and no two the same, since what starts
# programs may do it at regular intervals.
_FIRST, _LONGEST = 0.001, 0.05


class DumpPause:
    """The pause of one container; nothing where it cannot be paused by a cgroup (version 2) of its own."""

    def __init__(self, container: containers.Container, command: Sequence[str]) -> None:
        """`command` is the real runtime with its global options."""
        self._container, self._command = container, command
        self._groups = containers.list_freezable(container)
        self._group: str | None = None
        self._noted = False

    def is_wanted(self) -> bool:
        """Whether it is of use: some process may run, and nobody else has paused the container."""
        if not self._groups or any(map(cgroup_freezer.is_frozen, self._groups)):
            return False
        return not all(map(proc.is_still, cgroup_freezer.members(self._groups[0])))

    def begin(self, *, timeout: float) -> None:
        """Pause it; within so many seconds no process waits. May be called again after `let_go_on`.

        Raises GpusnapError where some process waits all the time, Interrupted where a signal came; the
        container goes on.
        """
        self._note()
        try:
            if self._try_pause():
                self._wait(timeout)
            else:
                self.let_go_on()  # as CRIU finds it, then
            stop_if_asked()
        except BaseException:
            self.let_go_on()
            raise

    def _try_pause(self) -> bool:
        """Have the runtime pause it: whether that has been done, by a group that is known."""
        done = control([*self._command, "pause", self._container.id])
        # Also where it failed: runc leaves a group frozen of which a process does not freeze in time.
        self._group = next(filter(cgroup_freezer.is_frozen, self._groups), None)
        if done.code == 0 and self._group is None:
            control([*self._command, "resume", self._container.id])
        return done.code == 0 and self._group is not None

    def _wait(self, timeout: float) -> None:
        assert self._group is not None
        deadline, longest = time.monotonic() + timeout, _FIRST
        while True:
            cgroup_freezer.settle(self._group)
            found = next(vfork.iterate_waiting(cgroup_freezer.members(self._group)), None)
            if found is None:
                return
            if time.monotonic() > deadline:
                raise vfork.make_too_long_error(found, timeout)
            stop_if_asked()
            cgroup_freezer.thaw(self._group)
            time.sleep(random.uniform(_FIRST / 2, longest))
            longest = min(longest * 2, _LONGEST)
            cgroup_freezer.freeze(self._group)

    def let_go_on(self) -> None:
        """Let it go on. May be called again, and without `begin`."""
        if self._group is not None:
            cgroup_freezer.thaw(self._group)
            self._group = None
        if self._noted:
            journal.drop(self._container.key, journal.PAUSED)
            self._noted = False

    def _note(self) -> None:
        init = proc.process(self._container.pid)
        identity = (init.pid, init.start) if init is not None else (0, 0)
        pause = journal.Pause(state_files.owner(), "", False, (), init=identity, groups=self._groups)
        journal.note_pause(self._container.key, pause)
        self._noted = True


def put_right(entry: journal.Entry) -> journal.Entry:
    """Let a container go on that a killed gpusnap had paused for its dump; the entry without that pause.

    Raises GpusnapError.
    """
    pause = entry.paused
    if pause is None or pause.init is None:
        return entry
    if proc.is_same(*pause.init):  # else it has ended, and what has its name and its cgroup now is another
        for group in filter(cgroup_freezer.is_frozen, pause.groups):
            cgroup_freezer.thaw(group)
    # From now on a pause is somebody else's.
    journal.drop(entry.key, journal.PAUSED)
    return replace(entry, paused=None)
