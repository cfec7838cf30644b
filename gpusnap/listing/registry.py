"""The checkpoints among the tags of a repository in a registry."""

from __future__ import annotations

from collections.abc import Callable

from gpusnap.checkpoints.list import Row, describe
from gpusnap.checkpoints.locator import InRegistry
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import (
    BlobError,
    DigestError,
    EngineImage,
    LayoutError,
    NotACheckpoint,
    NotInRegistry,
)
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.layout.documents import Manifest, parse_document
from gpusnap.oci.registry.repository import Repository
from gpusnap.oci.store.tags import by_age
from gpusnap.operations.open import manifests, open_repository

_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class RemoteListing:
    """A repository: the checkpoints among the tags that were read, the newest last."""

    repository: str
    rows: tuple[Row, ...]
    tags: int
    """Number of its tags."""
    looked_at: int
    """Number of tags that were read, the last ones by name."""


def listing(
    place: InRegistry, *, limit: int, plain_http: bool = False, step: Callable[[int, int], object]
) -> RemoteListing:
    """List the checkpoints among the last `limit` tags by name; omits other tags.

    step: called with the number of tags that were read, and the total. Raises OciError, SettingsError.
    """
    with open_repository(place, plain_http=plain_http) as repository:
        tags = sorted(repository.read_tags())
        last = tags[-limit:]
        found: dict[str, Row] = {}
        done = 0

        def look(tag: str) -> None:
            nonlocal done
            row = _row(repository, place.reference.name, tag)
            if row is not None:
                found[tag] = row
            done += 1
            step(done, len(last))

        threads = max(1, min(_CONNECTIONS, len(last)))
        run_for_each(last, look, threads=threads, ending=repository.interrupt)
    by_digest: dict[str, Row] = {}
    for row in sorted(found.values(), key=lambda row: (by_age(row.created), row.names)):
        before = by_digest.get(row.digest)
        by_digest[row.digest] = row if before is None else replace(row, names=(*before.names, *row.names))
    return RemoteListing(place.reference.name, tuple(by_digest.values()), len(tags), len(last))


def _row(repository: Repository, name: str, tag: str) -> Row | None:
    """Return the row of a tag; None if it is no checkpoint, or was removed meanwhile."""
    try:
        root, read = manifests(repository, tag)
    except (NotInRegistry, BlobError):
        return None
    names = (f"{name}:{tag}",)
    try:
        artifact = artifacts.read(root, read)
    except EngineImage:
        image = Manifest.from_json(parse_document(read(root), f"the manifest {root.digest}"))
        blobs = {each.digest: each.size for each in (image.config, *image.layers)}
        return describe(root.digest, names, "image", blobs, image.annotations)
    except NotACheckpoint:
        return None
    except (LayoutError, DigestError, NotInRegistry):
        return describe(root.digest, names, "damaged", {}, {})
    blobs = {each.digest: each.size for each in (*artifact.blobs(), *artifact.documents)}
    return describe(root.digest, names, "checkpoint", blobs, artifact.annotations)
