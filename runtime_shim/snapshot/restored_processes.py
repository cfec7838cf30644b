"""Checks the processes of a restore against the manifest: none is missing, and none is unlisted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.log import note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.records.manifest import GpuProcess
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls


def check_all_there(wanted: Iterable[GpuProcess], there: Collection[int], images: str) -> None:
    """Check that the processes of the manifest are `there`, by PID in the container.

    A process that CRIU restored from `images` and that has ended since is only reported. Raises GpusnapError
    for one that was never in the dump.
    """
    for process in wanted:
        if process.pid in there:
            continue
        if not manifest_file.has(images, f"core-{process.pid}.img"):
            raise GpusnapError(
                f"process {process.pid} ({process.name}) of the checkpoint was not restored: it is not in "
                "CRIU's images",
                hint="it was not dumped, or the checkpoint was modified; restore another one",
            )
        note(
            f"process {process.pid} ({process.name}) exited before its GPU state could be restored; the "
            "rest of the container continues to run",
            code="GPS-511",
        )


def drop_ended(processes: Sequence[proc.Process], gone_on: Collection[int], init: int) -> list[proc.Process]:
    """Return the processes that still exist; those that ended after they continued are only reported.

    Without its init there is no container.
    """
    left = []
    for process in processes:
        if process.pid == init or process.pid not in gone_on or proc.is_running(process.pid):
            left.append(process)
            continue
        note(
            f"process {process.pid} ({process.comm}) exited as soon as it ran again; the rest of the "
            "container continues to run",
            code="GPS-511",
        )
    return left


def check_none_suspended(driver: Driver | None, processes: Iterable[proc.Process]) -> None:
    """Like `check_none_forgotten`, if the manifest has no GPU. `driver`: this host's, if any."""
    if driver is None:
        return
    try:
        driver.open()
    except GpuError:
        return  # a driver without the checkpoint API has suspended none
    check_none_forgotten(driver, processes)


def check_none_forgotten(driver: Driver, processes: Iterable[proc.Process]) -> None:
    """Check that no process is suspended that the manifest does not list. Raises GpusnapError."""
    for process in processes:
        native = driver.plugin is None
        state = driver_calls.state(driver, process.pid) if native else driver.state(process.pid)
        if state is not None and state is not ProcessState.RUNNING:
            raise GpusnapError(
                f"process {process.pid} ({process.comm}) was restored with its GPU state "
                f"{state.name.lower()}, but the checkpoint's manifest does not list it",
                hint="the checkpoint was modified after it was made; restore another one",
                code="GPS-604",
            )


def check_came_back(driver: Driver, processes: Iterable[proc.Process]) -> None:
    """Check that the restored processes have their GPU state again. Raises GpusnapError.

    If a plugin restored it, CRIU has already checked that, and the processes run. One may have ended, or have
    closed its GPU, but none may still be suspended.
    """
    for process in processes:
        state = driver.state(process.pid) if proc.is_running(process.pid) else None
        if state is None and driver.plugin is not None:
            continue
        if state is not ProcessState.RUNNING:
            raise GpusnapError(
                f"process {process.pid} ({process.comm}) was not restored with its GPU state",
                hint="its own log may say why",
                code="GPS-509",
            )
