"""Reads files of unknown type: with a size limit, and without waiting."""

from __future__ import annotations

import os
import stat

from gpusnap.hooks.errors import HookError
from gpusnap.runtime_shim.errors import reason


def read_file(path: str, limit: int, *, folder: int | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes; `folder`: a descriptor that `path` is relative to.

    Raises HookError for anything else there; FileNotFoundError passes through.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with os.fdopen(os.open(path, flags, dir_fd=folder), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise HookError(f"{path} is not a regular file", code="GPS-908")
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        raise HookError(f"{path} cannot be read: {said}", code="GPS-908") from error
    if len(data) > limit:
        raise HookError(f"{path} is larger than {limit >> 10} KiB", code="GPS-908")
    return data
