"""GPU memory that is suspended into RAM: it stays in files of a tmpfs, and nothing is written to a disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from gpusnap.oci.chunks.encoding import ReadSpeed
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.errors import Refused
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks


class NoDestination:
    """`destination.Destination` for what is not to be written at all."""

    kind = "ram"
    place = ""
    speed: ReadSpeed | None = None

    def __init__(self, key: str) -> None:
        # Never made; the journal wants a path.
        self.layout = Layout(os.path.join(tmpfs.FOLDER, key, "layout"))

    def begin(self) -> None:
        """Nothing is needed."""

    def mark_needed(self) -> None:
        """Nobody else removes what is staged."""

    def open_known(self) -> AbstractContextManager[Known | None]:
        """Whoever asks is about to write. Raises Refused."""
        raise Refused(
            "there is not enough RAM for files with the GPU memory",
            hint="free some memory, or checkpoint the container: gpusnap checkpoint",
            code="GPS-216",
        )

    def write_images(self) -> tuple[FileRecord, ...]:
        """There are none."""
        return ()

    def commit(self, tables: Sequence[Table], *, kept: bool) -> None:
        """Nothing was written."""

    def name(self, record: Manifest) -> None:
        """Likewise."""

    def close(self, record: Manifest | None) -> None:
        """Likewise."""

    def discard(self, *, earlier: bool) -> None:
        """Likewise."""


def create_staged(key: str, settings: Memory) -> Chunks:
    """Pages that stay in staged files. The limit memory.ceiling does not apply to them."""
    return Chunks("", key, replace(settings, ceiling=0), destination=NoDestination(key))


class SuspendedChunks(Chunks):
    """The memory of a suspended container on its way into a checkpoint, or the store; it stays suspended.

    What the journal says of it is true all the time.
    """

    def note(self, pids: Sequence[int]) -> None:
        """Nothing changes."""

    def close(self) -> None:
        """What is staged stays."""
        self._end_early()
        self.leave()

    def discard(self, *, layout: bool) -> None:
        """Remove what was written."""
        self.close()
        self._destination.discard(earlier=not layout)
