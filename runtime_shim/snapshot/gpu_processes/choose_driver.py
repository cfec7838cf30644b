"""Chooses which of a host's drivers suspends the GPUs of a container, and how."""

from __future__ import annotations

from collections.abc import Sequence

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu import driver_of, find_drivers
from gpusnap.runtime_shim.gpu.api.criu_plugin import CUDA
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.settings import Settings

_PLUGIN = "criu-plugin"


def choose_driver(driver: Driver, container: containers.Container, settings: Settings) -> Driver:
    """Return the driver for a container, with the method to suspend that the settings ask for.

    `driver` is this host's first one. On a host with GPUs of two vendors, it is the one whose device files
    the container's processes hold, or else one that has device files in the container's /dev. Raises Refused
    if processes hold files of both: a checkpoint contains GPUs of one vendor.
    """
    every = find_drivers()
    if len(every) > 1 and container.pid and any(each.vendor == driver.vendor for each in every):
        driver = _find_holder(every, container) or driver
    if driver.plugin is None and driver.vendor == "nvidia" and settings.nvidia.driver == _PLUGIN:
        return driver_of("nvidia", CUDA.name) or driver
    return driver


def _find_holder(every: Sequence[Driver], container: containers.Container) -> Driver | None:
    members = containers.processes(container.pid, container.id)
    holding = [each for each in every if any(each.holds(process.pid) for process in members)]
    if len(holding) > 1:
        vendors = " and ".join(each.vendor.upper() for each in holding)
        raise Refused(
            f"the processes of container {container.id} use GPUs of {vendors}, but a checkpoint supports "
            "only one vendor",
            hint="run the programs for each vendor in separate containers",
        )
    return next(iter(holding), None) or next((each for each in every if each.nodes(container.pid)), None)
