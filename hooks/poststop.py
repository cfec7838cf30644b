"""The stage poststop: removes the record of a container that is gone (runtime-spec, config.md, Poststop)."""

from __future__ import annotations

import os

from gpusnap.hooks import folder
from gpusnap.hooks.errors import HookError
from gpusnap.runtime_shim.errors import reason


def forget(data: bytes) -> None:
    """Remove gpusnap's record of the container whose state `data` is. Raises HookError."""
    try:
        if not os.listdir(folder.FOLDER):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise HookError(f"{folder.FOLDER} cannot be read: {reason(error)}", code="GPS-908") from error
    from gpusnap.hooks import place
    from gpusnap.hooks.document import parse

    state = parse(data, "the container's state")
    container = place.check_id(state.get("id"))
    if not os.path.lexists(os.path.join(folder.FOLDER, container)):
        return
    from gpusnap.hooks import schema

    schema.check(state, "state", "the container's state")
    try:
        place.remove(container)
    except OSError as error:
        raise HookError(
            f"the record of container {container} cannot be removed: {reason(error)}", code="GPS-908"
        ) from error
