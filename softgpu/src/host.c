#define _GNU_SOURCE
#include "host.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

const char *state_dir(void)
{
    const char *dir = getenv("SOFTGPU_DIR");
    return dir && *dir ? dir : "/run/softgpu";
}

static bool parse_uuid(const char *text, struct gpu *gpu)
{
    const char *p = text;
    if (strncmp(p, "GPU-", 4) != 0 || strlen(p) != UUID_TEXT - 1)
        return false;
    p += 4;
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        if (i == 4 || i == 6 || i == 8 || i == 10)
            if (*p++ != '-')
                return false;
        if (!isxdigit((unsigned char)p[0]) || !isxdigit((unsigned char)p[1]) || sscanf(p, "%2x", &byte) != 1)
            return false;
        gpu->uuid[i] = (unsigned char)byte;
        p += 2;
    }
    snprintf(gpu->uuid_text, sizeof(gpu->uuid_text), "%s", text);
    return true;
}

static bool parse_size(const char *text, uint64_t *bytes)
{
    char *end;
    errno = 0;
    *bytes = strtoull(text, &end, 10);
    if (errno || end == text)
        return false;
    if (strcmp(end, "KiB") == 0)
        *bytes <<= 10;
    else if (strcmp(end, "MiB") == 0)
        *bytes <<= 20;
    else if (strcmp(end, "GiB") == 0)
        *bytes <<= 30;
    else if (*end)
        return false;
    return *bytes != 0;
}

static bool parse_switch(const char *text, bool *on)
{
    *on = strcmp(text, "on") == 0;
    return *on || strcmp(text, "off") == 0;
}

static bool parse_compute_mode(const char *text, int *mode)
{
    static const char *const NAMES[] = {"default", NULL, "prohibited", "exclusive-process"};
    for (int i = 0; i < 4; i++)
        if (NAMES[i] && strcmp(text, NAMES[i]) == 0) {
            *mode = i;
            return true;
        }
    return false;
}

static bool parse_field(char *key, struct gpu *gpu)
{
    char *value = strchr(key, '=');
    int end = 0;
    if (!value)
        return false;
    *value++ = '\0';
    if (strcmp(key, "uuid") == 0)
        return parse_uuid(value, gpu);
    if (strcmp(key, "minor") == 0)
        return sscanf(value, "%3u%n", &gpu->minor, &end) == 1 && !value[end] && gpu->minor < CTL_MINOR;
    if (strcmp(key, "cc") == 0)
        return sscanf(value, "%3d.%3d%n", &gpu->cc_major, &gpu->cc_minor, &end) == 2 && !value[end];
    if (strcmp(key, "memory") == 0)
        return parse_size(value, &gpu->memory);
    if (strcmp(key, "mig") == 0)
        return parse_switch(value, &gpu->mig);
    if (strcmp(key, "persistence") == 0)
        return parse_switch(value, &gpu->persistence);
    if (strcmp(key, "compute-mode") == 0)
        return parse_compute_mode(value, &gpu->compute_mode);
    if (strcmp(key, "pci") == 0)
        return sscanf(value, "%8x:%2x:%2x.0%n", &gpu->pci_domain, &gpu->pci_bus, &gpu->pci_device, &end) ==
                   3 &&
               end && !value[end];
    return false;
}

/* `rest` is what follows the word gpu: fields, and last of all name=, which takes the rest of the line with
 * its blanks. */
static bool parse_gpu(char *rest, struct host *host)
{
    if (host->count == GPU_MAX)
        return false;
    struct gpu *gpu = &host->gpus[host->count];
    *gpu = (struct gpu){.minor = CTL_MINOR, .pci_bus = (unsigned)host->count + 1};
    char *name = strstr(rest, "name=");
    if (!name || !name[5])
        return false;
    snprintf(gpu->name, sizeof(gpu->name), "%s", name + 5);
    *name = '\0';
    char *save = NULL;
    for (char *field = strtok_r(rest, " \t", &save); field; field = strtok_r(NULL, " \t", &save))
        if (!parse_field(field, gpu))
            return false;
    for (int i = 0; i < host->count; i++)
        if (host->gpus[i].minor == gpu->minor || !memcmp(host->gpus[i].uuid, gpu->uuid, 16))
            return false;
    host->count++;
    return gpu->minor != CTL_MINOR && gpu->memory && gpu->cc_major && gpu->uuid_text[0];
}

static bool parse_line(char *line, struct host *host)
{
    int major, minor, end = 0;
    line += strspn(line, " \t");
    line[strcspn(line, "\n")] = '\0';
    for (size_t n = strlen(line); n && isspace((unsigned char)line[n - 1]); n--)
        line[n - 1] = '\0';
    if (!*line || *line == '#')
        return true;
    if (strncmp(line, "gpu ", 4) == 0)
        return parse_gpu(line + 4, host);
    if (sscanf(line, "driver %79s%n", host->driver, &end) == 1)
        return !line[end];
    if (sscanf(line, "cuda %d.%d%n", &major, &minor, &end) == 2) {
        host->cuda = major * 1000 + minor * 10;
        return !line[end];
    }
    return sscanf(line, "major %u%n", &host->major, &end) == 1 && !line[end] && host->major;
}

int host_read(struct host *host)
{
    char path[4096], line[1024];
    *host = (struct host){.major = 195};
    snprintf(path, sizeof(path), "%s/gpus.conf", state_dir());
    FILE *file = fopen(path, "re");
    if (!file)
        return -ENOENT;
    int result = 0;
    for (int number = 1; !result && fgets(line, sizeof(line), file); number++)
        if (!parse_line(line, host)) {
            fprintf(stderr, "softgpu: %s, line %d is not understood; softgpu/README.md has the grammar\n",
                    path, number);
            result = -EINVAL;
        }
    fclose(file);
    if (!result && (!host->driver[0] || !host->cuda)) {
        fprintf(stderr, "softgpu: %s names no driver and CUDA version; add the lines `driver` and `cuda`\n",
                path);
        result = -EINVAL;
    }
    return result;
}

void node_path(char *path, unsigned long size, unsigned minor)
{
    if (minor == CTL_MINOR)
        snprintf(path, size, "/dev/nvidiactl");
    else
        snprintf(path, size, "/dev/nvidia%u", minor);
}

bool node_usable(const struct host *host, unsigned minor)
{
    char path[64];
    struct stat st;
    node_path(path, sizeof(path), minor);
    /* A node of the right name and the wrong number would open another GPU: a real driver notices, so does
     * this one. */
    if (stat(path, &st) < 0 || !S_ISCHR(st.st_mode) || st.st_rdev != makedev(host->major, minor))
        return false;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0) {
        close(fd);
        return true;
    }
    /* No kernel driver stands behind the node. The kernel asks mode and device cgroup first, so these say
     * "allowed". */
    return errno == ENXIO || errno == ENODEV;
}
