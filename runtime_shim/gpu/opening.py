"""A driver that starts while whoever needs it does something else.

NVIDIA's takes 0.2 to 0.5 s until it can be called (cuInit, nvmlInit), and the modules of a checkpoint or a
restore take 0.1 s to be imported. At the same time they take as long as the longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpusnap.runtime_shim.gpu.api.driver import Driver

# Seconds until a process may end while the driver starts in it: exit(3) runs what libcuda has registered.
_PATIENCE = 60.0


@contextmanager
def opening(driver: Driver | None, *, host: bool = False) -> Iterator[None]:
    """Have a driver start while the block runs, if it is one that we call ourselves.

    `host`: also what tells of its GPUs, NVML.
    Nothing is decided here: whoever needs the driver opens it, too, waits for this one, and has the error. To
    be entered after question_process.start, which is for a process without threads.
    """
    begun: list[threading.Thread] = []
    if driver is not None and driver.plugin is None:
        for call in (driver.open, driver.host) if host else (driver.open,):
            thread = threading.Thread(target=_try, args=(call,), name="gpusnap-driver", daemon=True)
            with suppress(RuntimeError):  # no thread is to be had, and it only saves time
                thread.start()
                begun.append(thread)
    try:
        yield
    finally:
        end = time.monotonic() + _PATIENCE
        for thread in begun:
            thread.join(max(0.0, end - time.monotonic()))


def _try(call: Callable[[], object]) -> None:
    with suppress(Exception):  # whoever needs the driver asks it, too
        call()
