/*
 * Which runtimes a command may go to, the first of them first: find_all() in runtime/find.py.
 *
 * crun and runc do not know each other's containers. So whatever the settings say by now, a container's own
 * runtime has to stop and remove it; each leaves a file of its own in ROOT/ID.
 */
#ifndef GPUSNAP_CHOICE_H
#define GPUSNAP_CHOICE_H

#include "kernel.h"
#include "line.h"
#include "lookup.h"
#include "text.h"

/* These begin a container, which has no runtime yet. BEGINNINGS in runtime/find.py. */
static const char *const beginnings[] = {"create", "run", NULL};

/* Values of --root, or directories above it, with which runc comes first. RUNC_ROOTS in runtime/find.py. */
static const char *const runc_roots[] = {"/run/containerd/runc", "/run/crio-gpusnap", NULL};

#define RUNTIMES (sizeof(runtime_names) / sizeof(*runtime_names) - 1)

/* Names or absolute paths, none of them twice: the settings' one, and those of runtime_names. */
struct choices {
    const char *names[1 + RUNTIMES];
    size_t count;
};

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

/* Whether a word can be a container's ID, as opposed to an option or a path. */
static int is_id(const char *word)
{
    return word[0] != '\0' && word[0] != '-' && !same(word, ".") && !same(word, "..") &&
           word[length_before(word, '/')] == '\0';
}

/* The name of the one runtime that made the container which the line names; NULL where that cannot be told. */
static const char *creator(const struct line *line, int argc, char **argv, char **envp)
{
    if (line->at >= argc || whole(argv[line->at], beginnings))
        return NULL;
    for (int i = line->at + 1; i < argc; i++) {
        const char *found = NULL;
        int count = 0;

        for (size_t which = 0; runtime_names[which] != NULL && is_id(argv[i]); which++)
            if (knows(which, argv[i], line->root, envp)) {
                found = runtime_names[which];
                count++;
            }
        if (count > 0)
            return count == 1 ? found : NULL;
    }
    return NULL;
}

/* Whether runc comes before crun; preferred() in runtime/find.py. */
static int prefers_runc(const struct line *line, int argc, char **argv)
{
    if (line->root == NULL)
        return line->at < argc && same(argv[line->at], "features");
    for (const char *const *each = runc_roots; *each != NULL; each++) {
        const size_t length = length_before(*each, '\0');

        if (begins(line->root, *each) && (line->root[length] == '\0' || line->root[length] == '/'))
            return 1;
    }
    return 0;
}

static void add(struct choices *choices, const char *name)
{
    if (name == NULL)
        return;
    for (size_t i = 0; i < choices->count; i++)
        if (same(choices->names[i], name))
            return;
    choices->names[choices->count++] = name;
}

/* Fills `choices`, which is empty. `named` is the settings' runtime, or NULL. */
static void choose(struct choices *choices, const struct line *line, int argc, char **argv, char **envp,
                   const char *named)
{
    const char *made_by = creator(line, argc, argv, envp);
    const int runc_first = prefers_runc(line, argc, argv);

    /* Another kind, such as a wrapper, comes first: it may have made the container by crun or runc. */
    if (named == NULL || (made_by != NULL && whole(base_name(named), runtime_names) &&
                          !same(base_name(named), made_by)))
        add(choices, made_by);
    add(choices, named);
    add(choices, made_by);
    for (size_t i = 0; i < RUNTIMES; i++)
        add(choices, runtime_names[runc_first ? RUNTIMES - 1 - i : i]);
}

#endif
