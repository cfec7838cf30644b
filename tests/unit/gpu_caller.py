"""Runs Nvidia's methods as it is told, line by line: JSON `[name, argument, …]` in, `[class, value]` out.

The class is "" for success, otherwise the exception's, and the value then [sentence, code_name]. `all` runs a
method on many processes at once and answers results and errors by PID. Tests start it where the driver is
softgpu's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from gpusnap.runtime_shim.gpu import find_driver, holders
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia
from gpusnap.runtime_shim.process.ptrace import positions
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls
from gpusnap.runtime_shim.stopping.stop import settle, stop

driver = Nvidia()


def lock(pid: int, timeout: float = 20.0) -> None:
    driver.lock(pid, timeout=timeout)


def restore(pid: int, pairs: list[tuple[str, str]] | None = None) -> None:
    driver.restore(pid, [(old, new) for old, new in pairs or []])


def settled(pid: int) -> list[int]:
    """Stop a process at a safe instant; the threads that stand within the C library all the same.

    Those that never leave it would cost a second of a core each time, and stand no differently after it.
    """
    stop([pid], timeout=10)
    settle([pid], within=0.2)
    return positions.list_unsafe(pid)


def settled_at_last(pid: int) -> list[int]:
    """The same with all the time that a busy machine may take."""
    stop([pid], timeout=10)
    settle([pid], within=20.0)
    return positions.list_unsafe(pid)


def safe_restore(pid: int) -> None:
    driver_calls.restore(driver, pid)


def safe_state(pid: int) -> int | None:
    return driver_calls.state(driver, pid)


def in_all(method: str, pids: list[int]) -> list[dict[str, Any]]:
    outcome = run_at_once(FUNCTIONS[method], pids)
    errors = {str(pid): type(error).__name__ for pid, error in outcome.errors.items()}
    return [{str(pid): value for pid, value in outcome.results.items()}, errors]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "open": driver.open,
    "found": lambda: find_driver() is not None,
    "host": lambda: dataclasses.asdict(driver.host()),
    "state": driver.state,
    "restore_thread": driver.restore_thread,
    "memory_used": driver.memory_used,
    "handles": driver.list_handles,
    "visible": driver.list_visible,
    "holders": lambda pids: holders(driver, pids),
    "lock": lock,
    "checkpoint": driver.checkpoint,
    "restore": restore,
    "unlock": driver.unlock,
    "all": in_all,
    "settled": settled,
    "settled_at_last": settled_at_last,
    "safe_lock": lambda pid: driver_calls.lock(driver, pid, timeout=20.0),
    "safe_checkpoint": lambda pid: driver_calls.checkpoint(driver, pid),
    "safe_restore": safe_restore,
    "safe_unlock": lambda pid: driver_calls.unlock(driver, pid),
    "safe_state": safe_state,
}


def main() -> None:
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = ["", FUNCTIONS[method](*arguments)]
        except GpuError as error:
            answer = [type(error).__name__, [error.sentence(), error.code_name]]
        print(json.dumps(answer), flush=True)


main()
