"""Leaves a container stopped after its dump until its checkpoint is stored; then `gpusnap` removes it.

Podman removes a container with --rm as soon as it has ended, with CRIU's images, its files and its volumes.
If the dump ended it, all of that would be lost if Podman were killed, or failed, before it has exported
everything. So `gpusnap checkpoint` has Podman leave such a container running, and its order makes the runtime
leave it paused, and its GPU state where the journal says:

    gpusnap checkpoint            Podman                  gpusnap-runtime
    orders it                ──>  --leave-running   ──>   as without --leave-running until the dump,
                                                          which leaves the container paused
                                  exports
    commits the checkpoint,
    removes the container; or brings it back after any error

No process runs after the dump, so the checkpoint and its files belong together. The journal names the command
as the one at work. If that is killed, the runtime brings the container back if it still works, else the
command's guardian does (gpusnap.operations.checkpointing.guardian), or `gpusnap recover`. The order is
refused (`CODE`) where the container cannot be left so; then the dump ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, Refused
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime.criu.config import Connections
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.gpu_processes.dump_pause import DumpPause
from gpusnap.runtime_shim.snapshot.gpu_processes.job import CheckpointJob
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.recovery import checkpoint as recovery

CODE = "GPS-218"
WAY_BACK = (
    "pynvml",
    "gpusnap.runtime_shim.gpu.nvidia.nvml_ctypes",
    "gpusnap.runtime_shim.gpu.nvidia.cuda",
    "gpusnap.runtime_shim.process.ptrace.tracer",
    "gpusnap.runtime_shim.process.ptrace.populate",
)
"""Modules that `bring_back` imports late. Who may have to call it imports them before the dump: an upgrade of
gpusnap may replace or remove their files."""
# Seconds for the runtime of a Podman that was killed to end, and between two looks.
_PATIENCE, _EVERY = 120.0, 0.1


def check(job: CheckpointJob, connections: Connections) -> None:
    """Raise Refused if the container cannot be left stopped after its dump.

    If TCP connections are to be open after a restore, their other ends must not notice how the container is
    removed.
    """
    if job.driver.plugin is not None:
        raise make_refusal("CRIU's plugin resumes its GPU state")
    if connections is Connections.KEPT:
        raise make_refusal("its TCP connections would be closed before they are restored")
    if job.paused is not None or not containers.list_freezable(job.container):
        raise make_refusal("it cannot be paused in a control group of its own (version 2)")


def make_refusal(why: str) -> Refused:
    """Return the error for a container that is not left stopped."""
    return Refused(f"the container must end at its dump: {why}", code=CODE)


def keep_paused(job: CheckpointJob, pause: DumpPause | None) -> None:
    """Keep the container paused after the dump, unless a later step fails."""
    if pause is not None:
        pause.stays = True
        job.transaction.undo("unpausing the container", pause.let_go_on)


def forget(container: str) -> None:
    """Free the RAM and remove the records of a container of that ID that was left stopped and has ended.

    Raises GpusnapError.
    """
    for entry in journal.entries({}):
        if entry.container == container:
            with journal.hold(entry.key):
                transfer.remove_staged(entry.key)
                journal.drop(entry.key, journal.PAUSED)
                journal.remove(entry.key)


def bring_back(container: str, find_driver: Callable[[], Driver], settings: Memory) -> None:
    """Let a container of that ID run on, if it was left stopped; wait for a runtime that works on it.

    `find_driver` is called only if that is needed. Raises GpusnapError.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            unreadable: dict[str, GpusnapError] = {}
            for entry in journal.entries(unreadable):
                if entry.container == container:
                    recovery.recover(entry, find_driver(), settings)
            for key, error in unreadable.items():
                if container_key.id_of(key) == container:
                    raise error
            return
        except GpusnapError as error:
            if error.code != "GPS-020" or time.monotonic() > end:
                raise
        time.sleep(_EVERY)


def check_remover(remover: tuple[int, int]) -> None:
    """Raise Interrupted if the process that removes the container has ended: then it runs on at once."""
    if not proc.is_same(*remover):
        raise Interrupted("gpusnap checkpoint ended before its checkpoint was complete", hint="try again")
