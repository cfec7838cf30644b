"""A checkpoint that is stored as an artifact: its parts, and whether Podman or containerd can restore it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from gpusnap.base.user_errors import Damaged
from gpusnap.checkpoints import locator
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DiskError, OciError, StoreError
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.oci.layout.documents import EMPTY, Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.records import manifest, manifest_json
from gpusnap.runtime_shim.records.artifact import write_artifact


@dataclass(frozen=True, slots=True)
class ArtifactParts:
    root: Descriptor
    artifact: Artifact
    config: bytes
    """manifest.json; empty for a container without GPU state."""
    record: manifest.Manifest | None
    """The decoded manifest.json."""

    @property
    def tables(self) -> list[Table]:
        """Return the tables of all regions, and of images that are in chunks."""
        return self.record.tables if self.record is not None else []

    @property
    def gpu_memory(self) -> int:
        """Return how many bytes of GPU memory the container used."""
        return sum(gpu.memory_used for gpu in self.record.gpus) if self.record is not None else 0

    @property
    def size(self) -> int:
        """Return the size of all its blobs and manifests in bytes."""
        return sum(each.size for each in self.parts)

    @property
    def parts(self) -> tuple[Descriptor, ...]:
        """Return all its blobs and manifests."""
        return (*self.artifact.blobs(), *self.artifact.documents)

    def check_podman(self) -> None:
        """Raise Refused if Podman cannot restore it: it is incomplete, or containerd's."""
        self.check_whole()
        if self.artifact.is_image:
            raise Refused(
                f"{self.root.digest} is a containerd checkpoint, which Podman cannot restore",
                hint="on a host with containerd: gpusnap copy WHAT containerd:IMAGE, then ctr container "
                "restore --live NAME IMAGE",
                code="GPS-607",
            )

    def check_containerd(self) -> None:
        """Raise Refused if containerd cannot restore it: it is incomplete, or Podman's."""
        self.check_whole()
        if not self.artifact.is_image:
            raise Refused(
                f"{self.root.digest} is not a containerd checkpoint, but one of Podman's or Kubernetes', "
                "which ctr cannot restore",
                hint="gpusnap restore REF has Podman restore it",
                code="GPS-607",
            )

    def check_whole(self) -> None:
        """Raise Refused if it is only the GPU part of a checkpoint that Podman has."""
        if self.artifact.records is None:
            whose = self.record.container[:12] if self.record is not None else ""
            raise Refused(
                f"{self.root.digest} has only the memory of a checkpoint; its records are in the archive "
                "that Podman exported, or in Podman's storage",
                hint=f"run podman container restore --import ARCHIVE, or podman container restore {whose}",
                code="GPS-608",
            )


def load(
    root: Descriptor, layout: Layout, read: Callable[[Descriptor], bytes] | None = None
) -> ArtifactParts:
    """Read an artifact and its config from a layout; `read` reads manifests, if given.

    Raises OciError, ManifestError, and Damaged, also if its config names chunks that are none of its layers:
    a pull would not fetch those, and gc would remove them.
    """
    whole = artifacts.read(root, read or layout.read_blob)
    config = whole.config
    if config.media_type == EMPTY:
        return ArtifactParts(root, whole, b"", None)
    if config.size > manifest.LARGEST:
        raise Damaged(
            f"the manifest {config.digest} has {config.size} bytes, but at most {manifest.LARGEST} are "
            "allowed",
            code="GPS-604",
        )
    data = layout.read_blob(config, limit=manifest.LARGEST)
    found = ArtifactParts(root, whole, data, manifest_json.decode(data, f"the manifest {config.digest}"))
    layers = {(each.digest, each.size) for each in whole.chunks}
    for chunk in descriptors(found.tables):
        if (chunk.digest, chunk.size) not in layers:
            raise Damaged(
                f"{root.digest} names the chunk {chunk.digest} of {chunk.size} bytes in its manifest, but "
                "not among its layers",
                hint="get another copy from where it was made",
            )
    return found


@contextmanager
def hold_artifact(place: locator.InStore) -> Iterator[tuple[Store, ArtifactParts]]:
    """Open an artifact in a store, and protect it from gc. Raises NotFound, OciError, ManifestError."""
    store = locator.open_store(place.store)
    root = place.entry().descriptor
    with ExitStack() as stack:
        hold(store, root.digest, stack)
        yield store, load(root, store.layout)


def hold(store: Store, digest: str, stack: ExitStack) -> None:
    """Protect a manifest and all blobs below it from gc until `stack` closes. Raises NotThere, DiskError.

    A store that is mounted read-only, or is another tool's layout, has no gc, and needs no protection.
    """
    try:
        stack.enter_context(store.hold(digest))
    except DiskError as error:
        if _is_foreign(store) or _is_read_only(error, store):
            return
        raise


def _is_foreign(store: Store) -> bool:
    try:
        store.check()
    except StoreError:
        return True
    return False


def _is_read_only(error: OciError, store: Store) -> bool:
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.EROFS:
        return True
    with suppress(OSError):
        return bool(os.statvfs(store.path).f_flag & os.ST_RDONLY)
    return False


def roots(store: Store) -> set[str]:
    """Return the digests of everything that has a name in a store."""
    return {each.descriptor.digest for each in store.entries()}


def pages_of(found: ArtifactParts, staging: Layout, before: set[str]) -> str:
    """Return the digest of the runtime's index entry for it: memory without records; see Staging.commit.

    Empty if there is none, or if it existed `before`.
    """
    pages = write_artifact(staging, found.record).digest if found.record is not None else ""
    return "" if pages in before else pages
