/* Copies and fills. Streams run their work at once, so the asynchronous calls are the same work. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "process.h"

static CUresult with_context(void)
{
    struct context *context;
    pthread_mutex_lock(&process.lock);
    CUresult result = context_current(&context);
    pthread_mutex_unlock(&process.lock);
    return result;
}

static CUresult write_checked(CUdeviceptr to, const void *from, size_t size)
{
    CUresult result = with_context();
    return result != CUDA_SUCCESS ? result
           : !from && size        ? CUDA_ERROR_INVALID_VALUE
                                  : memory_write(to, from, size);
}

static CUresult read_checked(void *to, CUdeviceptr from, size_t size)
{
    CUresult result = with_context();
    return result != CUDA_SUCCESS ? result
           : !to && size          ? CUDA_ERROR_INVALID_VALUE
                                  : memory_read(from, to, size);
}

static CUresult between(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    struct span span;
    CUresult result = with_context();
    /* Both ends are looked at first: a copy that fails must not have begun. */
    if (result == CUDA_SUCCESS && size)
        result = memory_resolve(to, size, &span);
    if (result == CUDA_SUCCESS && size)
        result = memory_resolve(from, size, &span);
    char *buffer = malloc(CHUNK);
    if (!buffer)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t done = 0; result == CUDA_SUCCESS && done < size;) {
        size_t n = size - done < CHUNK ? size - done : CHUNK;
        result = memory_read(from + done, buffer, n);
        if (result == CUDA_SUCCESS)
            result = memory_write(to + done, buffer, n);
        done += n;
    }
    free(buffer);
    return result;
}

/* Any two addresses of the unified address space; what the driver did not give out is plain host memory. */
static CUresult unified(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    struct span span;
    bool to_ours = memory_resolve(to, size, &span) == CUDA_SUCCESS;
    bool from_ours = memory_resolve(from, size, &span) == CUDA_SUCCESS;
    bool device = (to >= DEVICE_BASE && !to_ours) || (from >= DEVICE_BASE && !from_ours);
    if (device)
        return CUDA_ERROR_INVALID_VALUE;
    if (to_ours && from_ours)
        return between(to, from, size);
    if (to_ours)
        return write_checked(to, (void *)(uintptr_t)from, size);
    if (from_ours)
        return read_checked((void *)(uintptr_t)to, from, size);
    memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr to, uint32_t word, size_t size)
{
    struct span span;
    CUresult result = with_context();
    if (result == CUDA_SUCCESS && size)
        result = memory_resolve(to, size, &span);
    size_t part = size < CHUNK ? size : CHUNK;
    uint32_t *buffer = malloc(part + sizeof(word));
    if (!buffer)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < part / 4 + 1; i++)
        buffer[i] = word;
    for (size_t done = 0; result == CUDA_SUCCESS && done < size;) {
        size_t n = size - done < part ? size - done : part;
        result = memory_write(to + done, buffer, n);
        done += n;
    }
    free(buffer);
    return result;
}

static CUresult fill_words(CUdeviceptr to, uint32_t word, size_t count)
{
    return to % 4 || count > SIZE_MAX / 4 ? CUDA_ERROR_INVALID_VALUE : fill(to, word, count * 4);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    THROUGH_GATE(write_checked(to, from, size));
}
EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    THROUGH_GATE(read_checked(to, from, size));
}
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    THROUGH_GATE(between(to, from, size));
}
EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    THROUGH_GATE(unified(to, from, size));
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    (void)stream;
    THROUGH_GATE(write_checked(to, from, size));
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    THROUGH_GATE(read_checked(to, from, size));
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    THROUGH_GATE(between(to, from, size));
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    (void)stream;
    THROUGH_GATE(unified(to, from, size));
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char byte, size_t count)
{
    THROUGH_GATE(fill(to, byte * 0x01010101u, count));
}
EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int word, size_t count)
{
    THROUGH_GATE(fill_words(to, word, count));
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t count, CUstream stream)
{
    (void)stream;
    THROUGH_GATE(fill(to, byte * 0x01010101u, count));
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int word, size_t count, CUstream stream)
{
    (void)stream;
    THROUGH_GATE(fill_words(to, word, count));
}
