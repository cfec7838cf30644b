"""The NVML calls that gpusnap makes, for hosts without nvidia-ml-py: same names, results and errors.

Debian has that package only outside of main, so a host may have the driver but not the package. Callers use
nvidia-ml-py if it is installed (see nvml.binding), and otherwise this module; a test compares both.
Prototypes, structures and constants: nvml.h of CUDA 12.9.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import TypeVar

# The names of NVML's own functions, and of Python's bindings to it, by which they are found.

_LIBRARY = "libnvidia-ml.so.1"

# nvmlReturn_t
_SUCCESS = 0
_INSUFFICIENT_SIZE = 7
_LIBRARY_NOT_FOUND = 12
_FUNCTION_NOT_FOUND = 13

_NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE, of a number of 64 bits."""

# NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE is 80, NVML_DEVICE_NAME_V2_BUFFER_SIZE and _UUID_V2_ are 96.
_TEXT = 96

Handle = ctypes.c_void_p
_Structure = TypeVar("_Structure", bound=ctypes.Structure)


class NVMLError(Exception):
    """NVML's result was not NVML_SUCCESS: `value`, an nvmlReturn_t."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    )


class Process:
    """A process on a GPU: its PID, and its bytes there, None if the driver does not report them."""

    __slots__ = ("pid", "usedGpuMemory")

    def __init__(self, pid: int, used: int) -> None:
        self.pid = pid
        self.usedGpuMemory = None if used == _NOT_AVAILABLE else used


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NVMLError(_LIBRARY_NOT_FOUND) from error


def _ask(name: str, *arguments: object) -> int:
    """Return a function's result; FUNCTION_NOT_FOUND if this driver has none of that name."""
    try:
        function = getattr(_library(), name)
    except AttributeError:
        return _FUNCTION_NOT_FOUND
    function.restype = ctypes.c_int
    return int(function(*arguments))


def _call(name: str, *arguments: object) -> None:
    value = _ask(name, *arguments)
    if value != _SUCCESS:
        raise NVMLError(value)


def _text(name: str, *arguments: object) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _call(name, *arguments, buffer, ctypes.c_uint(_TEXT))
    return buffer.value.decode("utf-8", "replace")


def _number(name: str, *arguments: object) -> int:
    number = ctypes.c_uint()
    _call(name, *arguments, ctypes.byref(number))
    return number.value


def _pair(name: str, handle: Handle) -> tuple[int, int]:
    first, second = ctypes.c_uint(), ctypes.c_uint()
    _call(name, handle, ctypes.byref(first), ctypes.byref(second))
    return first.value, second.value


def _structure(name: str, kind: type[_Structure], handle: Handle) -> _Structure:
    found = kind()
    _call(name, handle, ctypes.byref(found))
    return found


def nvmlDeviceGetHandleByIndex(index: int) -> Handle:
    """Return the GPU with this number."""
    handle = Handle()
    _call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    return handle


nvmlInit = partial(_call, "nvmlInit_v2")
nvmlSystemGetDriverVersion = partial(_text, "nvmlSystemGetDriverVersion")
nvmlSystemGetCudaDriverVersion_v2 = partial(_number, "nvmlSystemGetCudaDriverVersion_v2")
nvmlDeviceGetCount = partial(_number, "nvmlDeviceGetCount_v2")
# These take the handle of a GPU.
nvmlDeviceGetUUID = partial(_text, "nvmlDeviceGetUUID")
nvmlDeviceGetName = partial(_text, "nvmlDeviceGetName")
nvmlDeviceGetMinorNumber = partial(_number, "nvmlDeviceGetMinorNumber")
nvmlDeviceGetMemoryInfo = partial(_structure, "nvmlDeviceGetMemoryInfo", Memory)
nvmlDeviceGetCudaComputeCapability = partial(_pair, "nvmlDeviceGetCudaComputeCapability")
nvmlDeviceGetMigMode = partial(_pair, "nvmlDeviceGetMigMode")
nvmlDeviceGetComputeMode = partial(_number, "nvmlDeviceGetComputeMode")
nvmlDeviceGetPersistenceMode = partial(_number, "nvmlDeviceGetPersistenceMode")
nvmlDeviceGetPciInfo = partial(_structure, "nvmlDeviceGetPciInfo_v3", PciInfo)


def nvmlDeviceGetComputeRunningProcesses(handle: Handle) -> list[Process]:
    """Return the processes that compute on it."""
    count = ctypes.c_uint(0)
    value = _ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), None)
    while value == _INSUFFICIENT_SIZE:
        # More may have started by the next call.
        count.value = count.value * 2 + 5
        rows = (_ProcessInfo * count.value)()
        value = _ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), rows)
        if value == _SUCCESS:
            return [Process(row.pid, row.usedGpuMemory) for row in rows[: count.value]]
    if value != _SUCCESS:
        raise NVMLError(value)
    return []
