/*
 * Kernels that end only when the peers' were launched, as those of NCCL: `barrier`.
 *
 *     <state dir>/collectives/<group>    a slot for each rank; whoever reads or changes it holds its flock
 *
 * A rank that launches writes into its slot whose it is and what it contributes. The last one to come finds
 * all slots filled by processes that live, and gives each the sum. A slot names the file of its process' GPU
 * memory (store.h), which that process alone holds, which has a new name after each restore, and which is
 * gone or nobody's when the process was killed or checkpointed. So what such a process left counts for
 * nothing, and nobody has to clean up. No process remembers anything from one launch to the next, so ranks
 * that come back from an older checkpoint meet like any others. The file is open only while a launch is in
 * flight: never in a process that is locked.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "collective.h"
#include "process.h"

#define RANKS_MAX 64
#define LOOK_NS 500000

struct slot {
    char client[UUID_TEXT + 23]; /* <GPU UUID>/<file> below mem/; empty: nobody's */
    uint64_t value, sum;
    uint64_t done; /* the sum is there */
};

static int open_group(uint64_t group)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/collectives", state_dir());
    if (mkdir(path, 0777) == 0)
        (void)!chmod(path, 0777); /* containers with other users share it, as mem/ */
    snprintf(path, sizeof(path), "%s/collectives/%016llx", state_dir(), (unsigned long long)group);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0)
        (void)!fchmod(fd, 0666);
    return fd;
}

static void lock_group(int fd)
{
    while (flock(fd, LOCK_EX) < 0 && errno == EINTR)
        ;
}

static bool read_slot(int fd, uint32_t rank, struct slot *slot)
{
    ssize_t n = pread(fd, slot, sizeof(*slot), (off_t)(rank * sizeof(*slot)));
    slot->client[sizeof(slot->client) - 1] = '\0';
    return n == sizeof(*slot);
}

static bool write_slot(int fd, uint32_t rank, const struct slot *slot)
{
    return pwrite(fd, slot, sizeof(*slot), (off_t)(rank * sizeof(*slot))) == sizeof(*slot);
}

/* Whether every rank has launched and waits, with the sum of what they contribute. */
static bool all_here(int fd, uint32_t ranks, uint32_t own, uint64_t *sum)
{
    *sum = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct slot slot;
        if (!read_slot(fd, rank, &slot) || slot.done || !slot.client[0])
            return false;
        if (rank != own && !store_alive(slot.client))
            return false;
        *sum += slot.value;
    }
    return true;
}

static bool tell_all(int fd, uint32_t ranks, uint64_t sum)
{
    struct slot slot;
    bool good = true;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        good = read_slot(fd, rank, &slot) && good;
        slot.sum = sum;
        slot.done = 1;
        good = write_slot(fd, rank, &slot) && good;
    }
    return good;
}

static CUresult arrive(int fd, uint32_t ranks, uint32_t rank, const struct slot *own)
{
    uint64_t sum;
    lock_group(fd);
    bool good = write_slot(fd, rank, own) && (!all_here(fd, ranks, rank, &sum) || tell_all(fd, ranks, sum));
    flock(fd, LOCK_UN); /* in words: a child forked meanwhile has the same open file */
    return good ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

/* Until the last one has come. UNKNOWN where another process has taken the rank. */
static CUresult wait_for_sum(int fd, uint32_t rank, const struct slot *own, uint64_t *sum)
{
    for (;; nanosleep(&(struct timespec){0, LOOK_NS}, NULL)) {
        struct slot now;
        lock_group(fd);
        bool good = read_slot(fd, rank, &now);
        flock(fd, LOCK_UN);
        if (!good || strcmp(now.client, own->client) != 0)
            return CUDA_ERROR_UNKNOWN;
        if (now.done) {
            *sum = now.sum;
            return CUDA_SUCCESS;
        }
    }
}

CUresult collective_sum(const struct device *device, uint64_t group, uint32_t ranks, uint32_t rank,
                        uint64_t *value)
{
    struct slot own = {.value = *value};
    if (!ranks || ranks > RANKS_MAX || rank >= ranks)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(own.client, sizeof(own.client), "%s/%s", device->gpu.uuid_text, device->client.name);
    int fd = open_group(group);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = arrive(fd, ranks, rank, &own);
    if (result == CUDA_SUCCESS)
        result = wait_for_sum(fd, rank, &own, value);
    close(fd);
    return result;
}
