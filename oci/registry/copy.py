"""Copies a manifest and everything below it from a layout into a registry, or from a registry into a layout.

Many blobs are copied at once; existing ones are skipped. In a push the manifests go last, children before
their parents, so that a registry never has one whose blobs it lacks, and the next push can continue a killed
one. In a pull the blobs get their names when they are complete; the caller writes the layout's index last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from gpusnap.oci.base.dataclass import dataclass, list_fields, replace
from gpusnap.oci.base.errors import BlobError, NotInRegistry, Rejected
from gpusnap.oci.base.threads import Crew, SharedIterator
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.graph import walk
from gpusnap.oci.layout.layout import Layout, read_piece
from gpusnap.oci.registry.refusals import BLOB_LOST
from gpusnap.oci.registry.repository import Repository

_THREADS = 8


class Source(Protocol):
    """The source of a manifest and everything below it: a `Repository`, or a layout."""

    def resolve(self, wanted: str) -> Descriptor:
        """Return the descriptor of a digest, or of a name there."""

    def read_manifest(self, wanted: str) -> tuple[Descriptor, bytes]:
        """Return a manifest or an index, with its digest checked."""

    def fetch_blob(
        self, wanted: Descriptor, layout: Layout, *, step: Callable[[int], object] = lambda at: None
    ) -> None:
        """Copy a blob into a layout, checked before it gets its name there; as Repository.fetch_blob."""

    def interrupt(self) -> None:
        """Let nobody wait for long any more; as Repository.interrupt."""


class InLayout:
    """The manifests of a layout as a source, which names them only by their digests."""

    def __init__(self, layout: Layout, roots: Sequence[Descriptor]) -> None:
        self._layout = layout
        self._known = {each.digest: each for root in roots for each, _ in walk(root, layout.read_blob)}

    def resolve(self, wanted: str) -> Descriptor:
        """Return one of the roots, or of the documents below them."""
        return self._known[wanted]

    def read_manifest(self, wanted: str) -> tuple[Descriptor, bytes]:
        """Read one of these. Raises BlobError."""
        found = self._known[wanted]
        return found, self._layout.read_blob(found)

    def fetch_blob(
        self, wanted: Descriptor, layout: Layout, *, step: Callable[[int], object] = lambda at: None
    ) -> None:
        """Copy a blob. Raises BlobError, DiskFull, DiskError, LayoutError, and what `step` raises."""
        with self._layout.open_blob(wanted.digest, wanted.size) as file, layout.receive(wanted) as incoming:
            while piece := read_piece(file):
                incoming.write(piece)
                step(incoming.size)

    def interrupt(self) -> None:
        """Do nothing: nobody waits for a layout."""


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """Blobs and manifests that were transferred, and those that were skipped; sizes in bytes."""

    blobs: int = 0
    bytes: int = 0
    skipped_blobs: int = 0
    skipped_bytes: int = 0
    mounted: int = 0
    """Of those skipped, the ones that the registry took from another of its repositories."""


def add(one: TransferTotals, other: TransferTotals) -> TransferTotals:
    """Return the sum of both transfers."""
    return TransferTotals(
        *(getattr(one, name) + getattr(other, name) for name in list_fields(TransferTotals))
    )


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is: what was moved, including parts of blobs, and all."""

    moved: TransferTotals
    all_bytes: int


class _Tally:
    """The totals so far, for all workers; `progress` is called by one at a time."""

    def __init__(self, progress: Callable[[TransferProgress], object] | None) -> None:
        self.moved = TransferTotals()
        self._progress = progress
        self._lock = threading.Lock()
        self._all_bytes = 0
        self._parts: dict[str, int] = {}

    def expect(self, wanted: Sequence[Descriptor]) -> None:
        """Add to what is to be moved, or will be found not to need it."""
        with self._lock:
            self._all_bytes += sum(each.size for each in wanted)
            self._tell()

    def note_part(self, of: Descriptor, at: int) -> None:
        """Record that so many bytes of a blob have been moved."""
        with self._lock:
            if self._parts.get(of.digest) != at:
                self._parts[of.digest] = at
                self._tell()

    def note_sent(self, one: Descriptor) -> None:
        with self._lock:
            self._parts.pop(one.digest, None)
            now = self.moved
            self.moved = replace(now, blobs=now.blobs + 1, bytes=now.bytes + one.size)
            self._tell()

    def note_skipped(self, one: Descriptor, *, mounted: bool = False) -> None:
        """Record that it exists without having been moved."""
        with self._lock:
            self._parts.pop(one.digest, None)
            now = self.moved
            self.moved = replace(
                now,
                skipped_blobs=now.skipped_blobs + 1,
                skipped_bytes=now.skipped_bytes + one.size,
                mounted=now.mounted + mounted,
            )
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            now = replace(self.moved, bytes=self.moved.bytes + sum(self._parts.values()))
            self._progress(TransferProgress(now, self._all_bytes))


def push(
    root: Descriptor,
    layout: Layout,
    repository: Repository,
    *,
    tag: str = "",
    threads: int = _THREADS,
    mount_from: Sequence[str] = (),
    progress: Callable[[TransferProgress], object] | None = None,
) -> TransferTotals:
    """Copy a manifest or an index, and everything below it, into a repository, and name it there.

    tag: its name; without one it is found only by its digest. mount_from: repositories of the same registry
    that may have some of the blobs. If the layout lacks a blob, that is no error if the registry has it.
    Raises BlobError, which names the blob, LayoutError, RegistryError and its subclasses, and whatever
    `progress` raises. What the registry has by then stays, without the name.
    """
    documents: list[tuple[Descriptor, bytes]] = []
    blobs: list[Descriptor] = []
    for one, content in walk(root, layout.read_blob):
        if content is None:
            blobs.append(one)
        else:
            documents.append((one, content))
    tally, crew = _Tally(progress), Crew(repository.interrupt)
    tally.expect([*blobs, *(one for one, _ in documents)])

    def send(one: Descriptor) -> None:
        def step(at: int) -> None:
            crew.check()
            tally.note_part(one, at)

        if repository.has_blob(one.digest, one.size, pushing=True):
            tally.note_skipped(one)
        elif repository.send_blob(one, layout, mount_from=mount_from, step=step):
            tally.note_skipped(one, mounted=True)
        else:
            tally.note_sent(one)

    def send_lost(one: Descriptor) -> None:
        if not repository.has_blob(one.digest, one.size, pushing=True):
            repository.send_blob(one, layout, step=lambda _: crew.check())
            tally.note_sent(one)

    _move_all(blobs, send, crew, threads)
    for one, content in documents:
        name = tag if one.digest == root.digest and tag else one.digest
        if _has_manifest(repository, name, one.digest):
            tally.note_skipped(one)
            continue
        if not _put(repository, one, content, name):
            # It had confirmed all of them.
            crew = Crew(repository.interrupt)
            _move_all(blobs, send_lost, crew, threads)
            repository.put_manifest(content, one.media_type, name)
        tally.note_sent(one)
    return tally.moved


def pull(
    source: Source,
    wanted_root: str,
    layout: Layout,
    *,
    have: Callable[[Descriptor], bool] = lambda one: False,
    wanted: Callable[[Descriptor], bool] = lambda one: True,
    threads: int = _THREADS,
    progress: Callable[[TransferProgress], object] | None = None,
) -> tuple[Descriptor, TransferTotals]:
    """Copy what a tag or a digest refers to, and everything below it, into a layout.

    have: called for each manifest and blob that the layout lacks; it may put it there, and returns whether it
    need not be fetched. wanted: called for each blob, not for manifests; False omits it. A blob that the
    layout has is read and compared with its digest, and fetched anew if it is wrong: a host that crashed may
    have lost what a killed pull had written. Returns the descriptor of the top and the totals. Raises
    BlobError, which names the blob, LayoutError, DiskFull, DiskError, RegistryError and its subclasses, and
    whatever have, wanted or progress raises. What was complete by then stays in the layout.
    """
    tally, crew = _Tally(progress), Crew(source.interrupt)

    def document(one: Descriptor) -> bytes:
        tally.expect([one])
        content = _find_kept(one, layout, have)
        if content is not None:
            tally.note_skipped(one)
            return content
        found, content = source.read_manifest(one.digest)
        _take(found, content, layout, tally, one)
        return content

    root = source.resolve(wanted_root)
    blobs = [one for one, content in walk(root, document) if content is None and wanted(one)]
    tally.expect(blobs)

    def fetch(one: Descriptor) -> None:
        def step(at: int) -> None:
            crew.check()
            tally.note_part(one, at)

        if _is_right(one, layout) or have(one):
            tally.note_skipped(one)
        else:
            source.fetch_blob(one, layout, step=step)
            tally.note_sent(one)

    _move_all(blobs, fetch, crew, threads)
    return root, tally.moved


def _move_all(
    blobs: Sequence[Descriptor], move: Callable[[Descriptor], None], crew: Crew, threads: int
) -> None:
    shared = SharedIterator(blobs)

    def work() -> None:
        for one in shared:
            crew.check()
            move(one)

    crew.start(max(1, min(threads, len(blobs))), work)
    crew.join()


def _put(repository: Repository, one: Descriptor, content: bytes, name: str) -> bool:
    """Put a manifest; False if the repository lacks one of its blobs."""
    try:
        repository.put_manifest(content, one.media_type, name)
    except Rejected as error:
        if error.says == BLOB_LOST:
            return False
        raise
    return True


def _has_manifest(repository: Repository, name: str, digest: str) -> bool:
    """Whether the repository has that manifest under that name."""
    try:
        return repository.resolve(name, pushing=True).digest == digest
    except NotInRegistry:
        return False


def _find_kept(one: Descriptor, layout: Layout, have: Callable[[Descriptor], bool]) -> bytes | None:
    """Return a document that need not be fetched from the registry."""
    if layout.has_blob(one.digest, one.size) or have(one):
        with suppress(BlobError):
            layout.check_blob(one)
            return layout.read_blob(one)
    return None


def _take(found: Descriptor, content: bytes, layout: Layout, tally: _Tally, one: Descriptor) -> None:
    """Add a document from the registry, which must be what its parent says."""
    if found.size != one.size:
        raise BlobError(f"the manifest {one.digest} has {found.size} bytes, not {one.size}")
    layout.add_blob(content, media_type=one.media_type, digest=one.digest, anew=True)
    tally.note_sent(one)


def _is_right(one: Descriptor, layout: Layout) -> bool:
    """Whether the layout has that blob with the right digest."""
    if not layout.has_blob(one.digest, one.size):
        return False
    try:
        layout.check_blob(one)
    except BlobError:
        return False
    return True
