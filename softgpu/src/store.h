/*
 * GPU memory, outside the processes that use it.
 *
 *     <state dir>/mem/<GPU UUID>/<client>     one file per process and GPU: 2 MiB of header (one page used),
 * then the memory, sparse
 *
 * Rules:
 * - Who creates, removes, or changes the used bytes of a file holds an exclusive flock on the GPU's
 * directory.
 * - The owner holds a POSIX write lock on its file from creation on. The kernel drops it when the owner dies,
 * fork does not inherit it, and F_GETLK tells anyone the owner's PID as seen from the asker's PID namespace.
 * A file without a holder is dead: who sums up removes it.
 * - POSIX locks go with the first close of any descriptor of that file, so nobody opens a file that its own
 * process has open already.
 */
#ifndef SOFTGPU_STORE_H
#define SOFTGPU_STORE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "host.h"

#define GRANULE (2ull << 20)
#define STORE_DATA GRANULE /* where memory begins in the file */

struct client {
    int fd; /* -1 when not attached */
    uint64_t used;
    char dir[4096 - 64], name[20];
};

typedef void store_visit(void *arg, pid_t pid, uint64_t used);

/* Attach this process to the GPU with `used` bytes. 0, -ENOMEM (GPU full), -EBUSY (its compute mode forbids
 * it), or another -errno. */
int store_attach(struct client *client, const struct gpu *gpu, uint64_t used);

/* Change the used bytes. 0 or -ENOMEM, -errno. Shrinking always works. */
int store_resize(struct client *client, const struct gpu *gpu, uint64_t used);

/* Give all memory back and forget the file. Does nothing when not attached. */
void store_detach(struct client *client);

/* Hold the lock of a GPU's directory, as whoever attaches does. A descriptor or -errno. */
int store_lock(const struct gpu *gpu);
void store_unlock(int descriptor);

/* Used bytes of the GPU by living processes; `visit` (or NULL) sees each. PID 0: a process outside the
 * caller's PID namespace. -errno on error. */
int64_t store_used(const struct gpu *gpu, store_visit *visit, void *arg);

/* Whether the process lives that has this file, <GPU UUID>/<file>; false for this process' own. */
bool store_alive(const char *file);

/* Whole reads and writes at an offset of the memory. 0 or -errno. */
int store_read(const struct client *client, uint64_t offset, void *to, uint64_t size);
int store_write(const struct client *client, uint64_t offset, const void *from, uint64_t size);

/* Drop the pages of a freed span; they read as zero after. */
void store_discard(const struct client *client, uint64_t offset, uint64_t size);

#endif
