/*
 * How one process asks another for a checkpoint: through a mailbox in the target's own memory, and a signal
 * to its restore thread. No descriptor, socket or file is involved, so it works for a process that CRIU has
 * just put into another container.
 *
 * The caller finds the mailbox by its magic in the writable mappings of libcuda.so*, writes a request with
 * process_vm_writev, signals the thread, and reads answers with process_vm_readv. Rules that make callers who
 * do not know of each other safe:
 * - A caller writes a request only when the slot's nonce is 0. Two may still do so at once; then one
 * overwrites the other, whole or in part.
 * - The target takes a request only if its checksum is right, offers to begin by putting its nonce into
 * `current`, and begins when the caller has put it into `confirmed`. Without that, within a second, it drops
 * the request: its caller is dead. So a caller that sees neither offer nor answer knows that nothing was
 * done, and asks again.
 * - Answers stay in a ring, by nonce.
 */
#ifndef SOFTGPU_MAILBOX_H
#define SOFTGPU_MAILBOX_H

#include <stdint.h>
#include <sys/types.h>

#include "cuda_abi.h"
#include "host.h"

#define MAILBOX_VERSION 1
#define MAILBOX_SIGNAL SIGRTMAX
#define ANSWERS 8

enum operation { OP_STATE = 1, OP_LOCK, OP_CHECKPOINT, OP_RESTORE, OP_UNLOCK };

struct request {
    uint64_t nonce;
    uint32_t operation, timeout_ms, pair_count, unused;
    CUcheckpointGpuPair pairs[GPU_MAX];
    uint64_t check;
};

struct answer {
    uint64_t nonce; /* first: who copies upwards and sees it also sees the result, which was written before */
    int64_t result;
};

struct mailbox {
    unsigned char magic[16];
    uint32_t version, size;
    uint64_t self;    /* its own address: tells it from a copy of the file's bytes */
    uint64_t session; /* random, one for each cuInit: another process under a reused PID has another */
    int32_t pid, tid; /* as the target sees itself; a child by fork has another PID than stands here */
    uint32_t state;   /* CUprocessState */
    uint32_t answered;
    uint64_t current;   /* nonce of the request that is offered or worked on */
    uint64_t confirmed; /* written by the caller */
    struct request request;
    struct answer answers[ANSWERS];
};

extern struct mailbox mailbox;

static inline uint64_t request_check(const struct request *request)
{
    const unsigned char *bytes = (const unsigned char *)request;
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a */
    for (size_t i = 0; i < offsetof(struct request, check); i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return hash;
}

#endif
