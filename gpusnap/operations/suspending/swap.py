"""`gpusnap swap`: takes one container off the GPU, and puts another on.

While the first is suspended, the work for the second that needs no GPU is done: both are checked, the plan is
made, and the spilled memory of the second is read from the store into RAM. The driver restores the second
when the first is off, because there is no room for both.

Whether the second will fit is decided before anything is done, by what the first is known to free
(`make_way.check_swap`). When the first is off, the resume of the second measures what is free, before it
begins.

Other commands may act meanwhile. A command that resumes, suspends or removes the second takes its lock, which
the swap takes only when the first is suspended. The swap then finds the second in another state and says so.
It resumes the first, unless the second runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress

from gpusnap.engines import podman
from gpusnap.oci.base.errors import OciError
from gpusnap.operations.suspending import make_way, targets
from gpusnap.operations.suspending.ahead import Ahead
from gpusnap.operations.suspending.moved import MovedContainer
from gpusnap.operations.suspending.resume import resume_this
from gpusnap.operations.suspending.suspend import suspend_this
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, UsageError, make_unforeseen
from gpusnap.runtime_shim.base.transaction import hold_signals, make_interruptible
from gpusnap.runtime_shim.gpu import estimate_used
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.records import suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import load
from gpusnap.runtime_shim.snapshot.suspended_containers import resume as resuming
from gpusnap.runtime_shim.snapshot.suspended_containers.load import MemoryLoad

_Used = Mapping[int, Mapping[str, int]]
"""Bytes of GPU memory by PID and GPU UUID."""


def swap(out: str, into: str, early: Ahead, request: GpuMap = ()) -> tuple[MovedContainer, MovedContainer]:
    """Suspend container `out`, and resume `into` in its place; if that fails, resume `out` again.

    `early`: the requests that were started ahead, for both in this order. If `into` would not fit even then,
    or nobody can know, nothing is done. Raises NotFound, Refused, GpusnapError.
    """
    settings, driver = settings_file.load(), early.driver()
    first, second = early.containers
    _check_order(out, into, early)
    found = targets.find_suspended(into, second)
    if found.stage is not Stage.SUSPENDED:
        found.check_not_at_work()
        raise suspensions.make_unfinished_error(found)
    target = targets.find_running(out, first)
    container = target[1]
    pids = [each.pid for each in containers.processes(container.pid, container.id)]
    host, reported = driver.host(), driver.memory_used(pids)
    used = estimate_used(reported, host)
    try:
        make_way.check_swap(found, out, driver, host, reported, request)
    except resuming.NoRoom as error:
        make_way.propose(error, found, driver, request)
        raise
    with ExitStack() as stack:
        loading = _begin_loading(found, settings, used)
        if loading is not None:
            stack.callback(loading.close)
        # A signal between the two is handled like any other error.
        stack.enter_context(make_interruptible())
        try:
            suspended = suspend_this(target, early, leaving=found.key)
            return suspended, resume_this(found, settings, driver, second, request, loading)
        except Exception as error:  # of any kind: the first one may be off
            with hold_signals():
                said = error if isinstance(error, GpusnapError) else make_unforeseen(error)
                off = _find_suspension(container.id)
                # Not one that another gpusnap has suspended meanwhile.
                if off is not None and off.stage is Stage.SUSPENDED and off.owner == state_files.owner():
                    there = f"{into} runs, and {out} is suspended"
                    if not _is_running(found):
                        there = _bring_back(off, settings, driver, first)
                    said.add_hint(there)
            if said is error:
                raise
            raise said from error


def _find_suspension(container: str) -> Suspension | None:
    """Return the record of a suspended container; None if it cannot be read: the first error is reported."""
    with suppress(GpusnapError):
        return suspensions.find_by_container(container)
    return None


def _is_running(found: Suspension) -> bool:
    """Return whether a container is resumed, and only its own command has failed."""
    with suppress(GpusnapError):
        return found.is_alive and suspensions.read(found.key) is None
    return False


def _bring_back(off: Suspension, settings: Settings, driver: Driver, asked: podman.Inspection) -> str:
    """Resume the first container again; return a sentence about the result."""
    try:
        resume_this(off, settings, driver, asked)
    except GpusnapError as error:
        if not _is_running(off):
            return f"{off.name} is suspended, and could not be resumed: {error.sentence()}"
        return f"{off.name} continues to run; {error.sentence()}"
    return f"{off.name} continues to run"


def _check_order(out: str, into: str, early: Ahead) -> None:
    """Check that they are two containers, in the right order. Raises UsageError, ContainerError."""
    first, second = early.containers
    if out == into:
        raise UsageError(
            f"OUT and IN are both {out}", hint="gpusnap ps shows which one runs and which one is suspended"
        )
    if targets.is_suspended(out, first) and not targets.is_suspended(into, second):
        raise ContainerError(
            f"{out} is suspended and {into} is not, but a swap suspends the first and resumes the second",
            hint=f"gpusnap swap {into} {out}",
            code="GPS-206",
        )


def _begin_loading(found: Suspension, settings: Settings, used: _Used) -> MemoryLoad | None:
    """Begin to read the spilled memory of a container; None if it has none, or RAM is too short.

    An error of the store is reported by the resume.
    """
    needed = sum(sum(of.values()) for of in used.values())
    try:
        return load.begin(found, settings.memory, beside=needed)
    except (OSError, OciError, GpusnapError):
        return None
