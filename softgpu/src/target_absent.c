/* A driver before 570: no restore thread, no mailbox, and none of the cuCheckpointProcess functions. */
#include "process.h"

int target_start(void) { return 0; }
