/*
 * gpusnap-runtime: what Podman, containerd and CRI-O run in place of crun or runc.
 *
 * They run it for every state, kill and delete, where crun itself takes 2 ms and Python's start alone more than 10.
 * So this program becomes the real runtime by exec for every command but checkpoint and restore. For those it
 * becomes the Python entry (runtime_shim/shim/entry.py), which decides by the same rules;
 * tests/unit/runtime_shim/launcher/test_launcher.py runs both on the same command lines.
 *
 * While a container is suspended, or where a killed gpusnap has left something of it, its delete, kill, pause and
 * resume go to Python too (shim/suspended.py); watch.h says when.
 *
 * Nothing that is wrong with gpusnap's settings or its Python may keep a command from a real runtime: the first of
 * its choices (choice.h) that can be started. Python is asked only where none can, so that it says why.
 *
 * During a restore CRIU runs this program, too, to wait for gpusnap at two of its stages (gate.h).
 *
 * The Python entry learns in GPUSNAP_LAUNCHER which file started it, so that it does not take that file, perhaps
 * installed as "crun" in front of the real one, for the real runtime. The real runtime never sees that variable.
 */
#include "choice.h"
#include "gate.h"
#include "kernel.h"
#include "line.h"
#include "lookup.h"
#include "settings.h"
#include "tell.h"
#include "text.h"
#include "watch.h"

#ifndef PYTHON_ENTRY
#define PYTHON_ENTRY "/usr/libexec/gpusnap/gpusnap-runtime"
#endif
#ifndef SETTINGS_FILE
#define SETTINGS_FILE "/etc/gpusnap/gpusnap.toml"
#endif
#ifndef VERSION_TEXT
#define VERSION_TEXT "unknown"
#endif

#define LAUNCHER_VARIABLE "GPUSNAP_LAUNCHER="
#define EXIT_NOT_FOUND 127 /* as shells have it */

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
    static char named[sizeof(LAUNCHER_VARIABLE) + PATH_SIZE];
    const size_t prefix = sizeof(LAUNCHER_VARIABLE) - 1;
    long length = link_target("/proc/self/exe", named + prefix, PATH_SIZE);
    size_t count = 0;
    char **longer;

    for (size_t i = 0; i < prefix; i++)
        named[i] = LAUNCHER_VARIABLE[i];
    if (length <= 0 || length >= PATH_SIZE)
        return envp;
    named[prefix + (size_t)length] = '\0';
    while (envp[count] != NULL)
        count++;
    longer = pages((count + 2) * sizeof(*longer));
    if (longer == NULL)
        return envp;
    for (size_t i = 0; i < count; i++)
        longer[i] = envp[i];
    longer[count] = named;
    return longer;
}

static void become(const char *path, struct launch *launch)
{
    char *own = launch->argv[0];

    if (launch->warning != NULL) {
        const char *const parts[] = {launch->warning, "; ", path, " runs in its place: see gpusnap settings", NULL};

        warn(parts, launch->first);
        launch->warning = NULL;
    }
    launch->argv[0] = (char *)path;
    execute(path, launch->argv, launch->envp);
    launch->argv[0] = own; /* not a program after all */
}

/* Become the real runtime: the first choice that can be started. Returns where none can. */
static void become_real(const struct line *line, int argc, char **argv, struct launch *launch)
{
    static const char unreadable[] = "the settings file " SETTINGS_FILE " cannot be read";
    static const char bad[] = "runtime in " SETTINGS_FILE " is neither a name nor an absolute path";
    static const char missing[] = "the real runtime that " SETTINGS_FILE " names cannot be started";
    static char name[PATH_SIZE];
    static struct choices choices;
    enum setting setting = runtime_setting(SETTINGS_FILE, name, sizeof(name));
    const char *named = setting == SETTING_FOUND ? name : NULL;

    choose(&choices, line, argc, argv, launch->envp, named);
    if (setting == SETTING_UNREADABLE)
        launch->warning = unreadable;
    else if (setting == SETTING_BAD)
        launch->warning = bad;
    for (size_t i = 0; i < choices.count; i++) {
        become_named(choices.names[i], launch);
        if (choices.names[i] == named)
            launch->warning = missing;
    }
}

/* The real runtime's version, whose lines Podman and containerd read, then ours; negative where it has none. */
static int tell_version(const struct line *line, int argc, char **argv, struct launch *launch)
{
    static const char own[] = "gpusnap-runtime version " VERSION_TEXT "\n";
    long child = fork_process();
    int code;

    if (child < 0)
        return -1;
    if (child == 0) {
        become_real(line, argc, argv, launch);
        leave(EXIT_NOT_FOUND);
    }
    code = wait_for_end(child);
    if (code == ENDED_BY_SIGPIPE)
        code = 0; /* as with `--version | head -1`: nobody reads on */
    if (code == 0) {
        ignore_sigpipe();
        write_to(1, own, sizeof(own) - 1);
    }
    return code == EXIT_NOT_FOUND ? -1 : code;
}

/* Not in the words of strerror(ENOENT) and strerror(EACCES), which Podman replaces; see runtime_shim/base/errors.py. */
static int python_is_missing(long error, enum whose whose)
{
    if (whose == PASS || whose == VERSION)
        say("gpusnap-runtime: no real runtime can be started, neither crun nor runc; install one of them\n");
    say("gpusnap-runtime: its Python program " PYTHON_ENTRY " cannot be started: ");
    if (error == -ENOENT) {
        say("it or its interpreter does not exist");
    } else if (error == -EACCES) {
        say("access is refused");
    } else {
        say("error ");
        say_number(-error);
    }
    say(whose == WATCHED ? ", so the suspended container is not resumed" : ", so nothing is checkpointed or restored");
    say("; reinstall gpusnap [GPS-002]\n");
    return EXIT_NOT_FOUND;
}

static int run(int argc, char **argv, char **envp)
{
    static char *bare[] = {PYTHON_ENTRY, NULL};
    static struct launch launch;
    struct line line = classify(argc, argv);
    char *asked;
    int gate = run_gate(argc, envp);

    if (gate >= 0)
        return gate;
    drop_launcher_variable(envp);
    launch.argv = argv;
    launch.envp = envp;
    if (argc > 0 && know_self(&launch.self)) {
        launch.first = line.at < argc && whole(argv[line.at], beginnings);
        if (line.whose == OURS && (asked = probe(argc, argv, line.at)) != NULL) {
            /* Cut to what is asked: of `checkpoint ID --help` crun would make a checkpoint. */
            line.whose = PASS;
            argv[line.at + 1] = asked;
            argv[argc = line.at + 2] = NULL;
        }
        if (line.whose == WATCHED) {
            char *own = argv[0];
            const char *container = container_of(argc, argv, line.at);

            if (is_watched(argv[line.at], container)) {
                long error;

                argv[0] = bare[0];
                error = execute(PYTHON_ENTRY, argv, with_launcher_variable(envp));
                if (would_run_half(argv[line.at], container))
                    return python_is_missing(error, WATCHED);
                argv[0] = own; /* without Python, what stops and removes containers still does */
            }
            line.whose = PASS;
        }
        if (line.whose == PASS) {
            become_real(&line, argc, argv, &launch);
        } else if (line.whose == VERSION) {
            int code = tell_version(&line, argc, argv, &launch);

            if (code >= 0)
                return code;
        }
    }
    if (argc > 0)
        argv[0] = bare[0];
    return python_is_missing(execute(PYTHON_ENTRY, argc > 0 ? argv : bare, with_launcher_variable(envp)),
                             line.whose);
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
