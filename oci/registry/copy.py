"""A manifest and everything below it, from a layout into a registry or from a registry into a layout.

Many blobs at once; what is there already is passed over. In a push the manifests go last, children before
their parents, so that a registry never has one whose blobs it lacks, and what was begun and killed serves the
next push. In a pull the blobs come in under their names when they are whole; the layout's index is the
caller's to write, last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Protocol

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import BlobError, NotInRegistry
from gpusnap.oci.base.threads import Crew, SharedIterator
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.graph import walk
from gpusnap.oci.layout.layout import Layout, read_piece
from gpusnap.oci.registry.repository import Repository

_THREADS = 8


class Source(Protocol):
    """Where a manifest and what is below it come from: a `Repository`, or a layout."""

    def resolve(self, wanted: str) -> Descriptor:
        """What a digest, or a name there, stands for."""

    def read_manifest(self, wanted: str) -> tuple[Descriptor, bytes]:
        """A manifest or an index, its digest checked."""

    def fetch_blob(
        self, wanted: Descriptor, layout: Layout, *, step: Callable[[int], object] = lambda at: None
    ) -> None:
        """Bring a blob into a layout, checked before it has its name there; as Repository.fetch_blob."""

    def interrupt(self) -> None:
        """Have nobody wait for long any more; as Repository.interrupt."""


class InLayout:
    """The manifests of a layout as a source, which names them by their digests alone."""

    def __init__(self, layout: Layout, roots: Sequence[Descriptor]) -> None:
        self._layout = layout
        self._known = {each.digest: each for root in roots for each, _ in walk(root, layout.read_blob)}

    def resolve(self, wanted: str) -> Descriptor:
        """One of the roots, or what is below them."""
        return self._known[wanted]

    def read_manifest(self, wanted: str) -> tuple[Descriptor, bytes]:
        """One of these. Raises BlobError."""
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
        """Nobody waits for a layout."""


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """Blobs and manifests that went over the wire, and such as did not have to; sizes in bytes."""

    blobs: int = 0
    bytes: int = 0
    skipped_blobs: int = 0
    skipped_bytes: int = 0
    mounted: int = 0
    """of those skipped, the ones that the registry took over from another of its repositories"""


def add(one: TransferTotals, other: TransferTotals) -> TransferTotals:
    """What both transfers moved."""
    return TransferTotals(
        *(getattr(one, each.name) + getattr(other, each.name) for each in fields(TransferTotals))
    )


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is, of how much: what was moved, parts of blobs included."""

    moved: TransferTotals
    all_bytes: int


class _Tally:
    """What was moved so far, for all workers; `progress` is called by one at a time."""

    def __init__(self, progress: Callable[[TransferProgress], object] | None) -> None:
        self.moved = TransferTotals()
        self._progress = progress
        self._lock = threading.Lock()
        self._all_bytes = 0
        self._parts: dict[str, int] = {}

    def expect(self, wanted: Sequence[Descriptor]) -> None:
        """That much more is to be moved, or is found not to need it."""
        with self._lock:
            self._all_bytes += sum(each.size for each in wanted)
            self._tell()

    def note_part(self, of: Descriptor, at: int) -> None:
        """So many bytes of a blob have come through."""
        with self._lock:
            if self._parts.get(of.digest) != at:
                self._parts[of.digest] = at
                self._tell()

    def note_sent(self, one: Descriptor) -> None:
        """All of it has."""
        with self._lock:
            self._parts.pop(one.digest, None)
            now = self.moved
            self.moved = replace(now, blobs=now.blobs + 1, bytes=now.bytes + one.size)
            self._tell()

    def note_skipped(self, one: Descriptor, *, mounted: bool = False) -> None:
        """It is there without having been moved."""
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
    """Bring a manifest or an index, and all below it, into a repository, and name it there.

    tag: its name; without one it is found by its digest only. mount_from: repositories of the same registry
    that may have some of the blobs. A blob that the layout lacks is no error where the registry has it.
    Raises BlobError, which names the blob, LayoutError, RegistryError and those below it, and whatever
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

    _move_all(blobs, send, crew, threads)
    for one, content in documents:
        name = tag if one.digest == root.digest and tag else one.digest
        if _has_manifest(repository, name, one.digest):
            tally.note_skipped(one)
        else:
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
    """Bring what a tag or a digest stands for, and all below it, into a layout.

    have: asked for each manifest and blob that the layout lacks; it may put it there, and says whether it
    need not come. wanted: asked for each blob, not for manifests; False leaves it out. A blob that the layout
    has is read and compared with its digest, and comes anew where it is wrong: a host that went down may have
    lost what a killed pull had written. Returns the descriptor of the top and what was moved.
    Raises BlobError, which names the blob, LayoutError, DiskFull, DiskError, RegistryError and those below
    it, and whatever have, wanted or progress raises. What was whole by then stays in the layout.
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


def _has_manifest(repository: Repository, name: str, digest: str) -> bool:
    """Whether the repository has that manifest under that name."""
    try:
        return repository.resolve(name, pushing=True).digest == digest
    except NotInRegistry:
        return False


def _find_kept(one: Descriptor, layout: Layout, have: Callable[[Descriptor], bool]) -> bytes | None:
    """A document that need not come from the registry."""
    if layout.has_blob(one.digest, one.size) or have(one):
        with suppress(BlobError):
            layout.check_blob(one)
            return layout.read_blob(one)
    return None


def _take(found: Descriptor, content: bytes, layout: Layout, tally: _Tally, one: Descriptor) -> None:
    """A document from the registry, which must be what its parent says it is."""
    if found.size != one.size:
        raise BlobError(f"the manifest {one.digest} has {found.size} bytes, not {one.size}")
    layout.add_blob(content, media_type=one.media_type, digest=one.digest, anew=True)
    tally.note_sent(one)


def _is_right(one: Descriptor, layout: Layout) -> bool:
    """Whether the layout has that blob as its digest says."""
    if not layout.has_blob(one.digest, one.size):
        return False
    try:
        layout.check_blob(one)
    except BlobError:
        return False
    return True
