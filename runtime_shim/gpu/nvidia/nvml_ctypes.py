"""The calls of NVML that gpusnap makes, for hosts without nvidia-ml-py; names, answers and errors are its.

Debian has that package outside main only, so a host may well have the driver and lack it. Whatever calls
NVML takes nvidia-ml-py where it is (see nvml.binding), and this otherwise; a test holds one against the
other. Prototypes, structures and constants: nvml.h of CUDA 12.9.
"""

from __future__ import annotations

import ctypes
from functools import cache

# The names of NVML's own functions, and of Python's bindings to it: they are looked up by them.

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


class NVMLError(Exception):
    """NVML answered something else than NVML_SUCCESS: `value`, an nvmlReturn_t."""

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
    """A process on a GPU: its PID, and the bytes that it has there, None where the driver does not tell."""

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
    """What a function answers; FUNCTION_NOT_FOUND where this driver has none of that name."""
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


def nvmlInit() -> None:
    """Load and start NVML."""
    _call("nvmlInit_v2")


def nvmlSystemGetDriverVersion() -> str:
    """Such as 580.159.04."""
    return _text("nvmlSystemGetDriverVersion")


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    """13000 of 13.0."""
    return _number("nvmlSystemGetCudaDriverVersion_v2")


def nvmlDeviceGetCount() -> int:
    """How many GPUs there are."""
    return _number("nvmlDeviceGetCount_v2")


def nvmlDeviceGetHandleByIndex(index: int) -> Handle:
    """The GPU of this number."""
    handle = Handle()
    _call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    return handle


def nvmlDeviceGetUUID(handle: Handle) -> str:
    """GPU-…"""
    return _text("nvmlDeviceGetUUID", handle)


def nvmlDeviceGetName(handle: Handle) -> str:
    """Its model."""
    return _text("nvmlDeviceGetName", handle)


def nvmlDeviceGetMinorNumber(handle: Handle) -> int:
    """N of /dev/nvidiaN."""
    return _number("nvmlDeviceGetMinorNumber", handle)


def nvmlDeviceGetMemoryInfo(handle: Handle) -> Memory:
    """Its memory, in bytes."""
    memory = Memory()
    _call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return memory


def nvmlDeviceGetCudaComputeCapability(handle: Handle) -> tuple[int, int]:
    """(9, 0) of 9.0."""
    return _pair("nvmlDeviceGetCudaComputeCapability", handle)


def nvmlDeviceGetMigMode(handle: Handle) -> tuple[int, int]:
    """Whether MIG is on now, and will be after a reset."""
    return _pair("nvmlDeviceGetMigMode", handle)


def nvmlDeviceGetComputeMode(handle: Handle) -> int:
    """nvmlComputeMode_t."""
    return _number("nvmlDeviceGetComputeMode", handle)


def nvmlDeviceGetPersistenceMode(handle: Handle) -> int:
    """1 where the driver keeps the GPU ready while nobody uses it."""
    return _number("nvmlDeviceGetPersistenceMode", handle)


def nvmlDeviceGetPciInfo(handle: Handle) -> PciInfo:
    """Its address on the PCI bus."""
    info = PciInfo()
    _call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(info))
    return info


def nvmlDeviceGetComputeRunningProcesses(handle: Handle) -> list[Process]:
    """The processes that compute on it."""
    count = ctypes.c_uint(0)
    value = _ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), None)
    while value == _INSUFFICIENT_SIZE:
        # More may have come by the time of the next call.
        count.value = count.value * 2 + 5
        rows = (_ProcessInfo * count.value)()
        value = _ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), rows)
        if value == _SUCCESS:
            return [Process(row.pid, row.usedGpuMemory) for row in rows[: count.value]]
    if value != _SUCCESS:
        raise NVMLError(value)
    return []
