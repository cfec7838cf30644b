"""Errors for commands that need root: they name the missing privilege, and not its consequences."""

from __future__ import annotations

import errno
import os

from gpusnap.runtime_shim.base.errors import GpusnapError, reason

_CODE = "GPS-005"
_HINT = "run gpusnap as root"
_REFUSED = (errno.EACCES, errno.EPERM)


def is_root() -> bool:
    """Return whether this process runs as root."""
    return os.geteuid() == 0


def require_root(command: str) -> None:
    """Raise GpusnapError if a command that needs root is run by another user."""
    if is_root():
        return
    if command == "checkpoint":
        raise GpusnapError(
            "gpusnap checkpoint was not run as root, but only containers of root can be checkpointed",
            hint=_HINT,
            code=_CODE,
        )
    raise GpusnapError(f"gpusnap {command} must be run as root", hint=_HINT, code=_CODE)


def check_access(path: str) -> None:
    """Raise GpusnapError if this user may not see whether a path exists."""
    if is_root():
        return
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in _REFUSED:
            raise GpusnapError(f"{path} cannot be read: {reason(error)}", hint=_HINT, code=_CODE) from error


def explain_error(error: GpusnapError) -> GpusnapError:
    """Return the error; if a user's access was denied, with the advice to run the command as root."""
    if is_root() or "as root" in error.hint or not _is_refused(error):
        return error
    hint = f"{_HINT}; {error.hint}" if error.hint else _HINT
    return GpusnapError(str(error), hint=hint, code=_CODE)


def _is_refused(error: BaseException) -> bool:
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in _REFUSED:
            return True
        found = found.__cause__
    return False
