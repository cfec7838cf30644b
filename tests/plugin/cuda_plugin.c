/* A stand-in for CRIU's CUDA plugin: the same work at the same hooks, by the program cuda-checkpoint on PATH.
 *
 *   before CRIU stops a task   lock
 *   once it is stopped         checkpoint, for which the driver's thread in the task is let run
 *   restored, still stopped    restore and unlock, by the same thread
 *   the dump is over           the same for those that run on
 */

#include "criu_plugin.h"
#include "journal.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

static const char NAME[] = "cuda_plugin";
enum { MOST = 64 };
static int suspended[MOST], count, noted, wanted = 1;

/* Runs cuda-checkpoint to its end; its exit code, or -1. `number` takes what it prints. */
static int run(const char *option, const char *action, int pid, int *number)
{
	char text[16], answer[256] = "";
	int ends[2], status;
	ssize_t length;

	snprintf(text, sizeof(text), "%d", pid);
	if (pipe(ends))
		return -1;
	pid_t child = fork();
	if (child < 0)
		return -1;
	if (child == 0) {
		dup2(ends[1], 1);
		dup2(ends[1], 2);
		if (action)
			execlp("cuda-checkpoint", "cuda-checkpoint", option, action, "--pid", text, "--timeout", "10000", NULL);
		else
			execlp("cuda-checkpoint", "cuda-checkpoint", option, "--pid", text, NULL);
		_exit(127);
	}
	close(ends[1]);
	length = read(ends[0], answer, sizeof(answer) - 1);
	close(ends[0]);
	if (waitpid(child, &status, 0) != child || !WIFEXITED(status))
		return -1;
	if (length > 0 && number)
		*number = atoi(answer);
	say("%s %s %s %d", NAME, option, action ? action : "", WEXITSTATUS(status));
	return WEXITSTATUS(status) == 127 ? -1 : WEXITSTATUS(status);
}

/* Let the driver's thread of a task that CRIU traces run while the actions are done. */
static int with_thread(int thread, int pid, const char *first, const char *second)
{
	uint64_t mask, all = ~(UINT64_C(1) << (SIGTRAP - 1));
	int status, result;

	if (ptrace(PTRACE_GETSIGMASK, thread, sizeof(mask), &mask) || ptrace(PTRACE_SETSIGMASK, thread, sizeof(all), &all))
		return -1;
	if (ptrace(PTRACE_SETOPTIONS, thread, NULL, 0) || ptrace(PTRACE_CONT, thread, NULL, 0))
		return -1;
	result = run("--action", first, pid, NULL);
	if (!result && second)
		result = run("--action", second, pid, NULL);
	if (ptrace(PTRACE_INTERRUPT, thread, NULL, 0) || waitpid(thread, &status, __WALL) != thread || !WIFSTOPPED(status))
		return -1;
	ptrace(PTRACE_SETOPTIONS, thread, NULL, PTRACE_O_SUSPEND_SECCOMP | PTRACE_O_TRACESYSGOOD);
	if (ptrace(PTRACE_SETSIGMASK, thread, sizeof(mask), &mask))
		return -1;
	return result ? -1 : 0;
}

static int begin(int stage)
{
	count = noted = 0;
	wanted = 1;
	if (stage == STAGE_RESTORE && check_and_remove_inventory_plugin)
		wanted = check_and_remove_inventory_plugin(NAME, strlen(NAME));
	/* A frozen process cannot answer the driver. */
	if (stage == STAGE_DUMP && set_compel_interrupt_only_mode)
		set_compel_interrupt_only_mode();
	say_begin(NAME, stage);
	return 0;
}

static int pause_devices(int pid)
{
	int thread = 0, found = run("--get-restore-tid", NULL, pid, &thread);
	if (found)
		return found < 0 ? -1 : -ENOTSUP;
	if (!noted && add_inventory_plugin(NAME))
		return -1;
	noted = 1;
	if (count == MOST || run("--action", "lock", pid, NULL))
		return -1;
	suspended[count++] = pid;
	return 0;
}

static int checkpoint_devices(int pid)
{
	int thread = 0, found = run("--get-restore-tid", NULL, pid, &thread);
	if (found)
		return found < 0 ? -1 : -ENOTSUP;
	return with_thread(thread, pid, "checkpoint", NULL);
}

static int resume_late(int pid)
{
	int thread = 0, found = wanted ? run("--get-restore-tid", NULL, pid, &thread) : 1;
	if (found)
		return found < 0 ? -1 : -ENOTSUP;
	return with_thread(thread, pid, "restore", "unlock");
}

static void end(int stage, int result)
{
	say("%s exit %d %d", NAME, stage, result);
	for (int i = 0; stage == STAGE_DUMP && i < count; i++) {
		int thread = 0;
		if (!run("--get-restore-tid", NULL, suspended[i], &thread))
			with_thread(thread, suspended[i], "restore", "unlock");
	}
}

struct description CR_PLUGIN_DESC = {
	.name = NAME,
	.init = begin,
	.exit = end,
	.version = PLUGIN_VERSION,
	.hooks = HOOKS,
	.hook = {
		[PAUSE_DEVICES] = (void *)pause_devices,
		[CHECKPOINT_DEVICES] = (void *)checkpoint_devices,
		[RESUME_DEVICES_LATE] = (void *)resume_late,
	},
};
