"""Decides whether a suspended container fits in place of others, and suggests one to swap with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpusnap.oci.base.dataclass import replace
from gpusnap.operations.suspending import usage
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu import estimate_used
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap
from gpusnap.runtime_shim.gpu.assignment import FREE
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import resume as resuming

_MOST_NAMED = 3


def propose(error: resuming.NoRoom, found: Suspension, driver: Driver, request: GpuMap) -> None:
    """Add to a refusal who uses the GPUs, and a command that frees enough memory, if known."""
    with suppress(GpusnapError):
        hint, swap = _hint(found, driver.host(), usage.map_running(driver), request)
        error.hint = hint if swap else hint + error.more


def check_swap(
    found: Suspension,
    out: str,
    driver: Driver,
    host: Host,
    reported: Mapping[int, Mapping[str, int | None]],
    request: GpuMap,
) -> None:
    """Check that a suspended container fits when container `out` is off its GPUs.

    `reported`: `Driver.memory_used` of the processes of `out`, at the time of `host`. On a GPU where the
    driver does not report it, they free nothing that one could count on, unless nobody else is there whose
    use is not reported. Raises NoRoom if it does not fit, Refused if nobody can know whether it does.
    """
    if _fits(found, subtract_freed(host, [_keep_known(own) for own in reported.values()]), request):
        return
    unknown = {uuid for own in reported.values() for uuid, size in own.items() if size is None}
    others = driver.memory_used(pid for pid in proc.pids() if pid not in reported) if unknown else {}
    # At most what is in use on these GPUs, except what others are known to use.
    most = estimate_used({**reported, **others}, host)
    resuming.check(found, subtract_freed(host, [most[pid] for pid in reported]), request)
    shared = {
        uuid for own in others.values() for uuid, size in own.items() if size is None and uuid in unknown
    }
    # Without the GPUs that the processes share with such others.
    least = [{uuid: size for uuid, size in most[pid].items() if uuid not in shared} for pid in reported]
    if shared and not _fits(found, subtract_freed(host, least), request):
        numbers = " and ".join(str(gpu.index) for gpu in host.gpus if gpu.uuid in shared)
        raise Refused(
            f"the driver does not report how much memory of GPU {numbers} container {out} and other programs "
            f"use, so whether {found.name} fits in place of {out} is not known",
            hint=f"gpusnap suspend {out}; then gpusnap resume {found.name} says whether it fits, and changes "
            "nothing if it does not",
            code="GPS-401",
        )


def _keep_known(sizes: Mapping[str, int | None]) -> Mapping[str, int]:
    return {uuid: size for uuid, size in sizes.items() if size is not None}


def subtract_freed(host: Host, freed: Sequence[Mapping[str, int]]) -> Host:
    """Return the host with so many bytes less in use; by GPU UUID."""
    gpus = tuple(
        replace(gpu, memory_used=max(0, gpu.memory_used - sum(each.get(gpu.uuid, 0) for each in freed)))
        for gpu in host.gpus
    )
    return replace(host, gpus=gpus)


def _hint(
    found: Suspension, host: Host, users: Mapping[str, Mapping[str, int]], request: GpuMap
) -> tuple[str, bool]:
    """Return the hint, and whether it has a swap that frees enough."""
    seen = {gpu.uuid: gpu.index for gpu in host.gpus if gpu.uuid in {own.uuid for own in found.gpus}}
    there = {name: used for name, used in users.items() if any(uuid in seen for uuid in used)}
    names = sorted(there, key=lambda name: (sum(there[name].values()), name))
    if not names or not _fits(found, subtract_freed(host, [*there.values()]), request):
        return f"{FREE}: nvidia-smi lists it", False
    # The container that uses least and is enough.
    enough = [name for name in names if _fits(found, subtract_freed(host, [there[name]]), request)]
    shown = [*enough[:1], *(name for name in reversed(names) if name not in enough[:1])][:_MOST_NAMED]
    who = "; ".join(
        f"container {name} uses "
        + " and ".join(
            f"{human(size)} of GPU {seen[uuid]}" for uuid, size in there[name].items() if uuid in seen
        )
        for name in shown
    )
    if enough:
        return f"{who}: gpusnap swap {enough[0]} {found.name}", True
    return f"{who}: gpusnap suspend {' '.join(reversed(names))} frees memory", False


def _fits(found: Suspension, host: Host, request: GpuMap) -> bool:
    try:
        resuming.check(found, host, request)
    except Refused:
        return False
    return True
