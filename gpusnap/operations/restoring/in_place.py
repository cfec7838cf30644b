"""Restores into the stopped container that the checkpoint ended, which Podman keeps under its name.

Podman then restores it from its own storage, as `podman container restore CONTAINER` does; an import would
require that the container is removed first. In place, nothing can be lost: the container keeps its volumes,
logs, pod and dependents. If the restore fails, Podman leaves the container and its images unchanged (libpod,
Container.restore: both change only after a success).

Podman writes the files of the checkpoint over the container's own (rootfs-diff.tar, in its storage). Files
that somebody changed or removed in the stopped container, for example with `podman cp`, are restored. Added
files remain.

This is done only if Podman has that very checkpoint: the container has the ID and the name of the one in the
archive, a checkpoint ended it and it was not started since, and the images in Podman's storage are those in
the archive. Any other container with that name is left alone. Podman forgets at a restart of the host that a
checkpoint ended the container; then the manifest of the checkpoint says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress

from gpusnap.base.user_errors import Killed
from gpusnap.checkpoints.formats.entries import entries, read_member
from gpusnap.checkpoints.formats.names import FIRST, LARGEST_DUMP
from gpusnap.checkpoints.statistics import ended_container
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.store.tags import is_later
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.records.manifest import INVENTORY

# Options of `podman container restore` without --import (cmd/podman/containers/restore.go).
_TAKEN = frozenset(
    ("--file-locks", "--ignore-static-ip", "--ignore-static-mac", "--tcp-close", "--tcp-established")
)
_VOLUMES = "--ignore-volumes"
_STOPPED = ("exited", "stopped")
_IMAGES = "checkpoint/"
# Images up to this size are compared by content, and memory only by its size.
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A stopped container that Podman can restore in place, and the options for that."""

    container: podman.Container
    options: tuple[str, ...]


def find(archive: str, options: Sequence[str], ids: Collection[str]) -> Target | None:
    """Find the container that an archive's checkpoint has ended, if these options allow a restore in place.

    None if that is not certain. ids: of all containers that Podman has.
    """
    with suppress(GpusnapError, OciError, OSError, ValueError, KeyError, TypeError):
        config = parse_json(read_member(archive, FIRST[0], limit=LARGEST_DUMP) or b"{}")
        container_id, name = str(config["id"]), str(config["name"])
        taken = _select_options(options, name)
        if taken is None or container_id not in ids:
            return None
        found = podman.inspect_container(container_id)
        ours = (found.id, found.name) == (container_id, name)
        if (
            ours
            and found.status in _STOPPED
            and (found.checkpointed or _ended_before_restart(found))
            and _has_images(found.checkpoint_path, archive)
        ):
            return Target(found, taken)
    return None


def restore(target: Target, run: Callable[[Sequence[str]], object]) -> None:
    """Restore it with `run`, which gets the options for Podman; errors say what is left. Raises likewise."""
    try:
        podman.clean_up(target.container)
        run((*target.options, target.container.id))
    except Killed:
        raise
    except GpusnapError as error:
        name = target.container.name
        raise type(error)(
            f"{error}; nothing is lost: Podman still has {name}, stopped, and its checkpoint",
            hint="correct that, then run the same command again",
            code=error.code,
        ) from error


def _ended_before_restart(found: podman.Container) -> bool:
    """Return whether the checkpoint in Podman's storage ended the container, which was not started since.

    After a failed checkpoint of a container with --rm, it may have run on. Raises ManifestError.
    """
    record = manifest_file.read(found.checkpoint_path)
    since = is_later(record.created, found.started_at)
    return since and ended_container(record.timing) and not found.auto_remove


def _select_options(options: Sequence[str], name: str) -> tuple[str, ...] | None:
    """Return the options for a restore in place, which keeps name and volumes; None if impossible."""
    words = [word for word in options if word != _VOLUMES]
    if "--name" in words:
        at = words.index("--name")
        if words[at + 1 : at + 2] != [name]:
            return None
        del words[at : at + 2]
    return tuple(words) if _TAKEN.issuperset(words) else None


def _has_images(folder: str, archive: str) -> bool:
    """Return whether a folder has exactly the images of an archive. Raises OSError, OciError."""
    seen = set()
    with closing(entries(archive)) as found:
        for entry in found:
            if entry.content is None or not entry.name.startswith(_IMAGES):
                continue
            name = entry.name.removeprefix(_IMAGES)
            path = os.path.join(folder, name)
            if os.lstat(path).st_size != entry.info.size:
                return False
            if entry.info.size <= _SMALL:
                with open(path, "rb") as file:
                    if file.read(_SMALL + 1) != entry.content.read(_SMALL + 1):
                        return False
            seen.add(name)
    images = {name for name in os.listdir(folder) if name.endswith(".img")}
    return INVENTORY in seen and images <= seen
