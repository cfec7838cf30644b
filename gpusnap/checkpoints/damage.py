"""Determines which part of a checkpoint a damaged blob belongs to: a region, an image, or another part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gpusnap.checkpoints.statistics import parts
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DigestError, LayoutError
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.chunks.table import MEDIA_TYPES, Table
from gpusnap.oci.chunks.verify import Fault
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.graph import is_document
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import ManifestError
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.records import manifest, manifest_json
from gpusnap.runtime_shim.records.manifest import Manifest

Progress = Callable[[int, int], object]
"""Called with the number of bytes that were checked, and the total."""

_WHAT = {
    artifacts.CONFIG: "gpusnap's manifest",
    artifacts.RECORDS: "the records: CRIU's images, and the engine's files",
    artifacts.IMAGE: "the records: CRIU's images, and containerd's files",
    artifacts.ROOTFS: "the rootfs diff",
    artifacts.BLOB: "containerd's image: the files that changed, or the base image",
}
# For each blob; a chunk that is used a thousand times need not be listed a thousand times.
_MOST_PLACES = 8


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged blob, its fault, and the parts of a checkpoint that it belongs to."""

    digest: str
    media_type: str
    size: int
    what: str
    belongs_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was verified: the user's word, the number and bytes of its blobs, and the damaged ones."""

    what: str
    digest: str
    """Digest of its manifest; empty for a file."""
    blobs: int
    size: int
    read: bool
    """False if a registry was only asked whether it has the blobs."""
    damaged: tuple[Damage, ...]
    note: str = ""
    """What could not be verified."""


def describe_damage(fault: Fault, places: Mapping[str, Sequence[str]]) -> Damage:
    """Return a fault with the parts it belongs to, by `places` or, for other blobs, by its media type."""
    blob = fault.descriptor
    found = list(places.get(blob.digest, ())) or [_describe_by_type(blob)]
    if len(found) > _MOST_PLACES:
        found[_MOST_PLACES:] = [f"and {len(found) - _MOST_PLACES} more places"]
    return Damage(blob.digest, blob.media_type, blob.size, fault.what, tuple(found))


def _describe_by_type(blob: Descriptor) -> str:
    """Say what a blob is by its descriptor alone."""
    if is_document(blob):
        return "the list of the checkpoint's parts"
    if blob.media_type in MEDIA_TYPES.values():
        notes = blob.annotations
        at = f" of {notes[artifacts.CHUNK_REGION][:80]}" if artifacts.CHUNK_REGION in notes else ""
        return f"a chunk{at}"
    return _WHAT.get(blob.media_type, "a part that gpusnap does not know")


def map_blobs(root: Descriptor, layout: Layout) -> dict[str, list[str]]:
    """Return the parts that each blob below `root` belongs to, if manifests and config can still be read."""
    try:
        artifact = artifacts.read(root, layout.read_blob)
    except (LayoutError, DigestError):
        return {}
    return map_artifact_blobs(artifact, config_of(artifact, layout))


def config_of(artifact: Artifact, layout: Layout) -> Manifest | None:
    with suppress(LayoutError, DigestError, ManifestError):
        data = layout.read_blob(artifact.config, limit=manifest.LARGEST)
        return manifest_json.decode(data, artifact.config.digest)
    return None


def tables_of(root: Descriptor, layout: Layout) -> tuple[Table, ...]:
    """Return the tables of an artifact's config; () if manifests or config cannot be read."""
    try:
        record = config_of(artifacts.read(root, layout.read_blob), layout)
    except (LayoutError, DigestError):
        return ()
    return tuple(record.tables) if record is not None else ()


def map_artifact_blobs(artifact: Artifact, record: Manifest | None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for each in (artifact.config, artifact.records, artifact.rootfs, *artifact.carried):
        if each is not None:
            found[each.digest].append(_describe_by_type(each))
    for digest, places in map_manifest_chunks(record).items():
        found[digest] += places
    for chunk in artifact.chunks:
        if chunk.digest not in found:
            found[chunk.digest].append(_describe_by_type(chunk))
    return found


def map_manifest_chunks(record: Manifest | None) -> dict[str, list[str]]:
    """Return the places in which each chunk is used."""
    found: dict[str, list[str]] = defaultdict(list)
    names = {process.pid: process.name for process in record.processes} if record else {}
    for part in parts(record):
        if part.process is None:
            what = f"CRIU's image {part.name}"
        else:
            what = f"the region {part.name} of process {part.process} ({names[part.process]})"
        for chunk in part.table.chunks:
            found[chunk.blob].append(f"{what}, at {human(chunk.offset)}")
    return found
