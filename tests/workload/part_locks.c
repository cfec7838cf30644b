/* Threads that take the locks of the C library all the time, as programs do: a driver that works within the
 * process needs them too, and waits where a thread was stopped with one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpuwork.h"

/* fork(2) holds all of malloc's and stdio's for as long as the kernel copies the process. */
static void *fork_all_day(void *unused)
{
    while (!stopping) {
        pid_t pid = fork();
        if (pid == 0)
            _exit(0);
        if (pid > 0)
            waitpid(pid, NULL, 0);
        free(malloc(5000));
    }
    return unused;
}

/* A large block has a mapping of its own, and realloc alone would only resize that, without any lock: then no
 * block would be left that is not such a one. */
static void *malloc_all_day(void *seed)
{
    unsigned random = (unsigned)(uintptr_t)seed + 1;
    void *held[64] = {NULL};
    mallopt(M_MMAP_THRESHOLD, 128 << 10); /* else it grows, and memory is no longer taken and given back */
    while (!stopping) {
        random = random * 1103515245 + 12345;
        unsigned i = random >> 16 & 63, size = (random >> 8 & 0xffff) << (random >> 24 & 3);
        if (random >> 28 & 1) {
            free(held[i]);
            held[i] = NULL;
        }
        held[i] = realloc(held[i], size + 1);
        if (held[i])
            memset(held[i], (int)i, 64 < size + 1 ? 64 : size + 1);
    }
    for (int i = 0; i < 64; i++)
        free(held[i]);
    return NULL;
}

/* stderr's lock, as every line that is printed takes it; held in this code, where nobody sees it from outside. */
static void *stdio_all_day(void *unused)
{
    while (!stopping) {
        flockfile(stderr);
        for (volatile int i = 0; i < 20000; i++)
            ;
        funlockfile(stderr);
        for (volatile int i = 0; i < 5000; i++)
            ;
    }
    return unused;
}

static void *dlopen_all_day(void *unused)
{
    static const char *const NAMES[] = {"libm.so.6", "libresolv.so.2", "libutil.so.1", "libanl.so.1"};
    for (unsigned i = 0; !stopping; i++) {
        void *loaded = dlopen(NAMES[i % 4], RTLD_NOW);
        if (loaded)
            dlclose(loaded);
    }
    return unused;
}

static const struct {
    const char *name;
    void *(*work)(void *);
} KINDS[] = {{"fork", fork_all_day}, {"malloc", malloc_all_day}, {"stdio", stdio_all_day}, {"dlopen", dlopen_all_day}};

void locks_start(const struct options *options)
{
    if (!options->locks)
        return;
    int known = 0;
    for (size_t k = 0; k < sizeof(KINDS) / sizeof(KINDS[0]); k++) {
        if (strcmp(options->locks, "all") != 0 && strcmp(options->locks, KINDS[k].name) != 0)
            continue;
        known = 1;
        for (unsigned i = 0; i < options->lock_threads; i++) {
            pthread_t thread;
            int error = pthread_create(&thread, NULL, KINDS[k].work, (void *)(uintptr_t)i);
            if (error)
                die("cannot start a thread: %s", strerror(error));
            pthread_setname_np(thread, KINDS[k].name);
            pthread_detach(thread);
        }
    }
    if (!known)
        die("--locks takes fork, malloc, stdio, dlopen or all, and not `%s`", options->locks);
}
