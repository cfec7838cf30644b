"""The GPUs' memory of a checkpoint on its way back, beside CRIU: begun before the container is there.

    chunks, read, checked, decompressed ─→ files of memory.stage ─┐
    the real runtime, CRIU ───────────────→ the processes, stopped ┴→ mapped into them ─→ driver restore

What is decompressed has been checked before. Of what is in the files the digests are checked while the driver
works, and no process goes on before they are found right.

Where the regions are not to be had in memory twice over (memory.ceiling), the chunks stop in a few slots and
are copied into the processes one after the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from gpusnap.oci.chunks import reader as reading
from gpusnap.oci.chunks.buffers import Target
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim import threads
from gpusnap.runtime_shim.errors import ImageError
from gpusnap.runtime_shim.process import mount_namespace
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.progress import reporter
from gpusnap.runtime_shim.records.manifest import FOLDER, Manifest
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import transfer

_SWITCH = 0.0005  # seconds
# What is staged goes when the restore fails, so that nobody is sent to look for it.
_CHANGED = "see with gpusnap verify whether the checkpoint is as it was made, and restore another one if not"


def _most_of(cores: int) -> int:
    """Some are left to the runtime and to CRIU, which nobody would wait for any shorter else."""
    return max(1, cores * 3 // 4)


@dataclass(frozen=True, slots=True)
class _Nowhere:
    """A region whose process has ended: gpusnap.oci.chunks.buffers' Target."""

    size: int

    def view(self, offset: int, size: int) -> None:
        """It is no memory of ours."""

    def write(self, offset: int, data: memoryview) -> None:
        """Nobody reads it."""


class Filling:
    """The chunks of a checkpoint on their way back."""

    def __init__(
        self,
        image_path: str,
        record: Manifest,
        settings: Memory,
        key: str,
        blobs: Blobs | None = None,
    ) -> None:
        """`key`: of the container that it becomes. `blobs`: the chunks, if not in the image directory.

        Raises ImageError where the manifest's tables or the layout cannot be right.
        """
        self._path = os.path.join(image_path, FOLDER)
        self._key = key
        self._stage = Stage(key)
        self._regions = [(p.pid, region) for p in record.processes for region in p.regions]
        self._areas = self._staged(settings)
        self._checking: threading.Thread | None = None
        self._wrong: ImageError | None = None
        # The workers hold the interpreter for moments only, but by default who waits for it waits 5 ms.
        sys.setswitchinterval(_SWITCH)
        try:
            with transfer.as_image_error(self._path):
                self._reading = reading.Reading(
                    [region.table for _, region in self._regions],
                    blobs or Layout(self._path),
                    threads=settings.threads or _most_of(copies.cores()),
                    ceiling=transfer.ceiling(settings),
                    targets=self._areas or None,
                    later=True,
                    progress=reporter.move,
                )
        except BaseException:
            self._drop()
            raise

    def __enter__(self) -> Filling:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading, and let go of what is staged. May be called twice."""
        self._reading.close()
        if self._checking is not None:
            self._checking.join()
        self._drop()

    def deliver(self, by_inner: Mapping[int, int]) -> None:
        """Have every region in its process; `by_inner` has this host's PID by the container's.

        They may not go on before `right`. Those that are not in `by_inner` have ended.

        Raises ImageError, and GpusnapError where a process cannot have it.
        """
        with transfer.as_image_error(self._path):
            if not self._areas:
                targets: list[Target] = [
                    transfer.Part(by_inner[pid], region.start, region.table.size)
                    if pid in by_inner
                    else _Nowhere(region.table.size)
                    for pid, region in self._regions
                ]
                self._reading.deliver(targets)
                return
            self._reading.wait()
        for (_, region), area in zip(self._regions, self._areas, strict=True):
            if any(size >= copies.HUGE for _, size in region.table.gaps()):
                # The driver would find these zeros page by page; without memory for them it does.
                with contextlib.suppress(OSError):
                    area.populate()
        found: dict[int, list[Area]] = {}
        for (pid, _), area in zip(self._regions, self._areas, strict=True):
            if pid in by_inner:
                found.setdefault(by_inner[pid], []).append(area)
        for error in transfer.give(self._key, found, hint=_CHANGED).values():
            raise error
        checking = threading.Thread(target=self._check, name="gpusnap-check")
        threads.start(checking)
        self._checking = checking

    def right(self) -> None:
        """Return when all of it is known to be right. From any thread. Raises ImageError."""
        if self._checking is not None:
            self._checking.join()
        if self._wrong is not None:
            raise self._wrong

    def _check(self) -> None:
        try:
            with transfer.as_image_error(self._path):
                # The driver copies in a single thread, and all cores' hashing would take its memory from it.
                self._reading.verify(threads=max(1, copies.cores() * 3 // 8))
        except ImageError as error:
            self._wrong = error

    def _staged(self, settings: Memory) -> list[Area]:
        """A file for each region; none where the ceiling or this host does not allow it."""
        working = max((c.stored for _, r in self._regions for c in r.table.chunks), default=0)
        working *= settings.threads or _most_of(copies.cores())
        if not mount_namespace.lasting():
            return []
        if settings.ceiling and sum(r.table.size for _, r in self._regions) > settings.ceiling - working:
            return []
        areas: list[Area] = []
        try:
            for pid, region in self._regions:
                areas.append(self._stage.area(f"{pid}-{region.start:x}", region.start, region.table.size))
        except OSError:
            for area in areas:
                area.discard()
            return []
        return areas

    def _drop(self) -> None:
        for area in self._areas:
            area.close()
        transfer.free(self._stage)
