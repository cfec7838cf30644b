"""Tests on a real GPU. Where there is none that can be used they skip, and say why."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import realhost  # noqa: E402
import shimhost  # noqa: E402
from support import containers_left, podman  # noqa: E402

from gpusnap.runtime_shim.gpu.api.driver import Gpu  # noqa: E402
from gpusnap.runtime_shim.gpu.api.errors import GpuError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402


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


@pytest.fixture
def two(driver: Nvidia) -> tuple[Gpu, Gpu]:
    """Two GPUs of a kind."""
    gpus = driver.host().gpus
    if len(gpus) < 2 or gpus[0].model != gpus[1].model:
        pytest.skip("needs two GPUs of a kind")
    return gpus[0], gpus[1]


@pytest.fixture(scope="session")
def machine(driver: Nvidia) -> Iterator[realhost.Machine]:
    """This machine as a host of GPU containers, gpusnap installed."""
    reason = realhost.missing()
    if reason:
        pytest.skip(reason)
    with realhost.machine(driver.host().gpus[0].minor) as found:
        yield found


@pytest.fixture(params=["crun", "runc"])
def real(request: pytest.FixtureRequest, machine: realhost.Machine) -> Iterator[str]:
    """Each real runtime in turn, by the settings file; the test's containers are removed after it."""
    name: str = request.param
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    before = set(containers_left())
    shimhost.write_settings(f'runtime = "{name}"\n')
    yield name
    for left in set(containers_left()) - before:
        podman("rm", "--force", "--time", "0", left)
    shimhost.write_settings("")


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Path]:
    """Where an export goes; it is large, so it does not stay."""
    path = tmp_path / "checkpoint.tar"
    yield path
    path.unlink(missing_ok=True)
