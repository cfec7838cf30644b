"""`gpusnap copy`: copies a checkpoint from any place to any other; push and pull are special cases of it.

Blobs that the destination already has are not sent or written again. A copy in a store gets its name when it
is complete, a registry gets the manifest last, and a file gets its name when it is complete. So a killed copy
leaves nothing wrong. A store and a registry keep the blobs that have arrived, for the next attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, TypeAlias

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import convert_errors
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.artifact import ArtifactParts
from gpusnap.checkpoints.formats import containerd_images as images
from gpusnap.checkpoints.locator import InContainerd, InFile, InLayoutFile, InRegistry, InStore
from gpusnap.checkpoints.names import dated_name, store_name
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import StoreError
from gpusnap.oci.layout.archive_writer import write_archive as write_layout
from gpusnap.oci.layout.digests import get_hex
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.index import REF_NAME, check_name
from gpusnap.operations import push_pull
from gpusnap.operations.disk_space import check_archive, check_copy
from gpusnap.operations.open import open_repository
from gpusnap.operations.pull import Referrers, fetch, have, open_staging
from gpusnap.operations.sources import Local, open_local
from gpusnap.runtime_shim.base.errors import UsageError

if TYPE_CHECKING:
    from gpusnap.oci.registry.copy import TransferTotals

Source: TypeAlias = InStore | InFile | InRegistry | InContainerd
Destination: TypeAlias = Source | InLayoutFile


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What was copied, and where it is now: in exactly one of reference, store, file and image."""

    digest: str
    moved: TransferTotals
    """Blobs that were sent or written, and blobs that the destination already had."""
    reference: str = ""
    store: str = ""
    name: str = ""
    """The name in the store; empty if it has none there."""
    file: str = ""
    image: images.ImportedImage | None = None
    """The image in containerd, or, with `file`, the image that ctr will make of it."""


def copy(what: Source, to: Destination, *, plain_http: bool = False, progress: Progress) -> CopyResult:
    """Copy a checkpoint and its referrers. Raises NotFound, Damaged, GpusnapError."""
    if isinstance(to, InFile | InLayoutFile):
        locator.check_new_file(to.path)
    if isinstance(what, InStore) and isinstance(to, InStore) and what.store.path == to.store.path:
        return _add_name(what, to)
    with convert_errors():
        if isinstance(what, InRegistry):
            return _from_registry(what, to, plain_http=plain_http, progress=progress)
        home = to.store if isinstance(to, InStore) else None
        with open_local(what, progress, home) as source:
            return _from_layout(source, to, plain_http=plain_http, progress=progress)


def _add_name(what: InStore, to: InStore) -> CopyResult:
    """Add another name in the same store."""
    from gpusnap.oci.registry.copy import TransferTotals

    if not to.wanted:
        raise UsageError(
            f"{to.store.path} is the store that the checkpoint is already in",
            hint="name the copy: oci:DIR:NAME",
        )
    root = what.resolve().entry.descriptor
    with convert_errors():
        store = locator.open_store(to.store, write=True)
        found = kept.load(root, store.layout)
        store.tag(root.digest, to.wanted)
    parts = [*found.artifact.blobs(), *found.artifact.documents]
    moved = TransferTotals(skipped_blobs=len(parts), skipped_bytes=found.size)
    return CopyResult(root.digest, moved, store=store.path, name=to.wanted)


def _from_registry(what: InRegistry, to: Destination, *, plain_http: bool, progress: Progress) -> CopyResult:
    if isinstance(to, InRegistry):
        return _relay(what, to, plain_http=plain_http, progress=progress)
    if isinstance(to, InLayoutFile):
        referrers, store = Referrers(), locator.default_store()
        incoming = fetch(store, what, after=referrers, plain_http=plain_http, progress=progress)
        with incoming as (staging, found, moved):
            name = store_name(what.reference)
            check_archive(found.parts, to.path)
            _write_layout(found.root, referrers.found, staging.layout, to, name, progress)
        return CopyResult(found.root.digest, moved, file=to.path)
    file = to.path if isinstance(to, InFile) else ""
    place = None if isinstance(to, InFile) else to
    done = push_pull.pull(what, file=file, to=place, plain_http=plain_http, progress=progress)
    return CopyResult(
        done.digest, done.moved, store=done.store, name=done.name, file=file, image=done.image or done.packed
    )


def _relay(what: InRegistry, to: InRegistry, *, plain_http: bool, progress: Progress) -> CopyResult:
    """Copy from one registry to another. Blobs that the second has are not fetched either."""
    referrers, store = Referrers(), locator.default_store()
    with open_repository(to, plain_http=plain_http, mirrors=False) as there:

        def lacks(one: Descriptor) -> bool:
            return not there.has_blob(one.digest, one.size, pushing=True)

        incoming = fetch(store, what, after=referrers, wanted=lacks, plain_http=plain_http, progress=progress)
        with incoming as (staging, found, _):
            same = what.reference.registry == to.reference.registry
            source = Local(found.root, staging.layout, store)
            pushed = push_pull.send(
                source,
                to,
                plain_http,
                progress,
                also=referrers.found,
                mount_from=[what.reference.repository] if same else [],
            )
    return CopyResult(pushed.digest, pushed.moved, reference=pushed.reference)


def _from_layout(source: Local, to: Destination, *, plain_http: bool, progress: Progress) -> CopyResult:
    if isinstance(to, InRegistry):
        pushed = push_pull.send(source, to, plain_http, progress)
        return CopyResult(pushed.digest, pushed.moved, reference=pushed.reference)
    found = kept.load(source.root, source.layout)
    name = _name(source, found)
    if isinstance(to, InStore):
        return _copy_into_store(source, found, to, to.wanted or name, progress)
    if isinstance(to, InContainerd):
        found.check_containerd()
        progress.stage("into containerd")
        brought = images.bring(found, source.layout, to, progress)
        return replace(_make_copied(found), image=brought)
    if isinstance(to, InLayoutFile):
        check_archive(found.parts, to.path)
        _write_layout(found.root, source.referrers(), source.layout, to, name, progress)
        return replace(_make_copied(found), file=to.path)
    found.check_whole()
    progress.stage("archive")
    packed = push_pull.write_file(found, source.layout, to.path, name, progress)
    return replace(_make_copied(found), file=to.path, image=packed)


def _copy_into_store(
    source: Local, found: ArtifactParts, to: InStore, name: str, progress: Progress
) -> CopyResult:
    from gpusnap.oci.registry import copy as transfer

    if source.staging is None:
        what = f"the copy of {_name(source, found) or found.root.digest}"
        check_copy(found.parts, to.store.path, there=to.store.layout, what=what)
    store, also = to.store.create(), source.referrers()
    done = CopyResult(found.root.digest, _make_copied(found).moved, store=store.path, name=name)
    names = [name] if name else []
    if source.staging is not None:
        progress.stage("to disk")
        source.staging.commit(found.root, names=names, foreign=found.tables)
        return done
    place = f"copy-{get_hex(found.root.digest)[:32]}"
    with open_staging(store, place, f"copy to {store.path}", progress) as staging:
        progress.stage(f"copy to {store.path}")
        layout = transfer.InLayout(source.layout, (found.root, *also))
        moved = transfer.TransferTotals()
        for each in (found.root, *also):
            came = transfer.pull(
                layout, each.digest, staging.layout, have=have(staging), progress=progress.show_transfer
            )[1]
            moved = transfer.add(moved, came)
        progress.stage("to disk")
        staging.commit(found.root, names=names, also=also, foreign=found.tables)
    return replace(done, moved=moved)


def _write_layout(
    root: Descriptor,
    also: Sequence[Descriptor],
    layout: Layout,
    to: InLayoutFile,
    name: str,
    progress: Progress,
) -> None:
    progress.stage("archive")
    notes = {**root.annotations, **({REF_NAME: name} if name else {})}
    write_layout(to.path, (replace(root, annotations=notes), *also), layout, progress=progress.at)


def _make_copied(found: ArtifactParts) -> CopyResult:
    """Return the result for a destination that got every blob."""
    from gpusnap.oci.registry.copy import TransferTotals

    parts = [*found.artifact.blobs(), *found.artifact.documents]
    return CopyResult(found.root.digest, TransferTotals(blobs=len(parts), bytes=found.size))


def _name(source: Local, found: ArtifactParts) -> str:
    """Return a copy's name if none was given: that in the source, or `gpusnap checkpoint`'s; else ""."""
    with suppress(StoreError):
        return check_name(source.name)
    notes = found.artifact.annotations
    container = notes.get("org.criu.checkpoint.container.name", "")
    with suppress(StoreError, ValueError):
        created = datetime.fromisoformat(notes.get("org.opencontainers.image.created", ""))
        return dated_name(container, notes.get("io.gpusnap.container.id", ""), created)
    return ""
