"""Lists a store or a repository: one row for each manifest, with its size on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, TypeAlias

from gpusnap.base.user_errors import may_be_whole
from gpusnap.checkpoints import migrations
from gpusnap.checkpoints.labels import labels_in
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import BlobError, DigestError, LayoutError, OciError
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.layout.digests import PREFIX
from gpusnap.oci.layout.documents import EMPTY, OCTETS, Descriptor, parse_document
from gpusnap.oci.layout.graph import is_document, walk
from gpusnap.oci.store.referrers import subject_of
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import by_age

UNREAD = "cannot be read now: "
"""How the fault of something begins that may be undamaged."""

Kind: TypeAlias = Literal["checkpoint", "pages", "referrer", "image", "other", "damaged"]


@dataclass(frozen=True, slots=True)
class NamedDigest:
    """A digest in a store's index, with all its names in order."""

    root: Descriptor
    names: tuple[str, ...]
    created: str


@dataclass(frozen=True, slots=True)
class Row:
    """A manifest in a list; sizes in bytes, texts empty if the manifest lacks them."""

    digest: str
    names: tuple[str, ...]
    created: str
    """RFC 3339."""
    kind: Kind
    """pages: the chunks of a checkpoint whose archive is elsewhere. referrer: a signature or the like, of
    `subject`. image: a checkpoint in a registry that is an ordinary image for an engine. other: not
    gpusnap's. damaged: a manifest of it is missing or broken, or cannot be read."""
    container: str
    """The container's name."""
    container_id: str
    gpus: str
    """Number and model of the GPUs."""
    driver: str
    """The version of the GPUs' driver."""
    memory: int
    """GPU memory in use."""
    processes: int
    """Number of processes with GPU state."""
    size: int
    """Size of all blobs."""
    own: int
    """Size of the blobs that nothing else in the store uses."""
    subject: str
    """The digest that a referrer refers to."""
    fault: str
    """Why it cannot be restored: a manifest is missing, or a blob, if `listing` has checked for that; or why
    that is unknown (`UNREAD`)."""
    labels: Mapping[str, str]
    migrating: str = ""
    """The other host that may run its container, while a migration to that has not ended."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A store, the newest checkpoint last; `blobs` and `size` count all that has a name, each blob once."""

    store: str
    rows: tuple[Row, ...]
    blobs: int
    size: int


@dataclass(frozen=True, slots=True)
class _Looked:
    """The blobs and manifests below one digest."""

    blobs: Mapping[str, int]
    annotations: Mapping[str, str]
    kind: Kind
    fault: str = ""
    subject: str = ""


def list_named(store: Store) -> tuple[NamedDigest, ...]:
    """Return everything that the index names, each digest once. Raises LayoutError."""
    found: dict[str, list[tuple[Descriptor, str, str]]] = {}
    for entry in store.entries():
        found.setdefault(entry.descriptor.digest, []).append((entry.descriptor, entry.name, entry.created))
    return tuple(
        NamedDigest(
            entries[0][0],
            tuple(sorted(name for _, name, _ in entries if name)),
            next((created for *_, created in entries if created), ""),
        )
        for entries in found.values()
    )


def blobs_of(store: Store, root: Descriptor) -> dict[str, int]:
    """Return digest and bytes of every blob from `root` on. Raises LayoutError, DigestError."""
    return {each.digest: each.size for each, _ in walk(root, store.read)}


def listing(store: Store, *, look_for_blobs: bool = False) -> Listing:
    """List a store; damaged entries have a row as well. Raises LayoutError for a broken index.

    look_for_blobs: for checkpoints, a blob that is missing or has another size is also a fault; no blob is
    read.
    """
    found = [(each, _look_below(store, each.root)) for each in list_named(store)]
    if look_for_blobs:
        lacking = _find_missing(store, (looked.blobs for _, looked in found if looked.kind == "checkpoint"))
        found = [(each, _with_fault(store, looked, lacking)) for each, looked in found]
    uses = Counter(digest for _, looked in found for digest in looked.blobs)
    rows = sorted((_row(each, looked, uses) for each, looked in found), key=lambda row: by_age(row.created))
    every = {digest: size for _, looked in found for digest, size in looked.blobs.items()}
    return Listing(store.path, tuple(rows), len(every), sum(every.values()))


def is_pages_only(store: Store, root: Descriptor) -> bool:
    """Return whether it is the chunks of a checkpoint without the records of an engine."""
    return _look_below(store, root).kind == "pages"


def _look_below(store: Store, root: Descriptor) -> _Looked:
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
        return _Looked({}, root.annotations, "damaged", explain_fault(error))
    try:
        artifact = artifacts.read(root, read)
    except LayoutError:
        subject = subject_of(read(root))
        return _Looked(blobs, _annotations(read(root)), "referrer" if subject else "other", subject=subject)
    pages_only = artifact.records is None and artifact.config.media_type != EMPTY
    return _Looked(blobs, artifact.annotations, "pages" if pages_only else "checkpoint")


def _find_missing(store: Store, every: Iterable[Mapping[str, int]]) -> frozenset[tuple[str, int]]:
    """Return digest and bytes of the blobs that are missing; each is checked once."""
    wanted = {blob for blobs in every for blob in blobs.items() if blob[0].startswith(PREFIX)}
    lacks = store.layout.list_missing(Descriptor(OCTETS, digest, size) for digest, size in wanted)
    return frozenset((each.digest, each.size) for each in lacks)


def _with_fault(store: Store, looked: _Looked, lacking: Collection[tuple[str, int]]) -> _Looked:
    if looked.kind != "checkpoint" or not lacking:
        return looked
    gone = sorted(blob for blob in looked.blobs.items() if blob in lacking)
    if not gone:
        return looked
    more = f", and {len(gone) - 1} more of its {len(looked.blobs)} blobs" if len(gone) > 1 else ""
    return replace(looked, fault=_explain_missing(store, *gone[0]) + more)


def _explain_missing(store: Store, digest: str, size: int) -> str:
    try:
        store.layout.open_blob(digest, size).close()
    except BlobError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            return explain_fault(error)
    return f"the blob {digest} is missing"


def explain_fault(error: Exception) -> str:
    """Return the fault of a row, by what could not be read."""
    return (UNREAD if isinstance(error, OciError) and may_be_whole(error) else "") + str(error)


def _annotations(content: bytes) -> Mapping[str, str]:
    match parse_document(content, "the manifest"):
        case {"annotations": dict(found)}:
            return {str(key): str(value) for key, value in found.items()}
        case _:
            return {}


def _row(each: NamedDigest, looked: _Looked, uses: Mapping[str, int]) -> Row:
    own = sum(size for digest, size in looked.blobs.items() if uses[digest] == 1)
    found = describe(each.root.digest, each.names, looked.kind, looked.blobs, looked.annotations)
    return replace(
        found,
        created=found.created or each.created,
        own=own,
        subject=looked.subject,
        fault=looked.fault,
        migrating=migrations.host_of(each.root.digest),
    )


def describe(
    digest: str, names: tuple[str, ...], kind: Kind, blobs: Mapping[str, int], notes: Mapping[str, str]
) -> Row:
    """Return the row of a manifest with these blobs (digest and bytes), by its annotations."""
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
    """Return an annotation as a number; 0 if it is none, because anybody may have written it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
