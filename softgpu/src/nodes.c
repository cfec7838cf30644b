/*
 * Holding a GPU: O_PATH descriptors on its device nodes, which is as near as one gets to an open GPU without
 * a kernel driver. They show as /dev/nvidia0 in /proc/PID/fd, CRIU refuses to dump them, fork inherits them,
 * exec drops them.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>

#include "process.h"

static int hold(const char *path) { return open(path, O_PATH | O_CLOEXEC); }

static void release(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

bool nodes_hold(struct device *device)
{
    char path[64];
    node_path(path, sizeof(path), device->gpu.minor);
    device->node_fd = hold(path);
    return device->node_fd >= 0;
}

bool nodes_hold_control(void)
{
    process.ctl_fd = hold("/dev/nvidiactl");
    process.uvm_fd = hold("/dev/nvidia-uvm"); /* may be absent */
    return process.ctl_fd >= 0;
}

void nodes_release(void)
{
    for (int i = 0; i < process.visible_count; i++)
        release(&process.visible[i].node_fd);
    release(&process.ctl_fd);
    release(&process.uvm_fd);
}
