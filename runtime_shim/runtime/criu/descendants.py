"""Kills or continues the descendants of this process: the real runtime, CRIU, and restored processes.

    gpusnap-runtime ─ runtime ─┬─ CRIU ─ its helpers
                               └─ the container's init ─ …    CRIU makes it a child of its caller

To lose none of them, gpusnap becomes their subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): a process that loses
its parent becomes a child of gpusnap, instead of conmon's or the shim's. This does not affect a successful
restore: the container's init goes to the reaper of gpusnap's own parent.

A CRIU that is killed in the middle of a dump leaves its own code in the container's processes. So one that a
signal has stopped is not ended, but has to go on: the container would stand for as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.process.stopped_processes import StoppedProcesses
from gpusnap.runtime_shim.runtime.criu import scratch_files

_PATIENCE = 30.0  # seconds that killed processes may take to end
_INTERVAL = 0.01
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_STOPPED, _LOOK = 10.0, 2.0  # seconds that a signal may stop one of them, and between two looks for that

_libc = ctypes.CDLL(None, use_errno=True)


def children(of: int | None = None, parents: Mapping[int, int] | None = None) -> frozenset[int]:
    """Return the children of a process, of this one without a PID."""
    if of is None and parents is None and (own := proc.list_own_children()) is not None:
        return own
    wanted = os.getpid() if of is None else of
    found = proc.parents() if parents is None else parents
    return frozenset(pid for pid, parent in found.items() if parent == wanted)


def kill_all(
    *, but: Collection[int], waited: Callable[[], Collection[int]], ended: Callable[[], bool]
) -> None:
    """Kill all descendants of this process, and wait until they have ended.

    `but`: children that are not killed, nor their descendants. `waited`: those for which another thread
    waits. It repeats until `ended` returns True, because that thread may be about to start one. Raises
    GpusnapError if some do not end.
    """
    owner = state_files.owner()
    deadline = time.monotonic() + _PATIENCE
    with _become_subreaper():
        while (left := _list_left(but, owner)) or not ended():
            pidfd.remember((each.pid, each.start) for each in map(proc.process, left) if each is not None)
            # The PID of an ended process may belong to another one before it was remembered.
            for pid in left & _list_left(but, owner):
                pidfd.send(pid, signal.SIGKILL)
            for pid in left.difference(waited()):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                raise GpusnapError(
                    "processes of the restore were killed but do not exit: "
                    f"{' '.join(str(pid) for pid in sorted(left))}",
                    hint="check /proc/PID/stack for what they wait for; then run gpusnap recover",
                    code="GPS-025",
                )
            time.sleep(_INTERVAL)


@contextmanager
def continue_stopped() -> Iterator[None]:
    """While the block runs, continue processes started by it that a signal has stopped for some seconds."""
    over, others = threading.Event(), children()
    thread = threading.Thread(target=_watch, args=(over, others), name="gpusnap-stopped", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread is to be had: nobody is to stop them
        thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(over: threading.Event, others: Collection[int]) -> None:
    watched = StoppedProcesses(_STOPPED)
    while not over.wait(_LOOK):
        with contextlib.suppress(GpusnapError, OSError):  # the next time, then
            stopped = [pid for pid in _list_below(others) if proc.is_thread_stopped(pid, pid)]
            found = (each for each in map(proc.process, stopped) if each is not None)
            for pid in watched.find_long(found):
                if not over.is_set():
                    name = proc.comm(pid)
                    pidfd.send(pid, signal.SIGCONT)
                    note(
                        f"{name} (process {pid}) was stopped by a signal, and has to go on: SIGCONT sent",
                        code="GPS-524",
                    )


@contextmanager
def _become_subreaper() -> Iterator[None]:
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _list_left(but: Collection[int], owner: tuple[int, int]) -> set[int]:
    """Return all descendants of this process; earlier orphans are found by their environment."""
    return _list_below(but) | set(scratch_files.children(owner))


def _list_below(but: Collection[int]) -> set[int]:
    parents = proc.parents()
    return proc.add_descendants(children(parents=parents).difference(but), parents)
