/*
 * libnvidia-ml: what an inventory asks for. Shares the host description and the memory files with libcuda,
 * keeps nothing open, and lists only the GPUs whose nodes the caller may open. Function names, values and
 * layouts are NVML's ABI.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "host.h"
#include "store.h"

#define EXPORT __attribute__((visibility("default")))

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

typedef const struct gpu *nvmlDevice_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

#define NVML_MEMORY_V2 (sizeof(nvmlMemory_v2_t) | 2u << 24)

typedef struct {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} nvmlProcessInfo_t;

typedef struct {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

static struct {
    pthread_mutex_t lock;
    int users;
    struct host host;                /* as it was at the first nvmlInit */
    const struct gpu *gpus[GPU_MAX]; /* those that the caller may use */
    int count;
} nvml = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const struct {
    nvmlReturn_t value;
    const char *sentence;
} RESULTS[] = {
    {0, "success"},
    {1, "NVML was not initialised"},
    {2, "an argument is not valid"},
    {3, "not supported on this device"},
    {4, "not permitted"},
    {5, "initialised already"},
    {6, "not found"},
    {7, "the buffer is too small"},
    {8, "external power is missing"},
    {9, "the driver is not loaded"},
    {10, "time ran out"},
    {11, "interrupt trouble"},
    {12, "a shared library was not found"},
    {13, "the library lacks this function"},
    {14, "the infoROM is corrupt"},
    {15, "the GPU is lost"},
    {16, "the GPU must be reset"},
    {17, "the operating system refused"},
    {18, "driver and library versions differ"},
    {19, "the GPU is in use"},
    {20, "not enough memory"},
    {21, "no data"},
    {22, "not possible while ECC is on for vGPU"},
    {23, "not enough resources"},
    {24, "frequency not supported"},
    {25, "the version of an argument is unknown"},
    {26, "deprecated"},
    {27, "not ready"},
    {28, "no such GPU"},
    {29, "wrong state"},
    {30, "this type of reset is not supported"},
    {999, "unknown error"},
};

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    for (size_t i = 0; i < sizeof(RESULTS) / sizeof(RESULTS[0]); i++)
        if (RESULTS[i].value == result)
            return RESULTS[i].sentence;
    return "unknown error";
}

static nvmlReturn_t start(void)
{
    if (host_read(&nvml.host) != 0 || !node_usable(&nvml.host, CTL_MINOR))
        return NVML_ERROR_DRIVER_NOT_LOADED;
    nvml.count = 0;
    for (int i = 0; i < nvml.host.count; i++)
        if (node_usable(&nvml.host, nvml.host.gpus[i].minor))
            nvml.gpus[nvml.count++] = &nvml.host.gpus[i];
    return nvml.count ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    pthread_mutex_lock(&nvml.lock);
    nvmlReturn_t result = nvml.users ? NVML_SUCCESS : start();
    if (result == NVML_SUCCESS)
        nvml.users++;
    pthread_mutex_unlock(&nvml.lock);
    return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    pthread_mutex_lock(&nvml.lock);
    nvmlReturn_t result = nvml.users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (nvml.users)
        nvml.users--;
    pthread_mutex_unlock(&nvml.lock);
    return result;
}

/* Every function begins with one of these two. */
#define NEED_INIT(condition)                    \
    do {                                        \
        if (!nvml.users)                        \
            return NVML_ERROR_UNINITIALIZED;    \
        if (!(condition))                       \
            return NVML_ERROR_INVALID_ARGUMENT; \
    } while (0)

#define NEED_DEVICE(device, condition) NEED_INIT(index_of(device) >= 0 && (condition))

static int index_of(nvmlDevice_t device)
{
    for (int i = 0; i < nvml.count; i++)
        if (nvml.gpus[i] == device)
            return i;
    return -1;
}

static nvmlReturn_t give_text(char *to, unsigned int size, const char *text)
{
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    NEED_INIT(version);
    return give_text(version, size, nvml.host.driver);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int size)
{
    char text[100];
    NEED_INIT(version);
    snprintf(text, sizeof(text), "%d.%s", nvml.host.cuda / 1000, nvml.host.driver);
    return give_text(version, size, text);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    NEED_INIT(version);
    *version = nvml.host.cuda;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    NEED_INIT(count);
    *count = (unsigned)nvml.count;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    NEED_INIT(device && index < (unsigned)nvml.count);
    *device = nvml.gpus[index];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    NEED_INIT(uuid && device);
    for (int i = 0; i < nvml.count; i++)
        if (strcasecmp(nvml.gpus[i]->uuid_text, uuid) == 0) {
            *device = nvml.gpus[i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    NEED_DEVICE(device, index);
    *index = (unsigned)index_of(device);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int size)
{
    NEED_DEVICE(device, uuid);
    return give_text(uuid, size, device->uuid_text);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int size)
{
    NEED_DEVICE(device, name);
    return give_text(name, size, device->name);
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    NEED_DEVICE(device, minor);
    *minor = device->minor;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    NEED_DEVICE(device, major && minor);
    *major = device->cc_major;
    *minor = device->cc_minor;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    NEED_DEVICE(device, current && pending);
    if (device->cc_major < 8) /* MIG came with compute capability 8.0 */
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = device->mig;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, int *mode)
{
    NEED_DEVICE(device, mode);
    *mode = device->compute_mode;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, int *mode)
{
    NEED_DEVICE(device, mode);
    *mode = device->persistence;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    NEED_DEVICE(device, pci);
    *pci = (nvmlPciInfo_t){
        .domain = device->pci_domain,
        .bus = device->pci_bus,
        .device = device->pci_device,
        .pci_device_id =
            0x10de}; /* the low half is the vendor, the high half a model that softgpu does not invent */
    snprintf(pci->bus_id_legacy, sizeof(pci->bus_id_legacy), "%04X:%02X:%02X.0", device->pci_domain & 0xffff,
             device->pci_bus & 0xff, device->pci_device & 0xff);
    snprintf(pci->bus_id, sizeof(pci->bus_id), "%08X:%02X:%02X.0", device->pci_domain, device->pci_bus,
             device->pci_device);
    return NVML_SUCCESS;
}

static nvmlReturn_t memory_of(nvmlDevice_t device, unsigned long long *used, unsigned long long *available)
{
    int64_t sum = store_used(device, NULL, NULL);
    if (sum < 0)
        return sum == -EACCES || sum == -EPERM ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_UNKNOWN;
    *used = (unsigned long long)sum;
    *available = *used < device->memory ? device->memory - *used : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    NEED_DEVICE(device, memory);
    memory->total = device->memory;
    return memory_of(device, &memory->used, &memory->free);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    NEED_DEVICE(device, memory);
    if (memory->version != NVML_MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = device->memory;
    memory->reserved = 0;
    return memory_of(device, &memory->used, &memory->free);
}

struct listing {
    nvmlProcessInfo_t *infos;
    unsigned int room, count;
};

static void list_process(void *arg, pid_t pid, uint64_t used)
{
    struct listing *list = arg;
    if (pid <= 0) /* in a PID namespace that the caller cannot see into */
        return;
    if (list->count < list->room)
        list->infos[list->count] =
            (nvmlProcessInfo_t){(unsigned)pid, used, 0xffffffffu, 0xffffffffu}; /* no MIG instance */
    list->count++;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                            nvmlProcessInfo_t *infos)
{
    NEED_DEVICE(device, count && (infos || !*count));
    struct listing list = {infos, infos ? *count : 0, 0};
    int64_t sum = store_used(device, list_process, &list);
    if (sum < 0)
        return NVML_ERROR_UNKNOWN;
    *count = list.count;
    return list.count > list.room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                             nvmlProcessInfo_t *infos)
{
    (void)infos;
    NEED_DEVICE(device, count);
    *count = 0;
    return NVML_SUCCESS;
}
