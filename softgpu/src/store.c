#define _GNU_SOURCE
#include "store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_MAGIC 0x314d454d55504753ull /* "SGPUMEM1" */

struct header {
    uint64_t magic;
    uint64_t used;
    uint64_t pid_namespace; /* inode of the owner's PID namespace; with pid it tells the owner its own file */
    int64_t pid;
};

static uint64_t own_pid_namespace(void)
{
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

/* Opens the GPU's directory, made if need be, and locks it. Descriptor or -errno. */
static int lock_dir(const char *dir)
{
    char parent[4096];
    snprintf(parent, sizeof(parent), "%s/mem", state_dir());
    /* Containers with other users and user namespaces share these. */
    if (mkdir(parent, 0777) == 0)
        (void)!chmod(parent, 0777);
    if (mkdir(dir, 0777) == 0)
        (void)!chmod(dir, 0777);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    while (flock(fd, LOCK_EX) < 0)
        if (errno != EINTR) {
            int error = -errno;
            close(fd);
            return error;
        }
    return fd;
}

/* Unlocks in words, not by close alone: a child forked meanwhile has the same open directory and would keep
 * it locked. */
static void unlock_dir(int fd)
{
    flock(fd, LOCK_UN);
    close(fd);
}

static void gpu_dir(char *dir, size_t size, const struct gpu *gpu)
{
    snprintf(dir, size, "%s/mem/%s", state_dir(), gpu->uuid_text);
}

int store_lock(const struct gpu *gpu)
{
    char path[4096];
    gpu_dir(path, sizeof(path), gpu);
    return lock_dir(path);
}

void store_unlock(int descriptor)
{
    if (descriptor >= 0)
        unlock_dir(descriptor);
}

/* A descriptor of this process that has the file open, or -1. */
static int own_descriptor(const struct stat *file)
{
    int found = -1;
    struct stat st;
    DIR *fds = opendir("/proc/self/fd");
    if (!fds)
        return -1;
    for (struct dirent *entry; found < 0 && (entry = readdir(fds));) {
        int fd = atoi(entry->d_name);
        if (entry->d_name[0] != '.' && fstat(fd, &st) == 0 && st.st_ino == file->st_ino &&
            st.st_dev == file->st_dev)
            found = fd;
    }
    closedir(fds);
    return found;
}

/* True if the client lives, with its PID and used bytes. */
static bool client_alive(int fd, bool ours, pid_t *pid, uint64_t *used)
{
    struct header header = {0};
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    bool whole = pread(fd, &header, sizeof(header), 0) == sizeof(header) && header.magic == HEADER_MAGIC;
    *used = whole ? header.used : 0;
    if (ours && whole && header.pid == getpid() && header.pid_namespace == own_pid_namespace()) {
        *pid = getpid(); /* F_GETLK does not report one's own locks */
        return true;
    }
    if (fcntl(fd, F_GETLK, &lock) < 0)
        return true; /* cannot tell: better counted than removed */
    *pid = lock.l_pid > 0 ? lock.l_pid : 0;
    return lock.l_type != F_UNLCK;
}

/* Sums up the locked directory and removes what dead processes left. */
static int64_t scan(int dirfd, store_visit *visit, void *arg)
{
    int64_t total = 0;
    int copy = openat(dirfd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = copy < 0 ? NULL : fdopendir(copy);
    if (!dir)
        return -errno;
    for (struct dirent *entry; (entry = readdir(dir));) {
        struct stat st;
        pid_t pid = 0;
        uint64_t used = 0;
        if (entry->d_name[0] == '.' || fstatat(dirfd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
            !S_ISREG(st.st_mode))
            continue;
        int own = own_descriptor(&st);
        int fd = own >= 0 ? own : openat(dirfd, entry->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0)
            continue;
        if (!client_alive(fd, own >= 0, &pid, &used)) {
            unlinkat(dirfd, entry->d_name, 0);
        } else {
            total += (int64_t)used;
            if (visit)
                visit(arg, pid, used);
        }
        if (own < 0)
            close(fd);
    }
    closedir(dir);
    return total;
}

int64_t store_used(const struct gpu *gpu, store_visit *visit, void *arg)
{
    char path[4096];
    gpu_dir(path, sizeof(path), gpu);
    int dir = lock_dir(path);
    if (dir < 0)
        return dir;
    int64_t total = scan(dir, visit, arg);
    unlock_dir(dir);
    return total;
}

bool store_alive(const char *file)
{
    char path[4096];
    struct stat st;
    pid_t pid;
    uint64_t used;
    snprintf(path, sizeof(path), "%s/mem/%s", state_dir(), file);
    if (stat(path, &st) < 0 || own_descriptor(&st) >= 0)
        return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    bool alive = client_alive(fd, false, &pid, &used);
    close(fd);
    return alive;
}

static void count_client(void *arg, pid_t pid, uint64_t used)
{
    (void)pid;
    (void)used;
    ++*(int *)arg;
}

/* 0 if the locked GPU has room for `more` bytes of a client that is new or not. */
static int admit(int dir, const struct gpu *gpu, uint64_t more, bool newcomer)
{
    int clients = 0;
    int64_t total = scan(dir, count_client, &clients);
    if (total < 0)
        return (int)total;
    if (newcomer && (gpu->compute_mode == 2 || (gpu->compute_mode == 3 && clients)))
        return -EBUSY;
    return (uint64_t)total > gpu->memory || more > gpu->memory - (uint64_t)total ? -ENOMEM : 0;
}

static int create_file(int dir, struct client *client)
{
    uint64_t number;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    struct header header = {HEADER_MAGIC, client->used, own_pid_namespace(), getpid()};
    if (getrandom(&number, sizeof(number), 0) != sizeof(number))
        return -EIO;
    snprintf(client->name, sizeof(client->name), "%016llx", (unsigned long long)number);
    int fd = openat(dir, client->name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    (void)!fchmod(fd, 0666); /* whoever sums up must read it, whatever the umask was */
    if (fcntl(fd, F_SETLK, &lock) < 0 || pwrite(fd, &header, sizeof(header), 0) != sizeof(header)) {
        int error = errno ? -errno : -EIO;
        unlinkat(dir, client->name, 0);
        close(fd);
        return error;
    }
    client->fd = fd;
    return 0;
}

int store_attach(struct client *client, const struct gpu *gpu, uint64_t used)
{
    client->fd = -1;
    client->used = used;
    gpu_dir(client->dir, sizeof(client->dir), gpu);
    int dir = lock_dir(client->dir);
    if (dir < 0)
        return dir;
    int error = admit(dir, gpu, used, true);
    if (!error)
        error = create_file(dir, client);
    unlock_dir(dir);
    return error;
}

int store_resize(struct client *client, const struct gpu *gpu, uint64_t used)
{
    int dir = lock_dir(client->dir);
    if (dir < 0)
        return dir;
    int error = used > client->used ? admit(dir, gpu, used - client->used, false) : 0;
    if (!error && pwrite(client->fd, &used, sizeof(used), offsetof(struct header, used)) != sizeof(used))
        error = -EIO;
    if (!error)
        client->used = used;
    unlock_dir(dir);
    return error;
}

void store_detach(struct client *client)
{
    if (client->fd < 0)
        return;
    int dir = lock_dir(client->dir);
    if (dir >= 0)
        unlinkat(dir, client->name, 0);
    close(client->fd);
    client->fd = -1;
    if (dir >= 0)
        unlock_dir(dir);
}

int store_read(const struct client *client, uint64_t offset, void *to, uint64_t size)
{
    for (uint64_t done = 0; done < size;) {
        ssize_t n = pread(client->fd, (char *)to + done, size - done, (off_t)(STORE_DATA + offset + done));
        if (n < 0 && errno != EINTR)
            return -errno;
        if (n == 0) { /* beyond what was ever written: memory that nobody set */
            memset((char *)to + done, 0, size - done);
            break;
        }
        done += n > 0 ? (uint64_t)n : 0;
    }
    return 0;
}

int store_write(const struct client *client, uint64_t offset, const void *from, uint64_t size)
{
    for (uint64_t done = 0; done < size;) {
        ssize_t n =
            pwrite(client->fd, (const char *)from + done, size - done, (off_t)(STORE_DATA + offset + done));
        if (n < 0 && errno != EINTR)
            return -errno;
        done += n > 0 ? (uint64_t)n : 0;
    }
    return 0;
}

void store_discard(const struct client *client, uint64_t offset, uint64_t size)
{
    fallocate(client->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(STORE_DATA + offset),
              (off_t)size);
}
