/*
 * CRIU runs this program at the stages of a dump and of a restore (criu(8), --action-script), without arguments and with
 * the stage in CRTOOLS_SCRIPT_ACTION. At some of them CRIU has to wait for gpusnap, which listens on the socket that
 * GPUSNAP_GATE names (runtime_shim/runtime/criu/gate.py): when it has dumped all processes and has not ended them yet,
 * before it restores the first process, and when it has restored all of them and lets none of them run yet. If this ends
 * with another code than 0 there, CRIU lets go on what it has dumped (criu/cr-dump.c, cr_dump_finish), or ends what it
 * has restored (criu/cr-restore.c, restore_root_task). So it does where gpusnap ends without an answer.
 */
#ifndef GPUSNAP_GATE_H
#define GPUSNAP_GATE_H

#include "kernel.h"
#include "text.h"

#include <asm/socket.h>

#define GATE_VARIABLE "GPUSNAP_GATE="
#define STAGE_VARIABLE "CRTOOLS_SCRIPT_ACTION="
#define INIT_VARIABLE "CRTOOLS_INIT_PID="
#define GATE_PATIENCE 120 /* seconds without a word of gpusnap, which says one for each piece of memory */

/* The first two are none of CRIU's: gpusnap asks by them whether this program knows the stages of a restore, or also
 * those of a dump, which an earlier one would pass. */
static const char *const gate_stages[] = {"probe", "probe-dump", "post-dump", "pre-restore", "post-restore", NULL};

/* What the environment says, NULL without it; `name` ends with the equals sign. */
static const char *from_environment(char **envp, const char *name)
{
    for (; *envp != NULL; envp++)
        if (begins(*envp, name))
            return *envp + length_before(name, '\0');
    return NULL;
}

/* A connection to a Unix socket on which a read does not wait for longer than GATE_PATIENCE. */
static long connect_to(const char *path)
{
    const long unix_domain = 1, stream = 1 | O_CLOEXEC;
    const struct {
        long seconds, microseconds;
    } patience = {GATE_PATIENCE, 0};
    struct {
        unsigned short family;
        char path[108];
    } address = {1, ""};
    long fd = kernel(__NR_socket, unix_domain, stream, 0, 0, 0, 0);

    if (fd < 0 || !put(address.path, sizeof(address.path), 0, path, length_before(path, '\0')))
        return -1;
    if (kernel(__NR_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO_OLD, (long)&patience, sizeof(patience), 0) < 0)
        return -1;
    return kernel(__NR_connect, fd, (long)&address, sizeof(address), 0, 0, 0) < 0 ? -1 : fd;
}

/* Ask gpusnap, and wait for its answer; 0 where CRIU may go on. */
static int ask_at_gate(const char *path, const char *stage, const char *init)
{
    static char line[64];
    size_t length = length_before(stage, '\0'), digits = length_before(init, '\0');
    const long pdeathsig = 1, sigkill = 9;
    char answer[256];
    long fd, got;

    if (!put(line, sizeof(line), 0, stage, length) || !put(line, sizeof(line), length, " ", 1) ||
        !put(line, sizeof(line), length + 1, init, digits) || !put(line, sizeof(line), length + 1 + digits, "\n", 1))
        return 1;
    ignore_sigpipe();
    /* If CRIU is killed, nobody waits for the answer, and gpusnap waits for this program's end. */
    kernel(__NR_prctl, pdeathsig, sigkill, 0, 0, 0, 0);
    fd = connect_to(path);
    if (fd < 0)
        return 1;
    write_to(fd, line, length + digits + 2);
    for (;;) {
        got = read_file(fd, answer, sizeof(answer));
        if (got == -EINTR)
            continue;
        if (got <= 0)
            return 1;
        for (long i = 0; i < got; i++)
            if (answer[i] != '.') /* which says that it is at work */
                return answer[i] == 'y' ? 0 : 1;
    }
}

/* CRIU's stage, where that is what this program was started for; its end. Returns -1 where it was not. */
static int run_gate(int argc, char **envp)
{
    const char *path = from_environment(envp, GATE_VARIABLE), *stage = from_environment(envp, STAGE_VARIABLE);
    const char *init = from_environment(envp, INIT_VARIABLE);

    if (argc != 1 || path == NULL || stage == NULL)
        return -1;
    if (!listed(stage, length_before(stage, '\0'), gate_stages))
        return 0;
    return ask_at_gate(path, stage, init == NULL ? "0" : init);
}

#endif
