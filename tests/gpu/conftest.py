"""Tests on a real GPU. Where there is none that can be used they skip, and say why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime_shim.gpu.errors import GpuError
from runtime_shim.gpu.nvidia import Nvidia

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def driver() -> Nvidia:
    """The NVIDIA driver of this host, opened."""
    # softgpu has the libraries and the nodes of a GPU, but never the kernel driver.
    if not os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("no NVIDIA kernel driver is loaded on this host")
    if os.geteuid() != 0:
        pytest.skip("suspending another process' GPU state needs root")
    driver = Nvidia()
    try:
        driver.open()
        gpus = driver.host().gpus
    except GpuError as error:
        pytest.skip(f"the GPU cannot be used: {error.sentence()}")
    if not gpus:
        pytest.skip("the driver lists no GPU")
    return driver
