"""A checkpoint that is kept as an artifact: its parts, and what it is to Podman."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from gpusnap import where
from gpusnap.failures import Damaged
from oci import artifact as artifacts
from oci.artifact import Artifact
from oci.chunks import Table
from oci.errors import DiskError, NotThere, OciError
from oci.layout import Layout
from oci.manifest import EMPTY, Descriptor
from oci.store import Store
from runtime_shim import manifest
from runtime_shim.chunk_home import labelled
from runtime_shim.errors import Refused

__all__ = ["Kept", "forget_pages", "held", "load", "roots"]


@dataclass(frozen=True, slots=True)
class Kept:
    """The parts of an artifact."""

    root: Descriptor
    artifact: Artifact
    config: bytes
    """manifest.json; empty for a container without GPU state."""
    record: manifest.Manifest | None
    """The same, decoded."""

    @property
    def tables(self) -> list[Table]:
        """Of all regions, and of images that are in chunks."""
        return [table for _, table in labelled(self.record)] if self.record is not None else []

    @property
    def gpu_memory(self) -> int:
        """Bytes that the container used of its GPUs."""
        return sum(gpu.memory_used for gpu in self.record.gpus) if self.record is not None else 0

    @property
    def size(self) -> int:
        """Bytes of all its blobs and manifests."""
        return sum(each.size for each in (*self.artifact.blobs(), *self.artifact.documents))

    def check_whole(self) -> None:
        """Raise Refused where it is only the GPU side of a checkpoint that Podman has."""
        if self.artifact.records is None:
            whose = self.record.container[:12] if self.record is not None else ""
            raise Refused(
                f"{self.root.digest} has only the memory of a checkpoint, whose records are in the archive "
                "that Podman exported, or in Podman's storage",
                hint=f"run podman container restore --import ARCHIVE, or podman container restore {whose}",
            )


def load(root: Descriptor, layout: Layout, read: Callable[[Descriptor], bytes] | None = None) -> Kept:
    """Read an artifact and its config from a layout, manifests by `read` where that is given.

    Raises OciError, ManifestError, Damaged.
    """
    whole = artifacts.read(root, read or layout.read_blob)
    config = whole.config
    if config.media_type == EMPTY:
        return Kept(root, whole, b"", None)
    if config.size > manifest.LARGEST:
        raise Damaged(
            f"the manifest {config.digest} has {config.size} bytes, and {manifest.LARGEST} are allowed"
        )
    data = layout.read_blob(config, limit=manifest.LARGEST)
    return Kept(root, whole, data, manifest.decode(data, f"the manifest {config.digest}"))


@contextmanager
def held(place: where.InStore) -> Iterator[tuple[Store, Kept]]:
    """What a store has, and no gc takes while the block runs. Raises NotFound, OciError, ManifestError."""
    store = where.open_store(place.store)
    root = place.entry().descriptor
    with ExitStack() as stack:
        # Where a store is mounted read-only, there is no gc.
        with suppress(DiskError):
            root = stack.enter_context(store.hold(root.digest))
        yield store, load(root, store.layout)


def roots(store: Store) -> set[str]:
    """The digests of all that a store names."""
    return {each.descriptor.digest for each in store.entries()}


def forget_pages(store: Store, config: Descriptor | None, before: set[str]) -> None:
    """Take out of the index what a runtime put there since `before`: memory without records.

    `config`: its manifest; None for any. The blobs stay. What cannot be told or done is left, and shown by
    `gpusnap ls`.
    """
    for entry in store.entries():
        digest = entry.descriptor.digest
        if entry.name or digest in before:
            continue
        with suppress(OciError):
            found = artifacts.read(entry.descriptor, store.read)
            same = config is None or found.config.digest == config.digest
            if found.records is None and same:
                with suppress(NotThere):
                    store.remove(digest)
