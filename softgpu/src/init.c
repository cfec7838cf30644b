/* cuInit: which GPUs there are for this process, and in which order it counts them. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "process.h"

struct process process = {.ctl_fd = -1, .uvm_fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;

CUresult result_of_errno(int negative)
{
    switch (-negative) {
    case 0: return CUDA_SUCCESS;
    case ENOMEM:
    case ENOSPC: /* the tmpfs behind the GPU is smaller than the GPU claims to be */
        return CUDA_ERROR_OUT_OF_MEMORY;
    case EBUSY: return CUDA_ERROR_DEVICE_UNAVAILABLE;
    case EACCES:
    case EPERM: return CUDA_ERROR_NOT_PERMITTED;
    default: return CUDA_ERROR_OPERATING_SYSTEM;
    }
}

static void find_visible(const struct host *host)
{
    for (int i = 0; i < host->count; i++) {
        /* A GPU in MIG mode computes only through instances, which softgpu does not have. */
        if (host->gpus[i].mig || !node_usable(host, host->gpus[i].minor))
            continue;
        process.visible[process.visible_count++] =
            (struct device){.gpu = host->gpus[i], .node_fd = -1, .client = {.fd = -1}};
    }
}

/* Index into visible that one word of CUDA_VISIBLE_DEVICES means: a number, or the beginning of a UUID. -1:
 * none. */
static int visible_by_word(const char *word)
{
    char *end;
    int found = -1;
    long number = strtol(word, &end, 10);
    if (end != word && !*end)
        return number >= 0 && number < process.visible_count ? (int)number : -1;
    for (int i = 0; i < process.visible_count; i++)
        if (strncmp(word, "GPU-", 4) == 0 &&
            strncmp(process.visible[i].gpu.uuid_text, word, strlen(word)) == 0) {
            if (found >= 0)
                return -1; /* the beginning of two UUIDs */
            found = i;
        }
    return found;
}

/* The list ends at the first word that means no GPU, as the CUDA programming guide has it. */
static void number_devices(void)
{
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    char list[1024], *save = NULL;
    if (!wanted) {
        for (int i = 0; i < process.visible_count; i++)
            process.ordinals[process.ordinal_count++] = i;
        return;
    }
    snprintf(list, sizeof(list), "%s", wanted);
    for (char *word = strtok_r(list, ", ", &save); word; word = strtok_r(NULL, ", ", &save)) {
        int index = visible_by_word(word);
        for (int i = 0; i < process.ordinal_count; i++)
            if (process.ordinals[i] == index) {
                process.ordinal_count = 0; /* a GPU named twice: none at all */
                return;
            }
        if (index < 0)
            return;
        process.ordinals[process.ordinal_count++] = index;
    }
}

static CUresult hold_all(void)
{
    bool held = nodes_hold_control();
    for (int i = 0; held && i < process.visible_count; i++)
        held = nodes_hold(&process.visible[i]);
    return held ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/*
 * In a child by fork: give up the memory files, whose locks stayed with the parent. The node descriptors stay
 * open, because that is what a real GPU leaves in such children and what a checkpoint has to cope with.
 */
static void after_fork(void)
{
    for (int i = 0; i < process.visible_count; i++)
        if (process.visible[i].client.fd >= 0)
            close(process.visible[i].client.fd);
}

static CUresult initialise(void)
{
    struct host host;
    int error = host_read(&host);
    if (error)
        return error == -ENOENT ? CUDA_ERROR_NO_DEVICE : CUDA_ERROR_SYSTEM_NOT_READY;
    if (!node_usable(&host, CTL_MINOR))
        return CUDA_ERROR_NO_DEVICE;
    process.visible_count = process.ordinal_count = 0;
    find_visible(&host);
    number_devices();
    if (!process.ordinal_count)
        return CUDA_ERROR_NO_DEVICE;
    process.cuda = host.cuda;
    CUresult result = hold_all();
    if (result == CUDA_SUCCESS)
        result = result_of_errno(target_start());
    if (result != CUDA_SUCCESS) {
        nodes_release();
        return result;
    }
    pthread_atfork(NULL, NULL, after_fork);
    process.pid = getpid();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (process.pid) /* in a child by fork CUDA cannot start again */
        return process.pid == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&init_lock);
    CUresult result = process.pid ? CUDA_SUCCESS : initialise();
    pthread_mutex_unlock(&init_lock);
    return result;
}

/* Kindness to the next one who sums up: memory of a process that exits in good order goes at once. */
__attribute__((destructor)) static void leave(void)
{
    if (process.pid && process.pid == getpid())
        for (int i = 0; i < process.visible_count; i++)
            store_detach(&process.visible[i].client);
}
