"""A migration from this host, as its note has it."""

from __future__ import annotations

from typing import Any

from gpusnap.checkpoints.migrations import OutgoingMigration
from gpusnap.oci.base.dataclass import replace

_FOUND = OutgoingMigration(
    id="0" * 32,
    container="w",
    name="w",
    there="w",
    host="gpu2",
    route=("gpu2", "", "0", "ssh", "gpusnap"),
    store="/store",
    checkpoint="w:migrating",
)


def outgoing(**changes: Any) -> OutgoingMigration:
    """One of the container w to gpu2, with changes."""
    return replace(_FOUND, **changes)
