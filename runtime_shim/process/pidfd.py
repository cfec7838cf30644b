"""Signals that reach the process that was listed, and no later one with its PID: pidfd_open(2).

A PID is free for another process as soon as its own has been waited for, which may happen between a look at
/proc and a signal. So each process gets a descriptor when it is first listed, and signals are sent by that.
The start time (proc_pid_stat(5), field 22) says whether a descriptor is of the process that was meant.

Descriptors are close-on-exec, and those of processes that have ended are closed when others are remembered.
They take a quarter of the limit (RLIMIT_NOFILE) at most; beyond that the start time alone is kept, and the
descriptor is opened and compared when a signal is sent.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import threading
from collections.abc import Iterable

from gpusnap.runtime_shim.process import proc

_SHARE = 4
_FEWEST = 16

# PID to start time, and to a descriptor where one is kept.
_starts: dict[int, int] = {}
_kept: dict[int, int] = {}
_lock = threading.RLock()


def remember(processes: Iterable[tuple[int, int]]) -> None:
    """Note these processes, by PID and start time; from now on `send` reaches them alone."""
    with _lock:
        fresh = {pid: start for pid, start in processes if _starts.get(pid) != start}
        if not fresh:
            return
        for pid in fresh:
            _drop(pid)
        _sweep()
        most = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE, _FEWEST)
        for pid, start in fresh.items():
            _starts[pid] = start
            if len(_kept) < most:
                with contextlib.suppress(OSError):  # it has ended, or no descriptor is left
                    found = _open(pid, start)
                    if found is not None:
                        _kept[pid] = found


def send(pid: int, number: int) -> None:
    """Send a signal to the process that was remembered with this PID; to the present one if none was.

    Nothing happens where it has ended. Raises PermissionError.
    """
    with _lock, contextlib.suppress(ProcessLookupError):
        if pid not in _starts:
            process = proc.process(pid)
            if process is None:
                return
            remember([(pid, process.start)])
        if pid in _kept:
            signal.pidfd_send_signal(_kept[pid], number)
        else:
            _send_to(pid, _starts[pid], number)


def forget() -> None:
    """Close all descriptors, and remember nobody."""
    with _lock:
        for pid in list(_starts):
            _drop(pid)


def _send_to(pid: int, start: int, number: int) -> None:
    """Send a signal to a process of which no descriptor is kept."""
    try:
        found = _open(pid, start)
    except (ProcessLookupError, PermissionError):
        raise
    except OSError:  # no descriptor is left: a process that nobody lets go on would be worse
        if proc.is_same(pid, start):
            os.kill(pid, number)
        return
    if found is not None:
        try:
            signal.pidfd_send_signal(found, number)
        finally:
            os.close(found)


def _open(pid: int, start: int) -> int | None:
    """A descriptor of the process; None where it is another by now. Raises OSError."""
    found = os.pidfd_open(pid)
    # After that: what has this PID now is what the descriptor is of, or has ended.
    if proc.is_same(pid, start):
        return found
    os.close(found)
    return None


def _drop(pid: int) -> None:
    _starts.pop(pid, None)
    if (found := _kept.pop(pid, None)) is not None:
        os.close(found)


def _sweep() -> None:
    """Close the descriptors of those that have ended; that they have is remembered by their start time."""
    poll = select.poll()
    ours = {found: pid for pid, found in _kept.items()}
    for found in ours:
        poll.register(found, select.POLLIN)  # readable once the process has ended (pidfd_open(2))
    for found, _ in poll.poll(0):
        del _kept[ours[found]]
        os.close(found)
