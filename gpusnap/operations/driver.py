"""This host's GPU driver, for commands that need one."""

from __future__ import annotations

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu import find_driver, find_drivers
from gpusnap.runtime_shim.gpu.api.driver import Driver


def needed_driver(vendor: str = "") -> Driver:
    """Return this host's driver, of `vendor` if it has several. Raises GpusnapError if it has none."""
    driver = find_driver()
    if driver is not None and driver.vendor != vendor and vendor:
        driver = next((each for each in find_drivers() if each.vendor == vendor), driver)
    if driver is None:
        raise GpusnapError(
            "this host has no GPU driver that gpusnap knows: no /dev/nvidia*, no /proc/driver/nvidia, no "
            "/dev/kfd",
            hint="load the driver, and check that nvidia-smi or rocminfo lists the GPUs",
            code="GPS-301",
        )
    return driver
