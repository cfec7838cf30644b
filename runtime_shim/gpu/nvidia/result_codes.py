"""Which exception represents each CUresult (CUDA's driver API) and each nvmlReturn_t (NVML).

The names are those of cuda.h (CUDA 13.0, and 13.5 through cuda-bindings) and nvml.h (through nvidia-ml-py). A
test compares both tables with these, so none is missing. A number that is in neither table comes from a newer
driver and becomes DriverFailed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gpusnap.runtime_shim.gpu.api.errors import (
    DriverFailed,
    DriverMismatch,
    DriverMissing,
    DriverNotReady,
    DriverTooOld,
    GpuBusy,
    GpuError,
    GpuOutOfMemory,
    HardwareFault,
    IllegalState,
    InvalidRequest,
    LockTimeout,
    MpsInTheWay,
    NoDevice,
    NotInitialized,
    NotSupported,
    PermissionRefused,
    WorkloadFault,
)

CUDA_SUCCESS = 0

_Table = Mapping[int, tuple[str, type[GpuError]]]
_Words = Mapping[type[GpuError], str]
_NO_WORDS: _Words = MappingProxyType({})

CUDA_RESULTS: _Table = MappingProxyType(
    {
        1: ("CUDA_ERROR_INVALID_VALUE", InvalidRequest),
        2: ("CUDA_ERROR_OUT_OF_MEMORY", GpuOutOfMemory),
        3: ("CUDA_ERROR_NOT_INITIALIZED", NotInitialized),
        4: ("CUDA_ERROR_DEINITIALIZED", NotInitialized),
        5: ("CUDA_ERROR_PROFILER_DISABLED", DriverFailed),
        6: ("CUDA_ERROR_PROFILER_NOT_INITIALIZED", DriverFailed),
        7: ("CUDA_ERROR_PROFILER_ALREADY_STARTED", DriverFailed),
        8: ("CUDA_ERROR_PROFILER_ALREADY_STOPPED", DriverFailed),
        # A library for linking against, of the CUDA toolkit: there is no driver behind it.
        34: ("CUDA_ERROR_STUB_LIBRARY", DriverMissing),
        36: ("CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", DriverTooOld),
        46: ("CUDA_ERROR_DEVICE_UNAVAILABLE", GpuBusy),
        47: ("CUDA_ERROR_MULTICAST_RESOURCE_FULL", GpuBusy),
        100: ("CUDA_ERROR_NO_DEVICE", NoDevice),
        101: ("CUDA_ERROR_INVALID_DEVICE", NoDevice),
        102: ("CUDA_ERROR_DEVICE_NOT_LICENSED", PermissionRefused),
        200: ("CUDA_ERROR_INVALID_IMAGE", DriverFailed),
        201: ("CUDA_ERROR_INVALID_CONTEXT", DriverFailed),
        202: ("CUDA_ERROR_CONTEXT_ALREADY_CURRENT", DriverFailed),
        205: ("CUDA_ERROR_MAP_FAILED", DriverFailed),
        206: ("CUDA_ERROR_UNMAP_FAILED", DriverFailed),
        207: ("CUDA_ERROR_ARRAY_IS_MAPPED", DriverFailed),
        208: ("CUDA_ERROR_ALREADY_MAPPED", DriverFailed),
        209: ("CUDA_ERROR_NO_BINARY_FOR_GPU", NotSupported),
        210: ("CUDA_ERROR_ALREADY_ACQUIRED", DriverFailed),
        211: ("CUDA_ERROR_NOT_MAPPED", DriverFailed),
        212: ("CUDA_ERROR_NOT_MAPPED_AS_ARRAY", DriverFailed),
        213: ("CUDA_ERROR_NOT_MAPPED_AS_POINTER", DriverFailed),
        214: ("CUDA_ERROR_ECC_UNCORRECTABLE", HardwareFault),
        215: ("CUDA_ERROR_UNSUPPORTED_LIMIT", NotSupported),
        216: ("CUDA_ERROR_CONTEXT_ALREADY_IN_USE", DriverFailed),
        217: ("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", NotSupported),
        218: ("CUDA_ERROR_INVALID_PTX", DriverFailed),
        219: ("CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", DriverFailed),
        220: ("CUDA_ERROR_NVLINK_UNCORRECTABLE", HardwareFault),
        221: ("CUDA_ERROR_JIT_COMPILER_NOT_FOUND", DriverMismatch),
        222: ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", NotSupported),
        223: ("CUDA_ERROR_JIT_COMPILATION_DISABLED", DriverFailed),
        224: ("CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", NotSupported),
        225: ("CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", NotSupported),
        226: ("CUDA_ERROR_CONTAINED", HardwareFault),
        227: ("CUDA_ERROR_INSUFFICIENT_LOADER_VERSION", DriverMismatch),
        300: ("CUDA_ERROR_INVALID_SOURCE", DriverFailed),
        301: ("CUDA_ERROR_FILE_NOT_FOUND", DriverFailed),
        302: ("CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", DriverMismatch),
        303: ("CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", DriverMismatch),
        304: ("CUDA_ERROR_OPERATING_SYSTEM", DriverFailed),
        400: ("CUDA_ERROR_INVALID_HANDLE", DriverFailed),
        401: ("CUDA_ERROR_ILLEGAL_STATE", IllegalState),
        402: ("CUDA_ERROR_LOSSY_QUERY", DriverFailed),
        500: ("CUDA_ERROR_NOT_FOUND", DriverFailed),
        # What cuCheckpointProcessLock answers once its timeout has passed (cuda.h).
        600: ("CUDA_ERROR_NOT_READY", LockTimeout),
        700: ("CUDA_ERROR_ILLEGAL_ADDRESS", WorkloadFault),
        701: ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", DriverFailed),
        702: ("CUDA_ERROR_LAUNCH_TIMEOUT", WorkloadFault),
        703: ("CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", DriverFailed),
        704: ("CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", DriverFailed),
        705: ("CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", DriverFailed),
        708: ("CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", DriverFailed),
        709: ("CUDA_ERROR_CONTEXT_IS_DESTROYED", DriverFailed),
        710: ("CUDA_ERROR_ASSERT", WorkloadFault),
        711: ("CUDA_ERROR_TOO_MANY_PEERS", GpuBusy),
        712: ("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", DriverFailed),
        713: ("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", DriverFailed),
        # 714 to 719 and 721: "the process must be terminated and relaunched" (cuda.h).
        714: ("CUDA_ERROR_HARDWARE_STACK_ERROR", WorkloadFault),
        715: ("CUDA_ERROR_ILLEGAL_INSTRUCTION", WorkloadFault),
        716: ("CUDA_ERROR_MISALIGNED_ADDRESS", WorkloadFault),
        717: ("CUDA_ERROR_INVALID_ADDRESS_SPACE", WorkloadFault),
        718: ("CUDA_ERROR_INVALID_PC", WorkloadFault),
        719: ("CUDA_ERROR_LAUNCH_FAILED", WorkloadFault),
        720: ("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", DriverFailed),
        721: ("CUDA_ERROR_TENSOR_MEMORY_LEAK", WorkloadFault),
        800: ("CUDA_ERROR_NOT_PERMITTED", PermissionRefused),
        801: ("CUDA_ERROR_NOT_SUPPORTED", NotSupported),
        802: ("CUDA_ERROR_SYSTEM_NOT_READY", DriverNotReady),
        803: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", DriverMismatch),
        804: ("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", DriverMismatch),
        805: ("CUDA_ERROR_MPS_CONNECTION_FAILED", MpsInTheWay),
        806: ("CUDA_ERROR_MPS_RPC_FAILURE", MpsInTheWay),
        807: ("CUDA_ERROR_MPS_SERVER_NOT_READY", MpsInTheWay),
        808: ("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", MpsInTheWay),
        809: ("CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", MpsInTheWay),
        810: ("CUDA_ERROR_MPS_CLIENT_TERMINATED", MpsInTheWay),
        811: ("CUDA_ERROR_CDP_NOT_SUPPORTED", NotSupported),
        812: ("CUDA_ERROR_CDP_VERSION_MISMATCH", NotSupported),
        # The program is recording a CUDA graph: as a state, one from which the step does not follow.
        900: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", IllegalState),
        901: ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", DriverFailed),
        902: ("CUDA_ERROR_STREAM_CAPTURE_MERGE", DriverFailed),
        903: ("CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", DriverFailed),
        904: ("CUDA_ERROR_STREAM_CAPTURE_UNJOINED", DriverFailed),
        905: ("CUDA_ERROR_STREAM_CAPTURE_ISOLATION", DriverFailed),
        906: ("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", DriverFailed),
        907: ("CUDA_ERROR_CAPTURED_EVENT", IllegalState),
        908: ("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", DriverFailed),
        909: ("CUDA_ERROR_TIMEOUT", LockTimeout),
        910: ("CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", DriverFailed),
        911: ("CUDA_ERROR_EXTERNAL_DEVICE", HardwareFault),
        912: ("CUDA_ERROR_INVALID_CLUSTER_SIZE", DriverFailed),
        913: ("CUDA_ERROR_FUNCTION_NOT_LOADED", DriverFailed),
        914: ("CUDA_ERROR_INVALID_RESOURCE_TYPE", DriverFailed),
        915: ("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", DriverFailed),
        916: ("CUDA_ERROR_KEY_ROTATION", DriverFailed),
        917: ("CUDA_ERROR_STREAM_DETACHED", DriverFailed),
        918: ("CUDA_ERROR_GRAPH_RECAPTURE_FAILURE", DriverFailed),
        919: ("CUDA_ERROR_FABRIC_NOT_READY", DriverNotReady),
        999: ("CUDA_ERROR_UNKNOWN", DriverFailed),
    }
)
"""CUresult, without success: its name and gpusnap's exception."""

NVML_RESULTS: _Table = MappingProxyType(
    {
        1: ("NVML_ERROR_UNINITIALIZED", NotInitialized),
        2: ("NVML_ERROR_INVALID_ARGUMENT", InvalidRequest),
        3: ("NVML_ERROR_NOT_SUPPORTED", NotSupported),
        4: ("NVML_ERROR_NO_PERMISSION", PermissionRefused),
        5: ("NVML_ERROR_ALREADY_INITIALIZED", IllegalState),
        6: ("NVML_ERROR_NOT_FOUND", NoDevice),
        7: ("NVML_ERROR_INSUFFICIENT_SIZE", DriverFailed),
        8: ("NVML_ERROR_INSUFFICIENT_POWER", HardwareFault),
        9: ("NVML_ERROR_DRIVER_NOT_LOADED", DriverMissing),
        10: ("NVML_ERROR_TIMEOUT", DriverNotReady),
        11: ("NVML_ERROR_IRQ_ISSUE", HardwareFault),
        12: ("NVML_ERROR_LIBRARY_NOT_FOUND", DriverMissing),
        13: ("NVML_ERROR_FUNCTION_NOT_FOUND", DriverTooOld),
        14: ("NVML_ERROR_CORRUPTED_INFOROM", HardwareFault),
        15: ("NVML_ERROR_GPU_IS_LOST", HardwareFault),
        16: ("NVML_ERROR_RESET_REQUIRED", HardwareFault),
        # "The GPU control device has been blocked by the operating system/cgroups" (nvml.h).
        17: ("NVML_ERROR_OPERATING_SYSTEM", PermissionRefused),
        18: ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", DriverMismatch),
        19: ("NVML_ERROR_IN_USE", GpuBusy),
        20: ("NVML_ERROR_MEMORY", GpuOutOfMemory),
        21: ("NVML_ERROR_NO_DATA", DriverFailed),
        22: ("NVML_ERROR_VGPU_ECC_NOT_SUPPORTED", NotSupported),
        23: ("NVML_ERROR_INSUFFICIENT_RESOURCES", GpuBusy),
        24: ("NVML_ERROR_FREQ_NOT_SUPPORTED", NotSupported),
        25: ("NVML_ERROR_ARGUMENT_VERSION_MISMATCH", DriverTooOld),
        26: ("NVML_ERROR_DEPRECATED", NotSupported),
        27: ("NVML_ERROR_NOT_READY", DriverNotReady),
        28: ("NVML_ERROR_GPU_NOT_FOUND", NoDevice),
        29: ("NVML_ERROR_INVALID_STATE", IllegalState),
        30: ("NVML_ERROR_RESET_TYPE_NOT_SUPPORTED", NotSupported),
        999: ("NVML_ERROR_UNKNOWN", DriverFailed),
    }
)
"""nvmlReturn_t, without success: its name and gpusnap's exception."""


def cuda_error(
    result: int,
    task: str,
    *,
    pid: int | None = None,
    name: str = "",
    because: _Words = _NO_WORDS,
    hints: _Words = _NO_WORDS,
) -> GpuError:
    """Return the exception for a CUresult other than success.

    `task` completes "the GPU driver could not …" and names the process. `name`: the library's own name for
    the number, for numbers that the table lacks. `because` and `hints` replace the texts of the exception's
    class.
    """
    known, kind = CUDA_RESULTS.get(result, (name or "an unknown CUDA error", DriverFailed))
    why = because.get(kind, kind.because)
    message = f"the GPU driver could not {task}: {why} ({known}, {result})"
    return kind(message, hint=hints.get(kind, kind.advice), code_name=known, pid=pid)


def nvml_error(value: int, task: str) -> GpuError:
    """Return the exception for an nvmlReturn_t other than success; `task` completes "NVML could not …"."""
    known, kind = NVML_RESULTS.get(value, ("an unknown NVML error", DriverFailed))
    message = f"NVML could not {task}: {kind.because} ({known}, {value})"
    return kind(message, hint=kind.advice, code_name=known)
