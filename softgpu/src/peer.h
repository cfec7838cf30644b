/* Another process as a caller of the checkpoint API sees it. */
#ifndef SOFTGPU_PEER_H
#define SOFTGPU_PEER_H

#include <stdbool.h>

#include "mailbox.h"

struct peer {
    pid_t pid;
    pid_t tid; /* of its restore thread, in the caller's PID namespace */
    uint64_t address, session;
};

/* OPERATING_SYSTEM: no such process. NOT_INITIALIZED: no CUDA in it. NOT_PERMITTED: one may not look. */
CUresult peer_find(pid_t pid, struct peer *peer, struct mailbox *now);

/* Reads the mailbox again. False when the process is gone, or is not what it was. */
bool peer_read(const struct peer *peer, struct mailbox *now);

bool peer_write(const struct peer *peer, uint64_t offset, const void *bytes, size_t size);
void peer_signal(const struct peer *peer);

#endif
