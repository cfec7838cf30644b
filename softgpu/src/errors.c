/* Every CUresult of CUDA 13.0: its value and name are the ABI's, the sentence is ours. */
#include <string.h>

#include "cuda_abi.h"

static const struct {
    int value;
    const char *name;
    const char *sentence;
} RESULTS[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "an argument is out of range or contradicts another"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "not enough memory for the request"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "the driver was not initialised in this process"},
    {4, "CUDA_ERROR_DEINITIALIZED", "the driver is shutting down"},
    {5, "CUDA_ERROR_PROFILER_DISABLED", "profiling is turned off"},
    {6, "CUDA_ERROR_PROFILER_NOT_INITIALIZED", "the profiler was not initialised"},
    {7, "CUDA_ERROR_PROFILER_ALREADY_STARTED", "the profiler runs already"},
    {8, "CUDA_ERROR_PROFILER_ALREADY_STOPPED", "the profiler is stopped already"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "a stub was loaded in place of the driver library"},
    {36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "this call needs a newer driver"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "the device is busy or closed to this process"},
    {100, "CUDA_ERROR_NO_DEVICE", "no usable device found"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "no such device"},
    {102, "CUDA_ERROR_DEVICE_NOT_LICENSED", "the device has no valid licence"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "the module image is not valid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "no such context, or none is current"},
    {202, "CUDA_ERROR_CONTEXT_ALREADY_CURRENT", "the context is current already"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping failed"},
    {206, "CUDA_ERROR_UNMAP_FAILED", "unmapping failed"},
    {207, "CUDA_ERROR_ARRAY_IS_MAPPED", "the array is mapped"},
    {208, "CUDA_ERROR_ALREADY_MAPPED", "the resource is mapped already"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "the image holds no code for this device"},
    {210, "CUDA_ERROR_ALREADY_ACQUIRED", "the resource was acquired already"},
    {211, "CUDA_ERROR_NOT_MAPPED", "the resource is not mapped"},
    {212, "CUDA_ERROR_NOT_MAPPED_AS_ARRAY", "the resource is not mapped as an array"},
    {213, "CUDA_ERROR_NOT_MAPPED_AS_POINTER", "the resource is not mapped as a pointer"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "memory error that ECC could not correct"},
    {215, "CUDA_ERROR_UNSUPPORTED_LIMIT", "the device does not support this limit"},
    {216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE", "the context is in use by another thread"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "these devices cannot reach each other's memory"},
    {218, "CUDA_ERROR_INVALID_PTX", "the PTX did not compile"},
    {219, "CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", "invalid graphics context"},
    {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "NVLink error that could not be corrected"},
    {221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "the PTX compiler library was not found"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "this driver is too old for the PTX"},
    {223, "CUDA_ERROR_JIT_COMPILATION_DISABLED", "compiling PTX is turned off"},
    {224, "CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", "execution affinity is not supported"},
    {225, "CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", "synchronising from device code is not supported"},
    {226, "CUDA_ERROR_CONTAINED", "a contained hardware error"},
    {300, "CUDA_ERROR_INVALID_SOURCE", "the kernel source is not valid"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", "symbol not found in a shared object"},
    {303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "a shared object did not initialise"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "a system call failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "no such handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the object is in the wrong state for this call"},
    {402, "CUDA_ERROR_LOSSY_QUERY", "the answer would lose information"},
    {500, "CUDA_ERROR_NOT_FOUND", "the named thing was not found"},
    {600, "CUDA_ERROR_NOT_READY", "the work is not finished yet"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel touched an address that is not its own"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "the launch asks for more than the device has"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the kernel ran too long"},
    {703, "CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", "texturing modes do not agree"},
    {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is on already"},
    {705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access is off"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "the primary context is in use"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the context was destroyed"},
    {710, "CUDA_ERROR_ASSERT", "an assertion failed on the device"},
    {711, "CUDA_ERROR_TOO_MANY_PEERS", "no more peers are possible"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "the host memory is registered already"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the host memory is not registered"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "stack corrupted on the device"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "illegal instruction on the device"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned access on the device"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "address space does not suit the instruction"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter on the device"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "the kernel failed"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks for a cooperative launch"},
    {721, "CUDA_ERROR_TENSOR_MEMORY_LEAK", "tensor memory was not freed"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "not allowed"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "not supported here"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "the system is not ready to start CUDA"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "kernel driver and library do not fit together"},
    {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
     "forward compatibility is not supported on this device"},
    {805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "no connection to the MPS control daemon"},
    {806, "CUDA_ERROR_MPS_RPC_FAILURE", "call to the MPS server failed"},
    {807, "CUDA_ERROR_MPS_SERVER_NOT_READY", "the MPS server is not ready"},
    {808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "the MPS server has no room for another client"},
    {809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", "the MPS server has no room for another connection"},
    {810, "CUDA_ERROR_MPS_CLIENT_TERMINATED", "the MPS server ended this client"},
    {811, "CUDA_ERROR_CDP_NOT_SUPPORTED", "dynamic parallelism is not supported"},
    {812, "CUDA_ERROR_CDP_VERSION_MISMATCH", "versions of dynamic parallelism do not agree"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not allowed while the stream is captured"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an earlier error spoilt the capture"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "would merge two captures"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not begun in this stream"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "a forked stream was not joined before the end of capture"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "would make the capture depend on work outside it"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "would make the capture depend on the default stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "the event belongs to a capture"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "the capture belongs to another thread"},
    {909, "CUDA_ERROR_TIMEOUT", "the wait took too long"},
    {910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", "the graph cannot be updated like this"},
    {911, "CUDA_ERROR_EXTERNAL_DEVICE", "an external device failed"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "invalid cluster size"},
    {913, "CUDA_ERROR_FUNCTION_NOT_LOADED", "the function is not loaded"},
    {914, "CUDA_ERROR_INVALID_RESOURCE_TYPE", "invalid resource type"},
    {915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "invalid resource configuration"},
    {916, "CUDA_ERROR_KEY_ROTATION", "keys must be rotated first"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown internal error"},
};

#define RESULT_COUNT (sizeof(RESULTS) / sizeof(RESULTS[0]))

const char *result_name(int result)
{
    for (size_t i = 0; i < RESULT_COUNT; i++)
        if (RESULTS[i].value == result)
            return RESULTS[i].name;
    return NULL;
}

int result_by_name(const char *name)
{
    for (size_t i = 0; i < RESULT_COUNT; i++)
        if (strcmp(RESULTS[i].name, name) == 0)
            return RESULTS[i].value;
    return -1;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name)
{
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = result_name((int)error);
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **sentence)
{
    if (!sentence)
        return CUDA_ERROR_INVALID_VALUE;
    *sentence = NULL;
    for (size_t i = 0; i < RESULT_COUNT; i++)
        if (RESULTS[i].value == (int)error)
            *sentence = RESULTS[i].sentence;
    return *sentence ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
