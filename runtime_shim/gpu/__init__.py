"""GPUs, one vendor's driver behind one protocol: find it, and find the processes that hold a GPU.

Importing this loads no driver library; `find_driver` looks at /proc and /dev alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime_shim.gpu import handles
from runtime_shim.gpu.driver import Driver

__all__ = ["find_driver", "holders"]


def find_driver() -> Driver | None:
    """The driver of this host's GPUs, not yet opened; None on a host without any."""
    from runtime_shim.gpu import nvidia

    return nvidia.Nvidia() if nvidia.present() else None


def holders(driver: Driver, pids: Iterable[int]) -> tuple[int, ...]:
    """Those of `pids` that have GPU state or may have it, in their order.

    A process counts if it holds a device file of the driver's vendor, or has the vendor's library loaded: a
    suspended process holds no device file. So a program that merely loaded the library counts too;
    `Driver.state` tells. Raises PermissionRefused where the kernel does not let us look.
    """
    return tuple(pid for pid in pids if _holds(driver, pid))


def _holds(driver: Driver, pid: int) -> bool:
    # A process on its way out still has its files open for a while.
    return handles.alive(pid) and bool(driver.handles(pid) or _has_library(driver.vendor, pid))


def _has_library(vendor: str, pid: int) -> bool:
    return vendor == "nvidia" and handles.maps_libcuda(pid)
