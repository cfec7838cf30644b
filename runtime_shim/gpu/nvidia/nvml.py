"""The GPUs of this host and who uses their memory, from NVML (libnvidia-ml.so.1) through nvidia-ml-py.

nvidia-ml-py is imported at the first call: it takes 40 ms, and most command lines never need it. Where it is
not installed, nvml_binding makes the same calls. NVML needs no GPU context and no cuInit. It is initialised
once and stays so until this process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from gpusnap.runtime_shim.gpu.api.driver import Gpu, Host
from gpusnap.runtime_shim.gpu.api.errors import HardwareFault, PermissionRefused
from gpusnap.runtime_shim.gpu.nvidia.result_codes import NVML_RESULTS, nvml_error

T = TypeVar("T")

# nvmlComputeMode_t of nvml.h; 1 (exclusive thread) has not been set by a driver since CUDA 8.
_COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}

# What a GPU answers that lacks a feature, or a driver that does not know it yet (nvml.h).
_NOT_SUPPORTED = 3
_FUNCTION_NOT_FOUND = 13

_lock = threading.Lock()
_ready = False


def inventory() -> Host:
    """Driver and GPUs, in NVML's order (that of the PCI bus).

    A GPU that NVML lists but does not open (it fell off the bus, or this cgroup may not use it) is left out:
    nothing can be restored onto it. Raises DriverMissing, DriverMismatch, DriverNotReady and others of
    `GpuError`.
    """
    nvml = _nvml()
    with _convert_errors("read the driver's version"):
        version = _text(nvml.nvmlSystemGetDriverVersion())
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    gpus = tuple(_gpu(nvml, index, handle) for index, handle in _handles(nvml))
    # 13000 is 13.0, 12080 is 12.8 (nvmlSystemGetCudaDriverVersion in nvml.h).
    return Host(
        vendor="nvidia", driver_version=version, cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}", gpus=gpus
    )


def driver_version() -> str:
    """The driver's version, such as 580.159.04; raises as `inventory` does."""
    nvml = _nvml()
    with _convert_errors("read the driver's version"):
        return _text(nvml.nvmlSystemGetDriverVersion())


def memory_used(pids: Iterable[int]) -> dict[int, dict[str, int]]:
    """Bytes of GPU memory by PID and GPU UUID, for those of `pids` that NVML lists as compute processes.

    NVML knows PIDs of the initial PID namespace: a caller in a nested one finds its processes missing or,
    worse, others under the same number, so run this where the container runtime runs. Where the driver does
    not tell the bytes (MIG, some virtual GPUs: "not available"), the process is listed with 0. A suspended
    process is not listed.
    """
    wanted = frozenset(pids)
    used: dict[int, dict[str, int]] = {}
    if not wanted:
        return used
    nvml = _nvml()
    for index, handle in _handles(nvml):
        with _convert_errors(f"list the processes of GPU {index}"):
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            processes: list[Any] = _ask_optional(
                partial(nvml.nvmlDeviceGetComputeRunningProcesses, handle), []
            )
        for process in processes:
            if process.pid in wanted:
                # One process may be listed more than once: for each of its MIG instances.
                bytes_by_uuid = used.setdefault(process.pid, {})
                bytes_by_uuid[uuid] = bytes_by_uuid.get(uuid, 0) + (process.usedGpuMemory or 0)
    return used


def is_open() -> bool:
    """Whether NVML was initialised in this process. A child by fork cannot use what it has open."""
    return _ready


def _nvml() -> Any:
    """The binding, initialised."""
    global _ready  # noqa: PLW0603 -- NVML itself is one per process, too
    nvml = binding()
    with _lock:
        if not _ready:
            with _convert_errors("start"):
                nvml.nvmlInit()
            _ready = True
    return nvml


def binding() -> Any:
    """nvidia-ml-py's module, or nvml_binding, which has what of it is called here."""
    try:
        import pynvml
    except ImportError:
        from gpusnap.runtime_shim.gpu.nvidia import nvml_ctypes

        return nvml_ctypes
    return pynvml


@contextmanager
def _convert_errors(task: str) -> Iterator[None]:
    """Turn NVML's exceptions into ours; `task` completes "NVML could not …"."""
    try:
        yield
    except binding().NVMLError as error:
        raise nvml_error(error.value, task) from error


def _handles(nvml: Any) -> Iterator[tuple[int, Any]]:
    with _convert_errors("count the GPUs"):
        count = int(nvml.nvmlDeviceGetCount())
    for index in range(count):
        try:
            yield index, nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            if NVML_RESULTS.get(error.value, ("", None))[1] not in (HardwareFault, PermissionRefused):
                raise nvml_error(error.value, f"open GPU {index}") from error


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    with _convert_errors(f"describe GPU {index}"):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        # (current, pending); a GPU that has no MIG does not support the question.
        mig = _ask_optional(lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)
        mode = _ask_optional(lambda: nvml.nvmlDeviceGetComputeMode(handle), 0)
        return Gpu(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            minor=int(nvml.nvmlDeviceGetMinorNumber(handle)),
            index=index,
            model=_text(nvml.nvmlDeviceGetName(handle)),
            compute_capability=f"{major}.{minor}",
            memory_total=int(memory.total),
            memory_used=int(memory.used),
            mig=mig == 1,
            compute_mode=_COMPUTE_MODES.get(mode, "default"),
            pci=_pci(nvml, handle),
        )


def _pci(nvml: Any, handle: Any) -> str:
    """NVML's domain has eight digits where sysfs has four."""
    address: str = _ask_optional(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId), "")
    return address[-12:].lower()


def _ask_optional(ask: Callable[[], T], otherwise: T) -> T:
    """What `ask` answers, or `otherwise` where this GPU or this driver does not know the question."""
    try:
        return ask()
    except binding().NVMLError as error:
        if error.value in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
            return otherwise
        raise


def _text(value: str | bytes) -> str:
    """NVML's strings are bytes in nvidia-ml-py before 11.515."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
