#define _GNU_SOURCE
#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "host.h"

#define FILE_MAX 16384
#define HANG_SLICE_MS 20u

struct line {
    char operation[16], comm[32];
    struct fault fault;
    long count; /* -1: no end */
};

static bool parse_word(char *word, struct line *line)
{
    char *value = strchr(word, '='), *end;
    if (strcmp(word, "die") == 0)
        return line->fault.die = true;
    if (strcmp(word, "keeps-gpu") == 0)
        return line->fault.keeps_gpu = true;
    if (!value || !value[1])
        return false;
    *value++ = '\0';
    if (strcmp(word, "comm") == 0)
        return snprintf(line->comm, sizeof(line->comm), "%s", value) > 0;
    if (strcmp(word, "state") == 0)
        return line->fault.fail = strcmp(value, "failed") == 0;
    if (strcmp(word, "spin") == 0) {
        line->fault.spin = strcmp(value, "handler") == 0 ? SPIN_HANDLER : SPIN_OTHERS;
        return line->fault.spin == SPIN_HANDLER || strcmp(value, "others") == 0;
    }
    if (strcmp(word, "result") == 0) {
        line->fault.result = result_by_name(value);
        return line->fault.result > 0;
    }
    long number = strtol(value, &end, 10);
    if (*end || number < 0)
        return false;
    if (strcmp(word, "hang") == 0)
        line->fault.hang_ms = (unsigned)number;
    else if (strcmp(word, "count") == 0)
        line->count = number;
    else
        return false;
    return true;
}

/* False for blank lines and comments, and for what is not understood, which is said. */
static bool parse(const char *text, struct line *line)
{
    char copy[256], *save = NULL;
    snprintf(copy, sizeof(copy), "%s", text);
    *line = (struct line){.count = -1};
    char *word = strtok_r(copy, " \t\r", &save);
    if (!word || *word == '#')
        return false;
    snprintf(line->operation, sizeof(line->operation), "%s", word);
    while ((word = strtok_r(NULL, " \t\r", &save)))
        if (!parse_word(word, line)) {
            fprintf(stderr, "softgpu: %s/faults: `%s` is not understood; softgpu/README.md has the grammar\n",
                    state_dir(), text);
            return false;
        }
    if (line->fault.fail && !line->fault.result)
        line->fault.result = CUDA_ERROR_UNKNOWN;
    return true;
}

/* The name of the process, which is its first thread's, not the restore thread's. */
static void own_comm(char *comm, int size)
{
    FILE *file = fopen("/proc/self/comm", "re");
    if (!file || !fgets(comm, size, file))
        comm[0] = '\0';
    comm[strcspn(comm, "\n")] = '\0';
    if (file)
        fclose(file);
}

/* Writes the file again with the count of one line lowered. A file that cannot be written keeps its counts:
 * such faults do not end. */
static void take_one(int fd, const char *text, const char *at, const char *end, long count)
{
    static char out[FILE_MAX + 64];
    char *to = mempcpy(out, text, (size_t)(at - text));
    if (count > 1) {
        const char *word = memmem(at, (size_t)(end - at), "count=", 6) + 6;
        const char *rest = word + strspn(word, "0123456789");
        to = mempcpy(to, at, (size_t)(word - at));
        to += sprintf(to, "%ld", count - 1);
        to = mempcpy(to, rest, (size_t)(end - rest));
    } else if (*end) {
        end++;
    }
    to = mempcpy(to, end, strlen(end));
    if (pwrite(fd, out, (size_t)(to - out), 0) == to - out)
        (void)!ftruncate(fd, to - out);
}

static struct fault search(int fd, char *text, const char *operation)
{
    char comm[32], one[256];
    struct line line;
    own_comm(comm, sizeof(comm));
    for (char *at = text, *end; *at; at = *end ? end + 1 : end) {
        end = strchrnul(at, '\n');
        snprintf(one, sizeof(one), "%.*s", (int)(end - at), at);
        if (!parse(one, &line) || strcmp(line.operation, operation) != 0)
            continue;
        if ((line.comm[0] && strcmp(line.comm, comm) != 0) || line.count == 0)
            continue;
        if (line.count > 0)
            take_one(fd, text, at, end, line.count);
        return line.fault;
    }
    return (struct fault){0};
}

struct fault fault_take(const char *operation)
{
    static char text[FILE_MAX]; /* only the restore thread comes here */
    char path[4096];
    struct fault fault = {0};
    snprintf(path, sizeof(path), "%s/faults", state_dir());
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 && errno != ENOENT)
        fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fault;
    while (flock(fd, LOCK_EX) < 0 && errno == EINTR)
        ;
    ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    if (n > 0) {
        text[n] = '\0';
        fault = search(fd, text, operation);
    }
    close(fd);
    return fault;
}

/* Until the time is over, or the file of faults is gone. */
void fault_hang(unsigned ms)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/faults", state_dir());
    for (unsigned slice; ms && access(path, F_OK) == 0; ms -= slice) {
        slice = ms < HANG_SLICE_MS ? ms : HANG_SLICE_MS;
        struct timespec left = {0, (long)slice * 1000000};
        while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
            ;
    }
}

void fault_die(const struct fault *fault)
{
    if (fault->die)
        kill(getpid(), SIGKILL);
}
