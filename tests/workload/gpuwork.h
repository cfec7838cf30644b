/*
 * gpuwork: a program that uses the GPU and notices every wrong bit. It knows nothing of softgpu: it loads
 * libcuda.so.1 by name and carries its kernels as PTX, so it runs on a real GPU too.
 */
#ifndef GPUWORK_H
#define GPUWORK_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#define GPUS_MAX 16

struct options {
    unsigned mib, children, counters, procs, late, delay, busy_ms, tick_ms, verify_every, touch, slices;
    unsigned rest;   /* times the CPU time of a tick, 0: as --tick says */
    unsigned vforks; /* ms, 0: none */
    struct rank {
        unsigned number, count; /* of a collective; count 0: none */
        uint64_t group;
    } rank;
    unsigned port;   /* of the server, 0: none */
    uint64_t ticks, seed;
    bool managed, tcp, inherit, watch, sleep_only, clock, collective;
    enum data { RANDOM, ZERO, BF16 } data;
    const char *locks; /* which locks are taken all the time; NULL: none */
    unsigned lock_threads;
    const char *gpus; /* "all", or ordinals with commas */
};

extern volatile sig_atomic_t stopping; /* SIGTERM or SIGINT came */
extern volatile sig_atomic_t changes;  /* how often SIGUSR1 came */

/* Says what went wrong and ends the process with status 1. */
__attribute__((noreturn, format(printf, 1, 2))) void die(const char *format, ...);

/* Sleeps until the time is over or the program shall stop. */
void sleep_ms(uint64_t ms);

/* part_gpu.c */
struct gpu;
int gpu_open(const struct options *options,
             struct gpu **gpus); /* cuInit, contexts, modules, memory with its pattern; number of GPUs */
void gpu_tick(struct gpu *gpu, unsigned busy_ms); /* adds one to every word, or to those of --touch */
bool gpu_meet(struct gpu *gpu, const struct rank *rank, uint64_t tick,
              bool *stop); /* a collective: false if its sum is wrong; `stop` if any rank stops */
void gpu_change(struct gpu *gpu, unsigned change); /* gives about 5 % of the words another pattern */
bool gpu_check(struct gpu *gpu, uint64_t tick,
               uint64_t *sum); /* compares every word, or those of one slice, with pattern + tick */
void gpu_uuid(struct gpu *gpu, char *text);                    /* as the driver says it now; 41 bytes */
struct gpu *gpu_at(struct gpu *gpus, int index);

/* part_family.c */
void family_start(const struct options *options, const char *seed_of_late);
int family_run_workers(int argc, char **argv,
                       const struct options *options); /* the launcher's whole life; exit status */
void family_inherit(void);
void family_count(const struct options *options); /* the children of --counters */
void family_end(void);

/* part_locks.c */
void locks_start(const struct options *options);

/* part_tcp.c */
void tcp_start(void);
bool tcp_exchange(uint64_t counter);

/* part_serve.c */
void serve_start(unsigned port);

#endif
