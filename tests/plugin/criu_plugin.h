/* What a plugin and CRIU know of each other, as far as the stand-ins here need it.
 *
 * CRIU looks up CR_PLUGIN_DESC in every library of its plugin folder, refuses one that is newer than itself or
 * has more hooks than it knows, and calls the hooks by number. The numbers below have been the same since
 * CRIU 4.0; later ones have been appended (criu-plugin.h). So a plugin that says it has HOOKS of them works
 * with any.
 */
#ifndef CRIU_PLUGIN_H
#define CRIU_PLUGIN_H

#include <stddef.h>

enum hook {
	DUMP_EXT_FILE = 2,       /* int (int fd, int id) */
	RESTORE_EXT_FILE = 3,    /* int (int id), a descriptor */
	RESUME_DEVICES_LATE = 9, /* int (int pid) */
	PAUSE_DEVICES = 10,      /* int (int pid) */
	CHECKPOINT_DEVICES = 11, /* int (int pid) */
	HOOKS = 12,
};

enum stage { STAGE_DUMP, STAGE_PRE_DUMP, STAGE_RESTORE };

struct description {
	const char *name;
	int (*init)(int stage);
	void (*exit)(int stage, int result);
	unsigned int version; /* 0.2.0 as (major << 16) + (minor << 8) + sublevel */
	unsigned int hooks;
	void *hook[HOOKS];
};
#define PLUGIN_VERSION (2u << 8)

/* Of the program that loads the plugin. */
extern int criu_get_image_dir(void);
extern int add_inventory_plugin(const char *name);
extern int check_and_remove_inventory_plugin(const char *name, size_t length) __attribute__((weak));
/* Stop tasks one by one, each after its PAUSE_DEVICES, instead of freezing their cgroup at once; CRIU 4.1. */
extern void set_compel_interrupt_only_mode(void) __attribute__((weak));
extern void print_on_level(unsigned int level, const char *format, ...);
#define LOG_INFO 3

#endif
