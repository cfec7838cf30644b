/* What one CUDA process is: its GPUs, contexts, memory, and the gate that every call goes through. */
#ifndef SOFTGPU_PROCESS_H
#define SOFTGPU_PROCESS_H

#include <pthread.h>
#include <stdbool.h>

#include "cuda_abi.h"
#include "host.h"
#include "store.h"

/*
 * Device addresses: GPU i of the process owns 16 TiB from here. Nothing on x86-64 or aarch64 maps memory
 * there, so a program that follows such a pointer on the CPU gets SIGSEGV, as with a real GPU.
 */
#define DEVICE_BASE 0x00f0000000000000ull
#define DEVICE_SPAN (1ull << 44)
#define CONTEXT_BYTES GRANULE /* what a context takes on the GPU */

struct context {
    struct context *next;
    int visible; /* index into process.visible */
    int references;
    bool primary;
};

struct allocation {
    struct allocation *next; /* by address */
    struct context *context;
    uint64_t offset, size, span; /* offset within the GPU's address range; span is size in whole granules */
};

/* Host memory that the driver gave out: managed, or page-locked. */
struct hostmem {
    struct hostmem *next;
    char *base;
    size_t size;
    int visible;
    bool managed;
};

struct device {
    struct gpu gpu;
    int node_fd; /* O_PATH, held while the process holds the GPU; -1 otherwise */
    int contexts;
    struct client client;
    struct allocation *allocations;
};

struct process {
    pid_t pid; /* 0 before cuInit; differs from getpid() in a child by fork */
    int cuda;
    int ctl_fd, uvm_fd;
    int visible_count;
    struct device visible[GPU_MAX]; /* every GPU whose node the process may open: what a restore must list */
    int ordinal_count;
    int ordinals[GPU_MAX]; /* CUDA ordinal -> index into visible, after CUDA_VISIBLE_DEVICES */
    struct context *contexts;
    struct hostmem *hostmem;
    pthread_mutex_t lock; /* for the lists; never held during I/O of a size the caller chose */
};

extern struct process process;

/* gate.c */
CUresult gate_enter(void);            /* blocks while locked */
CUresult gate_leave(CUresult result); /* returns its argument */
bool gate_close(unsigned timeout_ms); /* false when calls are still in flight at the deadline (0: none); the
                                         gate is open again then */
void gate_open(void);
void gate_break(void); /* the process is lost: every call answers UNKNOWN from now on */

#define ENTER()                           \
    do {                                  \
        CUresult entered_ = gate_enter(); \
        if (entered_ != CUDA_SUCCESS)     \
            return entered_;              \
    } while (0)

/* The body of an API function: an expression evaluated inside the gate … */
#define THROUGH_GATE(expression)       \
    do {                               \
        ENTER();                       \
        return gate_leave(expression); \
    } while (0)

/* … and under the lock of the lists. */
#define GUARDED(expression)                  \
    do {                                     \
        ENTER();                             \
        pthread_mutex_lock(&process.lock);   \
        CUresult result_ = (expression);     \
        pthread_mutex_unlock(&process.lock); \
        return gate_leave(result_);          \
    } while (0)

/* nodes.c */
bool nodes_hold(struct device *device); /* opens the GPU's node; false if it cannot */
bool nodes_hold_control(void);
void nodes_release(void);

/* context.c; the current context of this thread, checked */
CUresult context_current(struct context **context);

/* memory.c */
struct span {
    const struct client *client;
    uint64_t offset;
    char *host;
};
CUresult memory_resolve(CUdeviceptr address, size_t size, struct span *span);
CUresult memory_read(CUdeviceptr from, void *to, size_t size);
CUresult memory_write(CUdeviceptr to, const void *from, size_t size);
void memory_free_context(struct context *context); /* with process.lock held */

/* target.c, or nothing in a driver without the checkpoint API */
int target_start(void); /* starts the restore thread and opens the mailbox; -errno */

CUresult result_of_errno(int negative);

/* A piece of work that keeps the buffers of copies and kernels small. */
#define CHUNK ((size_t)64 << 10)

#endif
