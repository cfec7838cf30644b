"""What a store, or a repository, has: one row for each manifest, with what it takes on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from gpusnap.checkpoints import migrations
from gpusnap.checkpoints.labels import labels_in
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DigestError, LayoutError
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.layout.documents import EMPTY, Descriptor, parse_document
from gpusnap.oci.layout.graph import is_document, walk
from gpusnap.oci.store.referrers import subject_of
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import by_age

Kind: TypeAlias = Literal["checkpoint", "pages", "referrer", "image", "other", "damaged"]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store's index names: a digest, with all its names in order."""

    root: Descriptor
    names: tuple[str, ...]
    created: str


@dataclass(frozen=True, slots=True)
class Row:
    """One of them, and what its manifest says; sizes in bytes, texts empty where it says nothing."""

    digest: str
    names: tuple[str, ...]
    created: str
    """RFC 3339."""
    kind: Kind
    """pages: the chunks of a checkpoint whose archive lies elsewhere. referrer: a signature or the like, of
    `subject`. image: a checkpoint in a registry that is an ordinary image for an engine. other: not
    gpusnap's. damaged: a manifest of it is missing or broken."""
    container: str
    """Its name."""
    container_id: str
    gpus: str
    """Number and model."""
    driver: str
    """The version of the GPUs' driver."""
    memory: int
    """Of the GPUs, used."""
    processes: int
    """With GPU state."""
    size: int
    """Of all blobs."""
    own: int
    """Of those that nothing else in the store has."""
    subject: str
    """The digest of what a referrer refers to."""
    fault: str
    labels: Mapping[str, str]
    migrating: str = ""
    """The other host that its container may run on: a migration to it has not ended."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A store, the newest checkpoint last; `blobs` and `size` are of all that it names, each blob once."""

    store: str
    rows: tuple[Row, ...]
    blobs: int
    size: int


@dataclass(frozen=True, slots=True)
class _Looked:
    """What is below one digest."""

    blobs: Mapping[str, int]
    annotations: Mapping[str, str]
    kind: Kind
    fault: str = ""
    subject: str = ""


def kept(store: Store) -> tuple[Kept, ...]:
    """All that the index names, each digest once. Raises LayoutError."""
    found: dict[str, list[tuple[Descriptor, str, str]]] = {}
    for entry in store.entries():
        found.setdefault(entry.descriptor.digest, []).append((entry.descriptor, entry.name, entry.created))
    return tuple(
        Kept(
            entries[0][0],
            tuple(sorted(name for _, name, _ in entries if name)),
            next((created for *_, created in entries if created), ""),
        )
        for entries in found.values()
    )


def blobs_of(store: Store, root: Descriptor) -> dict[str, int]:
    """Digest and bytes of every blob from `root` on. Raises LayoutError, DigestError."""
    return {each.digest: each.size for each, _ in walk(root, store.read)}


def listing(store: Store, step: Callable[[], object] = lambda: None) -> Listing:
    """All of a store; what is damaged is a row as well. Raises LayoutError for a broken index.

    step: called after each manifest.
    """
    found = []
    for each in kept(store):
        found.append((each, _looked(store, each.root)))
        step()
    uses = Counter(digest for _, looked in found for digest in looked.blobs)
    rows = sorted((_row(each, looked, uses) for each, looked in found), key=lambda row: by_age(row.created))
    every = {digest: size for _, looked in found for digest, size in looked.blobs.items()}
    return Listing(store.path, tuple(rows), len(every), sum(every.values()))


def _looked(store: Store, root: Descriptor) -> _Looked:
    documents: dict[str, bytes] = {}

    def read(document: Descriptor) -> bytes:
        if document.digest not in documents:
            documents[document.digest] = store.read(document)
        return documents[document.digest]

    if not is_document(root):
        return _Looked({root.digest: root.size}, root.annotations, "other")
    try:
        blobs = {each.digest: each.size for each, _ in walk(root, read)}
    except (LayoutError, DigestError) as error:
        return _Looked({}, root.annotations, "damaged", str(error))
    try:
        artifact = artifacts.read(root, read)
    except LayoutError:
        subject = subject_of(read(root))
        return _Looked(blobs, _annotations(read(root)), "referrer" if subject else "other", subject=subject)
    pages_only = artifact.records is None and artifact.config.media_type != EMPTY
    return _Looked(blobs, artifact.annotations, "pages" if pages_only else "checkpoint")


def _annotations(content: bytes) -> Mapping[str, str]:
    match parse_document(content, "the manifest"):
        case {"annotations": dict(found)}:
            return {str(key): str(value) for key, value in found.items()}
        case _:
            return {}


def _row(each: Kept, looked: _Looked, uses: Mapping[str, int]) -> Row:
    own = sum(size for digest, size in looked.blobs.items() if uses[digest] == 1)
    found = described(each.root.digest, each.names, looked.kind, looked.blobs, looked.annotations)
    return replace(
        found,
        created=found.created or each.created,
        own=own,
        subject=looked.subject,
        fault=looked.fault,
        migrating=migrations.host_of(each.root.digest),
    )


def described(
    digest: str, names: tuple[str, ...], kind: Kind, blobs: Mapping[str, int], notes: Mapping[str, str]
) -> Row:
    """The row of something with these blobs (digest and bytes), by its annotations."""
    return Row(
        digest=digest,
        names=names,
        created=notes.get("org.opencontainers.image.created", ""),
        kind=kind,
        container=notes.get("org.criu.checkpoint.container.name", ""),
        container_id=notes.get("io.gpusnap.container.id", ""),
        gpus=notes.get("io.gpusnap.gpus", ""),
        driver=notes.get("io.gpusnap.driver", "").rpartition(" ")[2],
        memory=_number(notes.get("io.gpusnap.memory", "")),
        processes=_number(notes.get("io.gpusnap.processes", "")),
        size=sum(blobs.values()),
        own=0,
        subject="",
        fault="",
        labels=labels_in(notes),
    )


def _number(text: str) -> int:
    """An annotation's number; 0 for one that is none, as anybody may have written it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
