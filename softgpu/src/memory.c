/* Device memory: allocation, and access to it by address. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "process.h"

static uint64_t whole_granules(size_t size) { return ((uint64_t)size + GRANULE - 1) & ~(GRANULE - 1); }

static CUdeviceptr address_of(int visible, uint64_t offset)
{
    return DEVICE_BASE + (uint64_t)visible * DEVICE_SPAN + offset;
}

static bool is_device_address(CUdeviceptr address)
{
    return address >= DEVICE_BASE && address < DEVICE_BASE + (uint64_t)process.visible_count * DEVICE_SPAN;
}

/* First fit in the GPU's address range: the slot after which the new one goes. */
static struct allocation **find_gap(struct device *device, uint64_t span, uint64_t *offset)
{
    struct allocation **at = &device->allocations;
    *offset = 0;
    for (; *at && (*at)->offset - *offset < span; at = &(*at)->next)
        *offset = (*at)->offset + (*at)->span;
    return at;
}

static CUresult allocate(CUdeviceptr *address, size_t size)
{
    struct context *context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!address || !size)
        return CUDA_ERROR_INVALID_VALUE;
    struct device *device = &process.visible[context->visible];
    if (size > device->gpu.memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct allocation *made = malloc(sizeof(*made));
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (struct allocation){.context = context, .size = size, .span = whole_granules(size)};
    struct allocation **at = find_gap(device, made->span, &made->offset);
    int error = store_resize(&device->client, &device->gpu, device->client.used + made->span);
    if (error) {
        free(made);
        return result_of_errno(error);
    }
    made->next = *at;
    *at = made;
    *address = address_of(context->visible, made->offset);
    return CUDA_SUCCESS;
}

/* Unlinks *at and gives its memory back. */
static void release(struct device *device, struct allocation **at)
{
    struct allocation *gone = *at;
    *at = gone->next;
    store_discard(&device->client, gone->offset, gone->span);
    store_resize(&device->client, &device->gpu, device->client.used - gone->span);
    free(gone);
}

void memory_free_context(struct context *context)
{
    struct device *device = &process.visible[context->visible];
    for (struct allocation **at = &device->allocations; *at;)
        if ((*at)->context == context)
            release(device, at);
        else
            at = &(*at)->next;
}

static struct hostmem **find_host(const void *base)
{
    struct hostmem **at = &process.hostmem;
    while (*at && (*at)->base != (const char *)base)
        at = &(*at)->next;
    return at;
}

static CUresult free_host(const void *base, bool managed)
{
    struct hostmem **at = find_host(base), *gone = *at;
    if (!gone || gone->managed != managed)
        return CUDA_ERROR_INVALID_VALUE;
    *at = gone->next;
    munmap(gone->base, gone->size);
    free(gone);
    return CUDA_SUCCESS;
}

static CUresult free_address(CUdeviceptr address)
{
    if (!address)
        return CUDA_SUCCESS;
    if (!is_device_address(address))
        return free_host((void *)(uintptr_t)address, true);
    int visible = (int)((address - DEVICE_BASE) / DEVICE_SPAN);
    uint64_t offset = (address - DEVICE_BASE) % DEVICE_SPAN;
    struct device *device = &process.visible[visible];
    for (struct allocation **at = &device->allocations; *at; at = &(*at)->next)
        if ((*at)->offset == offset) {
            release(device, at);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult allocate_host(void **address, size_t size, bool managed)
{
    struct context *context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!address || !size)
        return CUDA_ERROR_INVALID_VALUE;
    struct hostmem *made = malloc(sizeof(*made));
    char *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!made || base == MAP_FAILED) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (struct hostmem){process.hostmem, base, size, context->visible, managed};
    process.hostmem = made;
    *address = base;
    return CUDA_SUCCESS;
}

/* The allocation that holds the address, or NULL. */
static struct allocation *containing(CUdeviceptr address, struct device **device, uint64_t *within)
{
    uint64_t offset = (address - DEVICE_BASE) % DEVICE_SPAN;
    *device = &process.visible[(address - DEVICE_BASE) / DEVICE_SPAN];
    for (struct allocation *a = (*device)->allocations; a; a = a->next)
        if (offset >= a->offset && offset - a->offset < a->size) {
            *within = offset - a->offset;
            return a;
        }
    return NULL;
}

static CUresult resolve(CUdeviceptr address, size_t size, struct span *span)
{
    struct device *device;
    uint64_t within;
    if (!is_device_address(address)) {
        for (struct hostmem *h = process.hostmem; h; h = h->next) {
            uint64_t base = (uint64_t)(uintptr_t)h->base;
            if (address >= base && address - base < h->size && size <= h->size - (address - base)) {
                *span = (struct span){.host = (char *)(uintptr_t)address};
                return CUDA_SUCCESS;
            }
        }
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct allocation *found = containing(address, &device, &within);
    if (!found || size > found->size - within)
        return CUDA_ERROR_INVALID_VALUE;
    *span = (struct span){.client = &device->client, .offset = found->offset + within};
    return CUDA_SUCCESS;
}

CUresult memory_resolve(CUdeviceptr address, size_t size, struct span *span)
{
    pthread_mutex_lock(&process.lock);
    CUresult result = resolve(address, size, span);
    pthread_mutex_unlock(&process.lock);
    return result;
}

CUresult memory_read(CUdeviceptr from, void *to, size_t size)
{
    struct span span;
    CUresult result = size ? memory_resolve(from, size, &span) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS || !size)
        return result;
    if (!span.host)
        return result_of_errno(store_read(span.client, span.offset, to, size));
    memmove(to, span.host, size);
    return CUDA_SUCCESS;
}

CUresult memory_write(CUdeviceptr to, const void *from, size_t size)
{
    struct span span;
    CUresult result = size ? memory_resolve(to, size, &span) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS || !size)
        return result;
    if (!span.host)
        return result_of_errno(store_write(span.client, span.offset, from, size));
    memmove(span.host, from, size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) { GUARDED(allocate(address, size)); }
EXPORT CUresult cuMemFree_v2(CUdeviceptr address) { GUARDED(free_address(address)); }

static CUresult allocate_managed(CUdeviceptr *address, size_t size, unsigned flags)
{
    void *base = NULL;
    if (!address || (flags != 1 && flags != 2)) /* CU_MEM_ATTACH_GLOBAL, CU_MEM_ATTACH_HOST */
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate_host(&base, size, true);
    *address = (CUdeviceptr)(uintptr_t)base;
    return result;
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned int flags)
{
    GUARDED(allocate_managed(address, size, flags));
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t size, unsigned int flags)
{
    (void)flags;
    GUARDED(allocate_host(address, size, false));
}

EXPORT CUresult cuMemAllocHost_v2(void **address, size_t size)
{
    GUARDED(allocate_host(address, size, false));
}
EXPORT CUresult cuMemFreeHost(void *address) { GUARDED(free_host(address, false)); }

static CUresult get_info(size_t *available, size_t *total)
{
    struct context *context;
    CUresult result = available && total ? context_current(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    struct device *device = &process.visible[context->visible];
    int64_t used = store_used(&device->gpu, NULL, NULL);
    if (used < 0)
        return result_of_errno((int)used);
    *total = device->gpu.memory;
    *available = (uint64_t)used < *total ? *total - (uint64_t)used : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *available, size_t *total) { GUARDED(get_info(available, total)); }

static CUresult address_range(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    struct device *device;
    uint64_t within;
    struct allocation *found = is_device_address(address) ? containing(address, &device, &within) : NULL;
    if (!found)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = address - within;
    if (size)
        *size = found->size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    GUARDED(address_range(base, size, address));
}

static CUresult pointer_attribute(void *data, int which, CUdeviceptr address)
{
    struct span span;
    CUresult result = data ? resolve(address, 1, &span) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return result;
    if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)data = span.host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    else if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || which == CU_POINTER_ATTRIBUTE_HOST_POINTER)
        *(CUdeviceptr *)data = address;
    else
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *data, int which, CUdeviceptr address)
{
    GUARDED(pointer_attribute(data, which, address));
}
