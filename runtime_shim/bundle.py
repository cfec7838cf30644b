"""The bundle's config.json, put right before a restore.

CDI's mounts (Podman's --device nvidia.com/gpu=…) have options but no `type`, which the runtime specification
allows. crun 1.21 reads the missing type on restore and crashes (criu.c, prepare_restore_mounts; newer ones
check it), so a bind mount is given its type. A bind mount whose source is a symbolic link (libcuda.so.1, as
people mount it by hand) fails in CRIU's restore ("Can't remount"), so the link is followed. Nothing else is
changed: the file comes from the caller, and what it grants stays as it is.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

from runtime_shim.errors import ContainerError, reason

__all__ = ["prepare"]


def prepare(bundle: str, config: dict[str, Any]) -> Callable[[], None]:
    """Write `config` back with what a restore needs; returns what puts the old file back.

    Raises ContainerError where the bundle cannot be written.
    """
    changed = [mount for mount in config.get("mounts") or () if _mend(mount)]
    if not changed:
        return lambda: None
    path = os.path.join(bundle, "config.json")
    try:
        with open(path, "rb") as file:
            before = file.read()
        _replace(path, json.dumps(config).encode())
    except OSError as error:
        raise ContainerError(f"{path} cannot be prepared for the restore: {reason(error)}") from error
    return lambda: _replace(path, before)


def _mend(mount: Any) -> bool:
    """Give one mount what it lacks; whether it lacked anything."""
    options = mount.get("options") or () if isinstance(mount, dict) else ()
    if "bind" not in options and "rbind" not in options:
        return False
    before = dict(mount)
    mount["type"] = mount.get("type") or "bind"
    source = mount.get("source")
    if isinstance(source, str) and os.path.isabs(source) and os.path.islink(source):
        mount["source"] = os.path.realpath(source)
    return bool(mount != before)


def _replace(path: str, data: bytes) -> None:
    """Write a file in one step, with the mode and the owner that it had."""
    before = os.stat(path)
    descriptor, name = tempfile.mkstemp(prefix=".config-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, before.st_mode & 0o7777)
            os.fchown(descriptor, before.st_uid, before.st_gid)
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
