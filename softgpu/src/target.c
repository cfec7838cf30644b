/* The target's side: the restore thread, the process state, and the mailbox. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "checkpoint.h"
#include "fault.h"
#include "mailbox.h"
#include "process.h"

#define CONFIRM_MS 1000 /* callers look every few milliseconds */

/* In .data, not .bss, so that it stands in a mapping that bears the library's name. The magic is random. */
__attribute__((section(".data"), aligned(64))) struct mailbox mailbox = {
    .magic = {0x9e, 0x3b, 0xf4, 0x71, 0x0d, 0xc8, 0x56, 0xa2, 0xe7, 0x1c, 0x83, 0x6f, 0xd9, 0x44, 0xb5, 0x2a},
    .version = MAILBOX_VERSION,
    .size = sizeof(struct mailbox),
};

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* As NVIDIA's driver, a lock needs a second thread of the driver's, and waits for it without a deadline: a
 * process of which the restore thread alone may run is not locked. */
static sem_t handler_asked, handler_answered;

static void wait_for(sem_t *semaphore)
{
    while (sem_wait(semaphore) < 0 && errno == EINTR)
        ;
}

static void *handler_thread(void *unused)
{
    (void)unused;
    pthread_setname_np(pthread_self(), "cuda-EvtHandlr");
    for (;;) {
        wait_for(&handler_asked);
        sem_post(&handler_answered);
    }
    return NULL;
}

static void ask_handler(void)
{
    sem_post(&handler_asked);
    wait_for(&handler_answered);
}

static uint64_t cpu_time(clockid_t clock)
{
    struct timespec used;
    clock_gettime(clock, &used);
    return (uint64_t)used.tv_sec * 1000000000 + (uint64_t)used.tv_nsec;
}

/* What the other threads of this process have run, in nanoseconds. */
static uint64_t others_ran(void)
{
    uint64_t own = cpu_time(CLOCK_THREAD_CPUTIME_ID);
    return cpu_time(CLOCK_PROCESS_CPUTIME_ID) - own;
}

/* NVIDIA's restore thread has been seen to yield, and nothing else, before it takes anything: it waits for what
 * another thread does. */
static void spin(const struct fault *fault)
{
    const uint64_t enough = 200 * 1000, before = others_ran();
    if (fault->spin == SPIN_HANDLER) {
        sem_post(&handler_asked);
        while (sem_trywait(&handler_answered) < 0)
            sched_yield();
    }
    while (fault->spin == SPIN_OTHERS && others_ran() < before + enough)
        sched_yield();
}

static CUresult fail(const struct fault *fault)
{
    if (fault->fail) {
        mailbox.state = CU_PROCESS_STATE_FAILED;
        gate_break();
    }
    return (CUresult)fault->result;
}

static CUresult lock(unsigned timeout_ms)
{
    struct fault fault = fault_take("lock");
    uint64_t deadline = now_ms() + timeout_ms;
    if (!gate_close(timeout_ms))
        return CUDA_ERROR_NOT_READY;
    if (timeout_ms &&
        now_ms() + fault.hang_ms >= deadline) { /* as if a call had been in flight for so long */
        uint64_t now = now_ms();
        fault_hang(now < deadline ? (unsigned)(deadline - now) : 0);
        gate_open();
        return CUDA_ERROR_NOT_READY;
    }
    fault_hang(fault.hang_ms);
    fault_die(&fault);
    if (fault.result) {
        CUresult result = fail(&fault);
        gate_open();
        return result;
    }
    mailbox.state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

/* The driver's own locks are held for moments of a checkpoint and a restore, in which its thread may be stopped
 * and its caller killed. */
static void hang(const struct fault *fault)
{
    int kept = fault->keeps_gpu && process.visible_count ? store_lock(&process.visible[0].gpu) : -1;
    fault_hang(fault->hang_ms);
    store_unlock(kept);
}

static CUresult checkpoint(void)
{
    struct fault fault = fault_take("checkpoint");
    hang(&fault);
    spin(&fault);
    if (fault.result)
        return fail(&fault);
    CUresult result = checkpoint_save(&fault);
    if (result == CUDA_SUCCESS)
        mailbox.state = CU_PROCESS_STATE_CHECKPOINTED;
    return result;
}

static CUresult restore(const struct request *request)
{
    struct fault fault = fault_take("restore");
    hang(&fault);
    spin(&fault);
    if (fault.result)
        return fail(&fault);
    CUresult result = checkpoint_restore(request->pairs, request->pair_count, &fault);
    if (result == CUDA_SUCCESS)
        mailbox.state = CU_PROCESS_STATE_LOCKED;
    return result;
}

static CUresult unlock(void)
{
    struct fault fault = fault_take("unlock");
    fault_hang(fault.hang_ms);
    fault_die(&fault);
    if (fault.result)
        return fail(&fault);
    mailbox.state = CU_PROCESS_STATE_RUNNING;
    gate_open();
    return CUDA_SUCCESS;
}

/* NVIDIA's restore thread uses malloc, stdio and the loader of the process that it lives in: it waits where a
 * thread of that was stopped with one of their locks. Here it takes each of them: every arena's of malloc, the
 * list of open files' and that of stderr, the loader's. */
static void use_libc(void)
{
    free(malloc(64 << 10));
    (void)mallinfo2();
    FILE *file = fopen("/dev/null", "we");
    if (file) {
        fputs("softgpu\n", file);
        fclose(file);
    }
    flockfile(stderr);
    funlockfile(stderr);
    void *loaded = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    if (loaded)
        dlclose(loaded);
}

static CUresult serve(const struct request *request)
{
    static const CUprocessState NEEDED[] = {
        [OP_LOCK] = CU_PROCESS_STATE_RUNNING,
        [OP_CHECKPOINT] = CU_PROCESS_STATE_LOCKED,
        [OP_RESTORE] = CU_PROCESS_STATE_CHECKPOINTED,
        [OP_UNLOCK] = CU_PROCESS_STATE_LOCKED,
    };
    if (request->operation ==
        OP_STATE) /* the caller reads it; that this thread answers is all that is asked */
        return CUDA_SUCCESS;
    if (request->operation < OP_STATE || request->operation > OP_UNLOCK || request->pair_count > GPU_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (mailbox.state != NEEDED[request->operation])
        return CUDA_ERROR_ILLEGAL_STATE;
    use_libc();
    switch (request->operation) {
    case OP_LOCK:
        ask_handler();
        return lock(request->timeout_ms);
    case OP_CHECKPOINT: return checkpoint();
    case OP_RESTORE: return restore(request);
    default: return unlock();
    }
}

/* Another process may write to the slot at any moment: volatile, and byte by byte, so that the compiler reads
 * it each time. */
static void copy_request(struct request *to)
{
    const volatile unsigned char *from = (const volatile unsigned char *)&mailbox.request;
    for (size_t i = 0; i < sizeof(*to); i++)
        ((unsigned char *)to)[i] = from[i];
}

static bool answered(uint64_t nonce)
{
    for (int i = 0; i < ANSWERS; i++)
        if (mailbox.answers[i].nonce == nonce)
            return true;
    return false;
}

static void empty_slot(uint64_t nonce)
{
    __atomic_compare_exchange_n(&mailbox.request.nonce, &nonce, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void answer(uint64_t nonce, CUresult result)
{
    struct answer *to = &mailbox.answers[mailbox.answered++ % ANSWERS];
    __atomic_store_n(&to->result, (int64_t)result, __ATOMIC_SEQ_CST);
    __atomic_store_n(&to->nonce, nonce, __ATOMIC_SEQ_CST);
    __atomic_store_n(&mailbox.current, 0, __ATOMIC_SEQ_CST);
    empty_slot(nonce);
}

/* True if the caller of the request lives and still waits. A process may have been stopped since it asked. */
static bool confirmed(uint64_t nonce)
{
    uint64_t deadline = now_ms() + CONFIRM_MS;
    __atomic_store_n(&mailbox.current, nonce, __ATOMIC_SEQ_CST);
    do {
        if (__atomic_load_n(&mailbox.confirmed, __ATOMIC_SEQ_CST) == nonce)
            return true;
        nanosleep(&(struct timespec){0, 20000}, NULL);
    } while (now_ms() < deadline);
    return false;
}

static void look_into_mailbox(void)
{
    struct request request;
    copy_request(&request);
    if (!request.nonce)
        return;
    if (request.check != request_check(&request) || answered(request.nonce)) {
        empty_slot(request.nonce);
    } else if (confirmed(request.nonce)) {
        answer(request.nonce, serve(&request));
    } else {
        __atomic_store_n(&mailbox.current, 0, __ATOMIC_SEQ_CST);
        empty_slot(request.nonce);
    }
}

static void *restore_thread(void *unused)
{
    sigset_t set;
    (void)unused;
    pthread_setname_np(pthread_self(), "cuda-restore");
    sigemptyset(&set);
    sigaddset(&set, MAILBOX_SIGNAL);
    mailbox.self = (uint64_t)(uintptr_t)&mailbox;
    mailbox.tid = gettid();
    __atomic_store_n(&mailbox.pid, getpid(), __ATOMIC_SEQ_CST); /* last: from now on it may be found */
    /* A caller that lets this thread alone run, by ptrace, blocks its signals: then it has to look by itself. */
    const struct timespec while_blocked = {.tv_nsec = 20 * 1000 * 1000};
    for (;;)
        if (sigtimedwait(&set, NULL, &while_blocked) > 0 || errno == EAGAIN)
            look_into_mailbox();
    return NULL;
}

int target_start(void)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    sem_init(&handler_asked, 0, 0);
    sem_init(&handler_answered, 0, 0);
    if (getrandom(&mailbox.session, sizeof(mailbox.session), 0) != sizeof(mailbox.session))
        return -EIO;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* The thread must have every signal blocked from its first instruction: the mailbox's would kill the
     * process. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attributes, handler_thread, NULL);
    if (!error)
        error = pthread_create(&thread, &attributes, restore_thread, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    while (!error && !__atomic_load_n(&mailbox.pid, __ATOMIC_SEQ_CST))
        sched_yield();
    return -error;
}
