"""Does GPU work in a paused container: the container is thawed meanwhile, but its programs do not run.

containerd pauses a task before it checkpoints it, and resumes it afterwards. CRI's CheckpointContainer does
the same, and a user may do it too. A frozen process cannot answer the GPU's driver. So:

    hold      while everything is frozen, send a SIGSTOP to each process that runs, then thaw the cgroup
    …         during the driver's calls, only the driver's own threads run (driver_calls.py)
    freeze    freeze the cgroup, then send a SIGCONT to each of those processes

A process does not run a single instruction of its own in either step. The exception are threads that are
within the C library: they leave it one by one (`settle` in stopping/stop.py).

This works because of the order in the kernel (Linux, kernel/signal.c). get_signal checks for a stop and for
the freezer before anything else, and do_freezer_trap sleeps even if signals are pending. So when a frozen
process is thawed, it takes a pending SIGSTOP before it returns to user space, and one thread takes it for
all. A SIGCONT moves a stopped process of a frozen cgroup into the freezer. A process that was stopped before
stays stopped.

Children between vfork(2) and their program are another exception: their parents cannot be stopped until the
program begins. So they first run up to its first instruction (stopping/vfork.py).

The journal records the pause as <container>.paused, for the case that gpusnap is killed: the cgroup, which
processes gpusnap stopped, and whether gpusnap thawed the cgroup.

Only for version 2 of cgroups: see container.has_own_v1_freezer.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime import cgroup_freezer
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry
from gpusnap.runtime_shim.stopping import vfork
from gpusnap.runtime_shim.stopping.stop import go_on, settle, wait_until_stopped


class PausedContainer:
    """A container in a frozen cgroup, and the processes of it that gpusnap has stopped."""

    def __init__(
        self,
        container: str,
        group: str,
        stopped: Mapping[int, int] = MappingProxyType({}),
        *,
        runtime: str = "",
    ) -> None:
        """`container`: its key. `group`: the cgroup's directory. `stopped`: by gpusnap, PID to start time.

        `runtime`: the kind of the real runtime, for `reopen`.
        """
        self._container, self._group, self._runtime = container, group, runtime
        self._stopped = dict(stopped)
        pidfd.remember(self._stopped.items())
        self._away: set[int] = set()
        self._thawed = False

    @property
    def held(self) -> Collection[int]:
        """The PIDs of the processes that gpusnap has stopped."""
        return self._stopped.keys()

    def hold(self, holders: Iterable[int] = (), *, timeout: float) -> None:
        """Stop all running processes, and thaw the cgroup. May be called again.

        When this returns, the processes `holders` are stopped, so that the driver can be asked about them.
        That takes at most `timeout` seconds. Raises GpusnapError; the caller then calls `freeze`.
        """
        if not self._thawed:
            seen: set[int] = set()
            while fresh := [pid for pid in cgroup_freezer.members(self._group) if pid not in seen]:
                seen.update(fresh)
                running = map(proc.process, [pid for pid in fresh if not proc.is_halted(pid)])
                found = {each.pid: each.start for each in running if each}
                pidfd.remember(found.items())
                self._stopped |= found
                self._note(thawed=False)
                _send(found, signal.SIGSTOP)
            self._note(thawed=True)
            self._thawed = True
            cgroup_freezer.thaw(self._group)
            # These would not stop, and CRIU could not get past them.
            try:
                vfork.finish(self._stopped, timeout=timeout)
            except GpusnapError:
                if not self._away:  # otherwise it is more important that the GPU state comes back
                    raise
        ours = [pid for pid in holders if pid in self._stopped]
        wait_until_stopped(ours, timeout=timeout)
        if not self._away:
            # They may have been paused anywhere. The driver has not taken memory yet that their threads need.
            settle(ours)

    def keep(self, pids: Iterable[int]) -> None:
        """The driver has taken the GPU state of these processes, or will: they stay stopped when frozen."""
        self._away.update(pids)

    def let_go(self, pid: int) -> None:
        """That process has its GPU state again: it may continue as soon as the container is resumed."""
        self._away.discard(pid)
        if pid not in self._stopped:
            go_on([pid])  # outside the frozen cgroup, so it was running all the time

    def freeze(self) -> None:
        """Pause it again, and resume the processes that only gpusnap stops. May be called again."""
        if cgroup_freezer.is_gone(self._group):
            self.forget()  # it has ended
            return
        cgroup_freezer.freeze(self._group)
        # From now on, whoever paused the container may resume it. It must not be frozen by gpusnap later.
        self._note(thawed=False)
        cgroup_freezer.settle(self._group)
        self._thawed = False
        there = {pid: start for pid, start in self._stopped.items() if proc.is_same(pid, start)}
        _send((pid for pid in there if pid not in self._away), signal.SIGCONT)
        self._stopped = {pid: start for pid, start in there.items() if pid in self._away}
        if self._stopped:
            self._note(thawed=False)
        else:
            self.forget()

    def check_nobody_waits(self) -> None:
        """Check, once they are frozen, that CRIU can stop all processes. Raises GpusnapError."""
        for each in vfork.iterate_waiting(cgroup_freezer.members(self._group)):
            raise vfork.make_for_good_error(each)

    def forget(self) -> None:
        """Remove the journal's record of the pause: nothing is left to undo."""
        journal.drop(self._container, journal.PAUSED)

    def _note(self, *, thawed: bool) -> None:
        stopped = tuple(self._stopped.items())
        pause = journal.Pause(state_files.owner(), self._group, thawed, stopped, self._runtime)
        journal.note_pause(self._container, pause)


def find(container: containers.Container, runtime: str = "") -> PausedContainer | None:
    """Return the pause of a container; None if it is not frozen, or not by a cgroup of its own.

    `runtime`: the kind of the real runtime.
    """
    group = containers.find_freezer(container)
    return PausedContainer(container.key, group, runtime=runtime) if group is not None else None


def reopen(entry: Entry, pids: Iterable[int]) -> PausedContainer | None:
    """Return the pause for the recovery after a killed gpusnap; None if the container is to run.

    `pids`: those of its processes that still exist. A container that was frozen is still frozen. If gpusnap
    had thawed it under runc, nobody has resumed it since: runc refuses to resume a thawed container. crun
    does not refuse, so under crun nobody can know. The container then runs, because a container that its
    engine considers running must not be frozen. If somebody has resumed it, this continues the processes that
    gpusnap stopped and that are not in `pids`.

    CRIU thaws a frozen container while it dumps it, and freezes it again at its end (criu/seize.c). If it was
    killed in between, nobody has resumed the container, and runc would refuse to. That cannot be told from a
    container that was resumed. So the container runs, and `answer_resume` answers an engine that resumes it.
    """
    alive = {each.pid: each.start for each in map(proc.process, pids) if each is not None}
    pause = entry.paused
    if pause is None:
        groups = (containers.frozen_group(pid, entry.container) for pid in alive)
        group = next((group for group in groups if group is not None), None)
        return PausedContainer(entry.key, group, alive) if group is not None else None
    stopped = {pid: start for pid, start in pause.stopped if proc.is_same(pid, start)}
    ours = pause.thawed and pause.runtime != "crun"
    if not cgroup_freezer.is_gone(pause.group) and (ours or cgroup_freezer.is_frozen(pause.group)):
        return PausedContainer(entry.key, pause.group, stopped | alive, runtime=pause.runtime)
    if pause.runtime != "crun" and not cgroup_freezer.is_gone(pause.group):
        with contextlib.suppress(GpusnapError):  # its engine then gets runc's answer
            journal.write_document(entry.key, journal.THAWED, {"group": pause.group})
    go_on(pid for pid in stopped if pid not in alive)
    return None


def sweep() -> None:
    """Remove the records of containers that `reopen` has left running, and that have ended since."""
    for key in journal.list_noted(journal.THAWED):
        noted = journal.load(key, journal.THAWED)
        if noted is not None and cgroup_freezer.is_gone(str(noted["group"])):
            journal.drop(key, journal.THAWED)


def answer_resume(key: str) -> bool:
    """Whether a container that is to be resumed runs already, because `reopen` has left it so.

    runc would refuse, and containerd would take the container for paused for ever. Raises GpusnapError.
    """
    noted = journal.load(key, journal.THAWED)
    if noted is None:
        return False
    journal.drop(key, journal.THAWED)  # whoever resumes it now knows that it runs
    group = str(noted["group"])
    return not cgroup_freezer.is_gone(group) and not cgroup_freezer.is_frozen(group)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        pidfd.send(pid, number)
