"""Finds Podman's own checkpoint of a container, or its export, if the store has none under its name.

If the command `gpusnap checkpoint` is killed, Podman and its runtime still complete the checkpoint, but
nobody gives it a name in the store. The container has ended; `podman container restore` continues it, one
with --rm from the export that the command has left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from gpusnap.base.user_errors import NotFound, convert_errors
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.names import container_name
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.files import exists
from gpusnap.oci.chunks.table import descriptors
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import by_age, is_later
from gpusnap.runtime_shim.base.errors import GpusnapError

if TYPE_CHECKING:
    from gpusnap.operations.checkpointing.exported_containers import ExportedContainer

UNNOTICED = "it has ended, and Podman was killed before it cleaned up"
"""What `list_unnoticed` finds, in words."""
# Seconds for Podman to list its containers. It may wait for a lock that another Podman has.
_PATIENCE = 3.0
# Seconds for Podman to describe all containers that may need memory in a store. A checkpoint or restore of
# one may be in progress, and Podman waits for it.
_DESCRIBING = 15.0
# Seconds to look into all exports that killed commands left.
_EXAMINING = 15.0
_NOT_INSTALLED = "GPS-901"


@dataclass(frozen=True, slots=True)
class StoppedContainer:
    """A container that Podman can restore from its own checkpoint, with memory that is in a store."""

    container: podman.Container
    store: str
    """The path of the store."""
    chunks: frozenset[str]
    """The digests of the chunks that its restore reads from there."""

    @property
    def id(self) -> str:
        return self.container.id

    @property
    def name(self) -> str:
        return self.container.name

    def make_command(self) -> str:
        """Return the command with which Podman restores it."""
        elsewhere = "" if locator.is_default(self.store) else self.store
        return podman.to_restore(self.container, store=elsewhere)


NeedyContainer: TypeAlias = "StoppedContainer | ExportedContainer"
"""A container that Podman can restore with memory without a name."""


def resolve(place: locator.InStore) -> locator.ResolvedName:
    """Resolve a word in a store; NotFound names a container that Podman can restore instead.

    Raises like `InStore.resolve`.
    """
    try:
        return place.resolve()
    except NotFound as error:
        said = str(error).partition(" (did you mean")[0]
        found = _find_restorable(place)
        if found is not None:
            raise NotFound(
                f"{said}, but Podman has a checkpoint of the container {found.name}",
                hint=f"{podman.to_restore(found)} continues it; podman start would lose its memory",
                code=error.code,
            ) from error
        if locator.is_default(place.store.path) and find_exported(place.wanted, [place.store.path]):
            raise NotFound(
                f"{said}, but Podman's export of the container {place.wanted} is left of a killed command",
                hint="gpusnap recover names it, and what continues the container",
                code=error.code,
            ) from error
        raise


def list_restorable(store: Store) -> tuple[StoppedContainer, ...]:
    """Return containers that Podman can restore, and whose memory is in the store without a name.

    A container is left out if the store lacks a chunk that its checkpoint needs: the store may have memory of
    an earlier checkpoint. Returns nothing if Podman is not installed, or if the store cannot be read. Raises
    GpusnapError if Podman does not answer in time.
    """
    from gpusnap.checkpoints.list import listing
    from gpusnap.runtime_shim.snapshot.memory import handover

    try:
        if not exists(store.path):
            return ()
        handed_over = handover.list_left(store)
        ids = {row.container_id for row in listing(store).rows if row.kind == "pages"}
    except OciError:
        return ()
    ids |= {each.container for each in handed_over}
    found: list[StoppedContainer] = []
    for there in _inspect_existing(ids - {""}):
        if not there.has_checkpoint():
            continue
        with suppress(GpusnapError, OciError):
            needed = _list_needed(there)
            if needed and _has_chunks(store, needed):
                chunks = frozenset(each.digest for each in needed)
                found.append(StoppedContainer(there, store.path, chunks))
    return tuple(found)


def list_exported(store: Store) -> tuple[ExportedContainer, ...]:
    """Return containers of which a killed command left Podman's export, and whose memory is in the store.

    One whose memory is in the export is left out, and one that needs a chunk which the store lacks. Raises
    GpusnapError, also if an export cannot be read: it may need any memory of the store.
    """
    from gpusnap.operations.checkpointing import exported_containers, left_exports

    missing = left_exports.list_missing()
    begun = [each for each in left_exports.list_begun() if each.store == store.path]
    left = [*left_exports.list_left(store.path), *left_exports.list_left_beside(missing)]
    left += [each for each in begun if each.archive not in {one.archive for one in left}]
    end = time.monotonic() + _EXAMINING
    found: list[ExportedContainer] = []
    for each in left:
        there = exported_containers.read(each, store.path, within=max(0.1, end - time.monotonic()))
        with convert_errors():
            if there.needed and _has_chunks(store, there.needed):
                found.append(there)
    return tuple(found)


def find_exported(wanted: str, stores: Sequence[str]) -> tuple[ExportedContainer, ...]:
    """Return the containers of that name or ID of which killed commands left Podman's export, by age.

    `stores`: the paths of this host's store and those of killed commands. An export that cannot be read is
    left out.
    """
    from gpusnap.operations.checkpointing import left_exports

    left = [*left_exports.list_left_beside(left_exports.list_missing())]
    for path in stores:
        with suppress(GpusnapError):  # a store that cannot be read hides no other one
            left += left_exports.list_left(path)
    if not left:
        return ()
    from gpusnap.operations.checkpointing import exported_containers

    end = time.monotonic() + _EXAMINING
    found: list[ExportedContainer] = []
    for each in left:
        with suppress(GpusnapError):
            within = max(0.1, end - time.monotonic())
            there = exported_containers.read(each, each.store or stores[0], within=within)
            if wanted == there.name or (wanted and there.id.startswith(wanted)):
                found.append(there)
    return tuple(sorted(found, key=lambda each: by_age(each.created)))


def has_later_export(source: locator.ResolvedName, name: str) -> bool:
    """Return whether a killed command left an export of a container that is later than its newest checkpoint.

    `name`: the container's name in the store, without a tag.
    """
    with suppress(GpusnapError, OciError, OSError):
        for each in find_exported(name, [source.place.store.path]):
            if container_name(each.name, each.id) == name and is_later(each.created, source.entry.created):
                return True
    return False


def find_needed(store: Store, needy: Sequence[NeedyContainer]) -> frozenset[str]:
    """Return the digests of what the store's index names that contains all chunks of one of these.

    Raises LayoutError.
    """
    from gpusnap.checkpoints.list import blobs_of, list_named

    needs = [each.chunks for each in needy if each.store == store.path]
    found: set[str] = set()
    for named in list_named(store) if needs else ():
        with suppress(OciError):
            blobs = blobs_of(store, named.root).keys()
            if any(chunks <= blobs for chunks in needs):
                found.add(named.root.digest)
    return frozenset(found)


def check_removal(store: Store, root: Descriptor) -> None:
    """Refuse to remove a checkpoint if the only memory of a stopped container would be lost.

    Only memory without records is checked: the records of a checkpoint are removed together with its memory.
    Raises GpusnapError, also if Podman does not say which containers it has; LayoutError.
    """
    from gpusnap.checkpoints.list import is_pages_only

    if not is_pages_only(store, root):
        return
    digest, hint = root.digest, "try again when Podman answers, or remove it with --force"
    try:
        stopped = list_restorable(store)
        hint = "gpusnap recover names the export; if it is of no use, remove that, or this with --force"
        exported = list_exported(store)
    except GpusnapError as error:
        raise GpusnapError(
            f"cannot determine whether a stopped container needs {digest}: {error}",
            hint=hint,
            code="GPS-706",
        ) from error
    needy: list[tuple[str, NeedyContainer]] = []
    needy += [(f"the stopped container {each.name}", each) for each in stopped]
    needy += [(f"the export of {each.name}, {each.left.archive},", each) for each in exported]
    for what, one in needy:
        if find_needed(store, [one]) == {digest}:
            raise GpusnapError(
                f"{what} needs {digest}, which is its only memory in {store.path}",
                hint=f"{one.make_command()} continues it; gpusnap rm --force removes its memory for good",
                code="GPS-706",
            )


def list_unnoticed() -> tuple[podman.Container, ...]:
    """Return containers with a checkpoint that have ended while Podman could not notice it.

    Both Podmans were killed: that which made the checkpoint, and that which cleans up after a container. (The
    checkpoint may be an earlier one of a container that ended later.) Those that run without Podman's
    knowledge are left out. Returns nothing if Podman does not answer.
    """
    from gpusnap.runtime_shim.snapshot.recovery import restored_containers

    found: list[podman.Container] = []
    with suppress(GpusnapError):
        running = {each.container for each in restored_containers.list_living()}
        for container_id in podman.list_not_cleaned_up(seconds=_PATIENCE):
            with suppress(GpusnapError):
                there = podman.inspect_container(container_id)
                # Podman would remove one with --rm as it notices the end.
                ended = there.is_not_cleaned_up or (there.is_listed_as_running and not there.auto_remove)
                unnoticed = ended and there.id not in running and there.has_checkpoint()
                if unnoticed and podman.is_ours(there.runtime):
                    found.append(there)
    return tuple(found)


def note_end(found: podman.Container, stores: Sequence[str] = ()) -> str:
    """Have Podman notice the end of one of these; return what was done, in words. Raises GpusnapError.

    `stores`: the paths of the stores that may have its memory.
    """
    try:
        now = podman.inspect_container(found.id)
    except NotFound:
        return "it was removed meanwhile"
    if not (now.is_not_cleaned_up or now.is_listed_as_running):
        return f"Podman lists it as {now.status} now"
    podman.clean_up(now)
    command = f"podman container restore {found.name}"
    with suppress(GpusnapError):
        restorable = (each for path in stores for each in list_restorable(Store(path)))
        command = next((each.make_command() for each in restorable if each.container.id == found.id), command)
    return f"{UNNOTICED}, which it has done now. To continue the container from its checkpoint: {command}"


def _has_chunks(store: Store, needed: Sequence[Descriptor]) -> bool:
    """Return whether the store has these, also as memory that was handed over. Raises OciError."""
    from gpusnap.runtime_shim.snapshot.memory import handover

    missing = {each.digest for each in store.layout.list_missing(needed)}
    if missing:
        for record in handover.list_left(store):
            missing -= {each.digest for each in descriptors(record.tables)}
    return not missing


def _inspect_existing(ids: Set[str]) -> list[podman.Container]:
    """Inspect those of these containers that exist, within one deadline. Raises GpusnapError.

    Podman lists them anew: since `list_unnoticed`, what was recovered may have taken minutes.
    """
    found: list[podman.Container] = []
    if not ids:
        return found
    end = time.monotonic() + _DESCRIBING
    try:
        existing = podman.names(seconds=_DESCRIBING)
    except GpusnapError as error:
        if error.code == _NOT_INSTALLED:
            return found
        raise
    for container_id in sorted(ids & existing.keys()):
        left = max(0.1, end - time.monotonic())
        with suppress(NotFound), podman.Inspection(container_id, seconds=left) as asked:
            found.append(asked.container())
    return found


def _list_needed(found: podman.Container) -> Sequence[Descriptor]:
    """Return the chunks that a restore from Podman's checkpoint needs from a store.

    Raises GpusnapError if the checkpoint cannot be read; LayoutError.
    """
    from gpusnap.runtime_shim.records import manifest_file
    from gpusnap.runtime_shim.records.manifest import FOLDER
    from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination

    path = found.checkpoint_path
    if not manifest_file.is_ours(path):
        return ()
    record = manifest_file.read(path)
    if record.pages != StoreDestination.kind:
        return ()
    return Layout(os.path.join(path, FOLDER)).list_missing(descriptors(record.tables))


def _find_restorable(place: locator.InStore) -> podman.Container | None:
    """Return the container of that name, if this is the host's store and its checkpoint is complete."""
    if not locator.is_default(place.store.path):
        return None
    with suppress(GpusnapError, OciError):
        found = podman.inspect_container(place.wanted)
        if found.name != place.wanted or not found.has_checkpoint():
            return None
        if not _list_needed(found):
            return found
        restorable = {each.container.id for each in list_restorable(place.store)}
        return found if found.id in restorable else None
    return None
