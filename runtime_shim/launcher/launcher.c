/*
 * gpusnap-runtime: what Podman, containerd and CRI-O run in place of crun or runc.
 *
 * They run it for every state, kill and delete, where crun itself takes 2 ms and Python's start alone more than 10.
 * So this program takes the commands that are surely none of gpusnap's and becomes the real runtime by exec. For
 * checkpoint, restore and --version, and for whatever it is not certain of, it becomes the Python entry
 * (runtime_shim/entry.py), which decides by the same rules, knows more forms of them and reports errors;
 * tests/unit/test_launcher.py runs both on the same command lines.
 *
 * The Python entry learns in GPUSNAP_LAUNCHER which file started it, so that it does not take that file, perhaps
 * installed as "crun" in front of the real one, for the real runtime. The real runtime never sees that variable.
 */
#include "kernel.h"
#include "lookup.h"
#include "preference.h"
#include "settings.h"
#include "text.h"

#ifndef PYTHON_ENTRY
#define PYTHON_ENTRY "/usr/libexec/gpusnap/gpusnap-runtime"
#endif
#ifndef SETTINGS_FILE
#define SETTINGS_FILE "/etc/gpusnap/gpusnap.toml"
#endif

#define LAUNCHER_VARIABLE "GPUSNAP_LAUNCHER="
#define EXIT_NOT_FOUND 127 /* as shells have it */

/* The same lists as GLOBAL_VALUES, GLOBAL_FLAGS and HELP in entry.py. */
static const char *const global_values[] = {
    "root", "log", "log-format", "log-level", "cgroup-manager", "rootless", "criu", NULL,
};
static const char *const global_flags[] = {"debug", "systemd-cgroup", NULL};
static const char *const help_options[] = {"help", "h", "usage", "?", NULL};

/*
 * True when the line surely is none of ours: its command is another one than checkpoint and restore, it asks for
 * help, or it ends before any command, so that the real runtime says what is wrong with it.
 */
static int is_for_the_real_runtime(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        size_t length;

        if (same(word, "--")) {
            if (++i == argc)
                return 1;
            word = argv[i];
            return !same(word, "checkpoint") && !same(word, "restore");
        }
        if (word[0] != '-' || word[1] == '\0')
            return !same(word, "checkpoint") && !same(word, "restore");
        word += word[1] == '-' ? 2 : 1;
        length = length_before(word, '=');
        if (listed(word, length, global_values)) {
            /* A value that is missing is the real runtime's to complain of. */
            if (word[length] == '\0' && ++i == argc)
                return 1;
        } else if (word[length] == '=') {
            return 0;
        } else if (listed(word, length, help_options)) {
            return 1;
        } else if (!listed(word, length, global_flags)) {
            return 0;
        }
    }
    return 1;
}

static void drop_launcher_variable(char **envp)
{
    char **kept = envp;

    for (char **each = envp; *each != NULL; each++)
        if (!begins(*each, LAUNCHER_VARIABLE))
            *kept++ = *each;
    *kept = NULL;
}

/* The environment with LAUNCHER_VARIABLE naming this file, or as it is where that cannot be made. */
static char **with_launcher_variable(char **envp)
{
    static char variable[sizeof(LAUNCHER_VARIABLE) + PATH_SIZE] = LAUNCHER_VARIABLE;
    const size_t prefix = sizeof(LAUNCHER_VARIABLE) - 1;
    long length = link_target("/proc/self/exe", variable + prefix, PATH_SIZE);
    size_t count = 0;
    char **longer;

    if (length <= 0 || length >= PATH_SIZE)
        return envp;
    variable[prefix + (size_t)length] = '\0';
    while (envp[count] != NULL)
        count++;
    longer = pages((count + 2) * sizeof(*longer));
    if (longer == NULL)
        return envp;
    for (size_t i = 0; i < count; i++)
        longer[i] = envp[i];
    longer[count] = variable;
    return longer;
}

/* The real runtime's path, in `path`; false when Python has to look for it. */
static int find_real_runtime(int argc, char **argv, char **envp, char *path)
{
    static char name[PATH_SIZE];
    const struct preference wanted = preference(argc, argv, global_values);
    struct self self;

    if (!know_self(&self))
        return 0;
    switch (runtime_setting(SETTINGS_FILE, name, sizeof(name))) {
    case SETTING_ABSENT:
        return find_by_name(wanted.first->name, envp, &self, path) ||
               find_by_name(wanted.second->name, envp, &self, path);
    case SETTING_FOUND:
        if (contradicts(name, wanted.created) && find_by_name(wanted.created->name, envp, &self, path))
            return 1;
        if (name[0] == '/')
            return join(path, PATH_SIZE, "", name) && is_runtime(path, &self);
        return find_by_name(name, envp, &self, path);
    default:
        return 0;
    }
}

static void say(const char *text)
{
    write_error(text, length_before(text, '\0'));
}

static void say_number(long number)
{
    char digits[24];
    size_t at = sizeof(digits);

    digits[--at] = '\0';
    do
        digits[--at] = (char)('0' + number % 10);
    while ((number /= 10) > 0 && at > 0);
    say(digits + at);
}

/* Not in the words of strerror(ENOENT) and strerror(EACCES), which Podman replaces; see runtime_shim/errors.py. */
static int python_is_missing(long error)
{
    say("gpusnap-runtime: its Python program " PYTHON_ENTRY " cannot be started: ");
    if (error == -ENOENT) {
        say("it or its interpreter does not exist");
    } else if (error == -EACCES) {
        say("access is refused");
    } else {
        say("error ");
        say_number(-error);
    }
    say("; install gpusnap anew\n");
    return EXIT_NOT_FOUND;
}

static int run(int argc, char **argv, char **envp)
{
    static char path[PATH_SIZE];
    static char *bare[] = {PYTHON_ENTRY, NULL};

    drop_launcher_variable(envp);
    if (argc > 0 && is_for_the_real_runtime(argc, argv) && find_real_runtime(argc, argv, envp, path)) {
        argv[0] = path;
        execute(path, argv, envp);
        /* Not a program after all: Python says what is wrong with it. */
    }
    if (argc > 0)
        argv[0] = bare[0];
    return python_is_missing(execute(PYTHON_ENTRY, argc > 0 ? argv : bare, with_launcher_variable(envp)));
}

#ifdef WITH_LIBC

int main(int argc, char **argv, char **envp)
{
    return run(argc, argv, envp);
}

#else

void begin(long *stack);

void __attribute__((noreturn)) begin(long *stack)
{
    int argc = (int)stack[0];
    char **argv = (char **)(stack + 1);

    leave(run(argc, argv, argv + argc + 1));
}

#endif
