/* What the processes of several ranks do together. */
#ifndef SOFTGPU_COLLECTIVE_H
#define SOFTGPU_COLLECTIVE_H

#include "process.h"

/* Waits until all ranks of the group have called it, each with a GPU of its process' own that has a context;
 * `value` is the sum of all then. Through the gate, so that a lock waits for it. */
CUresult collective_sum(const struct device *device, uint64_t group, uint32_t ranks, uint32_t rank,
                        uint64_t *value);

#endif
