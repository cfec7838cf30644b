/* A stand-in for NVIDIA's cuda-checkpoint: as much of its command line as a plugin of CRIU's uses, by the driver
 * library that is there, softgpu in tests.
 *
 *   cuda-checkpoint --get-restore-tid --pid PID
 *   cuda-checkpoint --get-state --pid PID
 *   cuda-checkpoint --action lock|checkpoint|restore|unlock --pid PID [--timeout MILLISECONDS]
 */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*call_t)(int pid, void *arguments);

static void *library;

static void *symbol(const char *name)
{
	void *found = dlsym(library, name);
	if (!found) {
		fprintf(stderr, "%s is missing\n", name);
		exit(2);
	}
	return found;
}

static call_t find(const char *name)
{
	return (call_t)symbol(name);
}

static int act(const char *action, int pid, unsigned int timeout)
{
	/* Each takes 64 bytes, of which a lock's first four are its timeout (cuda.h). */
	uint64_t arguments[8] = { !strcmp(action, "lock") ? timeout : 0 };
	if (!strcmp(action, "lock"))
		return find("cuCheckpointProcessLock")(pid, arguments);
	if (!strcmp(action, "checkpoint"))
		return find("cuCheckpointProcessCheckpoint")(pid, arguments);
	if (!strcmp(action, "restore"))
		return find("cuCheckpointProcessRestore")(pid, arguments);
	if (!strcmp(action, "unlock"))
		return find("cuCheckpointProcessUnlock")(pid, arguments);
	fprintf(stderr, "no action %s\n", action);
	return -1;
}

int main(int argc, char **argv)
{
	static const char *const states[] = { "running", "locked", "checkpointed", "failed" };
	const char *action = NULL, *wanted = NULL;
	unsigned int timeout = 0;
	int pid = 0, result, number = 0;

	for (int i = 1; i < argc; i++) {
		const char *value = i + 1 < argc ? argv[i + 1] : "";
		if (!strncmp(argv[i], "--get-", 6))
			wanted = argv[i];
		else if (i++, !strcmp(argv[i - 1], "--pid"))
			pid = atoi(value);
		else if (!strcmp(argv[i - 1], "--action"))
			action = value;
		else if (!strcmp(argv[i - 1], "--timeout"))
			timeout = atoi(value);
	}
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 2;
	}
	if ((result = ((int (*)(unsigned int))symbol("cuInit"))(0)) != 0) {
		fprintf(stderr, "cuInit: %d\n", result);
		return 2;
	}
	if (action)
		result = act(action, pid, timeout);
	else if (wanted && !strcmp(wanted, "--get-restore-tid"))
		result = find("cuCheckpointProcessGetRestoreThreadId")(pid, &number);
	else
		result = find("cuCheckpointProcessGetState")(pid, &number);
	if (result) {
		printf("result %d\n", result);
		return 1;
	}
	if (wanted && !strcmp(wanted, "--get-restore-tid"))
		printf("%d\n", number);
	else if (!action)
		printf("%s\n", number >= 0 && number < 4 ? states[number] : "unknown");
	return 0;
}
