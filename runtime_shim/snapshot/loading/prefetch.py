"""Reads the GPU memory of a checkpoint while CRIU restores the processes, and delivers it to them.

    chunks, read, decompressed, checked ─→ files of a stage ───────────┐
    the real runtime, CRIU ──────────────→ the processes, stopped ─────┴→ mapped into them ─→ driver restore

Chunks are still read while the driver reads the files; the driver waits for those that are missing
(demand_paging.py). If the kernel does not support that, all chunks are read first, and their content is
checked while the driver works.

In both cases no process continues before all digests are checked.

If there is no memory for a second copy of the regions (memory.ceiling), the chunks are read into a few
buffers and copied into the processes one after the other."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.chunks.buffers import Target
from gpusnap.oci.chunks.read_meter import ReadMeter
from gpusnap.oci.chunks.reader import EarlierReader, Reader
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.base.progress import reporter
from gpusnap.runtime_shim.base.transaction import is_asked_to_stop
from gpusnap.runtime_shim.process import mount_namespace
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import userfault
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.process.memory.userfault import Userfault
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote
from gpusnap.runtime_shim.records.manifest import FOLDER, Manifest, RegionRecord
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.loading.board import list_regions
from gpusnap.runtime_shim.snapshot.loading.demand_paging import DemandPaging, WaitTotals, has_whole_pages
from gpusnap.runtime_shim.snapshot.loading.descriptors import OF_A_FILE, may_open
from gpusnap.runtime_shim.snapshot.loading.join import JoinedMemory, JoinedProcess
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.pages import Pages

_SWITCH = 0.0005  # seconds
# Blobs that are read at once while CRIU works. CRIU opens hundreds of files. If these come from the same
# disk, each open waits behind the reads of the blobs: 45 ms with 12 blobs of 4 MiB, 5 s in all.
_READS = 2
# Workers until the processes are restored: at most this number, and at most one in so many. With all of them,
# the runtime's own thread rarely got the interpreter, and CRIU rarely the memory. On 16 cores the plan took
# 0.32 s beside 12 workers and 0.11 s beside 4, and a whole restore 4.8 and 3.9 s; on 32 cores the plan took
# 0.23 s beside 8 of 24.
_AT_FIRST, _PART_AT_FIRST = 4, 2
# The files in RAM are removed when the restore fails, so the hint must not point to them.
_CHANGED = "run gpusnap verify to check the checkpoint for damage, and restore another one if it is damaged"


def can_be_staged(regions: Sequence[tuple[int, RegionRecord]], settings: Memory, *, more: int = 0) -> bool:
    """Whether each region may have a file in RAM, beside `more` files: the ceiling and this host allow it."""
    working = max((c.stored for _, r in regions for c in r.table.chunks), default=0)
    working *= transfer.count_reading_threads(settings)
    if not mount_namespace.is_lasting() or not may_open(OF_A_FILE * (len(regions) + more)):
        return False
    return not settings.ceiling or sum(r.table.size for _, r in regions) <= settings.ceiling - working


@dataclass(frozen=True, slots=True)
class _NullTarget:
    """A region whose process has ended; a gpusnap.oci.chunks.buffers.Target."""

    size: int

    def view(self, offset: int, size: int) -> None:
        """None: it is not in memory of gpusnap."""

    def write(self, offset: int, data: memoryview) -> None:
        """Discard the data."""


class Prefetch:
    """Reads the chunks of a checkpoint into its processes."""

    def __init__(
        self,
        image_path: str,
        record: Manifest,
        settings: Memory,
        key: str,
        blobs: Blobs | None = None,
        after: EarlierReader | None = None,
        joined: JoinedProcess | None = None,
        meter: ReadMeter | None = None,
    ) -> None:
        """`key`: of the container that is restored. `blobs`: the chunks, if not in the image directory.
        `after`: the reading that CRIU waits for, which comes first. `joined`: a load process that has
        started. `meter`: that of the disk of `blobs`.

        Raises ImageError if the manifest's tables or the layout are invalid.
        """
        self._path = os.path.join(image_path, FOLDER)
        self._key = key
        self._stage = Stage(key)
        self._regions = list_regions(record)
        self._blobs = blobs or Layout(self._path)
        self._ceiling = transfer.ceiling(settings)
        self._meter = meter
        self._loaded: JoinedMemory | None = None
        self._areas = joined.areas if joined is not None and joined.regions else self._stage_regions(settings)
        self._paging = self._make_demand_paging() if settings.demand_paging else None
        self._reads = threading.Semaphore(_READS)
        self._workers = transfer.count_reading_threads(settings)
        self._turns = threading.Semaphore(max(1, min(_AT_FIRST, self._workers // _PART_AT_FIRST)))
        self._checking: threading.Thread | None = None
        self._wrong: ImageError | None = None
        # The workers hold the interpreter only for moments, but by default another thread waits 5 ms for it.
        sys.setswitchinterval(_SWITCH)
        self._reading: Reader | JoinedMemory
        try:
            if joined is not None and joined.regions:
                read = partial(self._read, verify_later=False)
                self._reading = self._loaded = JoinedMemory(joined, self._mark_placed, reporter.move, read)
            else:
                tables = [region.table for _, region in self._regions]
                placed = self._mark_placed if self._paging is not None else None
                self._reading = self._read(tables, placed, verify_later=self._paging is None, after=after)
        except BaseException:
            self._drop()
            raise
        try:
            if self._paging is not None:
                self._paging.populate_zeros()
        except BaseException:
            self.close()
            raise

    def _read(
        self,
        tables: Sequence[Table],
        on_placed: Callable[[int, Chunk], None] | None,
        *,
        verify_later: bool,
        after: EarlierReader | None = None,
    ) -> Reader:
        """Read chunks of the regions. Raises ImageError."""
        with transfer.as_image_error(self._path):
            return Reader(
                tables,
                self._blobs,
                threads=self._workers,
                ceiling=self._ceiling,
                targets=self._areas or None,
                verify_later=verify_later,
                groups=[pid for pid, _ in self._regions],
                prepare=partial(transfer.populate, dict(enumerate(self._areas))) if self._areas else None,
                on_placed=on_placed,
                reads=self._meter.around(self._reads) if self._meter is not None else self._reads,
                turns=self._turns,
                after=after,
                progress=reporter.move,
            )

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_loading(self) -> bool:
        """Whether memory may still be missing in a process. A thread that touches it waits."""
        return self._paging is not None and not self._paging.is_complete

    @property
    def waits_so_far(self) -> WaitTotals:
        """How long the processes waited for memory so far."""
        return self._paging.waits_so_far if self._paging is not None else WaitTotals(0, 0.0)

    def close(self) -> None:
        """End the reading, and close the files in RAM. May be called twice."""
        self._reading.close()
        if self._checking is not None:
            self._checking.join()
        self._drop()

    def deliver(self, by_inner: Mapping[int, int]) -> None:
        """Deliver every region to its process. `by_inner`: this host's PID, by the container's.

        The processes must not continue before `wait_checked`. Those that are not in `by_inner` have ended.
        Memory that they touch may still be loading: see `is_loading`.

        Raises ImageError, and GpusnapError if a process cannot get its memory.
        """
        for each in (self._reads, self._turns):
            each.release(self._workers)  # CRIU is done
        if self._loaded is not None:
            self._loaded.look_closely()
        if isinstance(self._reading, Reader) and not self._areas:
            with transfer.as_image_error(self._path):
                targets: list[Target] = [
                    transfer.ProcessRegion(by_inner[pid], region.start, region.table.size)
                    if pid in by_inner
                    else _NullTarget(region.table.size)
                    for pid, region in self._regions
                ]
                self._reading.deliver(targets)
            return
        found: dict[int, list[int]] = {}
        for at, (pid, _) in enumerate(self._regions):
            if pid in by_inner:
                found.setdefault(by_inner[pid], []).append(at)
        if self._paging is not None and not self._paging.is_complete:
            self._deliver_early(self._paging, found)
            return
        self._wait_for_all()
        areas = {pid: [self._areas[at] for at in regions] for pid, regions in found.items()}
        for error in transfer.map_areas(self._key, areas, hint=_CHANGED).values():
            raise error
        if self._paging is None and self._loaded is None:
            checking = threading.Thread(target=self._check, name="gpusnap-check")
            threads.start(checking)
            self._checking = checking

    def _deliver_early(self, paging: DemandPaging, found: Mapping[int, Sequence[int]]) -> None:
        """Map the files, complete or not; if a process cannot wait for missing memory, wait here."""
        userfaults: dict[int, Userfault] = {}

        def mapped(pid: int, remote: Remote) -> None:
            for at in found[pid]:
                area = self._areas[at]
                # Locked memory (mlockall(2), MCL_FUTURE) gets pages as soon as it is mapped, with what the
                # file contains so far, and no thread waits for these: EINVAL, and it is copied later.
                remote.madvise(area.address, area.size, mmap.MADV_DONTNEED)
                # A child would have the memory without the userfaultfd.
                remote.madvise(area.address, area.size, mmap.MADV_DONTFORK)
            with contextlib.suppress(OSError, GpusnapError):
                userfaults[pid] = Userfault(remote.userfaultfd())

        areas = {pid: [self._areas[at] for at in regions] for pid, regions in found.items()}
        errors = transfer.map_areas(
            self._key, areas, hint=_CHANGED, mapped=mapped, before_copy=self._wait_for_all
        ).values()
        try:
            paging.attach({pid: (each, found[pid]) for pid, each in userfaults.items()})
        except OSError:
            paging.detach()
        for error in errors:
            raise error
        with transfer.as_image_error(self._path):
            paging.check()
        if not paging.is_attached(found):
            self._wait_for_all()
        paging.serve(self._reading.hurry, self._reading.check)

    def _wait_for_all(self) -> None:
        """Return when all memory is in the files, zeros included. Raises ImageError."""
        with transfer.as_image_error(self._path):
            self._reading.wait()
            for (_, region), area in zip(self._regions, self._areas, strict=True):
                if any(size >= copies.HUGE for _, size in region.table.gaps()):
                    # The driver would take a fault for each page of zeros, and without memory get SIGBUS.
                    area.populate()

    def wait_checked(self) -> None:
        """Return when all memory is loaded and its digests are right. From any thread. Raises ImageError."""
        if self._paging is not None:
            with transfer.as_image_error(self._path):
                self._paging.wait()
        if self._checking is not None:
            self._checking.join()
        if self._wrong is not None:
            raise self._wrong

    def is_waiting(self, pid: int) -> bool:
        """Whether a thread of that process waits for memory that is still loading."""
        return self._paging is not None and self._paging.is_waiting(pid)

    def stop(self) -> None:
        """End what waits for memory, with the processes, so that the restore can be undone."""
        if self._paging is not None:
            self._paging.stop()

    def _check(self) -> None:
        try:
            assert isinstance(self._reading, Reader)
            with transfer.as_image_error(self._path):
                # The driver copies in a single thread. Hashing on all cores would take memory bandwidth from
                # it.
                self._reading.verify(threads=max(1, copies.cores() * 3 // 8))
        except ImageError as error:
            self._wrong = error

    def _mark_placed(self, at: int, chunk: Chunk) -> None:
        if self._paging is not None:
            self._paging.mark_ready(at, chunk.offset)

    def _make_demand_paging(self) -> DemandPaging | None:
        """None if the driver cannot wait for missing memory."""
        tables = [region.table for _, region in self._regions]
        if not self._areas or not has_whole_pages(tables) or userfault.explain_missing():
            return None
        return DemandPaging(self._areas, tables)

    def _stage_regions(self, settings: Memory) -> list[Area]:
        """Make a file in RAM for each region; none if the ceiling or this host does not allow it."""
        if not can_be_staged(self._regions, settings):
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
        if self._paging is not None:
            self._paging.close()
        for area in self._areas:
            area.close()
        transfer.free(self._stage)


class PrefetchedPages(Pages):
    """The memory of a restore, for the driver: in the processes, or still loading."""

    def __init__(self, prefetch: Prefetch | None) -> None:
        super().__init__()
        self._prefetch = prefetch
        self._asked = False

    @property
    def is_loading(self) -> bool:
        """As Prefetch.is_loading."""
        return self._prefetch is not None and self._prefetch.is_loading

    def give_back(self, pids: Sequence[int]) -> Mapping[int, GpusnapError]:
        """If the driver failed while memory was loading, wait until all of it is loaded, for another try."""
        if self._asked and self._prefetch is not None:
            self._prefetch.wait_checked()
        self._asked = True
        return {}

    def is_waiting(self, pid: int) -> bool:
        """As Prefetch.is_waiting."""
        return self._prefetch is not None and self._prefetch.is_waiting(pid)

    def check_signals(self) -> None:
        """If the restore is to stop, kill a process that misses memory: the call cannot be cancelled."""
        if self._prefetch is not None and self._prefetch.is_loading and is_asked_to_stop():
            self._prefetch.stop()
