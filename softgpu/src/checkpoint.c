#define _GNU_SOURCE
#include "checkpoint.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "process.h"

static const char REGION_MAGIC[16] = "softgpu region 1";

/* First granule of the region. The rest is the granules of all allocations, in the order of GPUs and
 * addresses. */
struct region_header {
    char magic[16];
    uint64_t size;
};

static struct {
    char *base;
    size_t size;
} region;

/* What NVIDIA's driver maps ends within a page, too. */
#define ODD 3216

static size_t region_size(void)
{
    size_t size = GRANULE + ODD;
    for (int i = 0; i < process.visible_count; i++)
        for (struct allocation *a = process.visible[i].allocations; a; a = a->next)
            size += a->span;
    return size;
}

typedef int move_bytes(const struct client *client, uint64_t offset, char *bytes, uint64_t size);

static int out_of_gpu(const struct client *client, uint64_t offset, char *bytes, uint64_t size)
{
    return store_read(client, offset, bytes, size);
}

/* By plain loads, as NVIDIA's driver does before the GPU copies: who touches a page that is not there waits in
 * the page fault of an instruction, and in no system call. */
static int into_gpu(const struct client *client, uint64_t offset, char *bytes, uint64_t size)
{
    static char loaded[64 << 10]; /* only the restore thread comes here, and its stack is small */
    int error = 0;
    for (uint64_t done = 0; done < size && !error; done += sizeof(loaded)) {
        memcpy(loaded, bytes + done, sizeof(loaded)); /* a span is a multiple of it */
        error = store_write(client, offset + done, loaded, sizeof(loaded));
    }
    return error;
}

/* Moves every allocation of GPU i, `*at` being where its granules begin in the region. */
static int move_device(int i, const struct client *client, move_bytes *move, size_t *at)
{
    int error = 0;
    for (struct allocation *a = process.visible[i].allocations; a && !error; a = a->next) {
        error = move(client, a->offset, region.base + *at, a->span);
        *at += a->span;
    }
    return error;
}

static bool any_managed(void)
{
    for (struct hostmem *h = process.hostmem; h; h = h->next)
        if (h->managed)
            return true;
    return false;
}

CUresult checkpoint_save(const struct fault *fault)
{
    if (any_managed())
        return CUDA_ERROR_NOT_SUPPORTED;
    region.size = region_size();
    /* One call with MAP_POPULATE, as NVIDIA's driver makes it: a tracer may take the flag away and populate
     * the mapping faster. */
    region.base =
        mmap(NULL, region.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (region.base == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct region_header *header = (struct region_header *)region.base;
    memcpy(header->magic, REGION_MAGIC, sizeof(header->magic));
    header->size = region.size;
    size_t at = GRANULE;
    int error = 0;
    for (int i = 0; i < process.visible_count && !error; i++)
        error = move_device(i, &process.visible[i].client, out_of_gpu, &at);
    if (error) {
        munmap(region.base, region.size);
        return result_of_errno(error);
    }
    for (int i = 0; i < process.visible_count; i++) {
        store_detach(&process.visible[i].client);
        fault_die(fault); /* in the middle: one GPU given up, the others not */
    }
    nodes_release();
    return CUDA_SUCCESS;
}

static const struct gpu *find_gpu(const struct host *host, const unsigned char *uuid)
{
    for (int i = 0; i < host->count; i++)
        if (memcmp(host->gpus[i].uuid, uuid, 16) == 0 && !host->gpus[i].mig &&
            node_usable(host, host->gpus[i].minor))
            return &host->gpus[i];
    return NULL;
}

static const unsigned char *new_uuid(const unsigned char *old, const CUcheckpointGpuPair *pairs,
                                     unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (memcmp(pairs[i].oldUuid.bytes, old, 16) == 0)
            return pairs[i].newUuid.bytes;
    return NULL;
}

static bool same_chip(const struct gpu *a, const struct gpu *b)
{
    return a->cc_major == b->cc_major && a->cc_minor == b->cc_minor && strcmp(a->name, b->name) == 0;
}

/*
 * A GPU for each that the process could see. With pairs: as many as there were GPUs and one for each of them,
 * so no other UUID is among them; the new ones distinct, here, and of the same kind.
 */
static CUresult choose(const struct host *host, const CUcheckpointGpuPair *pairs, unsigned count,
                       const struct gpu **chosen)
{
    CUresult refusal = count ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    if (count && count != (unsigned)process.visible_count)
        return refusal;
    for (int i = 0; i < process.visible_count; i++) {
        const unsigned char *old = process.visible[i].gpu.uuid;
        const unsigned char *uuid = count ? new_uuid(old, pairs, count) : old;
        chosen[i] = uuid ? find_gpu(host, uuid) : NULL;
        if (!chosen[i] || !same_chip(chosen[i], &process.visible[i].gpu))
            return refusal;
        for (int j = 0; j < i; j++)
            if (chosen[j] == chosen[i])
                return refusal;
    }
    return node_usable(host, CTL_MINOR) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static void unwind(struct client *staged)
{
    for (int i = 0; i < process.visible_count; i++)
        store_detach(&staged[i]);
    nodes_release();
}

/* Takes room on every chosen GPU, and only then copies. */
static int stage(struct client *staged, const struct gpu **chosen, const struct fault *fault)
{
    int error = 0;
    for (int i = 0; i < process.visible_count; i++)
        staged[i] = (struct client){.fd = -1};
    for (int i = 0; i < process.visible_count && !error; i++)
        if (process.visible[i].contexts)
            error = store_attach(&staged[i], chosen[i], process.visible[i].client.used);
    fault_die(fault);
    size_t at = GRANULE;
    for (int i = 0; i < process.visible_count && !error; i++)
        error = move_device(i, &staged[i], into_gpu, &at);
    return error;
}

static bool hold_chosen(const struct gpu **chosen)
{
    bool held = nodes_hold_control();
    for (int i = 0; i < process.visible_count && held; i++) {
        struct device now = {.gpu = *chosen[i]};
        held = nodes_hold(&now);
        process.visible[i].node_fd = now.node_fd;
    }
    return held;
}

CUresult checkpoint_restore(const CUcheckpointGpuPair *pairs, unsigned count, const struct fault *fault)
{
    static struct client staged[GPU_MAX]; /* only the restore thread comes here, and its stack is small */
    static struct host host;
    static bool broken; /* by a restore that lacked memory: driver 580.159 cannot restore the process any more */
    const struct gpu *chosen[GPU_MAX];
    const struct region_header *header = (const struct region_header *)region.base;
    if (memcmp(header->magic, REGION_MAGIC, sizeof(header->magic)) != 0 || header->size != region.size)
        return CUDA_ERROR_UNKNOWN; /* whoever took the bytes away has not put them back */
    if (broken)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (host_read(&host) != 0)
        return CUDA_ERROR_SYSTEM_NOT_READY;
    CUresult result = choose(&host, pairs, count, chosen);
    if (result != CUDA_SUCCESS)
        return result;
    int error = stage(staged, chosen, fault);
    if (!error && !hold_chosen(chosen))
        error = -EIO;
    if (error) {
        unwind(staged);
        broken = error == -ENOMEM;
        return result_of_errno(error);
    }
    for (int i = 0; i < process.visible_count; i++) {
        process.visible[i].gpu = *chosen[i];
        process.visible[i].client = staged[i];
    }
    process.cuda = host.cuda;
    munmap(region.base, region.size);
    return CUDA_SUCCESS;
}
