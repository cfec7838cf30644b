"""Opens files by their paths in the root of a process of a container, which may be malicious.

A symbolic link below /proc/PID/root is resolved from here: an absolute link leads out, to a path on this host
(path_resolution(7)). So a path is opened one name at a time, and a link on the way is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def directory(pid: int, path: str) -> Iterator[int]:
    """Open a directory by its path in a process's root, to read below it; yield the descriptor.

    Raises OSError, also for a link on the way.
    """
    descriptor = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in filter(None, path.split("/")):
            inner = os.open(name, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)
