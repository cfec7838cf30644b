"""Checks of GPUs and their drivers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from doctor_trees import only, tree
from fakes import FakeDriver, gpu

from gpusnap.doctor.host_checks import gpus
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu.api.criu_plugin import AMDGPU
from gpusnap.runtime_shim.gpu.api.errors import DriverMissing, DriverTooOld
from gpusnap.runtime_shim.settings import Settings


def test_driver() -> None:
    """Version and GPUs; it is opened and asked, and nothing else."""
    driver = FakeDriver(gpus=(gpu(0), gpu(1)))
    host, checks = gpus.check_driver(driver)
    verdict, found = only(checks)
    assert verdict == "ok"
    assert "NVIDIA driver 580.159.04 (CUDA 13.0)" in found.says
    assert "2 NVIDIA H100 80GB HBM3 with 80.0 GiB" in found.says
    assert host is not None
    assert {call.operation for call in driver.calls} == {"host", "open"}


@pytest.mark.parametrize(
    ("version", "verdict", "what"),
    [
        ("560.35.03", "warning", "since driver 570"),
        ("570.86.10", "warning", "only onto the same GPUs"),
        ("580.65.06", "ok", "has the checkpoint API"),
        ("999", "ok", "has the checkpoint API"),
        ("unknown", "ok", "has the checkpoint API"),
    ],
)
def test_releases_of_the_driver(version: str, verdict: str, what: str) -> None:
    """The API came with 570, and other GPUs with 580: an older one with the calls is no failure."""
    driver = FakeDriver(gpus=(gpu(0),))
    monkeyed = replace(driver.host(), driver_version=version)
    driver.host = lambda: monkeyed  # type: ignore[method-assign]
    found_verdict, found = only(gpus.check_driver(driver)[1])
    assert found_verdict == verdict
    assert what in found.says


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("open", DriverTooOld("no checkpoint API", hint="install driver 570")),
        ("host", DriverMissing("no library", hint="install it")),
    ],
)
def test_driver_that_refuses(operation: str, error: DriverTooOld | DriverMissing) -> None:
    """Its own sentence."""
    driver = FakeDriver()
    driver.fail(operation, None, error)
    host, checks = gpus.check_driver(driver)
    verdict, found = only(checks)
    assert (verdict, found.says, found.todo) == ("failure", str(error), error.hint)
    assert (host is None) is (operation == "host")


def test_no_driver_and_no_gpu() -> None:
    """Both are failures."""
    assert only(gpus.check_driver(None)[1])[0] == "failure"
    assert "no GPU" in only(gpus.check_driver(FakeDriver(gpus=()))[1])[1].says


def test_plugin() -> None:
    """Where it is, or what the settings lack."""

    def missing(wanted: object, settings: Settings) -> str:
        raise Refused("it is not installed on this host", hint="install it")

    assert (
        only(gpus.check_plugin(AMDGPU, Settings(), lambda wanted, settings: "/usr/lib/criu/x.so"))[0] == "ok"
    )
    assert only(gpus.check_plugin(AMDGPU, Settings(), missing))[0] == "failure"


def test_mig() -> None:
    """GPUs that are cut up are named."""
    assert only(gpus.check_mig((gpu(0), gpu(1))))[0] == "ok"
    verdict, found = only(gpus.check_mig((gpu(0), replace(gpu(1), mig=True))))
    assert verdict == "warning"
    assert found.says.startswith("GPU 1 in MIG mode")


@pytest.mark.parametrize(
    ("mode", "verdict", "said"),
    [
        ("default", "ok", "default"),
        ("exclusive-process", "warning", "GPU 1 in compute mode exclusive-process"),
        ("prohibited", "warning", "nothing can be restored onto it"),
    ],
)
def test_compute_modes(mode: str, verdict: str, said: str) -> None:
    """What a GPU is kept for."""
    found = only(gpus.check_compute_modes((gpu(0), replace(gpu(1), compute_mode=mode))))
    assert found[0] == verdict
    assert said in found[1].says


def test_persistence() -> None:
    """On, off, or not told."""
    assert only(gpus.check_persistence((gpu(0),), lambda: {0: True, 1: False}))[0] == "ok"
    assert only(gpus.check_persistence((gpu(0), gpu(1)), lambda: {0: True, 1: False}))[0] == "warning"
    assert [*gpus.check_persistence((gpu(0),), dict)] == []


@pytest.mark.parametrize(("name", "verdict"), [("nvidia-cuda-mps\n", "warning"), ("python3\n", "ok")])
def test_mps(tmp_path: Path, name: str, verdict: str) -> None:
    """By the name of a process, as the kernel cuts it."""
    root = tree(tmp_path, {"/proc/12/comm": "sh\n", "/proc/123/comm": name, "/proc/self/comm": "x\n"})
    found = only(gpus.check_mps(root))
    assert found[0] == verdict
    assert found[1].facts["pids"] == ([123] if verdict == "warning" else [])


@pytest.mark.parametrize("value", ["0", "1"])
def test_nodes_made(tmp_path: Path, value: str) -> None:
    """Either is well; a driver that does not tell is passed over."""
    root = tree(tmp_path, {"/proc/driver/nvidia/params": f"Mobile: 1\nModifyDeviceFiles: {value}\n"})
    assert only(gpus.check_device_file_creation(root))[1].facts["value"] == int(value)
    assert [*gpus.check_device_file_creation(str(tmp_path / "other"))] == []
