/* A stand-in for CRIU's plugin for AMD's GPUs: it is called as that one is, for /dev/kfd, and does nothing to a
 * GPU. Of each open /dev/kfd it writes an image of its own, and opens the device anew at the restore. */

#include "criu_plugin.h"
#include "journal.h"

#include <errno.h>
#include <stdint.h>
#include <sys/stat.h>

static const char NAME[] = "amdgpu_plugin";
static const char KFD[] = "/dev/kfd";
static int noted, wanted = 1;

static int begin(int stage)
{
	noted = 0;
	wanted = 1;
	if (stage == STAGE_RESTORE && check_and_remove_inventory_plugin)
		wanted = check_and_remove_inventory_plugin(NAME, strlen(NAME));
	say_begin(NAME, stage);
	return 0;
}

static void end(int stage, int result)
{
	say("%s exit %d %d", NAME, stage, result);
}

static int image(int id, int flags)
{
	char name[64];
	snprintf(name, sizeof(name), "amdgpu-kfd-%d.img", id);
	return openat(criu_get_image_dir(), name, flags | O_CLOEXEC, 0600);
}

static int dump_file(int fd, int id)
{
	struct stat theirs, kfd;
	if (fstat(fd, &theirs) || stat(KFD, &kfd) || theirs.st_rdev != kfd.st_rdev)
		return -ENOTSUP;
	if (!noted && add_inventory_plugin(NAME))
		return -1;
	noted = 1;
	say("%s dump-file", NAME);
	uint64_t number = theirs.st_rdev;
	int file = image(id, O_WRONLY | O_CREAT | O_TRUNC);
	if (file < 0)
		return -1;
	int right = write(file, &number, sizeof(number)) == sizeof(number);
	close(file);
	return right ? 0 : -1;
}

/* In the process that is restored, which sees the container's /dev by then. */
static int restore_file(int id)
{
	uint64_t number;
	int file = image(id, O_RDONLY);
	if (file < 0)
		return -ENOTSUP;
	int right = read(file, &number, sizeof(number)) == sizeof(number);
	close(file);
	if (!wanted || !right)
		return -1;
	int kfd = open(KFD, O_RDWR);
	print_on_level(LOG_INFO, "%s: restore-file %d\n", NAME, kfd >= 0);
	return kfd;
}

static int resume_late(int pid)
{
	say("%s resume-late %d", NAME, pid > 0);
	return 0;
}

struct description CR_PLUGIN_DESC = {
	.name = NAME,
	.init = begin,
	.exit = end,
	.version = PLUGIN_VERSION,
	.hooks = HOOKS,
	.hook = {
		[DUMP_EXT_FILE] = (void *)dump_file,
		[RESTORE_EXT_FILE] = (void *)restore_file,
		[RESUME_DEVICES_LATE] = (void *)resume_late,
	},
};
