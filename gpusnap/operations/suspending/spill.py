"""`gpusnap suspend --spill`: moves the GPU memory of suspended containers from RAM into the store."""

from __future__ import annotations

import subprocess

from gpusnap.base.program import find_program
from gpusnap.engines import podman
from gpusnap.operations.suspending import targets
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, reason
from gpusnap.runtime_shim.snapshot.suspended_containers import spill as spilling


def spill(name: str, asked: podman.Inspection) -> int:
    """Move the GPU memory of a suspended container to the store; return bytes. Raises NotFound, GpusnapError.

    `asked`: Podman's answer about the name.
    """
    found = targets.find_suspended(name, asked)
    return spilling.spill(found.key, settings_file.load())


def spill_behind(name: str, asked: podman.Inspection) -> None:
    """Do the same in a separate process, without waiting; after an error, the memory stays in RAM.

    Raises NotFound, GpusnapError if it cannot be started.
    """
    program = find_program()
    found = targets.find_suspended(name, asked)
    whole = f"{found.namespace}/{found.name}" if found.namespace else found.container
    try:
        subprocess.Popen(
            [program, "suspend", "--spill", "--wait", "--suspended", whole],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        raise GpusnapError(
            f"{name} is suspended, and stays in RAM: {program} cannot be run: {reason(error)}",
            hint=f"gpusnap suspend --spill --wait {name} moves it to the store",
        ) from error
