/* Which of crun and runc is looked for first, and which has created a container: as find() in runtime_shim/locate.py. */
#ifndef GPUSNAP_PREFERENCE_H
#define GPUSNAP_PREFERENCE_H

#include "kernel.h"
#include "text.h"

/* Values of --root, or directories above it, with which runc comes first. The same list as RUNC_ROOTS in locate.py. */
static const char *const runc_roots[] = {"/run/containerd/runc", "/run/crio-gpusnap", NULL};

/* A runtime, and the file by which it knows a container: --root, then the container's ID, then this. */
struct runtime {
    const char *name, *state;
};

static const struct runtime crun = {"crun", "/status"}, runc = {"runc", "/state.json"};

/*
 * Where the command stands in a line that surely is the real runtime's, argc without one; the value of --root in
 * *root. `values` are the names of the global options that take a value.
 */
static int find_command(int argc, char **argv, const char *const *values, const char **root)
{
    int i = 1;

    for (*root = ""; i < argc && argv[i][0] == '-' && argv[i][1] != '\0'; i++) {
        const char *word = argv[i] + (argv[i][1] == '-' ? 2 : 1);
        const size_t length = length_before(word, '=');

        if (same(argv[i], "--"))
            return i + 1;
        if (!listed(word, length, values))
            continue;
        if (word[length] == '\0' && ++i == argc)
            return argc;
        if (length == 4 && begins(word, "root"))
            *root = word[length] == '=' ? word + length + 1 : argv[i];
    }
    return i;
}

static int is_below_runc_root(const char *root)
{
    for (const char *const *each = runc_roots; *each != NULL; each++) {
        const size_t length = length_before(*each, '\0');

        if (begins(root, *each) && (root[length] == '\0' || root[length] == '/'))
            return 1;
    }
    return 0;
}

static int has_container(const char *root, const char *id, const struct runtime *runtime)
{
    static char path[PATH_SIZE];
    struct statx found;
    const size_t at = length_before(root, '\0'), length = length_before(id, '\0');

    return join(path, PATH_SIZE, root, "/") && put(path, PATH_SIZE, at + 1, id, length) &&
           put(path, PATH_SIZE, at + 1 + length, runtime->state, length_before(runtime->state, '\0')) &&
           status(path, &found) == 0;
}

/* Whether a word can be a container's ID, as opposed to an option or a path. */
static int is_name(const char *word)
{
    return word[0] != '\0' && word[0] != '-' && !same(word, ".") && !same(word, "..") &&
           word[length_before(word, '/')] == '\0';
}

struct preference {
    const struct runtime *first, *second;
    /* The one of them that has created a container whose ID is in the line; NULL where none has. */
    const struct runtime *created;
};

static struct preference preference(int argc, char **argv, const char *const *values)
{
    const char *root;
    const int command = find_command(argc, argv, values, &root);
    const int asks_for_features = root[0] == '\0' && command < argc && same(argv[command], "features");
    struct preference found = {&crun, &runc, NULL};

    if (is_below_runc_root(root) || asks_for_features) {
        found.first = &runc;
        found.second = &crun;
    }
    for (int i = command; root[0] != '\0' && found.created == NULL && i < argc; i++)
        if (is_name(argv[i]))
            found.created = has_container(root, argv[i], found.first)    ? found.first
                            : has_container(root, argv[i], found.second) ? found.second
                                                                         : NULL;
    if (found.created == found.second) {
        found.second = found.first;
        found.first = found.created;
    }
    return found;
}

/* Whether a setting names the other one of the two than that which created the container. */
static int contradicts(const char *setting, const struct runtime *created)
{
    const char *name = setting;

    for (const char *at = setting; *at != '\0'; at++)
        if (*at == '/')
            name = at + 1;
    return created != NULL && !same(name, created->name) && (same(name, crun.name) || same(name, runc.name));
}

#endif
