"""Starts a driver in parallel to other work.

NVIDIA's takes 0.2 to 0.5 s until it can be called (cuInit, nvmlInit), and importing the modules of a
checkpoint or a restore takes 0.1 s. In parallel, they take as long as the longer one. The process waits for
the end of the driver's start even if nobody needed it: exit(3) runs functions that libcuda has registered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from gpusnap.runtime_shim import threads
from gpusnap.runtime_shim.gpu.api.driver import Driver


def open_driver(driver: Driver | None, *, host: bool = False) -> AbstractContextManager[None]:
    """Start a driver while the block runs, if we call it ourselves; see threads.run_meanwhile.

    `host`: also NVML, which describes its GPUs. Must be entered after question_process.start, which needs a
    process without threads.
    """
    if driver is None or driver.plugin is not None:
        return threads.run_meanwhile(name="")
    calls = (driver.open, driver.host) if host else (driver.open,)
    return threads.run_meanwhile(*calls, name="gpusnap-driver")
