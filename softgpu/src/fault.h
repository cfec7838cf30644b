/* Faults on request: lines in <state dir>/faults, applied in the target of an operation. softgpu/README.md
 * has the grammar. */
#ifndef SOFTGPU_FAULT_H
#define SOFTGPU_FAULT_H

#include <stdbool.h>

struct fault {
    int result; /* CUDA_SUCCESS: none asked for */
    unsigned hang_ms;
    enum { SPIN_NOT, SPIN_HANDLER, SPIN_OTHERS } spin; /* yield until that thread, or any other, has run */
    bool die, fail, keeps_gpu; /* keeps_gpu: hang with the lock of a GPU's memory held */
};

/* The first line for this operation and process, and one use of it taken. All zero when there is none. */
struct fault fault_take(const char *operation);

void fault_hang(unsigned ms);

/* Kills this process if the fault says so. */
void fault_die(const struct fault *fault);

#endif
