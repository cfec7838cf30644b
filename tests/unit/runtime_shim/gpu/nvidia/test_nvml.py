"""Inventory and memory by process from NVML, with nvidia-ml-py's functions replaced one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpusnap.runtime_shim.gpu.api.errors import DriverMismatch, DriverMissing, DriverNotReady
from gpusnap.runtime_shim.gpu.nvidia import nvml

pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

UUIDS = [f"GPU-{i:08x}-0000-0000-0000-000000000000" for i in range(3)]


def fail(value: int) -> Any:
    def function(*_: object) -> None:
        raise pynvml.NVMLError(value)

    return function


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three GPUs; a test may replace single answers by `host(nvmlName=function)`. A handle is the index."""

    def change(**functions: Any) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function)

    monkeypatch.setattr(nvml, "_ready", False)
    change(
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.159.04",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle],
        nvmlDeviceGetName=lambda handle: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetMinorNumber=lambda handle: handle + 4,
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 << 30, used=1 << 30),
        nvmlDeviceGetMigMode=lambda handle: [0, 1],
        nvmlDeviceGetComputeMode=lambda handle: 3,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=b"0000ABCD:41:00.0"),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [],
    )
    return change


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_inventory(host: Any) -> None:
    found = nvml.inventory()
    assert (found.vendor, found.driver_version, found.cuda_version) == ("nvidia", "580.159.04", "13.0")
    assert [gpu.uuid for gpu in found.gpus] == UUIDS
    assert [(gpu.index, gpu.minor) for gpu in found.gpus] == [(0, 4), (1, 5), (2, 6)]
    gpu = found.gpus[0]
    assert (gpu.model, gpu.compute_capability) == ("NVIDIA H100 80GB HBM3", "9.0")
    assert (gpu.memory_total, gpu.memory_used) == (80 << 30, 1 << 30)
    assert (gpu.mig, gpu.compute_mode) == (False, "exclusive-process")
    assert gpu.pci == "abcd:41:00.0"


@pytest.mark.parametrize(("number", "text"), [(12080, "12.8"), (11040, "11.4"), (13010, "13.1")])
def test_cuda_version(host: Any, number: int, text: str) -> None:
    host(nvmlSystemGetCudaDriverVersion_v2=lambda: number)
    assert nvml.inventory().cuda_version == text


@pytest.mark.parametrize("answer", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_a_gpu_that_lacks_a_feature(host: Any, answer: int) -> None:
    host(
        nvmlDeviceGetMigMode=fail(answer),
        nvmlDeviceGetComputeMode=fail(answer),
        nvmlDeviceGetComputeRunningProcesses=fail(answer),
    )
    assert {(gpu.mig, gpu.compute_mode) for gpu in nvml.inventory().gpus} == {(False, "default")}
    assert nvml.memory_used([1]) == {}


def test_mig_and_an_unknown_compute_mode(host: Any) -> None:
    host(nvmlDeviceGetMigMode=lambda handle: [1, 1], nvmlDeviceGetComputeMode=lambda handle: 9)
    assert {(gpu.mig, gpu.compute_mode) for gpu in nvml.inventory().gpus} == {(True, "default")}


@pytest.mark.parametrize("answer", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NO_PERMISSION])
def test_a_gpu_that_cannot_be_opened_is_left_out(host: Any, answer: int) -> None:
    host(nvmlDeviceGetHandleByIndex=lambda index: fail(answer)() if index == 1 else index)
    assert [gpu.index for gpu in nvml.inventory().gpus] == [0, 2]


def test_errors_are_ours(host: Any) -> None:
    host(nvmlDeviceGetUUID=fail(pynvml.NVML_ERROR_TIMEOUT))
    with pytest.raises(DriverNotReady, match=r"NVML could not describe GPU 0: .*NVML_ERROR_TIMEOUT"):
        nvml.inventory()
    host(nvmlDeviceGetHandleByIndex=fail(pynvml.NVML_ERROR_TIMEOUT))
    with pytest.raises(DriverNotReady, match="open GPU 0"):
        nvml.inventory()
    host(nvmlSystemGetDriverVersion=fail(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    with pytest.raises(DriverMismatch, match="read the driver's version"):
        nvml.driver_version()


def test_starting_is_tried_again(host: Any) -> None:
    host(nvmlInit=fail(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    with pytest.raises(DriverMissing) as caught:
        nvml.inventory()
    assert caught.value.code_name == "NVML_ERROR_LIBRARY_NOT_FOUND"
    host(nvmlInit=lambda: None)
    assert nvml.driver_version() == "580.159.04"


def test_memory_used(host: Any) -> None:
    lists = {0: [process(7, 100), process(8, 5)], 1: [process(7, 1), process(7, 2)], 2: [process(9, None)]}
    host(nvmlDeviceGetComputeRunningProcesses=lambda handle: lists[handle])
    # Two entries of one process (MIG instances) are added up; bytes that are not available are not 0.
    assert nvml.memory_used([7, 9, 10]) == {7: {UUIDS[0]: 100, UUIDS[1]: 3}, 9: {UUIDS[2]: None}}
    assert nvml.memory_used([]) == {}
