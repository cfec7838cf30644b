"""The GPUs of this host and who uses their memory, from NVML (libnvidia-ml.so.1) through nvidia-ml-py.

nvidia-ml-py is imported at the first call: it takes 40 ms, and most command lines never need it. If it is not
installed, nvml_ctypes makes the same calls. NVML needs no GPU context and no cuInit. It is initialised once,
until this process ends.
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

# nvmlComputeMode_t of nvml.h; no driver has set 1 (exclusive thread) since CUDA 8.
_COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}

# The answers of a GPU without a feature, or of a driver that does not support it yet (nvml.h).
_NOT_SUPPORTED = 3
_FUNCTION_NOT_FOUND = 13

_lock = threading.Lock()
_ready = False


def inventory() -> Host:
    """Return driver and GPUs, in NVML's order (that of the PCI bus).

    A GPU that NVML lists but cannot open (it fell off the bus, or this cgroup may not use it) is omitted,
    because nothing can be restored onto it. Raises DriverMissing, DriverMismatch, DriverNotReady and others
    of `GpuError`.
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
    """Return the driver's version, such as 580.159.04; raises as `inventory` does."""
    nvml = _nvml()
    with _convert_errors("read the driver's version"):
        return _text(nvml.nvmlSystemGetDriverVersion())


def memory_used(pids: Iterable[int]) -> dict[int, dict[str, int | None]]:
    """Return bytes of GPU memory by PID and GPU UUID, for the `pids` that use a GPU (NVML lists them).

    NVML uses PIDs of the initial PID namespace: a caller in a nested one would miss its processes or, worse,
    find others with the same number, so run this where the container runtime runs. If the driver does not
    report the bytes (MIG, some virtual GPUs: "not available"), they are None. A suspended process is not
    listed.
    """
    wanted = frozenset(pids)
    used: dict[int, dict[str, int | None]] = {}
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
                # One process may be listed several times: for each of its MIG instances.
                bytes_by_uuid = used.setdefault(process.pid, {})
                before, own = bytes_by_uuid.get(uuid, 0), process.usedGpuMemory
                bytes_by_uuid[uuid] = None if before is None or own is None else before + own
    return used


def persistence_modes() -> dict[int, bool]:
    """Return by NVML's index whether a GPU's persistence mode is on, without GPUs that do not report it.

    Raises as `inventory` does.
    """
    nvml = _nvml()
    found: dict[int, bool] = {}
    for index, handle in _handles(nvml):
        try:
            found[index] = bool(nvml.nvmlDeviceGetPersistenceMode(handle))
        except nvml.NVMLError:
            continue
    return found


def is_open() -> bool:
    """Whether NVML was initialised in this process. A child by fork cannot use its parent's."""
    return _ready


def _nvml() -> Any:
    """Return the binding, initialised."""
    global _ready  # noqa: PLW0603 -- NVML itself is one per process, too
    nvml = binding()
    with _lock:
        if not _ready:
            with _convert_errors("start"):
                nvml.nvmlInit()
            _ready = True
    return nvml


def binding() -> Any:
    """Return nvidia-ml-py's module, or nvml_ctypes, which has the functions that are called here."""
    try:
        import pynvml
    except ImportError:
        from gpusnap.runtime_shim.gpu.nvidia import nvml_ctypes

        return nvml_ctypes
    return pynvml


@contextmanager
def _convert_errors(task: str) -> Iterator[None]:
    """Convert NVML's exceptions to gpusnap's; `task` completes "NVML could not …"."""
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
        # (current, pending); a GPU without MIG does not support the call.
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
    """Return the address; NVML's domain has eight digits, sysfs's four."""
    address: str = _ask_optional(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId), "")
    return address[-12:].lower()


def _ask_optional(ask: Callable[[], T], otherwise: T) -> T:
    """Return the result of `ask`, or `otherwise` if this GPU or this driver does not support it."""
    try:
        return ask()
    except binding().NVMLError as error:
        if error.value in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
            return otherwise
        raise


def _text(value: str | bytes) -> str:
    """NVML's strings are bytes in nvidia-ml-py before 11.515."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
