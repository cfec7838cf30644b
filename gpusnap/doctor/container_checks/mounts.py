"""Mounts of a container that are not in its configuration: CRIU needs the source of each."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gpusnap.doctor.base.check import Check, failure, ok
from gpusnap.runtime_shim.process.proc import Mount

# File systems that CRIU creates anew, with their content (criu/filesystems.c), or without a source on the
# host.
_MADE = frozenset(
    {
        *("proc", "sysfs", "tmpfs", "devtmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "binfmt_misc"),
        *("debugfs", "tracefs", "securityfs", "fusectl", "pstore", "autofs", "overlay"),
    }
)


def list_unexplained(
    mounts: Sequence[Mount], config: Mapping[str, Any], known: Collection[str] = ()
) -> tuple[Mount, ...]:
    """Return bind mounts from the host that the configuration does not name; `known`: other destinations.

    A mount below one that it names came with that (rbind).
    """
    named = {os.path.normpath(str(each.get("destination", ""))) for each in config.get("mounts") or ()}
    linux = config.get("linux") or {}
    masked = {*(linux.get("maskedPaths") or ()), *(linux.get("readonlyPaths") or ())}
    # Another mount of a file system that CRIU knows already is a bind of that.
    seen = {"/", *named, *known}
    roots = {(each.device, each.root.rstrip("/")) for each in mounts if each.destination in seen}
    found = []
    for mount in mounts:
        path = mount.destination
        if path == "/" or path in named or path in known or path in masked:
            continue
        if mount.kind in _MADE and mount.root == "/":  # a mount of a part of one comes from elsewhere
            continue
        # /dev/console is a terminal of the engine's; devices are bound if a user namespace forbids nodes.
        if path == "/dev" or path.startswith("/dev/"):
            continue
        if any(path.startswith(each.rstrip("/") + "/") for each in named - {"/"}):
            continue
        if any(mount.device == device and f"{mount.root}/".startswith(f"{top}/") for device, top in roots):
            continue
        found.append(mount)
    return tuple(found)


def check(mounts: Sequence[Mount], config: Mapping[str, Any], known: Collection[str] = ()) -> Iterator[Check]:
    """Report `list_unexplained`; `known` are the driver's mounts, which gpusnap declares to CRIU."""
    found = list_unexplained(mounts, config, known)
    for mount in found:
        yield failure(
            "mounts",
            f"{mount.destination} is a mount ({mount.kind}, {mount.root} of {mount.device}) that is not "
            "in the container's configuration, so CRIU does not know its source",
            "add it with --volume, or name it to CRIU: criu.external in the settings",
            destination=mount.destination,
            device=mount.device,
        )
    if not found:
        yield ok("mounts", "all of its mounts are in its configuration", driver=sorted(known))
