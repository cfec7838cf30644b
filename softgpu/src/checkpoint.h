/* What the restore thread does with the process's GPU memory. Both run with the gate closed and nothing in
 * flight. */
#ifndef SOFTGPU_CHECKPOINT_H
#define SOFTGPU_CHECKPOINT_H

#include "cuda_abi.h"
#include "fault.h"

/* Moves all device memory into one anonymous mapping, lets go of the GPUs. On failure nothing has changed. */
CUresult checkpoint_save(const struct fault *fault);

/* Puts it back, onto the GPUs that the pairs say. On failure the process is as checkpointed as before. */
CUresult checkpoint_restore(const CUcheckpointGpuPair *pairs, unsigned count, const struct fault *fault);

#endif
