/* Streams and events. All work is done when its call returns, so a stream is always empty and an event has
 * always happened. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "process.h"

struct stream {
    int unused;
};
struct event {
    struct timespec recorded;
};

static CUresult make(void **handle, size_t size)
{
    struct context *context;
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&process.lock);
    CUresult result = context_current(&context);
    pthread_mutex_unlock(&process.lock);
    if (result != CUDA_SUCCESS)
        return result;
    *handle = calloc(1, size);
    return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult drop(void *handle)
{
    if (!handle)
        return CUDA_ERROR_INVALID_HANDLE;
    free(handle);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    (void)flags;
    THROUGH_GATE(make((void **)stream, sizeof(struct stream)));
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    (void)flags;
    (void)priority;
    THROUGH_GATE(make((void **)stream, sizeof(struct stream)));
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) { THROUGH_GATE(drop(stream)); }

static CUresult nothing_to_wait_for(const void *handle)
{
    (void)handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) { THROUGH_GATE(nothing_to_wait_for(stream)); }
EXPORT CUresult cuStreamQuery(CUstream stream) { THROUGH_GATE(nothing_to_wait_for(stream)); }

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    (void)stream;
    (void)flags;
    THROUGH_GATE(event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    (void)flags;
    THROUGH_GATE(make((void **)event, sizeof(struct event)));
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) { THROUGH_GATE(drop(event)); }
EXPORT CUresult cuEventSynchronize(CUevent event)
{
    THROUGH_GATE(event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}
EXPORT CUresult cuEventQuery(CUevent event)
{
    THROUGH_GATE(event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    (void)stream;
    ENTER();
    if (!event)
        return gate_leave(CUDA_ERROR_INVALID_HANDLE);
    clock_gettime(CLOCK_MONOTONIC, &event->recorded);
    return gate_leave(CUDA_SUCCESS);
}

static CUresult elapsed(float *ms, const struct event *start, const struct event *end)
{
    if (!ms || !start || !end)
        return CUDA_ERROR_INVALID_VALUE;
    *ms = (float)(end->recorded.tv_sec - start->recorded.tv_sec) * 1e3f +
          (float)(end->recorded.tv_nsec - start->recorded.tv_nsec) / 1e6f;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
    THROUGH_GATE(elapsed(ms, start, end));
}
EXPORT CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
    THROUGH_GATE(elapsed(ms, start, end));
}
