/* The host as `gpus.conf` in the state directory describes it, and which of its GPUs this process may use. */
#ifndef SOFTGPU_HOST_H
#define SOFTGPU_HOST_H

#include <stdbool.h>
#include <stdint.h>

#define GPU_MAX 16
#define UUID_TEXT 41 /* "GPU-" + 36 characters + NUL */
#define GPU_NAME 96  /* as NVML's NVML_DEVICE_NAME_V2_BUFFER_SIZE */

struct gpu {
    unsigned char uuid[16];
    char uuid_text[UUID_TEXT];
    char name[GPU_NAME];
    unsigned minor;
    int cc_major, cc_minor;
    uint64_t memory;
    bool mig, persistence;
    int compute_mode; /* CUcomputemode: 0 default, 2 prohibited, 3 exclusive process */
    unsigned pci_domain, pci_bus, pci_device;
};

struct host {
    char driver[80];
    int cuda;       /* 13000 for 13.0, as cuDriverGetVersion says it */
    unsigned major; /* of the NVIDIA nodes; 195 unless the file says otherwise */
    int count;
    struct gpu gpus[GPU_MAX];
};

/* $SOFTGPU_DIR, or /run/softgpu. */
const char *state_dir(void);

/* Reads gpus.conf. 0, -ENOENT (no file), or -EINVAL (a line is not understood; stderr names it). */
int host_read(struct host *host);

/* Path of a GPU's device node; `minor` 255 is nvidiactl. */
void node_path(char *path, unsigned long size, unsigned minor);

/* True if the node is there and both its mode and the device cgroup let this process open it. No descriptor
 * stays open. */
bool node_usable(const struct host *host, unsigned minor);

#define CTL_MINOR 255

#endif
