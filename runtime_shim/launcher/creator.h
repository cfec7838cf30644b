/*
 * Which runtime made the container that a command is about: creator() in locate.py.
 *
 * crun and runc do not know each other's containers. So whatever the settings say by now, a container's own
 * runtime has to stop and remove it; each leaves a file of its own in ROOT/ID.
 */
#ifndef GPUSNAP_CREATOR_H
#define GPUSNAP_CREATOR_H

#include "kernel.h"
#include "line.h"
#include "lookup.h"
#include "text.h"

#define MOST_WORDS 64 /* are looked at, for the ID; MOST_WORDS in locate.py */

/* These begin a container, which has no runtime yet. BEGINNINGS in locate.py. */
static const char *const beginnings[] = {"create", "run", NULL};

static int has_state(const char *root, const char *below, const char *id, const char *file)
{
    static char path[PATH_SIZE], whole_root[PATH_SIZE];
    struct statx found;

    return join(whole_root, PATH_SIZE, root, below) && join(path, PATH_SIZE, whole_root, "/") &&
           join(whole_root, PATH_SIZE, path, id) && join(path, PATH_SIZE, whole_root, "/") &&
           join(whole_root, PATH_SIZE, path, file) && status(whole_root, &found) == 0 &&
           (found.stx_mode & FILE_TYPE) == REGULAR;
}

/* Whether a runtime knows the container, in --root or where it keeps its containers without one. */
static int knows(size_t which, const char *id, const char *root, char **envp)
{
    static char own[PATH_SIZE];
    const char *private = variable(envp, "XDG_RUNTIME_DIR=");

    if (root != NULL)
        return has_state(root, "", id, state_files[which]);
    if (!join(own, PATH_SIZE, "/", runtime_names[which]))
        return 0;
    return has_state("/run", own, id, state_files[which]) ||
           (private[0] == '/' && has_state(private, own, id, state_files[which]));
}

/* The name of the one runtime that made the container which the line names; NULL where that cannot be told. */
static const char *creator(const struct line *line, int argc, char **argv, char **envp)
{
    int last = argc - line->at > MOST_WORDS ? line->at + MOST_WORDS : argc - 1;

    if (line->at >= argc || whole(argv[line->at], beginnings))
        return NULL;
    for (int i = line->at + 1; i <= last; i++) {
        const char *word = argv[i], *found = NULL;
        int count = 0;

        if (word[0] == '\0' || word[0] == '-' || word[0] == '.' || word[length_before(word, '/')] == '/')
            continue;
        for (size_t which = 0; runtime_names[which] != NULL; which++)
            if (knows(which, word, line->root, envp)) {
                found = runtime_names[which];
                count++;
            }
        if (count > 0)
            return count == 1 ? found : NULL;
    }
    return NULL;
}

#endif
