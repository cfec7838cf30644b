"""`gpusnap suspend`: takes containers off their GPUs, with any engine."""

from __future__ import annotations

import time
from functools import partial

from gpusnap.container_hooks.commands import run_around_suspend
from gpusnap.engines import podman, systemd_unit
from gpusnap.operations.suspending import budget, targets
from gpusnap.operations.suspending.ahead import Ahead
from gpusnap.operations.suspending.moved import MovedContainer
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.snapshot.gpu_processes.choose_driver import choose_driver
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.suspended_containers import suspend as suspending
from gpusnap.runtime_shim.snapshot.suspended_containers.sweep import sweep


def suspend(name: str, early: Ahead) -> MovedContainer:
    """Suspend a running container by its name.

    `early`: the requests that were started ahead, for this container first. Raises NotFound, Refused,
    GpusnapError.
    """
    return suspend_this(targets.find_running(name, early.container), early)


def suspend_this(target: targets.Running, early: Ahead, *, leaving: str = "") -> MovedContainer:
    """Suspend a container that was found. `leaving`: the key of a container that is resumed next.

    `early`: the requests that were started ahead, for this container first. Raises Refused, GpusnapError.
    """
    began = time.monotonic()
    engine, container, real = target
    settings = settings_file.apply_annotations(settings_file.load_usable(), container.annotations)
    sweep(settings.store.path)
    driver = choose_driver(early.driver(), container, settings)
    if container.key in journal.list_noted("restore"):  # later, it could be taken for an incomplete one
        from gpusnap.runtime_shim.snapshot.recovery import restore as recover_restore

        said = recover_restore.recover(container.key, driver, remove=False)
        note(f"an earlier restore was interrupted; {said}", code="GPS-022")
    room = partial(budget.claim_room, settings, leaving=leaving)
    found = early.container.container() if engine.kind == "podman" else None
    if found is not None:
        systemd_unit.check_watchdog(found)
    with run_around_suspend(engine.kind, early.container):
        done, steps = suspending.suspend(container, real, settings, driver, engine, room=room)
        if found is not None:
            podman.end_health_checks(found)
    return MovedContainer(done, time.monotonic() - began, steps)
