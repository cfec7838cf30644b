"""One entry of a store's index.json."""

from __future__ import annotations

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.layout.documents import Descriptor


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the index; `name` and `created` (RFC 3339) are "" if it has none."""

    name: str
    descriptor: Descriptor
    created: str
