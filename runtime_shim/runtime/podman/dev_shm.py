"""What Podman keeps of a container's /dev/shm.

At the end of a checkpoint Podman writes all files of the directory that it mounts at /dev/shm into the file
devshm-checkpoint.tar of the bundle. A restore unpacks it there before it calls the runtime (libpod,
container_internal_common.go, checkpoint and restore). Twice that is wrong:

- A container that continues (--leave-running) changes the files before and while Podman reads them. They do
  not match its memory; CRIU finds other sizes ("has bad size"), or Podman a tar that is cut off ("unexpected
  EOF").
- With --ipc=host it is the /dev/shm of the host, with libpod_lock, the locks of Podman itself. With
  --ipc=container:NAME, or in a pod, it is that of another container. A restore replaces the files of other
  programs by old ones. With Podman 5.4, after `podman run -d --ipc=host …`, `podman container checkpoint` and
  `podman container restore`, the next `podman inspect` waits for ever for a lock that the process of the
  checkpoint held. An import makes a /dev/shm for the container alone, which then has the files of others.

Podman opens the file by its name, to write it and to read it. If it is a link to /dev/null, nothing is kept
and nothing is unpacked. gpusnap keeps what belongs to the container (snapshot/records/volumes.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gpusnap.runtime_shim.base.errors import ImageError, raise_as
from gpusnap.runtime_shim.runtime.bundle import binds

LINK = ("devshm-checkpoint.tar", "/dev/null")
"""The name in the bundle, and in an archive of `podman container checkpoint --export`; and where it leads."""
_AT = "/dev/shm"
# libpod, container_internal_common.go, generateSpec.
_MANAGER, _PODMAN = "io.container.manager", "libpod"


def is_of_podman(config: Mapping[str, Any]) -> bool:
    """Whether Podman wrote a config.json."""
    annotations = config.get("annotations")
    return isinstance(annotations, dict) and annotations.get(_MANAGER) == _PODMAN


def find_source(config: Mapping[str, Any]) -> str:
    """Return the directory of this host that Podman mounts at /dev/shm; empty for other engines."""
    if not is_of_podman(config):
        return ""
    sources = (
        os.path.normpath(str(mount.get("source")))
        for mount in binds(config)
        if os.path.normpath(str(mount.get("destination"))) == _AT
    )
    return next(sources, "")


def is_own(source: str, bundle: str) -> bool:
    """Whether such a directory is the container's alone.

    Podman's storage may be behind a symbolic link, which a runtime's state may name or not.
    """
    return os.path.realpath(source) == os.path.realpath(os.path.join(bundle, "shm"))


def prepare(config: Mapping[str, Any], bundle: str, *, runs_on: bool) -> None:
    """Have Podman keep /dev/shm with the checkpoint that begins, or not; `runs_on`: the container continues.

    Raises ImageError.
    """
    if not (source := find_source(config)):
        return
    if is_own(source, bundle) and not runs_on:
        keep(bundle)
        return
    name, target = LINK
    path = os.path.join(bundle, name)
    if not os.path.islink(path):
        with _raise_as(path):
            with suppress(FileNotFoundError):
                os.unlink(path)
            os.symlink(target, path)


def keep(bundle: str) -> None:
    """Have Podman keep all files of /dev/shm again. Raises ImageError."""
    path = os.path.join(bundle, LINK[0])
    if os.path.islink(path):
        with _raise_as(path):
            os.unlink(path)


def _raise_as(path: str) -> raise_as:
    return raise_as(
        ImageError, f"{path} cannot be replaced, so Podman would keep the wrong files of /dev/shm"
    )
