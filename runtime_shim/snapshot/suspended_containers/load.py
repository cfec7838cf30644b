"""Reads the spilled memory of a suspended container into RAM before its GPU is free.

`gpusnap swap` reads while the other container is suspended, so that the resume finds the memory in files that
are mapped into the processes (memory/transfer.py, `give`) and does not wait for a disk. Every chunk is
checked.

The files are only a copy. The journal says all the time that the memory is in the store, and a command that
resumes, recovers or checkpoints the container meanwhile reads it there. The container's lock is not held: the
files have names of their own,

    /run/gpusnap/stage/<key>/<pid>-<address>.load.<PID and start time of this gpusnap>

which nobody else uses. They are open, so they may be removed at any time. If gpusnap is killed, its files are
removed by the resume, or by the next command's `sweep`.

The RAM that is still to be filled is claimed (records/reservations.py), so that others do not count on it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from gpusnap.oci.base.errors import OciError, Stalled
from gpusnap.oci.chunks.reader import Reader
from gpusnap.oci.chunks.table import Chunk
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.process import mount_namespace
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry
from gpusnap.runtime_shim.snapshot.records.reservations import RAM, claim
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension

# Bytes that are read between two updates of the claim.
_STEP = 64 << 20


def begin(found: Suspension, settings: Memory, *, beside: int) -> MemoryLoad | None:
    """Start to read the spilled memory of a suspended container; None if nothing was spilled.

    `beside`: bytes of RAM that something else takes meanwhile. Raises Refused if there is no room for both;
    OSError, OciError, GpusnapError.
    """
    entry = journal.read(found.key)
    spilled = entry.measure_spilled() if entry is not None else {}
    if entry is None or not any(spilled.values()) or not mount_namespace.is_lasting():
        return None
    with ExitStack() as claimed:
        room = claimed.enter_context(claim())
        others = room.reserved.get(RAM, 0)
        space.check_memory(spilled, found.init[0], settings, reserved=others)
        space.check_memory(spilled | {0: beside}, os.getpid(), settings, reserved=others)
        if settings.ceiling:
            return None  # memory.ceiling limits the RAM that is used at once; the resume keeps to it
        room.record({RAM: sum(spilled.values())})
        return MemoryLoad(entry, settings, claimed.pop_all(), lambda left: room.change({RAM: left}))


class MemoryLoad:
    """The memory of an entry that is read into files. It starts when it is created; `close` ends it."""

    def __init__(
        self,
        entry: Entry,
        settings: Memory,
        claimed: ExitStack | None = None,
        shrink: Callable[[int], object] = id,
    ) -> None:
        """`claimed`: the claim of RAM, until everything is read. `shrink` is told how many bytes are missing.

        Raises OSError, OciError.
        """
        self.entry = entry
        self._claimed, self._shrink = claimed or ExitStack(), shrink
        chunks = [c for process in entry.processes for r in process.regions for c in r.table.chunks]
        self._left = self._told = sum(chunk.size for chunk in chunks)
        self._counting = threading.Lock()
        self._areas: dict[int, list[Area]] = {}
        self._reading: Reader | None = None
        tables = []
        try:
            stage = Stage(entry.key)
            mine = ".load.{}.{}".format(*state_files.owner())
            for process in entry.processes:
                for region in process.regions:
                    name = f"{process.pid}-{region.start:x}{mine}"
                    area = stage.area(name, region.start, region.table.size)
                    self._areas.setdefault(process.pid, []).append(area)
                    tables.append(region.table)
            self._reading = Reader(
                tables,
                Layout(entry.layout),
                threads=settings.threads or copies.cores(),
                ceiling=transfer.ceiling(settings),
                targets=self._load_all(),
                prepare=self._populate,
                patience=transfer.STALL,
            )
        except BaseException:
            self.close()
            raise

    def areas(self) -> Mapping[int, Sequence[Area]]:
        """Return the files, by PID, when everything is read; none if they could not be read.

        Whoever reads the store next reports its errors. Raises ImageError if the store does not respond.
        """
        assert self._reading is not None
        try:
            self._reading.wait()
        except Stalled:
            self.close()
            with transfer.as_image_error(self.entry.layout):
                raise
        except (OSError, OciError):
            self.close()
            return {}
        self._claimed.close()  # the RAM is in use now, and no longer counts as free
        return self._areas

    def close(self) -> None:
        """End the reading, and remove the files; what is mapped into a process stays there."""
        if self._reading is not None:
            self._reading.close()
        self._claimed.close()
        for area in self._load_all():
            with suppress(OSError):
                area.discard()
        self._areas = {}
        with suppress(OSError):  # the last one removes it
            tmpfs.leave(self.entry.key)

    def _load_all(self) -> list[Area]:
        return [area for areas in self._areas.values() for area in areas]

    def _populate(self, at: int, chunk: Chunk) -> None:
        """Allocate the pages of a chunk: a full tmpfs is an error here, but SIGBUS for a writer."""
        self._load_all()[at].populate(chunk.offset, chunk.size, threads=1)
        with self._counting:
            self._left -= chunk.size
            if self._told - self._left >= _STEP or not self._left:
                self._told = self._left
                self._shrink(self._left)
