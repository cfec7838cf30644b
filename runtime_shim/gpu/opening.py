"""A driver that starts while whoever needs it does something else.

NVIDIA's takes 0.2 to 0.5 s until it can be called (cuInit, nvmlInit), and the modules of a checkpoint or a
restore take 0.1 s to be imported. At the same time they take as long as the longer. The end of its start is
waited for, though nobody needed it: exit(3) runs what libcuda has registered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from gpusnap.runtime_shim import threads
from gpusnap.runtime_shim.gpu.api.driver import Driver


def open_driver(driver: Driver | None, *, host: bool = False) -> AbstractContextManager[None]:
    """Have a driver start while the block runs, if we call it ourselves; see threads.run_meanwhile.

    `host`: also what tells of its GPUs, NVML. To be entered after question_process.start, which is for a
    process without threads.
    """
    if driver is None or driver.plugin is not None:
        return threads.run_meanwhile(name="")
    calls = (driver.open, driver.host) if host else (driver.open,)
    return threads.run_meanwhile(*calls, name="gpusnap-driver")
