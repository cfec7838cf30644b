/*
 * Modules and kernels. An image is PTX text, as for the real driver; softgpu does not run PTX, it knows a few
 * kernels by the name of their entry and does their work on the CPU.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "collective.h"
#include "process.h"

struct launch {
    const struct device *device;
    uint64_t threads;
    void **params;
};

typedef CUresult kernel(const struct launch *launch);

struct function {
    kernel *run;
};
struct module {
    char *ptx;
};

/* add_one(u64 words, u32 count): words[i] += 1 for each thread i < count. */
static CUresult add_one(const struct launch *launch)
{
    CUdeviceptr words;
    uint32_t count;
    memcpy(&words, launch->params[0], sizeof(words));
    memcpy(&count, launch->params[1], sizeof(count));
    uint64_t left = (count < launch->threads ? count : launch->threads) * 4;
    uint32_t *buffer = malloc(CHUNK);
    if (!buffer)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_SUCCESS;
    while (left && result == CUDA_SUCCESS) {
        size_t n = left < CHUNK ? left : CHUNK;
        result = memory_read(words, buffer, n);
        for (size_t i = 0; i < n / 4; i++)
            buffer[i]++;
        if (result == CUDA_SUCCESS)
            result = memory_write(words, buffer, n);
        words += n;
        left -= n;
    }
    free(buffer);
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_ILLEGAL_ADDRESS : result;
}

/* busy(u32 milliseconds): keeps the GPU busy that long. */
static CUresult busy(const struct launch *launch)
{
    uint32_t ms;
    memcpy(&ms, launch->params[0], sizeof(ms));
    struct timespec left = {ms / 1000, (long)(ms % 1000) * 1000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) != 0)
        ;
    return CUDA_SUCCESS;
}

/* barrier(u64 group, u32 ranks, u32 rank, u64 word): ends when all ranks of the group have launched it, each a
 * process of its own; the u64 at `word` becomes the sum of all ranks'. */
static CUresult barrier(const struct launch *launch)
{
    uint64_t group, value;
    uint32_t ranks, rank;
    CUdeviceptr word;
    memcpy(&group, launch->params[0], sizeof(group));
    memcpy(&ranks, launch->params[1], sizeof(ranks));
    memcpy(&rank, launch->params[2], sizeof(rank));
    memcpy(&word, launch->params[3], sizeof(word));
    CUresult result = memory_read(word, &value, sizeof(value));
    if (result == CUDA_SUCCESS)
        result = collective_sum(launch->device, group, ranks, rank, &value);
    else if (result == CUDA_ERROR_INVALID_VALUE)
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    return result == CUDA_SUCCESS ? memory_write(word, &value, sizeof(value)) : result;
}

static struct {
    const char *name;
    struct function function;
} KNOWN[] = {{"add_one", {add_one}}, {"busy", {busy}}, {"barrier", {barrier}}};

#define KNOWN_COUNT (sizeof(KNOWN) / sizeof(KNOWN[0]))

static CUresult load(CUmodule *module, const char *image)
{
    struct context *context;
    if (!module || !image)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (image[0] == '\x7f' ||
        !isascii((unsigned char)image[0])) /* cubin, fatbin: machine code that nothing here can run */
        return CUDA_ERROR_INVALID_IMAGE;
    if (!strstr(image, ".version") || !strstr(image, ".target"))
        return CUDA_ERROR_INVALID_PTX;
    *module = malloc(sizeof(**module));
    if (!*module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*module)->ptx = strdup(image);
    return (*module)->ptx ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* True if the PTX has `.entry NAME` followed by no other character of a name. */
static bool has_entry(const char *ptx, const char *name)
{
    size_t length = strlen(name);
    for (const char *p = ptx; (p = strstr(p, ".entry"));) {
        p += strlen(".entry");
        p += strspn(p, " \t\r\n");
        if (strncmp(p, name, length) == 0 && !isalnum((unsigned char)p[length]) && p[length] != '_')
            return true;
    }
    return false;
}

static CUresult find(CUfunction *function, CUmodule module, const char *name)
{
    if (!function || !module || !name)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < KNOWN_COUNT; i++)
        if (strcmp(KNOWN[i].name, name) == 0 && has_entry(module->ptx, name)) {
            *function = &KNOWN[i].function;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult unload(CUmodule module)
{
    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    free(module->ptx);
    free(module);
    return CUDA_SUCCESS;
}

static bool known(const struct function *function)
{
    for (size_t i = 0; i < KNOWN_COUNT; i++)
        if (&KNOWN[i].function == function)
            return true;
    return false;
}

static CUresult launch(const struct function *function, uint64_t blocks, uint64_t block_threads,
                       void **params, void **extra)
{
    struct context *context;
    pthread_mutex_lock(&process.lock);
    CUresult result = context_current(&context);
    pthread_mutex_unlock(&process.lock);
    if (result != CUDA_SUCCESS)
        return result;
    if (!known(function))
        return CUDA_ERROR_INVALID_HANDLE;
    if (extra)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!params || !blocks || !block_threads || block_threads > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    const struct device *device = &process.visible[context->visible];
    return function->run(&(struct launch){device, blocks * block_threads, params});
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) { GUARDED(load(module, image)); }

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, int *options,
                                   void **values)
{
    (void)count;
    (void)options;
    (void)values;
    return cuModuleLoadData(module, image);
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    THROUGH_GATE(find(function, module, name));
}

EXPORT CUresult cuModuleUnload(CUmodule module) { THROUGH_GATE(unload(module)); }

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                               unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                               unsigned int block_z, unsigned int shared, CUstream stream, void **params,
                               void **extra)
{
    (void)shared;
    (void)stream;
    ENTER();
    return gate_leave(launch(function, (uint64_t)grid_x * grid_y * grid_z,
                             (uint64_t)block_x * block_y * block_z, params, extra));
}
