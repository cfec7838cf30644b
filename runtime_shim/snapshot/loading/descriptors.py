"""Checks a process's limit on descriptors before a restore opens many (getrlimit(2), RLIMIT_NOFILE).

A restore that reaches the limit half-way fails. So code that opens many files checks here first, and
otherwise uses a method with fewer.
"""

from __future__ import annotations

import os
import resource

OF_A_FILE = 2
"""Descriptors of a file in RAM: its own, and that of its mapping (cpython, Modules/mmapmodule.c)."""
# Descriptors that are left to all else: the chunks, the processes, the runtime.
_SPARE = 64


def may_open(count: int) -> bool:
    """Whether there may be so many descriptors more, and some for all else that is to be opened."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most == resource.RLIM_INFINITY or len(os.listdir("/proc/self/fd")) + count + _SPARE <= most
