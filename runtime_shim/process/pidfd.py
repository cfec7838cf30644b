"""Signals that reach the process that was listed, and no later one with its PID: pidfd_open(2).

Another process may get a PID as soon as its process has been waited for, which may happen between a read of
/proc and a signal. So each process gets a descriptor when it is first listed, and signals are sent with it.
The start time (proc_pid_stat(5), field 22) shows whether a descriptor belongs to the intended process.

Descriptors are close-on-exec, and those of ended processes are closed when others are remembered. They use at
most a quarter of the limit (RLIMIT_NOFILE). Beyond that only the start time is kept, and the descriptor is
opened and compared when a signal is sent.
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

# PID to start time, and to a descriptor if there is one.
_starts: dict[int, int] = {}
_kept: dict[int, int] = {}
_lock = threading.RLock()


def remember(processes: Iterable[tuple[int, int]]) -> None:
    """Remember these processes, by PID and start time; from now on `send` reaches only them."""
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
                with contextlib.suppress(OSError):  # it has ended, or no more descriptors can be opened
                    found = _open(pid, start)
                    if found is not None:
                        _kept[pid] = found


def send(pid: int, number: int) -> None:
    """Send a signal to the process that was remembered with this PID; to the current one if none was.

    Do nothing if it has ended. Raises PermissionError.
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
    """Close all descriptors, and forget all processes."""
    with _lock:
        for pid in list(_starts):
            _drop(pid)


def _send_to(pid: int, start: int, number: int) -> None:
    """Send a signal to a process without a kept descriptor."""
    try:
        found = _open(pid, start)
    except (ProcessLookupError, PermissionError):
        raise
    except OSError:  # no descriptor can be opened: a process that nobody continues would be worse
        if proc.is_same(pid, start):
            os.kill(pid, number)
        return
    if found is not None:
        try:
            signal.pidfd_send_signal(found, number)
        finally:
            os.close(found)


def _open(pid: int, start: int) -> int | None:
    """Open a descriptor of the process; None if its PID belongs to another one now. Raises OSError."""
    found = os.pidfd_open(pid)
    # After that: the process with this PID is the one of the descriptor, or has ended.
    if proc.is_same(pid, start):
        return found
    os.close(found)
    return None


def _drop(pid: int) -> None:
    _starts.pop(pid, None)
    if (found := _kept.pop(pid, None)) is not None:
        os.close(found)


def _sweep() -> None:
    """Close the descriptors of ended processes; their start times still show that they have ended."""
    poll = select.poll()
    ours = {found: pid for pid, found in _kept.items()}
    for found in ours:
        poll.register(found, select.POLLIN)  # readable once the process has ended (pidfd_open(2))
    for found, _ in poll.poll(0):
        del _kept[ours[found]]
        os.close(found)
