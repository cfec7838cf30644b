/* Whose command line it is: the same rules as classify() in shim/entry.py and probe() in runtime/command_line.py. */
#ifndef GPUSNAP_LINE_H
#define GPUSNAP_LINE_H

#include "text.h"

/* The same lists as GLOBAL_VALUES, GLOBAL_FLAGS, VERSION_OPTIONS, OUR_COMMANDS, WATCHED_COMMANDS and COMMANDS in shim/entry.py. */
static const char *const global_values[] = {
    "root", "log", "log-format", "log-level", "cgroup-manager", "rootless", "criu", NULL,
};
static const char *const global_flags[] = {"debug", "systemd-cgroup", NULL};
static const char *const version_options[] = {"version", "v", "V", NULL};
static const char *const our_commands[] = {"checkpoint", "restore", NULL};
static const char *const watched_commands[] = {"delete", "kill", "pause", "resume", NULL};
static const char *const commands[] = {
    "checkpoint", "create", "delete",  "events", "exec",  "features", "h",    "help",  "init",  "kill",   "list",
    "mounts",     "pause",  "ps",      "restore", "resume", "run",    "spec", "start", "state", "update", NULL,
};
/* HELP and FALSE in runtime/command_line_words.py. */
static const char *const help_options[] = {"help", "h", "usage", "?", NULL};
static const char *const false_words[] = {"0", "f", "F", "FALSE", "false", "False", NULL};
/* The options of runtime/options.py that take a value, but for network-lock: crun would read past its arguments. */
static const char *const checkpoint_values[] = {
    "image-path",  "work-path", "manage-cgroups-mode", "empty-ns",
    "parent-path", "status-fd", "page-server",         NULL,
};
static const char *const restore_values[] = {
    "bundle",   "b",           "pid-file",    "console-socket",    "image-path",   "work-path", "manage-cgroups-mode",
    "empty-ns", "gpu-map",     "parent-path", "lsm-profile", "lsm-mount-context", "preserve-fds", NULL,
};

enum whose { PASS, VERSION, OURS, WATCHED };

struct line {
    enum whose whose;
    int at;           /* where its command stands; argc without one */
    const char *root; /* the value of --root; NULL without */
};

static int whole(const char *word, const char *const *list)
{
    return listed(word, length_before(word, '\0'), list);
}

/* An option's name, without its one dash or two. */
static const char *name_of(const char *word)
{
    word++;
    return *word == '-' ? word + 1 : word;
}

static int is_option(const char *word)
{
    return word[0] == '-' && word[1] != '\0';
}

/* Whether an option takes the next word, which is NULL at the end of the line. */
static int takes_next(const char *name, size_t length, const char *next)
{
    if (listed(name, length, global_values))
        return 1;
    if (listed(name, length, global_flags) || listed(name, length, version_options) ||
        listed(name, length, help_options) || next == NULL)
        return 0;
    return next[0] != '-' && !whole(next, commands);
}

static struct line classify(int argc, char **argv)
{
    struct line line = {PASS, 1, NULL};
    int version = 0;

    while (line.at < argc) {
        const char *word = argv[line.at], *name, *value;
        size_t length;
        int off;

        if (!is_option(word) || same(word, "--")) {
            line.at += same(word, "--");
            break;
        }
        line.at++;
        name = name_of(word);
        length = length_before(name, '=');
        value = name[length] == '=' ? name + length + 1 : NULL;
        off = value != NULL && whole(value, false_words);
        if (listed(name, length, help_options) && !off) {
            line.at = argc;
            return line;
        }
        version |= listed(name, length, version_options) && !off;
        if (value == NULL && takes_next(name, length, line.at < argc ? argv[line.at] : NULL)) {
            value = line.at < argc ? argv[line.at] : NULL;
            line.at++;
        }
        if (length == 4 && begins(name, "root"))
            line.root = value;
    }
    if (line.at > argc)
        line.at = argc;
    if (version)
        line.whose = VERSION;
    else if (line.at < argc && whole(argv[line.at], our_commands))
        line.whose = OURS;
    else if (line.at < argc && whole(argv[line.at], watched_commands))
        line.whose = WATCHED;
    return line;
}

/*
 * The word by which a checkpoint or restore only asks to be told something, as Podman does to learn whether a
 * runtime can checkpoint (libpod, pkg/checkpoint/crutils); NULL for one that is meant.
 */
static char *probe(int argc, char **argv, int at)
{
    const char *const *values = same(argv[at], "checkpoint") ? checkpoint_values : restore_values;

    for (int i = at + 1; i < argc; i++) {
        const char *name;
        size_t length;
        int takes;

        if (same(argv[i], "--"))
            return NULL;
        if (!is_option(argv[i]))
            continue;
        name = name_of(argv[i]);
        length = length_before(name, '=');
        if (name[length] == '=')
            continue;
        if (listed(name, length, help_options))
            return argv[i];
        takes = listed(name, length, values);
        if (takes && i + 1 == argc)
            return argv[i];
        i += takes || same(name, "network-lock");
    }
    return NULL;
}

#endif
