"""Finds GPU files that a process inherited by fork and never used, and replaces them in place.

The workers of PyTorch's DataLoader are children by fork of a CUDA process. They hold all of its device files,
open and mapped, and use none of them: CUDA refuses to work in such a child. When the driver suspends the
parent, it removes the parent's files but not the children's, and CRIU dumps no such file. So while the parent
is stopped, locked but not suspended yet, gpusnap stops each child, replaces its descriptors by /dev/null and
its mappings by nothing, and continues it. This is never undone, and need not be: a handle shared with a
parent that has been suspended once is dead in any case, because the driver opens new ones when it resumes the
parent.

A process counts as such a child only if everything that it holds came from an ancestor with GPU state: each
descriptor is the same open file as one of the ancestor's (kcmp(2), KCMP_FILE), and each mapping is at the
same place as in the ancestor. gpusnap does not touch what a process opened by itself: it may be starting
CUDA, or watching the GPU. No table may be shared: if a child shares its memory or its descriptors with
another process (CLONE_VM, CLONE_FILES; in the middle of vfork or posix_spawn), a replacement in one is also
in the other, which may be the GPU process itself. Seen on an H200 with driver 580: each worker had 31
descriptors and 30 mappings, all of them inherited and close-on-exec, even after the parent had freed its
memory and its streams.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Iterable
from functools import partial

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.gpu.api.driver import Driver, HeldFiles
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.kcmp import EQUAL, FILE, FILES, VM, compare
from gpusnap.runtime_shim.process.ptrace.neutralise import NeutraliseResult, neutralise
from gpusnap.runtime_shim.records.manifest import NeutralisedProcess
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import find_idle_holders, find_users
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.stopping.stop import go_on, stop


@dataclass(frozen=True, slots=True)
class ClearedProcess:
    """A process whose inherited GPU files have been replaced."""

    process: proc.Process
    done: NeutraliseResult


def find_strangers(
    driver: Driver, processes: Collection[proc.Process], held: Collection[int] = ()
) -> dict[proc.Process, tuple[str, ...]]:
    """Return processes that hold GPU files without GPU state and not only by inheritance, with their files.

    `processes`: all processes of the container. If one shares its memory or its descriptors with another of
    them, every file counts as its own. Raises Refused for a stopped process, unless gpusnap stopped it
    (`held`).
    """
    idle = find_idle_holders(driver, processes, held)
    if not idle:
        return {}
    gpu = find_users(driver, (process for process in processes if process not in idle), held)
    source = _Source(driver, [process.pid for process in gpu])
    everyone = [process.pid for process in processes]
    own = {process: source.list_own(process.pid, everyone) for process in idle}
    return {process: files for process, files in own.items() if files}


def clear(
    driver: Driver,
    key: str,
    gpu: Collection[int],
    processes: Callable[[], Collection[proc.Process]],
    *,
    timeout: float,
    held: Collection[int] = (),
) -> tuple[ClearedProcess, ...]:
    """Replace what processes inherited from those in `gpu`, which are stopped and have their files open.

    `processes` returns the container's processes, anew at each call: a child may fork until it is stopped.
    Files that others hold are not touched. `timeout`: seconds for the stop. The journal of the container, by
    its `key`, records which processes are stopped, and keeps the registers of a thread that gpusnap uses.
    Processes in `held` are already stopped, and stay so. Raises GpusnapError; what was replaced before stays
    replaced, and all other processes continue.
    """
    source = _Source(driver, gpu)
    found: dict[int, proc.Process] = {}
    with contextlib.ExitStack() as stack:
        while True:
            there = tuple(processes())
            everyone = [process.pid for process in there]
            fresh = source.find_heirs(
                [p for p in there if p.pid not in gpu and p.pid not in found], everyone, held
            )
            if not fresh:
                break
            for pid in (pid for pid in fresh if pid not in held):
                stack.enter_context(journal.keep_idle(key, pid))
                stack.callback(go_on, [pid])
            stop(fresh, timeout=timeout)
            found |= fresh
        # Before it stopped, it may have opened something by itself, or got a child that shares its tables.
        heirs = [pid for pid in found if proc.is_running(pid) and not source.list_own(pid, everyone)]
        outcome = run_at_once(partial(_clear, driver, key), heirs)
        outcome.raise_first()
    return tuple(ClearedProcess(found[pid], each) for pid, each in sorted(outcome.results.items()) if each)


def say(cleared: Iterable[ClearedProcess]) -> None:
    """Print on stderr whose files were replaced."""
    pids = [each.process.pid for each in cleared]
    if pids:
        one = len(pids) == 1
        who = (
            "1 process has GPU files open that it"
            if one
            else f"{len(pids)} processes have GPU files open that they"
        )
        note(
            f"{who} inherited and never used; replaced by /dev/null: {' '.join(map(str, pids))}",
            code="GPS-213",
        )


def records(cleared: Iterable[ClearedProcess], init: int) -> tuple[NeutralisedProcess, ...]:
    """Return the manifest's records of the processes that still exist."""
    there = [each for each in cleared if proc.is_same(each.process.pid, each.process.start)]
    inner = containers.inner_pids(init, [each.process for each in there])
    return tuple(
        NeutralisedProcess(
            inner[each.process.pid],
            each.process.comm,
            each.done.descriptors,
            len(each.done.mappings),
            sum(mapping.size for mapping in each.done.mappings),
        )
        for each in there
    )


def _clear(driver: Driver, key: str, pid: int) -> NeutraliseResult | None:
    """Clear one stopped process; None if it has ended. The calling thread is the tracer."""
    held = driver.list_held(pid)
    numbers = [number for number, _ in held.descriptors]
    ranges = [(start, end) for start, end, _ in held.mappings]
    try:
        return neutralise(pid, numbers, ranges, lent=partial(journal.keep_thread, key, pid))
    except OSError as error:
        if proc.is_dying(pid):
            return None
        raise GpusnapError(
            f"process {pid} ({proc.comm(pid)}) has inherited GPU files open that cannot be replaced: "
            f"{reason(error)}",
            hint="quit the debugger that traces it, or start such workers with spawn or forkserver",
            code="GPS-213",
        ) from error


class _Source:
    """The files of the processes with GPU state, to compare those of others with."""

    def __init__(self, driver: Driver, gpu: Collection[int]) -> None:
        self._driver, self._gpu = driver, frozenset(gpu)
        self._held: dict[int, HeldFiles] = {}

    def find_heirs(
        self, processes: Iterable[proc.Process], everyone: Collection[int], held: Collection[int]
    ) -> dict[int, proc.Process]:
        """Return holders of GPU files only by inheritance, by PID. Raises Refused as `find_strangers`."""
        idle = find_idle_holders(self._driver, processes, held)
        return {process.pid: process for process in idle if not self.list_own(process.pid, everyone)}

    def list_own(self, pid: int, everyone: Collection[int]) -> tuple[str, ...]:
        """Return the paths of the files that a process holds and did not inherit, each once.

        If it shares its memory or its descriptors with one of `everyone`, these are all of its files.
        """
        held = self._driver.list_held(pid)
        if any(_shares_memory_or_files(pid, each) for each in {*everyone, *self._gpu} - {pid}):
            files = [path for _, path in held.descriptors] + [path for *_, path in held.mappings]
            return tuple(dict.fromkeys(files))
        ancestors = [each for each in proc.list_ancestors(pid) if each in self._gpu]
        inherited = {mapping for each in ancestors for mapping in self._list_held(each).mappings}
        files = [
            path
            for number, path in held.descriptors
            if not any(self._is_shared(each, pid, number) for each in ancestors)
        ]
        files += [path for start, end, path in held.mappings if (start, end, path) not in inherited]
        return tuple(dict.fromkeys(files))

    def _is_shared(self, ancestor: int, pid: int, number: int) -> bool:
        """Whether a descriptor is an open file of the ancestor, where it usually has the same number."""
        theirs = sorted(self._list_held(ancestor).descriptors, key=lambda each: each[0] != number)
        return any(_is_same_file(ancestor, each, pid, number) for each, _ in theirs)

    def _list_held(self, pid: int) -> HeldFiles:
        if pid not in self._held:
            self._held[pid] = self._driver.list_held(pid)
        return self._held[pid]


def _is_same_file(pid: int, number: int, other: int, other_number: int) -> bool:
    """Whether two descriptors share an open file description; False if the kernel does not say it."""
    return compare(pid, other, FILE, number, other_number) == EQUAL


def _shares_memory_or_files(pid: int, other: int) -> bool:
    """Whether two processes share their memory or their descriptors; True if this cannot be determined.

    A process that has ended has neither.
    """
    for kind in (VM, FILES):
        found = compare(pid, other, kind)
        if found == EQUAL or (found < 0 and found != -errno.ESRCH):
            return True
    return False
