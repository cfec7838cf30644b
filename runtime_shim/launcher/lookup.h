/* Where the real runtime is: the same rules as runtime_shim/runtime/find.py. */
#ifndef GPUSNAP_LOOKUP_H
#define GPUSNAP_LOOKUP_H

#include "kernel.h"
#include "text.h"

#define FILE_TYPE 0170000 /* S_IFMT of sys/stat.h */
#define REGULAR 0100000   /* S_IFREG */

/*
 * Searched after PATH, of which Podman and containerd may give little: Podman's own places for crun and runc
 * (containers-common, pkg/config/default.go) and libexec. The same list as SYSTEM_DIRECTORIES in runtime/find.py.
 */
static const char *const system_directories[] = {
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/sbin",
    "/bin",
    "/usr/libexec",
    "/usr/lib/cri-o-runc/sbin",
    "/run/current-system/sw/bin",
    NULL,
};

/* The real runtimes, the one that is preferred first, but under CRI (choice.h). The same list as NAMES in runtime/find.py. */
static const char *const runtime_names[] = {"crun", "runc", NULL};

/* What each of them has in a container's directory of its state, in their order; STATE_FILES in runtime/find.py.
 * Sources: crun, src/libcrun/status.c; runc, libcontainer/factory_linux.go. */
static const char *const state_files[] = {"status", "state.json", NULL};

/* This program's own file. */
struct self {
    struct statx status;
};

static int know_self(struct self *self)
{
    return status("/proc/self/exe", &self->status) == 0;
}

/* Fills `into` unless the file ends before; the number of bytes read, or negative. */
static long read_block(long fd, char *into, size_t size)
{
    size_t done = 0;

    while (done < size) {
        long got = read_file(fd, into + done, size - done);

        if (got == -EINTR)
            continue;
        if (got < 0)
            return got;
        if (got == 0)
            break;
        done += (size_t)got;
    }
    return (long)done;
}

static int same_blocks(long a, long b)
{
    static char ours[PATH_SIZE], theirs[PATH_SIZE];

    for (;;) {
        long count = read_block(a, ours, sizeof(ours));

        if (count < 0 || count != read_block(b, theirs, sizeof(theirs)))
            return 0;
        if (count == 0)
            return 1;
        for (long i = 0; i < count; i++)
            if (ours[i] != theirs[i])
                return 0;
    }
}

/* Two copies of the launcher, each taking the other for the real runtime, would exec each other for ever. */
static int is_copy_of_self(const char *path)
{
    long ours = open_file("/proc/self/exe"), theirs = open_file(path);
    int copy = ours >= 0 && theirs >= 0 && same_blocks(ours, theirs);

    if (ours >= 0)
        close_file(ours);
    if (theirs >= 0)
        close_file(theirs);
    return copy;
}

static int is_self(const char *path, const struct statx *found, const struct self *self)
{
    if (found->stx_ino == self->status.stx_ino && found->stx_dev_major == self->status.stx_dev_major &&
        found->stx_dev_minor == self->status.stx_dev_minor)
        return 1;
    return found->stx_size == self->status.stx_size && is_copy_of_self(path);
}

static int is_runtime(const char *path, const struct self *self)
{
    struct statx found;

    return status(path, &found) == 0 && (found.stx_mode & FILE_TYPE) == REGULAR && executable(path) == 0 &&
           !is_self(path, &found, self);
}

/* A variable's value, by its name and "="; "" without one. */
static const char *variable(char **envp, const char *name)
{
    for (; *envp != NULL; envp++)
        if (begins(*envp, name))
            return *envp + length_before(name, '\0');
    return "";
}

static const char *search_path(char **envp)
{
    return variable(envp, "PATH=");
}

/* What a lookup needs to know, and what becomes of the path that it finds: nothing, unless the exec fails. */
struct launch {
    char **argv;
    char **envp;
    struct self self;
    const char *warning; /* what is to be said before another runtime than the settings' runs; or NULL */
    int first;           /* whether the command begins a container */
};

static void become(const char *path, struct launch *launch);

/* Become the first runtime of that name that can be started: on PATH (absolute directories only), then in the
 * system's; or that file, for an absolute path. Returns where there is none. */
static void become_named(const char *name, struct launch *launch)
{
    static char path[PATH_SIZE];
    const char *at = search_path(launch->envp);
    const size_t name_length = length_before(name, '\0');

    if (name[0] == '/') {
        if (is_runtime(name, &launch->self))
            become(name, launch);
        return;
    }
    while (*at != '\0') {
        size_t length = length_before(at, ':');

        if (*at == '/' && put(path, PATH_SIZE, 0, at, length) && put(path, PATH_SIZE, length, "/", 1) &&
            put(path, PATH_SIZE, length + 1, name, name_length) && is_runtime(path, &launch->self))
            become(path, launch);
        at += length;
        at += *at == ':';
    }
    for (const char *const *each = system_directories; *each != NULL; each++)
        if (join(path, PATH_SIZE, *each, "/") &&
            put(path, PATH_SIZE, length_before(path, '\0'), name, name_length) && is_runtime(path, &launch->self))
            become(path, launch);
}

#endif
