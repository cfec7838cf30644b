#define _GNU_SOURCE
#include "peer.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define SCAN_MAX (1 << 20) /* libcuda's .data is a few pages */

static bool read_memory(pid_t pid, uint64_t address, void *to, size_t size)
{
    struct iovec local = {to, size}, remote = {(void *)(uintptr_t)address, size};
    return process_vm_readv(pid, &local, 1, &remote, 1, 0) == (ssize_t)size;
}

/* The ID by which a process or thread knows itself: the last field of NSpid in its status file. -1 when it is
 * gone. */
static pid_t innermost_id(const char *status_path)
{
    char line[256];
    pid_t id = -1;
    FILE *file = fopen(status_path, "re");
    if (!file)
        return -1;
    while (fgets(line, sizeof(line), file))
        if (strncmp(line, "NSpid:", 6) == 0) {
            char *last = strrchr(line, '\t');
            id = last ? atoi(last + 1) : -1;
            break;
        }
    fclose(file);
    return id;
}

/* The thread that calls itself `inner`, by its ID in the caller's PID namespace. -1 when there is none. */
static pid_t find_thread(pid_t pid, pid_t inner)
{
    char path[300];
    pid_t found = -1;
    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    if (!tasks)
        return -1;
    for (struct dirent *entry; found < 0 && (entry = readdir(tasks));) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "/proc/%d/task/%s/status", pid, entry->d_name);
        if (innermost_id(path) == inner)
            found = atoi(entry->d_name);
    }
    closedir(tasks);
    return found;
}

/* True if a writable mapping [start, end) has a mailbox in use, which is then read. */
static bool scan(pid_t pid, uint64_t start, uint64_t end, struct mailbox *now)
{
    if (end - start > SCAN_MAX || end - start < sizeof(*now))
        return false;
    char *bytes = malloc(end - start);
    bool found = false;
    if (bytes && read_memory(pid, start, bytes, end - start))
        for (size_t at = 0; !found && at + sizeof(*now) <= end - start; at += 16) {
            if (memcmp(bytes + at, mailbox.magic, sizeof(mailbox.magic)) != 0)
                continue;
            memcpy(now, bytes + at, sizeof(*now));
            found = now->version == MAILBOX_VERSION && now->size == sizeof(*now) && now->self == start + at;
        }
    free(bytes);
    return found;
}

static bool is_libcuda(const char *path)
{
    const char *base = strrchr(path, '/');
    return base && strncmp(base, "/libcuda.so", strlen("/libcuda.so")) == 0;
}

static CUresult find_mailbox(pid_t pid, struct mailbox *now)
{
    char path[64], mode[8];
    char line[4096 + 256];
    unsigned long start, end;
    bool found = false;
    snprintf(path, sizeof(path), "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    if (!maps)
        return errno == ENOENT || errno == ESRCH ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_NOT_PERMITTED;
    while (!found && fgets(line, sizeof(line), maps)) {
        int name = 0;
        if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %n", &start, &end, mode, &name) >= 3 && name &&
            mode[1] == 'w' && is_libcuda(line + name))
            found = scan(pid, start, end, now);
    }
    fclose(maps);
    return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult peer_find(pid_t pid, struct peer *peer, struct mailbox *now)
{
    char path[64];
    if (pid <= 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = find_mailbox(pid, now);
    if (result != CUDA_SUCCESS)
        return result;
    snprintf(path, sizeof(path), "/proc/%d/status", pid);
    /* A child by fork has a copy of the mailbox, and no restore thread. */
    if (!now->pid || innermost_id(path) != now->pid)
        return CUDA_ERROR_NOT_INITIALIZED;
    *peer = (struct peer){pid, find_thread(pid, now->tid), now->self, now->session};
    return peer->tid > 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

bool peer_read(const struct peer *peer, struct mailbox *now)
{
    /* By the restore thread's ID: when that thread is gone, be it by death or by exec, so is everyone who
     * could answer. */
    return read_memory(peer->tid, peer->address, now, sizeof(*now)) && now->session == peer->session &&
           memcmp(now->magic, mailbox.magic, sizeof(now->magic)) == 0;
}

bool peer_write(const struct peer *peer, uint64_t offset, const void *bytes, size_t size)
{
    struct iovec local = {(void *)(uintptr_t)bytes, size},
                 remote = {(void *)(uintptr_t)(peer->address + offset), size};
    return process_vm_writev(peer->tid, &local, 1, &remote, 1, 0) == (ssize_t)size;
}

void peer_signal(const struct peer *peer)
{
    /* A signal that does not arrive (queue full, thread gone) is not an error here: the caller sends it
     * again, or sees the death. */
    syscall(SYS_tgkill, peer->pid, peer->tid, MAILBOX_SIGNAL);
}
