"""Threads that a killed gpusnap held by ptrace: restores their registers and signal masks from files."""

from __future__ import annotations

from gpusnap.runtime_shim.base.errors import GpusnapError, reason
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Saved, put_back
from gpusnap.runtime_shim.process.ptrace.tracee import put_masks_back
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.snapshot.records import journal

_HINT = "check that it is not being debugged"


def unblock_signals(key: str) -> None:
    """Restore the signal masks of the threads of a container. Raises GpusnapError."""
    try:
        put_masks_back(journal.masks(key))
    except OSError as error:
        raise GpusnapError(
            f"the signal mask of a thread of container {container_key.id_of(key)} cannot be restored: "
            f"{reason(error)}",
            hint=_HINT,
        ) from error


def give_registers_back(key: str, pid: int, saved: Saved) -> None:
    """Restore a thread's registers, and its signal mask. Raises GpusnapError."""
    try:
        put_back(pid, saved)
    except OSError as error:
        raise GpusnapError(
            f"the registers of thread {saved.tid} of process {pid} cannot be restored: {reason(error)}",
            hint=_HINT,
        ) from error
    journal.drop_thread(key, pid)


def give_all_back(key: str) -> None:
    """Restore both, for all recorded threads of a container, which is stopped. Raises GpusnapError."""
    unblock_signals(key)
    for pid, start, saved in journal.threads(key):
        if proc.is_same(pid, start):
            pidfd.remember([(pid, start)])
            give_registers_back(key, pid, saved)
