"""Does GPU work in a paused container: the container is thawed meanwhile, but its programs do not run.

containerd pauses a task before it has it checkpointed and resumes it afterwards; so does CRI's
CheckpointContainer, and a user may. A frozen process cannot answer the GPU's driver. So

    hold      while all is frozen each process that runs gets a SIGSTOP, then the cgroup is thawed
    …         for the driver's calls its own threads alone are let run, see driver_calls.py
    freeze    the cgroup is frozen, then each of those processes gets a SIGCONT

and neither way a process runs a single instruction of its own, but for threads that stand within the C
library, which leave it one by one (stopping/stop.py, settle). A SIGSTOP that was sent to a frozen process is
taken when it is thawed, before it returns to user space, and by one thread for all; a SIGCONT leads a stopped
process of a frozen cgroup into the freezer (Linux, kernel/signal.c: get_signal looks for a stop and for the
freezer before anything else, and do_freezer_trap sleeps with signals pending). A process that was stopped
before stays so. The one exception are children between vfork(2) and their program: before anything else is
done they run up to its first instruction, since their parents cannot be stopped until then
(stopping/vfork.py). What a killed gpusnap leaves is in the journal, as <container>.paused: the cgroup, which
processes were stopped by us, and whether it was we who thawed.

Only for version 2 of cgroups: see container.has_own_v1_freezer.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime import cgroup_freezer
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry
from gpusnap.runtime_shim.stopping import vfork
from gpusnap.runtime_shim.stopping.stop import go_on, settle, stand


class PausedContainer:
    """A container in a frozen cgroup, and which of its processes we have stopped."""

    def __init__(
        self,
        container: str,
        group: str,
        stopped: Mapping[int, int] = MappingProxyType({}),
        *,
        runtime: str = "",
    ) -> None:
        """`container` is its key, `group` the folder of the cgroup; `stopped` by us, PID to start time.

        `runtime` is the kind of the real one, for `reopen`.
        """
        self._container, self._group, self._runtime = container, group, runtime
        self._stopped = dict(stopped)
        pidfd.remember(self._stopped.items())
        self._away: set[int] = set()
        self._thawed = False

    @property
    def held(self) -> Collection[int]:
        """The PIDs of those that we have stopped."""
        return self._stopped.keys()

    def hold(self, holders: Iterable[int] = (), *, timeout: float) -> None:
        """Stop all that would run, and thaw. `holders` stand when this returns: the driver is asked of them.

        Seconds of `timeout` for that. May be called again. Raises GpusnapError; `freeze` puts that right.
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
            # These would not stand, and CRIU not come by them.
            try:
                vfork.finish(self._stopped, timeout=timeout)
            except GpusnapError:
                if not self._away:  # else what matters is that GPU state comes back
                    raise
        ours = [pid for pid in holders if pid in self._stopped]
        stand(ours, timeout=timeout)
        if not self._away:
            # They were paused anywhere; the driver has taken nothing yet that their threads could miss.
            settle(ours)

    def keep(self, pids: Iterable[int]) -> None:
        """The driver has, or is about to take, the GPU state of these: they stay stopped when frozen."""
        self._away.update(pids)

    def let_go(self, pid: int) -> None:
        """That one has its GPU state again: it may go on as soon as the container is resumed."""
        self._away.discard(pid)
        if pid not in self._stopped:
            go_on([pid])  # outside the frozen cgroup, so that it ran all the time

    def freeze(self) -> None:
        """Pause the container again, and have all go on with that whom only we keep. May be called again."""
        if cgroup_freezer.is_gone(self._group):
            self.forget()  # it has ended
            return
        cgroup_freezer.freeze(self._group)
        # From now on whoever paused it may resume it, and shall not find it frozen by us later.
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
        """See that CRIU comes by all processes, for once that they are frozen. Raises GpusnapError."""
        for each in vfork.iterate_waiting(cgroup_freezer.members(self._group)):
            raise vfork.make_for_good_error(each)

    def forget(self) -> None:
        """Nothing is left to be put right."""
        journal.drop(self._container, journal.PAUSED)

    def _note(self, *, thawed: bool) -> None:
        stopped = tuple(self._stopped.items())
        pause = journal.Pause(state_files.owner(), self._group, thawed, stopped, self._runtime)
        journal.note_pause(self._container, pause)


def find(container: containers.Container, runtime: str = "") -> PausedContainer | None:
    """The pause that a container is in; None where it is not frozen, or not by a cgroup of its own.

    `runtime`: the kind of the real one.
    """
    group = containers.find_freezer(container)
    return PausedContainer(container.key, group, runtime=runtime) if group is not None else None


def reopen(entry: Entry, pids: Iterable[int]) -> PausedContainer | None:
    """The pause in which to put right what a killed gpusnap left; None where the container is to run.

    `pids` are those of its processes that are there. What was frozen is, and what we had thawed: whoever
    paused it has not resumed it since, as runc refuses to resume what is thawed. crun does not, so that under
    it nobody can tell; it runs then, since a container that an engine takes for a running one must not be
    frozen. If somebody has resumed it, what we stopped beside `pids` goes on here.
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
    go_on(pid for pid in stopped if pid not in alive)
    return None


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        pidfd.send(pid, number)
