"""GPU memory that is suspended into RAM: it stays in files of a tmpfs, and is not written to a disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.memory.destination import Destination


class NoDestination(Destination):
    """For memory that is not written."""

    kind = "ram"
    place = ""
    speed = None

    def __init__(self, key: str) -> None:
        # Never created, but the journal needs a path.
        self.layout = Layout(os.path.join(tmpfs.FOLDER, key, "layout"))

    def open_known(self) -> AbstractContextManager[Known | None]:
        """Called before a write, which must not happen. Raises Refused."""
        raise Refused(
            "there is not enough RAM for files with the GPU memory",
            hint="free some memory, or checkpoint the container: gpusnap checkpoint",
            code="GPS-216",
        )


def create_staged(key: str, settings: Memory) -> Chunks:
    """Return pages that stay in files in RAM. memory.ceiling does not apply to them."""
    return Chunks("", key, replace(settings, ceiling=0), destination=NoDestination(key))


class SuspendedChunks(Chunks):
    """The memory of a suspended container, for a checkpoint or a spill; the container stays suspended.

    The journal's record of it is right all the time.
    """

    def record_places(self, pids: Sequence[int]) -> None:
        """Do nothing: the record does not change."""

    def close(self) -> None:
        """Do nothing: the files in RAM stay."""
        self._end_early()
        self.leave()

    def discard(self, *, layout: bool, suspended: bool = False) -> None:
        """Remove what was written."""
        self.close()
        self._destination.discard(earlier=not layout)
