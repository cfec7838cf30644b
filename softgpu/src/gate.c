/*
 * The gate. Locks and futexes here live in the process's private memory and nothing else, so a thread that
 * waits at the gate is dumped and restored by CRIU like any other, and goes on when the gate opens.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <time.h>
#include <unistd.h>

#include "process.h"

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int in_flight;
    bool closed, broken;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

CUresult gate_enter(void)
{
    /* A child by fork has a copy of this state and none of the threads: it must never wait here. */
    if (!process.pid || process.pid != getpid())
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&gate.lock);
    while (gate.closed && !gate.broken)
        pthread_cond_wait(&gate.changed, &gate.lock);
    bool broken = gate.broken;
    if (!broken)
        gate.in_flight++;
    pthread_mutex_unlock(&gate.lock);
    return broken ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

CUresult gate_leave(CUresult result)
{
    pthread_mutex_lock(&gate.lock);
    if (--gate.in_flight == 0 && gate.closed)
        pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
    return result;
}

bool gate_close(unsigned timeout_ms)
{
    struct timespec deadline;
    int error = 0;
    clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&gate.lock);
    gate.closed = true;
    while (gate.in_flight && error != ETIMEDOUT) {
        if (timeout_ms)
            error = pthread_cond_clockwait(&gate.changed, &gate.lock, CLOCK_MONOTONIC, &deadline);
        else
            pthread_cond_wait(&gate.changed, &gate.lock);
    }
    bool drained = gate.in_flight == 0;
    if (!drained) {
        gate.closed = false;
        pthread_cond_broadcast(&gate.changed);
    }
    pthread_mutex_unlock(&gate.lock);
    return drained;
}

void gate_open(void)
{
    pthread_mutex_lock(&gate.lock);
    gate.closed = false;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}

void gate_break(void)
{
    pthread_mutex_lock(&gate.lock);
    gate.broken = true;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}
