"""Podman's stage precreate, which passes on a container's configuration before the container is created.

Podman gives the configuration on stdin and reads it back from stdout, after CDI's edits and before the
runtime sees it (libpod, setupOCIHooks; containers/common, pkg/hooks/exec/runtimeconfigfilter.go). The hook
changes what would break a later checkpoint or restore of a container with a GPU:

- A bind mount without a `type`, as CDI's are, gets it: crun 1.21 crashes on it when it restores.
- If the source of a bind mount is a symbolic link, it becomes the target: CRIU's restore cannot remount a
  link.
- A mount of the driver's files without a propagation option becomes rprivate: CRIU refuses to dump a mount
  that it would have to restore into a peer group of the host's.
- With a path given, the annotation org.criu.config names that file, unless the container has one.

bundle.prepare() also does the first two at a restore, for containers that were made without this hook.
"""

from __future__ import annotations

import os
from typing import Any

from gpusnap.hooks.config import has_gpu, is_named_as_drivers
from gpusnap.hooks.documents import check_schema, encode, parse

CRIU_ANNOTATION = "org.criu.config"
"""Read by runc and, from 1.26 on with CRIU 4.2, by crun; an older crun refuses to checkpoint with it."""

_PROPAGATION = frozenset(
    ("shared", "rshared", "slave", "rslave", "private", "rprivate", "unbindable", "runbindable")
)
# crun's option for a mount of the link itself; Podman's no-dereference becomes it.
_COPIES_LINK = "copy-symlink"


def prepare_config(data: bytes, criu_config: str = "") -> bytes:
    """Return the configuration in `data`, prepared for a checkpoint; `data` itself if nothing must change.

    Raises HookError if it is no configuration.
    """
    config = parse(data, "the container's configuration")
    if not has_gpu(config):
        return data
    check_schema(config, "config", "the container's configuration")
    changes = [_mend(mount) for mount in config.get("mounts") or ()]
    if criu_config:
        changes.append(_annotate(config, criu_config))
    return encode(config) if any(changes) else data


def _mend(mount: dict[str, Any]) -> bool:
    """Add what one mount lacks; return whether it lacked anything."""
    options = mount.get("options") or []
    if mount.get("type") != "bind" and not {"bind", "rbind"} & set(options):
        return False
    before = dict(mount)
    mount["type"] = mount.get("type") or "bind"
    source = mount.get("source", "")
    if os.path.isabs(source) and _COPIES_LINK not in options:
        mount["source"] = _resolve_link(source)
    ours = is_named_as_drivers(source) or is_named_as_drivers(mount["destination"])
    if ours and not _PROPAGATION & set(options):
        mount["options"] = [*options, "rprivate"]
    return mount != before


def _resolve_link(path: str) -> str:
    """Return the target of a symbolic link; `path` itself for anything else, and for a broken link."""
    try:
        return os.path.realpath(path, strict=True) if os.path.islink(path) else path
    except (OSError, ValueError):
        return path


def _annotate(config: dict[str, Any], path: str) -> bool:
    annotations = config.get("annotations")
    if annotations is None:
        annotations = config["annotations"] = {}
    return bool(annotations.setdefault(CRIU_ANNOTATION, path) is path)
