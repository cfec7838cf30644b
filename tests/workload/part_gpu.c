/* The GPU side. Only what the driver API documents: functions by their exported names, PTX for the kernels.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpuwork.h"

#define SLICE_WORDS (1u << 20) /* the unit of --slices: 4 MiB */
#define BLOCK_WORDS (1u << 16) /* checked at a time: 256 KiB, which a core's cache holds */
#define HOST_WORDS (1u << 20)  /* 4 MiB of the CPU's own memory, which is in CRIU's images */
#define HOST_SEED 0x7c3au
#define HOST_EVERY 8 /* ticks between two looks at it */
#define THREADS 256
#define PIECE_WORDS (2u << 18) /* of --touch and of what SIGUSR1 changes: 2 MiB */

static const char PTX[] = ".version 6.0\n"
                          ".target sm_52\n"
                          ".address_size 64\n"
                          /* words[i] += 1 for each i < count */
                          ".visible .entry add_one(.param .u64 words, .param .u32 count)\n"
                          "{\n"
                          "    .reg .pred %p<2>;\n"
                          "    .reg .b32 %r<7>;\n"
                          "    .reg .b64 %rd<5>;\n"
                          "    ld.param.u64 %rd1, [words];\n"
                          "    ld.param.u32 %r1, [count];\n"
                          "    mov.u32 %r2, %ctaid.x;\n"
                          "    mov.u32 %r3, %ntid.x;\n"
                          "    mov.u32 %r4, %tid.x;\n"
                          "    mad.lo.u32 %r5, %r2, %r3, %r4;\n"
                          "    setp.ge.u32 %p1, %r5, %r1;\n"
                          "    @%p1 bra DONE;\n"
                          "    cvta.to.global.u64 %rd2, %rd1;\n"
                          "    mul.wide.u32 %rd3, %r5, 4;\n"
                          "    add.s64 %rd4, %rd2, %rd3;\n"
                          "    ld.global.u32 %r6, [%rd4];\n"
                          "    add.s32 %r6, %r6, 1;\n"
                          "    st.global.u32 [%rd4], %r6;\n"
                          "DONE:\n"
                          "    ret;\n"
                          "}\n"
                          /* waits until so many milliseconds are over */
                          ".visible .entry busy(.param .u32 milliseconds)\n"
                          "{\n"
                          "    .reg .pred %p<2>;\n"
                          "    .reg .b32 %r<2>;\n"
                          "    .reg .b64 %rd<4>;\n"
                          "    ld.param.u32 %r1, [milliseconds];\n"
                          "    mul.wide.u32 %rd1, %r1, 1000000;\n"
                          "    mov.u64 %rd2, %globaltimer;\n"
                          "    add.s64 %rd1, %rd1, %rd2;\n"
                          "AGAIN:\n"
                          "    mov.u64 %rd3, %globaltimer;\n"
                          "    setp.lt.u64 %p1, %rd3, %rd1;\n"
                          "    @%p1 bra AGAIN;\n"
                          "    ret;\n"
                          "}\n"
                          /* *word = the sum of all ranks' words, when all have launched it; a real GPU has
                             nothing of the kind, so there this does nothing, and the sum is wrong */
                          ".visible .entry barrier(.param .u64 group, .param .u32 ranks, .param .u32 rank,\n"
                          "                        .param .u64 word)\n"
                          "{\n"
                          "    ret;\n"
                          "}\n";

static struct {
    int (*cuInit)(unsigned);
    int (*cuDeviceGetCount)(int *);
    int (*cuDeviceGet)(int *, int);
    int (*cuDeviceGetUuid_v2)(unsigned char *, int);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuCtxSetCurrent)(void *);
    int (*cuCtxSynchronize)(void);
    int (*cuMemAlloc_v2)(unsigned long long *, size_t);
    int (*cuMemAllocManaged)(unsigned long long *, size_t, unsigned);
    int (*cuMemcpyHtoD_v2)(unsigned long long, const void *, size_t);
    int (*cuMemcpyDtoH_v2)(void *, unsigned long long, size_t);
    int (*cuModuleLoadData)(void **, const void *);
    int (*cuModuleGetFunction)(void **, void *, const char *);
    int (*cuLaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          void *, void **, void **);
    int (*cuGetErrorName)(int, const char **);
} cu;

struct gpu {
    int device;
    void *context, *add_one, *busy, *barrier;
    unsigned long long words, meeting;
    uint32_t count, touched; /* words, and of these the first ones that a tick changes */
    unsigned slices, change;
    uint64_t seed;
    enum data data;
};

/* Compiled twice, and chosen when the program starts: for a CPU with AVX2, and for any. */
#ifdef __x86_64__
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

static uint32_t *host_words;

/* A block as it should be, and as it is. */
static uint32_t wanted_words[BLOCK_WORDS], found_words[BLOCK_WORDS];

/* A driver call that must succeed. */
#define CALL(function, ...) check(cu.function(__VA_ARGS__), #function)

static void check(int result, const char *function)
{
    const char *name = NULL;
    if (result == 0)
        return;
    cu.cuGetErrorName(result, &name);
    die("%s answers %s (%d)", function, name ? name : "an unknown result", result);
}

static void load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        die("%s; is there a GPU driver on this machine?", dlerror());
#define LOAD(name)                                             \
    do {                                                       \
        *(void **)&cu.name = dlsym(library, #name);            \
        if (!cu.name)                                          \
            die("the driver has no %s; it is too old", #name); \
    } while (0)
    LOAD(cuGetErrorName);
    LOAD(cuInit);
    LOAD(cuDeviceGetCount);
    LOAD(cuDeviceGet);
    LOAD(cuDeviceGetUuid_v2);
    LOAD(cuDevicePrimaryCtxRetain);
    LOAD(cuCtxSetCurrent);
    LOAD(cuCtxSynchronize);
    LOAD(cuMemAlloc_v2);
    LOAD(cuMemAllocManaged);
    LOAD(cuMemcpyHtoD_v2);
    LOAD(cuMemcpyDtoH_v2);
    LOAD(cuModuleLoadData);
    LOAD(cuModuleGetFunction);
    LOAD(cuLaunchKernel);
#undef LOAD
}

/* A hash of seed and i, so that no two pages are alike and none compresses. */
static uint64_t hash(uint64_t seed, uint32_t i)
{
    uint64_t z = (seed << 32 | i) + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* The same with 32 bits, for which a CPU has vectors: the finalizer of MurmurHash3. */
static uint32_t hash32(uint32_t seed, uint32_t i)
{
    uint32_t z = seed + i * 0x9e3779b9u;
    z = (z ^ z >> 16) * 0x85ebca6bu;
    z = (z ^ z >> 13 ^ seed) * 0xc2b2ae35u;
    return z ^ z >> 16;
}

/* A bf16 number from 32 random bits: the sum of some of them is about normally distributed, deviation 0.02. */
static uint32_t weight(uint32_t bits)
{
    int32_t sum = (int32_t)((bits & 0x7ff) + (bits >> 11 & 0x7ff) + (bits >> 22)) - 2559;
    float number = (float)sum * (0.02f / 890);
    uint32_t word;
    memcpy(&word, &number, sizeof(word));
    return word >> 16;
}

/* SIGUSR1 changes a twentieth of the pieces, of those that a tick leaves alone: in eight runs, or in single
 * pieces where there are few. */
static bool changes_at(const struct gpu *gpu, uint32_t i)
{
    uint32_t pieces = gpu->count / PIECE_WORDS, period = pieces / 8 > 20 ? pieces / 8 : 20;
    uint32_t piece = i / PIECE_WORDS;
    return piece * PIECE_WORDS >= gpu->touched && piece % period >= period - (period + 10) / 20;
}

/* The pattern of the words from `at` on, all of one piece. A test's CPU time is mostly this. */
FAST static void pattern(const struct gpu *gpu, uint32_t at, uint32_t n, uint32_t *words)
{
    unsigned change = changes_at(gpu, at) ? gpu->change : 0;
    uint64_t seed = gpu->seed ^ (uint64_t)change << 24;
    switch (gpu->data) {
    case ZERO:
        for (uint32_t i = 0; i < n; i++)
            words[i] = change;
        break;
    case RANDOM: {
        uint32_t start = (uint32_t)hash(seed, 0);
        for (uint32_t i = 0; i < n; i++)
            words[i] = hash32(start, at + i);
        break;
    }
    case BF16:
        for (uint32_t i = 0; i < n; i++) {
            uint64_t bits = hash(seed, at + i);
            words[i] = weight((uint32_t)bits) << 16 | weight((uint32_t)(bits >> 32));
        }
    }
}

static void write_pattern(struct gpu *gpu, uint32_t at)
{
    pattern(gpu, at, BLOCK_WORDS, wanted_words);
    CALL(cuMemcpyHtoD_v2, gpu->words + 4ull * at, wanted_words, 4ull * BLOCK_WORDS);
}

static void open_one(struct gpu *gpu, int ordinal, const struct options *options)
{
    void *module;
    CALL(cuDeviceGet, &gpu->device, ordinal);
    CALL(cuDevicePrimaryCtxRetain, &gpu->context, gpu->device);
    CALL(cuCtxSetCurrent, gpu->context);
    CALL(cuModuleLoadData, &module, PTX);
    CALL(cuModuleGetFunction, &gpu->add_one, module, "add_one");
    CALL(cuModuleGetFunction, &gpu->busy, module, "busy");
    if (options->rank.count) {
        CALL(cuModuleGetFunction, &gpu->barrier, module, "barrier");
        CALL(cuMemAlloc_v2, &gpu->meeting, sizeof(uint64_t));
    }
    gpu->count = options->mib << 18;
    gpu->touched = options->touch && options->touch < options->mib ? options->touch << 18 : gpu->count;
    gpu->slices = options->slices;
    gpu->data = options->data;
    gpu->seed = options->seed * GPUS_MAX + (unsigned)ordinal;
    if (options->managed)
        CALL(cuMemAllocManaged, &gpu->words, 4ull * gpu->count, 1);
    else
        CALL(cuMemAlloc_v2, &gpu->words, 4ull * gpu->count);
    for (uint32_t at = 0; at < gpu->count; at += BLOCK_WORDS)
        write_pattern(gpu, at);
}

static bool wanted(const char *list, int ordinal)
{
    if (strcmp(list, "all") == 0)
        return true;
    for (const char *p = list; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
        if (atoi(p) == ordinal)
            return true;
    return false;
}

int gpu_open(const struct options *options, struct gpu **gpus)
{
    int all, count = 0;
    load_driver();
    CALL(cuInit, 0);
    CALL(cuDeviceGetCount, &all);
    *gpus = calloc(GPUS_MAX, sizeof(**gpus));
    host_words = malloc(4ull * HOST_WORDS);
    if (!*gpus || !host_words)
        die("out of memory");
    for (uint32_t i = 0; i < HOST_WORDS; i++)
        host_words[i] = hash32(HOST_SEED, i);
    for (int i = 0; i < all && count < GPUS_MAX; i++)
        if (wanted(options->gpus, i))
            open_one(*gpus + count++, i, options);
    if (!count)
        die("--gpus %s names none of the %d GPUs here", options->gpus, all);
    return count;
}

struct gpu *gpu_at(struct gpu *gpus, int index) { return gpus + index; }

void gpu_tick(struct gpu *gpu, unsigned busy_ms)
{
    CALL(cuCtxSetCurrent, gpu->context);
    CALL(cuLaunchKernel, gpu->add_one, (gpu->touched + THREADS - 1) / THREADS, 1, 1, THREADS, 1, 1, 0, NULL,
         (void *[]){&gpu->words, &gpu->touched}, NULL);
    if (busy_ms)
        CALL(cuLaunchKernel, gpu->busy, 1, 1, 1, 1, 1, 1, 0, NULL, (void *[]){&busy_ms}, NULL);
    CALL(cuCtxSynchronize);
}

/* The upper bits of the word are the number of ranks that are to stop: so all stop after the same tick. */
#define STOP_BIT 40

bool gpu_meet(struct gpu *gpu, const struct rank *rank, uint64_t tick, bool *stop)
{
    uint64_t word = tick * (rank->number + 1) + ((uint64_t)*stop << STOP_BIT);
    uint64_t right = tick * rank->count * (rank->count + 1) / 2;
    CALL(cuCtxSetCurrent, gpu->context);
    CALL(cuMemcpyHtoD_v2, gpu->meeting, &word, sizeof(word));
    CALL(cuLaunchKernel, gpu->barrier, 1, 1, 1, 1, 1, 1, 0, NULL,
         (void *[]){(void *)&rank->group, (void *)&rank->count, (void *)&rank->number, &gpu->meeting}, NULL);
    CALL(cuCtxSynchronize);
    CALL(cuMemcpyDtoH_v2, &word, gpu->meeting, sizeof(word));
    *stop = word >> STOP_BIT;
    return (word & ((1ull << STOP_BIT) - 1)) == right;
}

void gpu_change(struct gpu *gpu, unsigned change)
{
    gpu->change = change;
    CALL(cuCtxSetCurrent, gpu->context);
    for (uint32_t at = 0; at < gpu->count; at += BLOCK_WORDS)
        if (changes_at(gpu, at))
            write_pattern(gpu, at);
}

FAST bool gpu_check(struct gpu *gpu, uint64_t tick, uint64_t *sum)
{
    uint32_t wrong = 0;
    *sum = 0;
    CALL(cuCtxSetCurrent, gpu->context);
    for (uint32_t at = 0; at < gpu->count; at += BLOCK_WORDS) {
        if (at / SLICE_WORDS % gpu->slices != tick % gpu->slices)
            continue;
        CALL(cuMemcpyDtoH_v2, found_words, gpu->words + 4ull * at, 4ull * BLOCK_WORDS);
        pattern(gpu, at, BLOCK_WORDS, wanted_words);
        uint32_t added = at < gpu->touched ? (uint32_t)tick : 0;
        for (uint32_t i = 0; i < BLOCK_WORDS; i++) {
            wrong |= found_words[i] ^ (wanted_words[i] + added);
            *sum += found_words[i];
        }
    }
    for (uint32_t i = 0; i < HOST_WORDS && tick % HOST_EVERY == 0; i++)
        wrong |= host_words[i] ^ hash32(HOST_SEED, i);
    return !wrong;
}

void gpu_uuid(struct gpu *gpu, char *text)
{
    unsigned char uuid[16];
    CALL(cuDeviceGetUuid_v2, uuid, gpu->device);
    text += sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        text += sprintf(text, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}
