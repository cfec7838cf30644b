"""The stage poststop: removes the record of a container that is gone (runtime-spec, config.md, Poststop)."""

from __future__ import annotations

import os

from gpusnap import hooks
from gpusnap.hooks.documents import HookError, parse
from gpusnap.runtime_shim.base.errors import reason


def remove_record(data: bytes) -> None:
    """Remove gpusnap's record of the container whose state `data` is. Raises HookError."""
    try:
        if not os.listdir(hooks.RECORDS):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise HookError(f"{hooks.RECORDS} cannot be read: {reason(error)}", code="GPS-908") from error
    from gpusnap.hooks.record_directories import check_id, remove_directory

    container = check_id(parse(data, "the container's state").get("id"))
    try:
        remove_directory(container)
    except OSError as error:
        raise HookError(
            f"the record of container {container} cannot be removed: {reason(error)}", code="GPS-908"
        ) from error
