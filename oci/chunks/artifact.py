"""A checkpoint as an OCI artifact: one manifest, or an index of several if one would be too large.

From image-spec v1.1, manifest.md ("Guidelines for Artifact Usage") and image-index.md.

    manifest   artifactType application/vnd.gpusnap.checkpoint.v1+json, annotations
        config   application/vnd.gpusnap.checkpoint.config.v1+json: of no interest here; or the empty one
        layers   records   application/vnd.gpusnap.checkpoint.records.v1.tar+zstd    none, or one, or one
                           application/vnd.gpusnap.checkpoint.image.v1.tar+zstd      of these
                 rootfs    application/vnd.gpusnap.checkpoint.rootfs.v1.tar+zstd     none, or one
                 carried   application/vnd.gpusnap.checkpoint.blob.v1                any number
                 chunks    application/vnd.gpusnap.chunk.v1, …+zstd                  each blob once

Records belong to an engine that writes its checkpoints as archives, or to one that keeps them as images.
Carried blobs are those of such an image, unchanged.

A registry takes a manifest of up to 4 MiB, and a chunk's place in one takes some 400 bytes. So from about
9,000 chunks on (70 GiB in chunks of 8 MiB), it is

    index      the same artifactType and annotations, and io.gpusnap.manifests: how many it has
        manifest   the same artifactType and io.gpusnap.manifests: config, records, rootfs, the first chunks
        manifest   artifactType application/vnd.gpusnap.chunks.v1+json, the empty config: further chunks
        …

A chunk's annotations say where its plain bytes were used first: a label of the region, offset, size and
digest. They are for people and other tools; the config has all uses. The same content results in the same
bytes.

Content that is read may come from anybody: layers and manifests may be in any order and repeated, and unknown
ones are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.oci.base.errors import EngineImage, LayoutError, NotACheckpoint
from gpusnap.oci.chunks.table import MEDIA_TYPES, Table
from gpusnap.oci.layout.documents import (
    EMPTY,
    EMPTY_BLOB,
    INDEX,
    MANIFEST,
    Descriptor,
    Index,
    Manifest,
    empty_descriptor,
    encode_document,
    parse_document,
)
from gpusnap.oci.layout.image_marks import engine_of
from gpusnap.oci.layout.layout import Layout

CHECKPOINT = "application/vnd.gpusnap.checkpoint.v1+json"
CHUNKS = "application/vnd.gpusnap.chunks.v1+json"
CONFIG = "application/vnd.gpusnap.checkpoint.config.v1+json"
RECORDS = "application/vnd.gpusnap.checkpoint.records.v1.tar+zstd"
IMAGE = "application/vnd.gpusnap.checkpoint.image.v1.tar+zstd"
"""Records of an engine that keeps its checkpoints as images."""
ROOTFS = "application/vnd.gpusnap.checkpoint.rootfs.v1.tar+zstd"
BLOB = "application/vnd.gpusnap.checkpoint.blob.v1"
"""A blob of such an image, which the image refers to."""

TITLE = "org.opencontainers.image.title"
TITLES = {RECORDS: "records.tar.zst", IMAGE: "image.tar.zst", ROOTFS: "rootfs-diff.tar.zst"}
_OF_RECORDS = (RECORDS, IMAGE)
CHUNK_REGION = "io.gpusnap.chunk.region"
CHUNK_OFFSET = "io.gpusnap.chunk.offset"
CHUNK_SIZE = "io.gpusnap.chunk.size"
CHUNK_DIGEST = "io.gpusnap.chunk.digest"
PARTS = "io.gpusnap.manifests"

# Below the 4 MiB that registries should accept, because some count more than the content.
LARGEST_DOCUMENT = 7 << 19
# 70 GiB in chunks of 8 MiB fit in one; their number is bounded as somebody has to fetch them all.
MOST_MANIFESTS = 1024


@dataclass(frozen=True, slots=True)
class Artifact:
    """The parts of a checkpoint. `chunks` in the order of their first use, each blob once.

    Without `records` it is the GPU side of an archive that is stored elsewhere.
    """

    config: Descriptor = field(default_factory=empty_descriptor)
    records: Descriptor | None = None
    rootfs: Descriptor | None = None
    chunks: tuple[Descriptor, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    documents: tuple[Descriptor, ...] = ()
    """The manifests and the index that it was read from, the top one first; `write` ignores them."""
    carried: tuple[Descriptor, ...] = ()
    """Blobs that are included unchanged, each once."""

    @property
    def is_image(self) -> bool:
        """Whether its records belong to an engine that keeps its checkpoints as images."""
        return self.records is not None and self.records.media_type == IMAGE

    def blobs(self) -> Iterator[Descriptor]:
        """Yield config, records, rootfs, carried blobs and chunks, as far as they exist."""
        yield self.config
        yield from (each for each in (self.records, self.rootfs) if each is not None)
        yield from self.carried
        yield from self.chunks


def chunk_layers(regions: Iterable[tuple[str, Table]]) -> tuple[Descriptor, ...]:
    """Return the blobs of some tables as layers, each once, with the place of its first use.

    A region's label is for example "1:7f0000000000" (a process and an address) or "pages-1.img" (a file).
    """
    found: dict[str, Descriptor] = {}
    for label, table in regions:
        for chunk in table.chunks:
            if chunk.blob not in found:
                notes = {
                    CHUNK_REGION: label,
                    CHUNK_OFFSET: str(chunk.offset),
                    CHUNK_SIZE: str(chunk.size),
                    CHUNK_DIGEST: chunk.plain,
                }
                media_type = MEDIA_TYPES[chunk.encoding]
                found[chunk.blob] = Descriptor(media_type, chunk.blob, chunk.stored, notes)
    return tuple(found.values())


def write(layout: Layout, artifact: Artifact) -> Descriptor:
    """Write its manifests, and the index if one is needed; return the descriptor of the top one.

    The caller writes the blobs, except the empty config. Raises LayoutError for parts of the wrong media
    type, and if the parts other than chunks are too large for a manifest; DiskFull, DiskError.
    """
    _check_types(artifact)
    notes = {key: value for key, value in sorted(artifact.annotations.items()) if key != PARTS}
    chunks = _drop_repeated(artifact.chunks)
    first = [_add_title(each) for each in (artifact.records, artifact.rootfs) if each is not None]
    first += _drop_repeated(artifact.carried)
    # manifest.md: a manifest has at least one layer, and the empty one means none.
    whole = Manifest(artifact.config, (*first, *chunks) or (empty_descriptor(),), CHECKPOINT, None, notes)
    if EMPTY in (artifact.config.media_type, whole.layers[0].media_type):
        layout.add_blob(EMPTY_BLOB)
    if _size(whole) <= LARGEST_DOCUMENT:
        return replace(layout.add_manifest(whole), annotations=notes)
    layout.add_blob(EMPTY_BLOB)
    parts = _parts(artifact.config, first, chunks)
    documents = tuple(layout.add_manifest(each) for each in parts)
    index = Index(documents, CHECKPOINT, _add_count(notes, len(parts)))
    content = encode_document(index.to_json())
    if len(content) > LARGEST_DOCUMENT or len(parts) > MOST_MANIFESTS:
        raise LayoutError(
            f"a checkpoint of {len(chunks)} chunks needs {len(parts)} manifests and an index of "
            f"{len(content)} bytes; {MOST_MANIFESTS} and {LARGEST_DOCUMENT} are allowed"
        )
    found = layout.add_blob(content, media_type=INDEX)
    return replace(found, artifact_type=CHECKPOINT, annotations=notes)


def read(root: Descriptor, read: Callable[[Descriptor], bytes]) -> Artifact:
    """Return the checkpoint that a manifest or an index describes.

    `read` returns the content of one, with its digest checked, like gpusnap.oci.store.store.Store.read and
    Layout.read_blob. Raises NotACheckpoint for something else, such as EngineImage; LayoutError for errors in
    it, and whatever `read` raises.
    """
    if root.media_type == MANIFEST:
        manifest = _manifest(root, read)
        if not _is_checkpoint(manifest):
            raise _describe_other_artifact(root, manifest)
        if PARTS in manifest.annotations:
            raise LayoutError(
                f"{root.digest} is one of {manifest.annotations[PARTS][:20]} manifests of a checkpoint; "
                "use the index that lists them all"
            )
        return _assemble(root, manifest, (), manifest.annotations, (root,))
    if root.media_type != INDEX:
        raise NotACheckpoint(f"{root.digest} is not a gpusnap checkpoint, but of type {root.media_type}")
    return _read_index(root, read)


def _read_index(root: Descriptor, read: Callable[[Descriptor], bytes]) -> Artifact:
    what = f"the index {root.digest}"
    index = Index.from_json(parse_document(read(root), what))
    if index.artifact_type not in ("", CHECKPOINT):
        raise NotACheckpoint(f"{root.digest} is not a gpusnap checkpoint, but of type {index.artifact_type}")
    named = _drop_repeated(each for each in index.manifests if each.media_type == MANIFEST)
    if len(named) > MOST_MANIFESTS:
        raise LayoutError(f"{what} lists {len(named)} manifests, but at most {MOST_MANIFESTS} are allowed")
    main: list[tuple[Descriptor, Manifest]] = []
    more: list[tuple[Descriptor, Manifest]] = []
    for each in named:
        manifest = _manifest(each, read)
        if _is_checkpoint(manifest):
            main.append((each, manifest))
        elif manifest.artifact_type == CHUNKS:
            if manifest.config.media_type != EMPTY:
                raise LayoutError(f"{what} has chunks in {each.digest}, which has its own config")
            more.append((each, manifest))
    if not main and not more and index.artifact_type != CHECKPOINT:
        raise NotACheckpoint(f"{root.digest} is not a gpusnap checkpoint, but another kind of index")
    if len(main) != 1:
        raise LayoutError(f"{what} has {len(main) or 'no'} manifests of a checkpoint instead of one")
    count = str(len(main) + len(more))
    for number in (index.annotations.get(PARTS, count), main[0][1].annotations.get(PARTS, count)):
        if number != count:
            raise LayoutError(f"{what} has {count} of the {number[:20]} manifests of the checkpoint")
    documents = (root, main[0][0], *(each for each, _ in more))
    notes = {key: value for key, value in index.annotations.items() if key != PARTS}
    return _assemble(root, main[0][1], [manifest for _, manifest in more], notes, documents)


def _assemble(
    root: Descriptor,
    main: Manifest,
    more: Sequence[Manifest],
    annotations: Mapping[str, str],
    documents: tuple[Descriptor, ...],
) -> Artifact:
    what = f"the checkpoint {root.digest}"
    known = (*TITLES, BLOB, *MEDIA_TYPES.values())
    layers = _drop_repeated(
        layer for part in (main, *more) for layer in part.layers if layer.media_type in known
    )
    if main.config.media_type not in (CONFIG, EMPTY):
        raise LayoutError(f"{what} has a config of an unknown type, {main.config.media_type}")
    if any(each.media_type in (*TITLES, BLOB) for part in more for each in part.layers):
        raise LayoutError(f"{what} has records or a rootfs in a manifest of chunks")

    def single(*media_types: str) -> Descriptor | None:
        found = [each for each in layers if each.media_type in media_types]
        if len(found) > 1:
            kind = found[-1].media_type
            raise LayoutError(f"{what} has {len(found)} layers of type {kind}, but only one is allowed")
        return found[0] if found else None

    records, rootfs = single(*_OF_RECORDS), single(ROOTFS)
    chunks = tuple(each for each in layers if each.media_type in MEDIA_TYPES.values())
    carried = tuple(each for each in layers if each.media_type == BLOB)
    return Artifact(main.config, records, rootfs, chunks, dict(annotations), documents, carried)


def _manifest(at: Descriptor, read: Callable[[Descriptor], bytes]) -> Manifest:
    what = f"the manifest {at.digest}"
    try:
        return Manifest.from_json(parse_document(read(at), what))
    except LayoutError as error:
        if at.digest in str(error):
            raise
        raise LayoutError(f"{what} is broken: {error}") from error


def _is_checkpoint(manifest: Manifest) -> bool:
    # manifest.md: without an artifactType, the media type of the config is the type.
    return (manifest.artifact_type or manifest.config.media_type) in (CHECKPOINT, CONFIG)


def _describe_other_artifact(root: Descriptor, manifest: Manifest) -> NotACheckpoint:
    """The error for the manifest of something else."""
    engine = engine_of(manifest)
    if engine is None:
        kind = manifest.artifact_type or manifest.config.media_type
        return NotACheckpoint(f"{root.digest} is not a gpusnap checkpoint, but of type {kind}")
    whose = "Podman" if engine == "podman" else "Kubernetes"
    return EngineImage(
        f"{root.digest} is a checkpoint as an image, which {whose} restores",
        engine=engine,
        manifest=root.digest,
    )


def _drop_repeated(named: Iterable[Descriptor]) -> tuple[Descriptor, ...]:
    """Return each blob once. Raises LayoutError for one that is described in two ways."""
    found: dict[str, Descriptor] = {}
    for each in named:
        first = found.setdefault(each.digest, each)
        if (first.size, first.media_type) != (each.size, each.media_type):
            raise LayoutError(
                f"the blob {each.digest} is listed as a {first.media_type} of {first.size} bytes, and as "
                f"a {each.media_type} of {each.size} bytes"
            )
    return tuple(found.values())


def _check_types(artifact: Artifact) -> None:
    allowed = [
        (artifact.config, "config", (CONFIG, EMPTY)),
        (artifact.records, "records", _OF_RECORDS),
        (artifact.rootfs, "rootfs", (ROOTFS,)),
        *((each, "carried blob", (BLOB,)) for each in artifact.carried),
        *((each, "chunk", tuple(MEDIA_TYPES.values())) for each in artifact.chunks),
    ]
    for part, what, types in allowed:
        if part is not None and part.media_type not in types:
            raise LayoutError(f"the {what} {part.digest} is a {part.media_type}, not a {' or '.join(types)}")


def _add_title(layer: Descriptor) -> Descriptor:
    notes = {**layer.annotations, TITLE: TITLES[layer.media_type]}
    return replace(layer, annotations=dict(sorted(notes.items())))


def _add_count(notes: Mapping[str, str], parts: int) -> dict[str, str]:
    return dict(sorted({**notes, PARTS: str(parts)}.items()))


def _parts(config: Descriptor, first: Sequence[Descriptor], chunks: Sequence[Descriptor]) -> list[Manifest]:
    """Return the manifests of an artifact that is too large for one, each as full as possible."""
    # With a count of manifests that is as long as any.
    main = Manifest(config, tuple(first), CHECKPOINT, None, _add_count({}, MOST_MANIFESTS))
    room = LARGEST_DOCUMENT - _size(main)
    further = LARGEST_DOCUMENT - _size(Manifest(empty_descriptor(), (), CHUNKS))
    filled: list[list[Descriptor]] = [[]]
    for chunk in chunks:
        need = len(encode_document(chunk.to_json())) + 1
        if need > room:
            if need > further:
                raise LayoutError(f"the annotations of the chunk {chunk.digest} are too large for a manifest")
            filled.append([])
            room = further
        filled[-1].append(chunk)
        room -= need
    main = Manifest(config, (*first, *filled[0]), CHECKPOINT, None, _add_count({}, len(filled)))
    if _size(main) > LARGEST_DOCUMENT:
        raise LayoutError("the annotations of the layers of a checkpoint are too large for a manifest")
    return [main, *(Manifest(empty_descriptor(), tuple(each), CHUNKS) for each in filled[1:])]


def _size(manifest: Manifest) -> int:
    return len(encode_document(manifest.to_json()))
