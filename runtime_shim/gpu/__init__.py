"""GPUs, with a vendor's driver behind one protocol: finds and starts it, and finds processes that hold one.

Importing this loads no driver library; `find_driver` only reads /proc and /dev.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.gpu.api import device_files
from gpusnap.runtime_shim.gpu.api.driver import Driver, Host
from gpusnap.runtime_shim.process import proc


def find_driver() -> Driver | None:
    """Return the driver of this host's GPUs, not opened yet; None on a host without any.

    On a host with GPUs of both, it is NVIDIA's, not AMD's.
    """
    return next(_iterate_present(), None)


def find_drivers() -> tuple[Driver, ...]:
    """Return the drivers of all vendors that have GPUs here, not opened yet; NVIDIA's first."""
    return tuple(_iterate_present())


def _iterate_present() -> Iterator[Driver]:
    """Yield one after the other: a vendor's modules are imported only when needed."""
    from gpusnap.runtime_shim.gpu.nvidia import driver as nvidia

    if nvidia.is_present():
        yield nvidia.Nvidia()
    from gpusnap.runtime_shim.gpu.amd import driver as amd

    if amd.is_present():
        yield amd.Amd()


def driver_of(vendor: str, plugin: str = "") -> Driver | None:
    """Return this host's driver of a vendor that suspends through CRIU's plugin of that name, or by itself.

    None if this host has no GPU of that vendor, or gpusnap no such method.
    """
    from gpusnap.runtime_shim.gpu.nvidia.plugin_driver import NvidiaByPlugin

    found = next((driver for driver in find_drivers() if driver.vendor == vendor), None)
    ways: tuple[Driver | None, ...] = (found, NvidiaByPlugin() if found and vendor == "nvidia" else None)
    return next((way for way in ways if way is not None and _name(way) == plugin), None)


def _name(driver: Driver) -> str:
    return driver.plugin.name if driver.plugin is not None else ""


def open_driver(driver: Driver | None) -> AbstractContextManager[None]:
    """Start a driver, and read its inventory, while the block runs, if we call it ourselves.

    NVIDIA's takes 0.2 to 0.5 s until it can be called (cuInit, nvmlInit), and importing the modules of a
    checkpoint or a restore takes 0.1 s: see threads.run_meanwhile. The process waits for the end of the
    driver's start even if nobody needed it: exit(3) runs functions that libcuda has registered. Must be
    entered after question_process.start, which needs a process without threads.
    """
    if driver is None or driver.plugin is not None:
        return threads.run_meanwhile(name="")
    return threads.run_meanwhile(driver.open, driver.host, name="gpusnap-driver")


def holders(driver: Driver, pids: Iterable[int]) -> tuple[int, ...]:
    """Return those of `pids` that have GPU state or may have it, in their order.

    A process counts if it holds a device file of the driver's vendor, or has loaded the vendor's library: a
    suspended process holds no device file. So a program that merely loaded the library counts too;
    `Driver.state` distinguishes them. Raises PermissionRefused if the kernel denies access.
    """
    return tuple(pid for pid in pids if _may_hold(driver, pid))


def _may_hold(driver: Driver, pid: int) -> bool:
    # An exiting process still has its files open for a while.
    return proc.is_alive(pid) and (driver.holds(pid) or _has_library(driver.vendor, pid))


def _has_library(vendor: str, pid: int) -> bool:
    return vendor == "nvidia" and device_files.maps_libcuda(pid)


def estimate_used(
    used: Mapping[int, Mapping[str, int | None]], host: Host
) -> Mapping[int, Mapping[str, int]]:
    """Return the bytes of `Driver.memory_used`, with an upper bound where the driver does not report them.

    What is in use on a GPU, and is not of another of these processes, counts for the first process whose
    share is unknown, and 0 for the next ones: so the sum is an upper bound too.
    """
    whole = {gpu.uuid: gpu.memory_used for gpu in host.gpus}
    for own in used.values():
        for uuid, size in own.items():
            whole[uuid] = max(0, whole.get(uuid, 0) - (size or 0))
    return {
        pid: {uuid: whole.pop(uuid, 0) if size is None else size for uuid, size in own.items()}
        for pid, own in used.items()
    }


def sum_by_gpu(used: Iterable[Iterable[tuple[str, int]]]) -> dict[str, int]:
    """Return the bytes on each GPU, by UUID, of what several processes use there."""
    found: dict[str, int] = {}
    for each in used:
        for uuid, size in each:
            found[uuid] = found.get(uuid, 0) + size
    return found
