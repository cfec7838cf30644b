"""`gpusnap suspend` and `resume`: containers off their GPUs and back, whatever engine runs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from functools import partial

from gpusnap.engines import podman
from gpusnap.operations.driver import needed_driver
from gpusnap.operations.suspending import budget, make_way, targets
from gpusnap.operations.suspending.ahead import Ahead
from gpusnap.operations.suspending.commands import after_resume, around_suspend
from gpusnap.operations.suspending.moved import Moved
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.memory.destination import StoreHome
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.suspend import criu_plugin
from gpusnap.runtime_shim.snapshot.suspended import resume as resuming
from gpusnap.runtime_shim.snapshot.suspended import spill as spilling
from gpusnap.runtime_shim.snapshot.suspended import suspend as suspending
from gpusnap.runtime_shim.snapshot.suspended.load import Loading
from gpusnap.runtime_shim.snapshot.suspended.sweep import sweep


def suspend(name: str, early: Ahead) -> Moved:
    """Suspend a running container by its name.

    `early`: what was asked ahead, of this container first. Raises NotFound, Refused, GpusnapError.
    """
    return suspend_this(targets.running(name, early.container), early)


def suspend_this(target: targets.Running, early: Ahead, *, leaving: str = "") -> Moved:
    """Suspend a container that was found. `leaving`: the key of one that is resumed next.

    `early`: what was asked ahead, of this container first. Raises Refused, GpusnapError.
    """
    began = time.monotonic()
    engine, container, real = target
    settings = settings_file.annotated(settings_file.usable(), container.annotations)
    sweep(settings.store.path)
    driver = criu_plugin.chosen(early.driver(), container, settings)
    room = partial(budget.make_room, settings, leaving=leaving)
    with around_suspend(engine.kind, early.container):
        done, steps = suspending.suspend(container, real, settings, driver, engine, room=room)
    return Moved(done, time.monotonic() - began, steps)


def resume(name: str, early: Ahead, request: GpuMap = ()) -> Moved:
    """Resume a suspended container by its name.

    `early`: what was asked ahead, of this container first. Raises NotFound, Refused, GpusnapError.
    """
    settings = settings_file.load()
    sweep(settings.store.path)
    found = targets.suspended(name, early.container)
    return resume_this(found, settings, early.driver(), early.container, request)


def resume_this(
    found: Suspension,
    settings: Settings,
    driver: Driver,
    asked: podman.Inspection | None = None,
    request: GpuMap = (),
    loading: Loading | None = None,
) -> Moved:
    """Resume a container that was found. Raises Refused, GpusnapError.

    `asked`: what Podman tells of it. `loading`: what was spilled of it, on its way into RAM.
    """
    began = time.monotonic()
    go_on = targets.engine_of(found).go_on
    with overrides.alone(found.container):
        try:
            done, steps = resuming.resume(
                found.key, settings, driver, go_on, request=request, loading=loading
            )
        except resuming.NoRoom as error:
            make_way.propose(error, found, driver, request)
            raise
    after_resume(found.engine, found.container, asked)
    return Moved(done, time.monotonic() - began, steps)


def spill(name: str, asked: podman.Inspection) -> int:
    """Move the GPU memory of a suspended container to the store; bytes. Raises NotFound, GpusnapError.

    Podman was asked for the name.
    """
    found = targets.suspended(name, asked)
    return spilling.spill(found.key, settings_file.load())


def spill_behind(name: str, asked: podman.Inspection) -> None:
    """The same, by a process of its own that nobody waits for; what goes wrong stays in RAM."""
    program = shutil.which(sys.argv[0]) or sys.argv[0]
    found = targets.suspended(name, asked)
    whole = f"{found.namespace}/{found.name}" if found.namespace else found.container
    subprocess.Popen(
        [program, "suspend", "--spill", "--wait", whole],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def pause_again(found: Suspension) -> bool:
    """Have Podman show a suspended container as paused, where a killed checkpoint of it left another word.

    Whether it did. Its runtime does nothing for it: the container is frozen. Raises GpusnapError, also where
    such a checkpoint is under way.
    """
    if found.engine != "podman":
        return False
    with overrides.ordered(found.container, pages=StoreHome.kind, asleep=True):
        if podman.container(found.container).status != "running":
            return False
        podman.pause(found.container)
    return True


def recover(found: Suspension) -> str:
    """Finish or undo what a killed gpusnap had begun; what was done, in words. Raises GpusnapError."""
    engine = targets.engine_of(found)
    with overrides.alone(found.container):
        return resuming.recover(found.key, settings_file.load(), needed_driver(), engine.go_on)
