"""Checks a process's limit on descriptors before a restore opens many (getrlimit(2), RLIMIT_NOFILE).

A restore that reaches the limit in the middle fails. So code that opens many files checks here first, and
otherwise uses a method that needs fewer.
"""

from __future__ import annotations

import os
import resource

OF_A_FILE = 2
"""Descriptors for a file in RAM: its own, and that of its mapping (cpython, Modules/mmapmodule.c)."""
# Descriptors that stay free for everything else: the chunks, the processes, the runtime.
_SPARE = 64


def may_open(count: int) -> bool:
    """Whether the process may open `count` more descriptors, and some for everything else."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most == resource.RLIM_INFINITY or len(os.listdir("/proc/self/fd")) + count + _SPARE <= most
