"""Finds Podman's own checkpoint of a container, if the store has none under its name.

If the command `gpusnap checkpoint` is killed, Podman and its runtime still complete the checkpoint, but
nobody gives it a name in the store. The container has ended; `podman container restore` continues it.
"""

from __future__ import annotations

import os
from contextlib import suppress

from gpusnap.checkpoints import locator
from gpusnap.engines import podman
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.files import exists
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.errors import GpusnapError, ManifestError
from gpusnap.user_errors import NotFound

UNNOTICED = "it has ended, and Podman was killed before it cleaned up"
"""What `list_unnoticed` finds, in words."""
_STOPPED = ("exited", "stopped")
# Seconds for Podman to list its containers. It may wait for a lock that another Podman has.
_PATIENCE = 3.0


def resolve(place: locator.InStore) -> locator.ResolvedName:
    """Resolve a word in a store; NotFound names a container that Podman can restore instead.

    Raises like `InStore.resolve`.
    """
    try:
        return place.resolve()
    except NotFound as error:
        found = _find_restorable(place)
        if found is None:
            raise
        raise NotFound(
            f"{str(error).partition(' (did you mean')[0]}, but Podman has a checkpoint of the container "
            f"{found.name}",
            hint=f"{podman.to_restore(found)} continues it; podman start would lose its memory",
            code=error.code,
        ) from error


def list_restorable(store: Store) -> tuple[podman.Container, ...]:
    """Return containers that Podman can restore, and whose memory is in the store without a name."""
    from gpusnap.checkpoints.list import listing
    from gpusnap.runtime_shim.snapshot.memory import handover

    found: list[podman.Container] = []
    if not exists(store.path):
        return ()
    with suppress(OciError, ManifestError):
        ids = {row.container_id for row in listing(store).rows if row.kind == "pages"}
        ids |= {each.container for each in handover.list_left(store)}
        for container_id in sorted(ids - {""}):
            with suppress(GpusnapError):
                there = podman.inspect_container(container_id)
                if _has_checkpoint(there):
                    found.append(there)
    return tuple(found)


def list_unnoticed() -> tuple[podman.Container, ...]:
    """Return containers with a checkpoint that have ended while Podman could not notice it.

    Both Podmans were killed: that which made the checkpoint, and that which cleans up after a container. (The
    checkpoint may be an earlier one of a container that ended later.) Those that run without Podman's
    knowledge are left out. Returns nothing if Podman does not answer.
    """
    from gpusnap.runtime_shim.snapshot import restored_containers

    found: list[podman.Container] = []
    with suppress(GpusnapError):
        running = {each.container for each in restored_containers.list_living()}
        for container_id in podman.list_not_cleaned_up(seconds=_PATIENCE):
            with suppress(GpusnapError):
                there = podman.inspect_container(container_id)
                ended = there.is_not_cleaned_up and there.id not in running and _has_checkpoint(there)
                if ended and podman.is_ours(there.runtime):
                    found.append(there)
    return tuple(found)


def note_end(found: podman.Container) -> str:
    """Have Podman notice the end of one of these; return what was done, in words. Raises GpusnapError."""
    try:
        now = podman.inspect_container(found.id)
    except NotFound:
        return "it was removed meanwhile"
    if not now.is_not_cleaned_up:
        return f"Podman lists it as {now.status} now"
    podman.clean_up(found)
    return (
        f"{UNNOTICED}, which it has done now. To continue the container from its checkpoint: "
        f"podman container restore {found.name}"
    )


def _has_checkpoint(found: podman.Container) -> bool:
    """Return whether it has ended, and Podman has a complete checkpoint of it.

    If Podman was killed, too, it has recorded none. CRIU writes the inventory last (criu, cr-dump.c).
    """
    if found.status not in _STOPPED:
        return False
    if found.checkpointed:
        return True
    with suppress(OSError):
        return exists(os.path.join(found.checkpoint_path, "inventory.img"))
    return False


def _find_restorable(place: locator.InStore) -> podman.Container | None:
    """Return the container of that name, if this is the host's store and its checkpoint is complete."""
    if not locator.is_default(place.store.path):
        return None
    from gpusnap.runtime_shim.records import manifest_file
    from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination

    with suppress(GpusnapError):
        found = podman.inspect_container(place.wanted)
        if found.name != place.wanted or not _has_checkpoint(found):
            return None
        path = found.checkpoint_path
        if not manifest_file.is_ours(path) or manifest_file.read(path).pages != StoreDestination.kind:
            return found
        return next((each for each in list_restorable(place.store) if each.id == found.id), None)
    return None
