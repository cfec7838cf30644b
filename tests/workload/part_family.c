/* The other processes: children without CUDA, a late starter, workers of a launcher, and the child by fork
 * alone. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gpuwork.h"

#define FAMILY_MAX 256
/* For a member to end after SIGTERM; and where a worker has failed, because a rank whose peer has ended waits
 * for it on the GPU without end. */
#define ENDING_MS 30000
#define FAILED_MS 1000

static pid_t members[FAMILY_MAX];
static int member_count;

static pid_t fork_member(void)
{
    if (member_count == FAMILY_MAX)
        die("more than %d child processes asked for; ask for fewer", FAMILY_MAX);
    fflush(stdout);
    pid_t pid = fork();
    if (pid < 0)
        die("cannot fork: %s", strerror(errno));
    if (pid == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* whatever becomes of the parent, nothing of it is left */
    else
        members[member_count++] = pid;
    return pid;
}

static void spawn(char *const *argv)
{
    if (fork_member() == 0) {
        execv("/proc/self/exe", argv);
        _exit(127);
    }
}

/* As a shell does for each command: it waits in the kernel until the program has begun. */
static void start_programs(unsigned ms)
{
    while (!stopping) {
        pid_t pid = vfork();
        if (pid == 0) {
            nanosleep(&(struct timespec){ms / 1000, (long)(ms % 1000) * 1000000}, NULL);
            execl("/bin/true", "true", NULL);
            _exit(127);
        }
        if (pid < 0 || waitpid(pid, NULL, 0) < 0)
            die("cannot start a program: %s", strerror(errno));
        sleep_ms(10);
    }
    _exit(0);
}

void family_start(const struct options *options, const char *seed_of_late)
{
    if (options->vforks && fork_member() == 0)
        start_programs(options->vforks);
    for (unsigned i = 0; i < options->children; i++)
        spawn((char *[]){"gpuwork", "--sleep", NULL});
    if (options->late) {
        char seconds[16], mib[16], tick[16];
        snprintf(seconds, sizeof(seconds), "%u", options->late);
        snprintf(mib, sizeof(mib), "%u", options->mib);
        snprintf(tick, sizeof(tick), "%u", options->tick_ms);
        spawn((char *[]){"gpuwork", "--delay", seconds, "--mib", mib, "--tick", tick, "--gpus",
                         (char *)options->gpus, "--seed", (char *)seed_of_late, NULL});
    }
}

/* As a PyTorch DataLoader worker: by fork after cuInit, so it has the parent's open device nodes, and never
 * calls CUDA. */
void family_inherit(void)
{
    if (fork_member() == 0) {
        while (!stopping)
            sleep_ms(1000000);
        _exit(0);
    }
}

/* The same, and it shows that it lives. O_PATH needs no driver behind the node. */
static void count(const struct options *options)
{
    if (options->watch && open("/dev/nvidiactl", O_PATH | O_CLOEXEC) < 0)
        die("cannot open /dev/nvidiactl: %s", strerror(errno));
    for (unsigned long long tick = 1; !stopping; tick++) {
        printf("pid=%d tick=%llu ok\n", getpid(), tick);
        sleep_ms(options->tick_ms);
    }
    _exit(0);
}

void family_count(const struct options *options)
{
    for (unsigned i = 0; i < options->counters; i++)
        if (fork_member() == 0)
            count(options);
}

/* By SIGTERM, and by SIGKILL after so long. */
static void end_members(unsigned ms)
{
    for (int i = 0; i < member_count; i++)
        kill(members[i], SIGTERM);
    for (unsigned waited = 0; member_count; waited++) {
        for (int i = member_count - 1; i >= 0; i--) {
            if (waited == ms)
                kill(members[i], SIGKILL);
            pid_t pid = waitpid(members[i], NULL, waited < ms ? WNOHANG : 0);
            if (pid != 0 && (pid > 0 || errno != EINTR))
                members[i] = members[--member_count];
        }
        if (member_count)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}

void family_end(void) { end_members(ENDING_MS); }

/* The launcher's own command line, with --procs 0, a seed of its own for each worker, and its rank at the end,
 * where they win. */
static void spawn_worker(int argc, char **argv, uint64_t seed, const struct rank *rank)
{
    char text[24], whose[64];
    char **line = calloc((size_t)argc + 7, sizeof(*line));
    if (!line)
        die("out of memory");
    memcpy(line, argv, (size_t)argc * sizeof(*line));
    snprintf(text, sizeof(text), "%llu", (unsigned long long)seed);
    line[argc] = "--procs";
    line[argc + 1] = "0";
    line[argc + 2] = "--seed";
    line[argc + 3] = text;
    if (rank->count) {
        snprintf(whose, sizeof(whose), "%u/%u/%llx", rank->number, rank->count,
                 (unsigned long long)rank->group);
        line[argc + 4] = "--rank";
        line[argc + 5] = whose;
    }
    spawn(line);
    free(line);
}

static void forget(pid_t pid)
{
    for (int i = 0; i < member_count; i++)
        if (members[i] == pid)
            members[i] = members[--member_count];
}

int family_run_workers(int argc, char **argv, const struct options *options)
{
    sigset_t set, before;
    int status = 0;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    struct rank rank = {.count = options->collective ? options->procs : 0};
    if (getrandom(&rank.group, sizeof(rank.group), 0) != sizeof(rank.group))
        die("no random number: %s", strerror(errno));
    for (; rank.number < options->procs; rank.number++)
        spawn_worker(argc, argv, options->seed + rank.number, &rank);
    sigprocmask(SIG_BLOCK, &set, &before);
    while (!stopping && !status && member_count) {
        int one;
        pid_t pid;
        while (!status && (pid = waitpid(-1, &one, WNOHANG)) > 0) {
            forget(pid);
            status = WIFEXITED(one) && WEXITSTATUS(one) == 0 ? 0 : 1;
        }
        if (member_count && !status && sigwaitinfo(&set, NULL) != SIGCHLD && errno != EINTR)
            stopping = 1;
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    end_members(status ? FAILED_MS : ENDING_MS);
    return status;
}
