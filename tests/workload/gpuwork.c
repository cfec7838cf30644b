#define _GNU_SOURCE
#include "gpuwork.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

volatile sig_atomic_t stopping, changes;

static const char USAGE[] =
    "usage: gpuwork [options]\n"
    "  --mib N            device memory per GPU (16)\n"
    "  --gpus LIST        all, or ordinals: 0,1 (all)\n"
    "  --tick MS          pause between ticks (100)\n"
    "  --rest K           the pause is at least K times as long as the tick took of the CPU (0)\n"
    "  --ticks N          end after N ticks (0: never)\n"
    "  --verify-every K   check every Kth tick (1)\n"
    "  --slices K         check a Kth of the memory at a tick, one after the other (1)\n"
    "  --touch N          a tick changes the first N MiB alone (0: all)\n"
    "  --data KIND        random words, zero ones, or weights: random, zero, bf16 (random)\n"
    "  --clock            say the time of day with each tick, and how often memory was changed\n"
    "  --busy MS          keep the GPU busy that long each tick (0)\n"
    "  --managed          use managed memory\n"
    "  --tcp              exchange a counter over a loopback connection each tick\n"
    "  --serve PORT       answer each number that a TCP connection sends with the next one\n"
    "  --seed N           seed of the pattern (1)\n"
    "  --delay SECONDS    start CUDA that much later (0)\n"
    "  --children K       start K children without CUDA\n"
    "  --late SECONDS     start a child that starts CUDA that much later\n"
    "  --inherit          after cuInit fork a child without exec, which never uses CUDA\n"
    "  --counters K       the same, K children that count, a line each tick\n"
    "  --watch            the counters also open a device node of their own, and keep it open\n"
    "  --vforks MS        start a child that starts programs all the time, each MS ms after its vfork\n"
    "  --locks KIND       threads that take libc's locks all the time: fork, malloc, stdio, dlopen, all\n"
    "  --lock-threads N   so many for each kind (1)\n"
    "  --procs P          be a launcher without CUDA, and start P workers with the other options\n"
    "  --collective       these meet in a collective each tick, and check its sum (softgpu only);\n"
    "                     each takes a random part of --tick and --busy each time\n"
    "  --rank R/P/GROUP   what each of them gets from the launcher\n"
    "  --sleep            do nothing at all until SIGTERM\n"
    "SIGUSR1 changes about 5 % of the memory, at the next tick.\n";

void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "gpuwork: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    exit(1);
}

static void change(int signal)
{
    (void)signal;
    changes++;
}

static void stop(int signal)
{
    (void)signal;
    stopping = 1;
}

void sleep_ms(uint64_t ms)
{
    /* With the signals blocked between test and sleep, none can come unseen. */
    sigset_t blocked, open;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGTERM);
    sigaddset(&blocked, SIGINT);
    sigprocmask(SIG_BLOCK, &blocked, &open);
    struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    if (!stopping)
        sigtimedwait(&blocked, NULL, &left) > 0 ? stopping = 1 : 0;
    sigprocmask(SIG_SETMASK, &open, NULL);
}

static unsigned long number(const char *text)
{
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno || *end || end == text || *text == '-')
        die("`%s` is not a number; see gpuwork --help", text);
    return value;
}

enum {
    MIB,
    GPUS,
    TICK,
    REST,
    TICKS,
    VERIFY,
    BUSY,
    MANAGED,
    TCP,
    SERVE,
    SEED,
    DELAY,
    CHILDREN,
    LATE,
    INHERIT,
    COUNTERS,
    WATCH,
    VFORKS,
    PROCS,
    COLLECTIVE,
    RANK,
    SLICES,
    TOUCH,
    DATA,
    CLOCK,
    LOCKS,
    LOCK_THREADS,
    SLEEP,
    HELP
};

static const struct option LONG[] = {
    {"mib", 1, NULL, MIB},
    {"gpus", 1, NULL, GPUS},
    {"tick", 1, NULL, TICK},
    {"rest", 1, NULL, REST},
    {"ticks", 1, NULL, TICKS},
    {"verify-every", 1, NULL, VERIFY},
    {"busy", 1, NULL, BUSY},
    {"managed", 0, NULL, MANAGED},
    {"tcp", 0, NULL, TCP},
    {"serve", 1, NULL, SERVE},
    {"seed", 1, NULL, SEED},
    {"delay", 1, NULL, DELAY},
    {"children", 1, NULL, CHILDREN},
    {"late", 1, NULL, LATE},
    {"inherit", 0, NULL, INHERIT},
    {"counters", 1, NULL, COUNTERS},
    {"watch", 0, NULL, WATCH},
    {"vforks", 1, NULL, VFORKS},
    {"procs", 1, NULL, PROCS},
    {"collective", 0, NULL, COLLECTIVE},
    {"rank", 1, NULL, RANK},
    {"slices", 1, NULL, SLICES},
    {"touch", 1, NULL, TOUCH},
    {"data", 1, NULL, DATA},
    {"clock", 0, NULL, CLOCK},
    {"locks", 1, NULL, LOCKS},
    {"lock-threads", 1, NULL, LOCK_THREADS},
    {"sleep", 0, NULL, SLEEP},
    {"help", 0, NULL, HELP},
    {NULL, 0, NULL, 0},
};

static enum data kind(const char *text)
{
    static const char *const NAMES[] = {[RANDOM] = "random", [ZERO] = "zero", [BF16] = "bf16"};
    for (enum data data = RANDOM; data <= BF16; data++)
        if (strcmp(text, NAMES[data]) == 0)
            return data;
    die("--data takes random, zero or bf16, and not `%s`", text);
}

static struct rank rank_of(const char *text)
{
    struct rank rank;
    unsigned long long group;
    int end = 0;
    if (sscanf(text, "%9u/%9u/%llx%n", &rank.number, &rank.count, &group, &end) != 3 || text[end] ||
        rank.number >= rank.count)
        die("--rank takes R/P/GROUP, and not `%s`", text);
    rank.group = group;
    return rank;
}

static void take(struct options *options, int which, const char *value)
{
    switch (which) {
    case MIB: options->mib = (unsigned)number(value); break;
    case GPUS: options->gpus = value; break;
    case TICK: options->tick_ms = (unsigned)number(value); break;
    case REST: options->rest = (unsigned)number(value); break;
    case TICKS: options->ticks = number(value); break;
    case VERIFY: options->verify_every = (unsigned)number(value); break;
    case BUSY: options->busy_ms = (unsigned)number(value); break;
    case MANAGED: options->managed = true; break;
    case TCP: options->tcp = true; break;
    case SERVE: options->port = (unsigned)number(value); break;
    case SEED: options->seed = number(value); break;
    case DELAY: options->delay = (unsigned)number(value); break;
    case CHILDREN: options->children = (unsigned)number(value); break;
    case LATE: options->late = (unsigned)number(value); break;
    case INHERIT: options->inherit = true; break;
    case COUNTERS: options->counters = (unsigned)number(value); break;
    case WATCH: options->watch = true; break;
    case VFORKS: options->vforks = (unsigned)number(value); break;
    case PROCS: options->procs = (unsigned)number(value); break;
    case COLLECTIVE: options->collective = true; break;
    case RANK: options->rank = rank_of(value); break;
    case SLICES: options->slices = (unsigned)number(value); break;
    case TOUCH: options->touch = (unsigned)number(value); break;
    case DATA: options->data = kind(value); break;
    case CLOCK: options->clock = true; break;
    case LOCKS: options->locks = value; break;
    case LOCK_THREADS: options->lock_threads = (unsigned)number(value); break;
    case SLEEP: options->sleep_only = true; break;
    case HELP: fputs(USAGE, stdout); exit(0);
    default: exit(2);
    }
}

static struct options parse(int argc, char **argv)
{
    struct options options = {
        .mib = 16, .tick_ms = 100, .verify_every = 1, .slices = 1, .seed = 1, .gpus = "all", .lock_threads = 1};
    for (int which; (which = getopt_long(argc, argv, "", LONG, NULL)) != -1;)
        take(&options, which, optarg);
    if (optind < argc)
        die("`%s` is not an option; see gpuwork --help", argv[optind]);
    if (!options.mib || options.mib > 16383 || !options.verify_every || !options.slices)
        die("--mib takes 1 to 16383, --verify-every and --slices at least 1");
    if (options.collective && !options.procs && !options.rank.count)
        die("--collective is for the workers of --procs");
    return options;
}

/* When it is and how often memory was changed, for those who measure a pause. */
static void print_clock(unsigned done)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now); /* CLOCK_MONOTONIC would go on from where it was after a restore */
    printf(" changes=%u at=%lld.%04ld", done, (long long)now.tv_sec, now.tv_nsec / 100000);
}

/* One line; false if a word was wrong. */
static bool report(const struct options *options, struct gpu *gpus, int count, uint64_t tick, unsigned done)
{
    char uuids[GPUS_MAX * 42] = "", *at = uuids;
    uint64_t sum = 0, part;
    bool good = true;
    for (int i = 0; i < count; i++) {
        good = gpu_check(gpu_at(gpus, i), tick, &part) && good;
        sum += part;
        at = i ? stpcpy(at, ",") : at;
        gpu_uuid(gpu_at(gpus, i), at);
        at += strlen(at);
    }
    printf("pid=%d tick=%llu %s gpu=%s sum=%016llx", getpid(), (unsigned long long)tick, good ? "ok" : "BAD",
           uuids, (unsigned long long)sum);
    if (options->clock)
        print_clock(done);
    putchar('\n');
    return good;
}

/* Ranks are never quite level: each takes another part of the time at each tick, as it is told. */
static unsigned part_of(unsigned ms, const struct options *options, uint64_t tick)
{
    uint64_t z = (options->seed << 32 ^ tick) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 29) * 0xbf58476d1ce4e5b9ull;
    return options->rank.count ? (unsigned)((z >> 32) % (ms + 1ull)) : ms;
}

/* What this thread has had of the CPU; less than before where a restore lies between. */
static uint64_t cpu_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* The pause after a tick that began when this thread had had so much of the CPU. */
static uint64_t pause_ms(const struct options *options, uint64_t tick, uint64_t begun_us)
{
    uint64_t now = cpu_us(), rest = now > begun_us ? (now - begun_us) * options->rest / 1000 : 0;
    uint64_t pause = part_of(options->tick_ms, options, tick);
    return rest > pause ? rest : pause;
}

static int work(const struct options *options)
{
    struct gpu *gpus;
    int count = gpu_open(options, &gpus);
    unsigned done = 0;
    if (options->inherit)
        family_inherit();
    family_count(options);
    if (options->tcp)
        tcp_start();
    locks_start(options);
    if (options->port)
        serve_start(options->port);
    for (uint64_t tick = 1; !stopping || options->rank.count; tick++) { /* ranks end together */
        uint64_t begun_us = cpu_us();
        for (; done < (unsigned)changes; done++)
            for (int i = 0; i < count; i++)
                gpu_change(gpu_at(gpus, i), done + 1);
        bool last = stopping;
        if (options->rank.count && !gpu_meet(gpu_at(gpus, 0), &options->rank, tick, &last)) {
            printf("pid=%d tick=%llu BAD collective\n", getpid(), (unsigned long long)tick);
            return 1;
        }
        for (int i = 0; i < count; i++)
            gpu_tick(gpu_at(gpus, i), part_of(options->busy_ms, options, tick));
        if (options->tcp && !tcp_exchange(tick)) {
            printf("pid=%d tick=%llu BAD tcp\n", getpid(), (unsigned long long)tick);
            return 1;
        }
        if (tick % options->verify_every == 0 && !report(options, gpus, count, tick, done))
            return 1;
        if (tick == options->ticks || last)
            break;
        sleep_ms(pause_ms(options, tick, begun_us));
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct options options = parse(argc, argv);
    struct sigaction action = {.sa_handler = stop, .sa_flags = SA_RESTART};
    setvbuf(stdout, NULL, _IOLBF, 0);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    action.sa_handler = change;
    sigaction(SIGUSR1, &action, NULL);
    if (options.procs)
        return family_run_workers(argc, argv, &options);
    if (options.sleep_only) {
        while (!stopping)
            sleep_ms(1000000);
        return 0;
    }
    family_start(&options, "77");
    for (unsigned waited = 0; waited < options.delay && !stopping; waited++)
        sleep_ms(1000);
    int status = stopping ? 0 : work(&options);
    family_end();
    return status;
}
