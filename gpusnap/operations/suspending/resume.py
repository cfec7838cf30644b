"""`gpusnap resume`: puts containers back on GPUs, with any engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpusnap.container_hooks.commands import run_after_resume
from gpusnap.engines import podman
from gpusnap.operations.suspending import make_way, targets
from gpusnap.operations.suspending.ahead import Ahead
from gpusnap.operations.suspending.moved import MovedContainer
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import resume as resuming
from gpusnap.runtime_shim.snapshot.suspended_containers.sweep import sweep

if TYPE_CHECKING:
    from gpusnap.runtime_shim.snapshot.suspended_containers.load import MemoryLoad


def resume(name: str, early: Ahead, request: GpuMap = ()) -> MovedContainer:
    """Resume a suspended container by its name.

    `early`: the requests that were started ahead, for this container first. Raises NotFound, Refused,
    GpusnapError.
    """
    settings = settings_file.load()
    sweep(settings.store.path)
    found = targets.find_suspended(name, early.container)
    return resume_this(found, settings, early.driver(), early.container, request)


def resume_this(
    found: Suspension,
    settings: Settings,
    driver: Driver,
    asked: podman.Inspection | None = None,
    request: GpuMap = (),
    loading: MemoryLoad | None = None,
) -> MovedContainer:
    """Resume a container that was found. Raises Refused, GpusnapError.

    `asked`: Podman's description of it. `loading`: the read of its spilled memory into RAM, if it has begun.
    """
    began = time.monotonic()
    engine = targets.engine_of(found)
    with run_after_resume(found, asked), overrides.keep_alone(found.container):
        try:
            done, steps = resuming.resume(
                found.key, settings, driver, engine, request=request, loading=loading
            )
        except resuming.NoRoom as error:
            make_way.propose(error, found, driver, request)
            raise
    return MovedContainer(done, time.monotonic() - began, steps)
