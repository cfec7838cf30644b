"""The part of `gpusnap recover` for suspended containers."""

from __future__ import annotations

from contextlib import suppress

from gpusnap.engines import podman
from gpusnap.operations.driver import needed_driver
from gpusnap.operations.suspending import targets
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import resume as resuming


def needs_recovery(found: Suspension) -> bool:
    """Return whether it is neither suspended nor resumed, or threads of it do not have their signal masks."""
    if found.stage is not Stage.SUSPENDED:
        return True
    try:
        return journal.has_held_threads(found.key)
    except GpusnapError:
        return True  # its recovery reports that


def is_awake(found: Suspension) -> bool:
    """Return whether Podman shows a suspended container as running; see `pause_again`."""
    if found.engine != "podman":
        return False
    with suppress(GpusnapError):
        return podman.inspect_container(found.container).status == "running"
    return False


def pause_again(found: Suspension) -> bool:
    """Make Podman show a suspended container as paused, if a killed checkpoint of it left another state.

    Returns whether that was needed. Its runtime does nothing for it: the container is frozen. Raises
    GpusnapError, also while such a checkpoint is running.
    """
    if found.engine != "podman":
        return False
    with overrides.order(found.container, pages=StoreDestination.kind, asleep=True):
        if podman.inspect_container(found.container).status != "running":
            return False
        podman.pause(found.container)
    return True


def recover(found: Suspension) -> str:
    """Finish or undo the work of a killed gpusnap; return a sentence about it. Raises GpusnapError."""
    engine = targets.engine_of(found)
    with overrides.keep_alone(found.container):
        return resuming.recover(found.key, settings_file.load(), needed_driver(), engine)
