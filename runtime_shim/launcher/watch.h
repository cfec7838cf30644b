/*
 * Whether gpusnap may have a say in a command that pauses, resumes, kills or deletes a container, as _is_watched in
 * shim/entry.py has it: where the container is suspended, and gpusnap is not itself having its engine pause it or let
 * it go on; and where the journal has a file of it that concerns the command. Where that cannot be told, it may.
 */
#ifndef GPUSNAP_WATCH_H
#define GPUSNAP_WATCH_H

#include "kernel.h"
#include "lookup.h"
#include "text.h"

/* As WATCH in shim/entry.py: there while some container is suspended, with a file for each (state_files.py). */
#ifndef WATCH_DIRECTORY
#define WATCH_DIRECTORY "/run/gpusnap/suspended"
#endif

/* As JOURNAL in shim/entry.py, and as _NOTED there: the endings of files, the first of them for a delete alone. */
#ifndef JOURNAL_DIRECTORY
#define JOURNAL_DIRECTORY "/run/gpusnap/journal"
#endif
static const char *const noted[] = {".restore", ".thawed", NULL};

#define RECORD_SIZE 65536 /* of a longer file gpusnap has the say */

/* The same list as _ON_THE_WAY in shim/entry.py; the first is for a pause alone. */
static const char *const on_the_way[] = {
    "\"stage\": \"suspending\"",
    "\"stage\": \"undone\"",
    "\"stage\": \"resumed\"",
    NULL,
};

/* As linux_dirent64 of getdents64(2). */
struct entry {
    unsigned long long inode;
    long long next;
    unsigned short size;
    unsigned char type;
    char name[];
};

/* The first word that is no option; empty without one. */
static const char *container_of(int argc, char **argv, int at)
{
    while (++at < argc)
        if (argv[at][0] != '-')
            return argv[at];
    return "";
}

/* Whether it is the name of a file of that container: ID, or ID@ANYTHING. */
static int is_of(const char *name, const char *container)
{
    return length_before(name, '@') == length_before(container, '\0') && begins(name, container);
}

/* What a file says: 1 where gpusnap has a say, 0 where it has none or the file is gone; a negative errno. */
static long has_say(const char *command, const char *name)
{
    const int first = same(command, "resume");
    static char path[PATH_SIZE], text[RECORD_SIZE + 1];
    long fd, length;

    if (!join(path, sizeof(path), WATCH_DIRECTORY "/", name))
        return -ENAMETOOLONG;
    if ((fd = open_file(path)) < 0)
        return fd == -ENOENT ? 0 : fd;
    if (same(command, "delete") || same(command, "kill")) {
        close_file(fd);
        return 1;
    }
    length = read_block(fd, text, RECORD_SIZE);
    close_file(fd);
    if (length < 0 || length == RECORD_SIZE)
        return length < 0 ? length : 1;
    text[length] = '\0';
    for (long at = 0; at < length; at++)
        for (const char *const *each = on_the_way + first; *each != NULL; each++)
            if (begins(text + at, *each))
                return 0;
    return 1;
}

/* Whether it is a file of the journal that concerns the command. */
static long is_noted(const char *command, const char *name)
{
    const size_t length = length_before(name, '\0');

    for (const char *const *each = noted + same(command, "resume"); *each != NULL; each++) {
        const size_t ending = length_before(*each, '\0');

        if (length > ending && same(name + length - ending, *each))
            return 1;
    }
    return 0;
}

/* What the first file says that is of that container and says something; not 0 where that cannot be told. */
static int ask_files(const char *directory, long (*says)(const char *command, const char *name), const char *command,
                     const char *container)
{
    static union {
        struct entry first;
        char bytes[32768];
    } found;
    long fd = open_file(directory), length, say = 0;

    if (fd < 0)
        return fd != -ENOENT;
    while (say == 0 && (length = kernel(__NR_getdents64, fd, (long)&found, sizeof(found), 0, 0, 0)) != 0) {
        if (length < 0)
            say = length;
        for (long at = 0; say == 0 && at < length;) {
            const struct entry *each = (const struct entry *)(const void *)(found.bytes + at);

            if (is_of(each->name, container))
                say = says(command, each->name);
            at += each->size;
        }
    }
    close_file(fd);
    return say != 0;
}

static int is_watched(const char *command, const char *container)
{
    return ask_files(WATCH_DIRECTORY, has_say, command, container) ||
           (!same(command, "pause") && !same(command, "kill") && ask_files(JOURNAL_DIRECTORY, is_noted, command, container));
}

/* Whether the real runtime would let a suspended container run without its GPU memory, as _would_run_half in
 * shim/entry.py has it. */
static int would_run_half(const char *command, const char *container)
{
    return same(command, "resume") && ask_files(WATCH_DIRECTORY, has_say, command, container);
}

#endif
