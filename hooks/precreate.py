"""Podman's stage precreate, which passes on a container's configuration before the container is created.

Podman gives the configuration on stdin and takes it back from stdout, after CDI's edits and before the
runtime sees it (libpod, setupOCIHooks; containers/common, pkg/hooks/exec/runtimeconfigfilter.go). What is
changed here is what later breaks a checkpoint or a restore of a container with a GPU:

- A bind mount without a `type`, as CDI's are, gets it: crun 1.21 crashes on it when it restores.
- A bind mount whose source is a symbolic link gets the file behind it: CRIU's restore cannot remount a link.
- A mount of the driver's files without a propagation option becomes rprivate: CRIU refuses to dump one that
  it would have to put back into a peer group of the host's.
- With a path given, the annotation org.criu.config names that file, where the container has none.

bundle.prepare() does the first two at a restore too, for containers that were made without this hook.
"""

from __future__ import annotations

import os
from typing import Any

from gpusnap.hooks import schema
from gpusnap.hooks.document import parse, text
from gpusnap.hooks.given import has_gpu, is_named_as_drivers

CRIU_ANNOTATION = "org.criu.config"
"""Read by runc and, from 1.26 on with CRIU 4.2, by crun; an older crun refuses to checkpoint with it."""

_PROPAGATION = frozenset(
    ("shared", "rshared", "slave", "rslave", "private", "rprivate", "unbindable", "runbindable")
)
# crun's option for a mount of the link itself; Podman's no-dereference becomes it.
_COPIES_LINK = "copy-symlink"


def prepare_config(data: bytes, criu_config: str = "") -> bytes:
    """The configuration in `data`, ready for a checkpoint; `data` itself where nothing has to change.

    Raises HookError where it is no configuration.
    """
    config = parse(data, "the container's configuration")
    if not has_gpu(config):
        return data
    schema.check(config, "config", "the container's configuration")
    changes = [_mend(mount) for mount in config.get("mounts") or ()]
    if criu_config:
        changes.append(_annotate(config, criu_config))
    return text(config) if any(changes) else data


def _mend(mount: dict[str, Any]) -> bool:
    """Give one mount what it lacks; whether it lacked anything."""
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
    """The file behind a symbolic link; `path` as it is for all else, and where the link leads nowhere."""
    try:
        return os.path.realpath(path, strict=True) if os.path.islink(path) else path
    except (OSError, ValueError):
        return path


def _annotate(config: dict[str, Any], path: str) -> bool:
    annotations = config.get("annotations")
    if annotations is None:
        annotations = config["annotations"] = {}
    return bool(annotations.setdefault(CRIU_ANNOTATION, path) is path)
