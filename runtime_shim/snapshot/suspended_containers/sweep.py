"""Frees the memory of a suspended container when it is resumed or has ended.

A container may end while it is suspended: it is removed or killed, or its engine is. gpusnap may not notice
that. So every command that works with suspended containers sweeps the records: if a container's first process
has ended, everything of it is removed.
"""

from __future__ import annotations

from contextlib import suppress

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.snapshot.memory import suspended_memory
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import spilled


def sweep(store: str = "") -> None:
    """Free what is kept for containers that have ended, also in that store. What cannot be read stays."""
    with suppress(GpusnapError):
        for key in journal.list_noted(journal.SUSPENDED):
            with suppress(GpusnapError, OSError):
                found = suspensions.read(key)
                spilled.sweep_loaded(key)
                if found is not None and not found.is_alive:
                    with journal.hold(key, patience=0):
                        remove(found)
    if store:
        spilled.sweep(store)


def remove(found: Suspension) -> None:
    """Free everything that is kept for a container that has ended, under its lock. Raises GpusnapError."""
    now = suspensions.read(found.key)
    if now is None or now.is_alive:
        return
    suspended_memory.free(found.key)
    suspensions.drop(found.key)
