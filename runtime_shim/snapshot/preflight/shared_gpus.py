"""Finds other processes on the GPUs of a job whose processes wait for one another.

NVIDIA's driver lets processes take turns on a GPU: it interrupts a kernel after about 2 ms. It does not
interrupt the kernels of a process that it has restored, not even after a restore on the same GPU. Seen on
H100s with driver 580.159.04 (bench/gpu_sharing.py; docs/benchmarks.md): another process then waits until such
a kernel ends, and a process whose kernel runs for 4.4 s while another one wants the GPU is ended (Xid 109).

A rank's kernel waits for the other ranks. So two jobs on the same two GPUs ended one another, soon after each
had been checkpointed with --leave-running. Of one job beside an ordinary process, a rank would end if it has
to wait for another rank for so long, such as for one that writes a file meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.settings import Nvidia
from gpusnap.runtime_shim.snapshot.preflight import nccl

_NAMED = 3


def refuse_ranks_beside_others(
    driver: Driver, processes: Sequence[proc.Process], users: Sequence[proc.Process], settings: Nvidia
) -> None:
    """Refuse ranks of a job if a process outside of the container uses one of their GPUs.

    `processes`: all of the container. `users`: those that use a GPU. For a checkpoint after which they run.
    """
    if settings.allow_nccl or driver.vendor != "nvidia" or not nccl.is_job(users):
        return
    others = _find_others(driver, {process.pid for process in processes})
    if others:
        named = ", ".join(others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise Refused(
            f"the GPUs of a job of several ranks are also used by process {named}{more}; "
            "after the checkpoint, NVIDIA's driver would no longer let them take turns within a kernel, and "
            "would end a rank that waits for another one for 4 s",
            hint="stop the other process, or make the checkpoint without --leave-running; if you are sure, "
            "give gpusnap checkpoint --force, or set nvidia.allow-nccl",
            code="GPS-219",
        )


def _find_others(driver: Driver, own: set[int]) -> list[str]:
    """Return the other processes on the GPUs that these PIDs use, as text, in order."""
    used = driver.memory_used(proc.pids())
    gpus = {uuid for pid in own for uuid in used.get(pid, ())}
    others = (pid for pid, each in sorted(used.items()) if pid not in own and gpus & each.keys())
    return [f"{pid} ({found.comm})" for pid in others if (found := proc.process(pid)) is not None]
