/* The checkpoint API: what a caller asks of another process, or of itself. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "peer.h"
#include "process.h"

#define RESEND_FIRST_US 20000
#define RESEND_LAST_US 1000000
#define POLL_FIRST_US 50
#define POLL_LAST_US 2000

static uint64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static void pause_us(unsigned us) { nanosleep(&(struct timespec){0, (long)us * 1000}, NULL); }

static bool find_answer(const struct mailbox *now, uint64_t nonce, CUresult *result)
{
    for (int i = 0; i < ANSWERS; i++)
        if (now->answers[i].nonce == nonce) {
            *result = (CUresult)now->answers[i].result;
            return true;
        }
    return false;
}

/* `now` is the mailbox as it was when the answer was there. */
static CUresult transact(const struct peer *peer, struct request *request, struct mailbox *now)
{
    CUresult result;
    uint64_t resend = 0, interval = RESEND_FIRST_US;
    unsigned poll = POLL_FIRST_US;
    if (getrandom(&request->nonce, sizeof(request->nonce), 0) != sizeof(request->nonce) || !request->nonce)
        return CUDA_ERROR_OPERATING_SYSTEM;
    request->check = request_check(request);
    for (;; pause_us(poll), poll = poll < POLL_LAST_US ? poll * 2 : poll) {
        if (!peer_read(peer, now))
            return CUDA_ERROR_OPERATING_SYSTEM; /* it died */
        if (find_answer(now, request->nonce, &result))
            return result;
        if (now->current == request->nonce && now->confirmed != request->nonce) {
            peer_write(peer, offsetof(struct mailbox, confirmed), &request->nonce, sizeof(request->nonce));
            poll = POLL_FIRST_US;
        } else if (now->current && request->operation == OP_STATE) {
            return CUDA_SUCCESS; /* it works for someone else, so it lives; the state stands in the mailbox */
        } else if (!now->current && !now->request.nonce) {
            peer_write(peer, offsetof(struct mailbox, request), request, sizeof(*request));
            resend = 0;
        }
        /* Whoever's request waits in the slot, its signal may have been lost with its caller. */
        if (!now->current && now_us() >= resend) {
            peer_signal(peer);
            resend = now_us() + interval;
            interval = interval * 2 < RESEND_LAST_US ? interval * 2 : RESEND_LAST_US;
        }
    }
}

static CUresult caller_ready(void)
{
    return process.pid && process.pid == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static bool all_zero(const void *bytes, size_t size)
{
    const unsigned char *p = bytes;
    while (size && !*p)
        p++, size--;
    return size == 0;
}

/* Waits as long as the target lives: as with NVIDIA's driver, a stopped or frozen process does not answer. */
static CUresult ask(int pid, struct request *request, struct mailbox *now)
{
    struct peer peer;
    CUresult result = caller_ready();
    if (result == CUDA_SUCCESS)
        result = peer_find(pid, &peer, now);
    return result == CUDA_SUCCESS ? transact(&peer, request, now) : result;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
    struct request request = {.operation = OP_STATE};
    struct mailbox now;
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = ask(pid, &request, &now);
    if (result == CUDA_SUCCESS)
        *state = (CUprocessState)now.state;
    return result;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    struct peer peer;
    struct mailbox now;
    CUresult result = caller_ready();
    if (result == CUDA_SUCCESS)
        result = tid ? peer_find(pid, &peer, &now) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *tid = peer.tid;
    return result;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, const CUcheckpointLockArgs *args)
{
    struct request request = {.operation = OP_LOCK, .timeout_ms = args ? args->timeoutMs : 0};
    struct mailbox now;
    if (args && (args->reserved0 || !all_zero(args->reserved1, sizeof(args->reserved1))))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &request, &now);
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, const CUcheckpointCheckpointArgs *args)
{
    struct request request = {.operation = OP_CHECKPOINT};
    struct mailbox now;
    if (args && !all_zero(args, sizeof(*args)))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &request, &now);
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, const CUcheckpointRestoreArgs *args)
{
    struct request request = {.operation = OP_RESTORE, .pair_count = args ? args->gpuPairsCount : 0};
    struct mailbox now;
    if (args && (!all_zero(args->reserved, sizeof(args->reserved)) || args->reserved1))
        return CUDA_ERROR_INVALID_VALUE;
    if (request.pair_count > GPU_MAX || (request.pair_count && !args->gpuPairs))
        return CUDA_ERROR_INVALID_VALUE;
    if (request.pair_count)
        memcpy(request.pairs, args->gpuPairs, request.pair_count * sizeof(request.pairs[0]));
    return ask(pid, &request, &now);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, const CUcheckpointUnlockArgs *args)
{
    struct request request = {.operation = OP_UNLOCK};
    struct mailbox now;
    if (args && !all_zero(args, sizeof(*args)))
        return CUDA_ERROR_INVALID_VALUE;
    return ask(pid, &request, &now);
}
