"""Checkpoints that can be read without a network: in a store, in a layout in a file, in an archive of Podman
or ctr, or in containerd. `open_local` presents each of them as an artifact in a layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from gpusnap.base.progress import Progress
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.formats import containerd_reader
from gpusnap.checkpoints.formats import podman as convert
from gpusnap.checkpoints.formats.containerd import Source
from gpusnap.checkpoints.formats.containerd_archive import Archive
from gpusnap.checkpoints.formats.layout_archive import InLayout, opened_layout
from gpusnap.checkpoints.labels import as_annotations
from gpusnap.checkpoints.volumes import Volume
from gpusnap.engines.ctr import InContainerd
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import ArchiveError, BlobError, LayoutError
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.layout.archive import is_layout
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.index import REF_NAME
from gpusnap.oci.store.referrers import list_referring
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store


@dataclass(frozen=True, slots=True)
class Local:
    """A checkpoint that can be read without a network: in a store, in a layout in a file, or unpacked."""

    root: Descriptor
    layout: Layout
    store: Store
    """The store that has it, or this host's."""
    staging: Staging | None = None
    """In `open_local`'s `home`, if it was unpacked from one of Podman's archives or from containerd."""
    name: str = ""
    """The name by which it was requested, or its name in the layout."""

    def referrers(self) -> tuple[Descriptor, ...]:
        """Return its referrers (signatures and the like) in its store, or in another tool's layout."""
        with suppress(LayoutError):  # a staging has no index
            return list_referring(self.layout.read_index().manifests, self.layout.read_blob, self.root.digest)
        return ()


@contextmanager
def open_local(
    what: locator.InStore | locator.InFile | locator.InContainerd,
    progress: Progress,
    home: Store | None = None,
) -> Iterator[Local]:
    """Open a checkpoint as an artifact in a layout; gc keeps it until the block ends.

    home: the store for unpacking an archive of Podman's, by default this host's store. Raises NotFound,
    Damaged, GpusnapError, OciError, ImageError.
    """
    with ExitStack() as stack:
        if isinstance(what, locator.InStore):
            store, found = stack.enter_context(kept.hold_artifact(what))
            yield Local(found.root, store.layout, store, name=what.entry().name)
            return
        place = layout_of(what, stack)
        store = (home or locator.default_store()).create()
        if place is not None and place.kind != "containerd":
            if place.kind == "checkpoint":
                kept.load(place.root, place.layout)
            yield Local(place.root, place.layout, store, name=place.root.annotations.get(REF_NAME, ""))
            return
        staging = stack.enter_context(store.stage())
        if isinstance(what, locator.InContainerd):
            progress.stage("containerd's image")
            root = take_in_image(staging, InContainerd(what.namespace, what.name), progress)
        else:
            progress.stage("archive")
            root, _ = take_in(staging, what.path, progress)
        yield Local(root, staging.layout, store, staging)


def layout_of(
    what: locator.InStore | locator.InFile | locator.InContainerd, stack: ExitStack
) -> InLayout | None:
    """Return an image layout in a file; None for anything else, and for a truncated one."""
    if isinstance(what, locator.InFile) and is_layout(what.path):
        with suppress(ArchiveError):
            return stack.enter_context(opened_layout(what.path))
    return None


def take_chunks(staging: Staging, chunks: Iterable[Descriptor]) -> None:
    """Add chunks from the store to the staging directory. Raises BlobError for one that neither has."""
    nowhere = staging.take_all(staging.layout.list_missing(chunks))
    if nowhere:
        first = nowhere[0]
        raise BlobError(
            f"the chunk {first.digest} of {first.size} bytes is neither in the checkpoint nor in the store "
            f"{os.path.dirname(os.path.dirname(staging.path))}"
        )


def take_in(
    staging: Staging,
    archive: str,
    progress: Progress,
    labels: Mapping[str, str] | None = None,
    *,
    written: Known | None = None,
) -> tuple[Descriptor, tuple[Volume, ...]]:
    """Convert an archive into an artifact in a staging directory; also return its volumes.

    The store may have its chunks. `written`: chunks that the store has compressed itself. Raises OciError,
    ImageError.
    """
    if is_layout(archive):
        with Archive(archive) as source:
            return take_in_image(staging, source, progress), ()
    taken = convert.take_in(
        archive, staging.layout, known=staging.take, written=written, progress=progress.at
    )
    take_chunks(staging, taken.chunks)
    notes = {**taken.annotations, **as_annotations(labels or {})}
    parts = artifact.Artifact(taken.config, taken.records, taken.rootfs, taken.chunks, notes)
    return artifact.write(staging.layout, parts), taken.volumes


def take_in_image(staging: Staging, source: Source, progress: Progress) -> Descriptor:
    """Do the same with an image of containerd's."""
    parts = containerd_reader.take_in(source, staging.layout, known=staging.take, progress=progress.at)
    take_chunks(staging, parts.chunks)
    return artifact.write(staging.layout, parts)
