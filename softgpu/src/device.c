/* Device queries. All pass the gate: after a restore a device is another GPU. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "process.h"

static struct device *device_at(CUdevice ordinal)
{
    if (ordinal < 0 || ordinal >= process.ordinal_count)
        return NULL;
    return &process.visible[process.ordinals[ordinal]];
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    struct host host;
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    if (process.pid)
        *version = process.cuda;
    else
        *version = host_read(&host) == 0 ? host.cuda : 0; /* allowed before cuInit */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    ENTER();
    if (!count)
        return gate_leave(CUDA_ERROR_INVALID_VALUE);
    *count = process.ordinal_count;
    return gate_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER();
    if (!device || !device_at(ordinal))
        return gate_leave(device ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE);
    *device = ordinal;
    return gate_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal)
{
    ENTER();
    struct device *device = device_at(ordinal);
    if (!device || !name || length < 1)
        return gate_leave(device ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "%s", device->gpu.name);
    return gate_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal)
{
    ENTER();
    struct device *device = device_at(ordinal);
    if (!device || !uuid)
        return gate_leave(device ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE);
    memcpy(uuid->bytes, device->gpu.uuid, sizeof(uuid->bytes));
    return gate_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal) { return cuDeviceGetUuid_v2(uuid, ordinal); }

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice ordinal)
{
    ENTER();
    struct device *device = device_at(ordinal);
    if (!device || !bytes)
        return gate_leave(device ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE);
    *bytes = device->gpu.memory;
    return gate_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice ordinal)
{
    ENTER();
    struct device *device = device_at(ordinal);
    if (!device || !id || length < 13)
        return gate_leave(device ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE);
    snprintf(id, (size_t)length, "%04x:%02x:%02x.0", device->gpu.pci_domain, device->gpu.pci_bus,
             device->gpu.pci_device);
    return gate_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice ordinal)
{
    ENTER();
    struct device *device = device_at(ordinal);
    if (!device || !major || !minor)
        return gate_leave(device ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE);
    *major = device->gpu.cc_major;
    *minor = device->gpu.cc_minor;
    return gate_leave(CUDA_SUCCESS);
}

static int attribute(const struct gpu *gpu, int which)
{
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: return gpu->compute_mode;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return (int)gpu->pci_bus;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: return (int)gpu->pci_device;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: return (int)gpu->pci_domain;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return gpu->cc_major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return gpu->cc_minor;
    default: return 0; /* a feature that softgpu does not have */
    }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int which, CUdevice ordinal)
{
    ENTER();
    struct device *device = device_at(ordinal);
    if (!device || !value || which < 1 || which >= CU_DEVICE_ATTRIBUTE_MAX)
        return gate_leave(device ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE);
    *value = attribute(&device->gpu, which);
    return gate_leave(CUDA_SUCCESS);
}
