"""`gpusnap history`: the checkpoints of one container in a store, over time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from gpusnap.base.user_errors import Damaged
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints.list import Row, blobs_of, explain_fault, list_named, listing
from gpusnap.checkpoints.statistics import measure_stopped
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import NotThere, OciError
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.store.store import Store
from gpusnap.retention.prune import container_of
from gpusnap.runtime_shim.base.errors import ManifestError


@dataclass(frozen=True, slots=True)
class Moment:
    """One checkpoint of a container. Sizes are in bytes; texts are empty if unknown."""

    digest: str
    names: tuple[str, ...]
    created: str
    """RFC 3339."""
    container_id: str
    size: int
    """Size of all its blobs."""
    new: int
    """Size of the blobs that no earlier checkpoint of the container has."""
    pause: float | None
    """Seconds for which the processes were stopped, or until they had ended; None without GPU state."""
    gpus: str
    driver: str
    labels: Mapping[str, str]
    fault: str = ""
    migrating: str = ""
    """The other host that may run its container, while a migration to that has not ended."""


def history(store: Store, word: str) -> tuple[Moment, ...]:
    """Return the checkpoints of a container, the oldest first; empty if the store has none of it.

    word: its name or ID, or a name of one of its checkpoints. Raises LayoutError, Ambiguous.
    """
    rows = [row for row in listing(store).rows if row.kind == "checkpoint"]
    found = [row for row in rows if word in (row.container_id, container_of(row))]
    if not found:
        with suppress(NotThere):
            digest = store.find(word).descriptor.digest
            of = {container_of(row) for row in rows if row.digest == digest}
            found = [row for row in rows if container_of(row) in of]
    roots = {each.root.digest: each.root for each in list_named(store)}
    seen: set[str] = set()
    return tuple(_moment(store, row, roots.get(row.digest), seen) for row in found)


def _moment(store: Store, row: Row, root: Descriptor | None, seen: set[str]) -> Moment:
    """`seen`: the blobs of earlier ones; those of this one are added.

    root: None if it was removed meanwhile.
    """
    blobs: Mapping[str, int] = {}
    pause: float | None = None
    driver = fault = ""
    try:
        if root is None:
            raise NotThere(f"the checkpoint {row.digest} has just been removed")
        found = kept.load(root, store.layout)
        blobs = blobs_of(store, found.root)
        if found.record is not None:
            pause = measure_stopped(found.record.timing)
            driver = f"{found.record.host.vendor} {found.record.host.driver_version}"
    except (OciError, ManifestError, Damaged) as error:
        fault = explain_fault(error)
    new = sum(size for digest, size in blobs.items() if digest not in seen)
    seen.update(blobs)
    return Moment(
        row.digest,
        row.names,
        row.created,
        row.container_id,
        row.size,
        new,
        pause,
        row.gpus,
        driver,
        row.labels,
        fault,
        row.migrating,
    )
