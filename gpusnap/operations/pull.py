"""Fetches a checkpoint from a registry into a staging directory of a store, without blobs that it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from gpusnap.base.progress import Progress
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator, volumes
from gpusnap.checkpoints.artifact import ArtifactParts
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.errors import BlobError, DiskFull, NotACheckpoint, OciError, StagingBusy
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.table import descriptors
from gpusnap.oci.layout.digests import get_hex
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.operations.disk_space import check_copy
from gpusnap.operations.open import open_repository

if TYPE_CHECKING:
    from gpusnap.oci.registry.copy import TransferTotals
    from gpusnap.oci.registry.repository import Repository

# Seconds between checks of a staging directory that another process uses.
_EVERY = 0.2
_PATIENCE = 600.0
# So few bytes arrive in time over any network.
_NOTHING = 64 << 20
# Bytes of chunks for measuring the speed of the network; a load process fetches these again.
_PROBE = 64 << 20


@contextmanager
def fetch(
    store: Store,
    what: locator.InRegistry,
    *,
    leave: int = 0,
    seconds: float = 0,
    check: Callable[[ArtifactParts], object] = lambda found: None,
    look: Callable[[ArtifactParts, Layout], object] | None = None,
    after: Callable[[Repository, Staging, ArtifactParts], TransferTotals] | None = None,
    wanted: Callable[[Descriptor], bool] = lambda one: True,
    plain_http: bool = False,
    progress: Progress,
) -> Iterator[tuple[Staging, ArtifactParts, TransferTotals]]:
    """Fetch a checkpoint from a registry into a staging directory of the store.

    leave: chunks that the store lacks are not fetched if they have at most this many bytes together and would
    arrive within `seconds`; chunks that the store has are then not checked, because a load process checks
    them. check: called after manifests and config have arrived and before anything else is fetched; raises
    for an unusable checkpoint. look: the same for containerd's checks, after their records have arrived.
    after: called when all blobs are there, to fetch more; returns what it moved. wanted: selects the blobs to
    fetch (without `leave`); the config is always fetched. The staging directory is removed at the end of the
    block, and kept for the next attempt if the block fails. Raises OciError, ManifestError, Damaged,
    NotFound.
    """
    from gpusnap.oci.registry import copy as transfer

    with ExitStack() as stack:
        repository = stack.enter_context(open_repository(what, plain_http=plain_http))
        progress.stage(f"pull of {what.reference}")
        if repository.reference.name != what.reference.name:  # a mirror, which a restore does not use
            leave = 0
        root = repository.resolve(what.reference.wanted)
        name = f"pull-{get_hex(root.digest)[:32]}"
        with _explain_whole_amount(store, repository, root, what):
            store.create()
            staging = stack.enter_context(open_staging(store, name, f"pull of {what.reference}", progress))
            early = transfer.pull(
                repository,
                root.digest,
                staging.layout,
                have=have(staging),
                wanted=lambda one: one.media_type == artifact.CONFIG,
            )[1]
        found = kept.load(root, staging.layout)
        check(found)

        def pull_blobs(which: Callable[[Descriptor], bool]) -> TransferTotals:
            return transfer.pull(
                repository,
                root.digest,
                staging.layout,
                have=have(staging, read=not leave),
                wanted=which,
                progress=progress.show_transfer,
            )[1]

        if look is not None and found.artifact.is_image:
            records = found.artifact.records
            of_records = pull_blobs(lambda one: records is not None and one.digest == records.digest)
            early = transfer.add(early, of_records)
            look(found, staging.layout)
        of_memory = descriptors(found.tables)
        away = {each.digest: each.size for each in _list_away(of_memory, staging, store)}  # not of volumes

        lacking = staging.layout.list_missing(each for each in found.parts if wanted(each))
        check_copy(lacking, store.path, there=store.layout, what=f"the pull of {what.reference}")

        if not leave:
            moved = pull_blobs(wanted)
        else:
            moved = pull_blobs(lambda one: one.digest not in away)
            if of_volumes := away.keys() & _list_volume_chunks(found, staging.layout):
                pull_blobs(lambda one: one.digest in of_volumes)
            if not _may_wait(away, leave, seconds, pull_blobs):
                pull_blobs(lambda one: one.digest in away)
        moved = _combine(early, moved)
        if after is not None:
            moved = transfer.add(moved, after(repository, staging, found))
        yield staging, found, moved


@contextmanager
def _explain_whole_amount(
    store: Store, repository: Repository, root: Descriptor, what: locator.InRegistry
) -> Iterator[None]:
    """If the first few bytes do not fit, say how much all of it needs. Raises Refused, OciError."""
    try:
        yield
    except DiskFull:
        with suppress(OciError):
            found = artifact.read(root, lambda one: repository.read_manifest(one.digest)[1])
            parts = [*found.blobs(), *found.documents]
            check_copy(parts, store.path, there=store.layout, what=f"the pull of {what.reference}")
        raise


class Referrers:
    """Fetches the referrers of a checkpoint, such as its signature: for `after` of `fetch`."""

    def __init__(self) -> None:
        self.found: tuple[Descriptor, ...] = ()
        """The manifests, once they have been fetched."""

    def __call__(self, repository: Repository, staging: Staging, of: ArtifactParts) -> TransferTotals:
        """Fetch them into the staging directory. Raises OciError."""
        from gpusnap.oci.registry import referrers

        self.found, moved = referrers.pull(
            repository,
            of.root.digest,
            staging.layout,
            have=lambda one: staging.take(one.digest, one.size),
        )
        return moved


def _combine(early: TransferTotals, moved: TransferTotals) -> TransferTotals:
    """Add two totals; the second counts as already present what the first has moved."""
    return replace(
        moved,
        blobs=moved.blobs + early.blobs,
        bytes=moved.bytes + early.bytes,
        skipped_blobs=moved.skipped_blobs - early.blobs,
        skipped_bytes=moved.skipped_bytes - early.bytes,
    )


def _list_away(chunks: Iterable[Descriptor], staging: Staging, store: Store) -> Iterator[Descriptor]:
    """Yield the chunks that are neither in a staging directory nor in its store."""
    for each in chunks:
        if not any(layout.has_blob(each.digest, each.size) for layout in (staging.layout, store.layout)):
            yield each


def _may_wait(
    away: Mapping[str, int],
    leave: int,
    seconds: float,
    pull_blobs: Callable[[Callable[[Descriptor], bool]], TransferTotals],
) -> bool:
    """Return whether chunks (digest to bytes) can be fetched later: they are few, and would arrive in time.

    Fetches some of them now, to measure the speed.
    """
    missing = sum(away.values())
    if missing > leave:
        return False
    if missing <= _NOTHING:
        return True
    probe: set[str] = set()
    size = 0
    for digest, each in away.items():
        if size >= min(missing // 32, _PROBE):
            break
        probe.add(digest)
        size += each
    began = time.monotonic()
    moved = pull_blobs(lambda one: one.digest in probe)
    return missing * (time.monotonic() - began) <= moved.bytes * seconds


@contextmanager
def open_staging(store: Store, name: str, what: str, progress: Progress) -> Iterator[Staging]:
    """Open a staging directory that is kept for the next attempt if the block fails, unless it is useless.

    It is useless if what arrived is no checkpoint. Raises like `_staging`.
    """
    staging = _staging(store, name, what, progress)
    try:
        yield staging
    except NotACheckpoint:
        staging.close()
        raise
    except BaseException:
        staging.close(leave=True)
        raise
    staging.close()


def _staging(store: Store, name: str, what: str, progress: Progress) -> Staging:
    """Open the staging directory of that name; if another process uses it, wait until that is done.

    The other process is at the same work ("pull of X"), so its blobs need not be fetched again. Raises
    OciError, such as StagingBusy if it takes too long.
    """
    waits = False
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            staging = store.stage(name)
        except StagingBusy:
            if time.monotonic() > end:
                raise
            if not waits:
                progress.stage(f"waiting for another {what}")
            waits = True
            time.sleep(_EVERY)
            continue
        if waits:
            progress.stage(what)
        return staging


def have(staging: Staging, *, read: bool = True) -> Callable[[Descriptor], bool]:
    """Return a function that says which blobs the store has, and with `read`, has undamaged.

    A pull fetches the others, and replaces damaged ones.
    """

    def is_there(one: Descriptor) -> bool:
        if not staging.take(one.digest, one.size):
            return False
        if not read:
            return True
        try:
            staging.layout.check_blob(one)
        except BlobError:
            return False
        return True

    return is_there


def _list_volume_chunks(found: ArtifactParts, layout: Layout) -> set[str]:
    """Return the chunks of volumes, which are written to Podman's archive before anything else."""
    records = found.artifact.records
    if records is None:
        return set()
    layers = {each.digest: each.size for each in found.artifact.chunks}
    with layout.open_blob(records.digest, records.size) as file:
        where = f"the records {records.digest}"
        return set(volumes.chunks(entries(file, where=where), layers, where))
