"""Pauses a running container only for CRIU's dump, at a moment when no process waits in vfork(2).

The runtimes make CRIU freeze the container's cgroup and seize its processes. If a process waits for its child
to begin a program, the dump fails after CRIU's timeout (stopping/vfork.py). A shell that starts programs all
day is in that state for a few percent of the time. So gpusnap makes the runtime pause the container before
the dump; it must be the runtime, because it also tells CRIU the cgroup. If a process waits, the container
continues for a moment and is paused again. If all processes are already stopped, gpusnap does not pause the
container.

If gpusnap is killed, the container stays paused. The journal records this (<container>.paused), and `recover`
resumes the container.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from gpusnap.oci.base.dataclass import replace
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.transaction import stop_if_asked
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import cgroup_freezer
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu.run import control
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.stopping import vfork

# Seconds that the container continues if a process waits. They increase each time, and are random, because a
# program that starts others may do so at regular intervals.
_FIRST, _LONGEST = 0.001, 0.05


class DumpPause:
    """The pause of one container; does nothing if no cgroup of its own (version 2) can pause it."""

    def __init__(self, container: containers.Container, command: Sequence[str]) -> None:
        """`command`: the real runtime with its global options."""
        self._container, self._command = container, command
        self._groups = containers.list_freezable(container)
        self._group: str | None = None
        self._noted = False
        self.stays = False
        """Whether the container is to stay paused after the dump."""

    def is_wanted(self) -> bool:
        """Whether a pause is useful: a process may run, and nobody else has paused the container."""
        if not self._groups or any(map(cgroup_freezer.is_frozen, self._groups)):
            return False
        return not all(map(proc.is_still, cgroup_freezer.members(self._groups[0])))

    def check_paused(self) -> None:
        """Raise GpusnapError if the container is not paused."""
        if self._group is None:
            raise GpusnapError(f"container {self._container.id} could not be paused", code="GPS-218")

    def begin(self, *, timeout: float) -> None:
        """Pause it at a moment when no process waits in vfork. May be called again after `let_go_on`.

        Raises GpusnapError if a process waits throughout the `timeout` seconds, Interrupted after a signal.
        The container then continues.
        """
        self._note()
        try:
            if self._try_pause():
                self._wait(timeout)
            else:
                self.let_go_on()  # CRIU then takes the container as it is
            stop_if_asked()
        except BaseException:
            self.let_go_on()
            raise

    def _try_pause(self) -> bool:
        """Make the runtime pause the container; return whether it did, with a cgroup that is known."""
        try:
            done = control([*self._command, "pause", self._container.id])
        finally:
            # Also after a failure: if a process does not freeze in time, runc leaves the cgroup frozen.
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
        """Resume the container. May be called again, and without `begin`."""
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
    """Resume a container that a killed gpusnap had paused for its dump; return the entry without that pause.

    Raises GpusnapError.
    """
    pause = entry.paused
    if pause is None or pause.init is None:
        return entry
    if proc.is_same(*pause.init):  # otherwise it has ended, and its name and cgroup may belong to another
        for group in filter(cgroup_freezer.is_frozen, pause.groups):
            cgroup_freezer.thaw(group)
    # From now on, a pause belongs to somebody else.
    journal.drop(entry.key, journal.PAUSED)
    return replace(entry, paused=None)
