"""Moves GPU memory of processes into chunks of an OCI layout: see destination.py.

    driver checkpoint into files of memory.stage ─→ journal ─→ regions are freed ─→ CRIU dumps the rest
          └→ chunks, before the dump or, if the container runs on, after it

A region is a mapping that the driver's checkpoint makes in a process. If possible, gpusnap makes this mapping
from a file of its own before the driver fills it: then nothing is copied, and the memory is given back by
mapping the file again. Otherwise the region is copied to such a file if there is enough memory for both. If
there is not, the region is written to chunks while the container waits. Before a region is freed, its bytes
are in files, and the journal names them. So no bytes are lost if gpusnap is killed: `gpusnap recover` puts
them back. Several processes are handled at once, on all cores."""

from __future__ import annotations

import contextlib
import errno
import mmap
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.chunks import writer as writing
from gpusnap.oci.chunks.table import Chunk, Progress, Table, descriptors
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, reason
from gpusnap.runtime_shim.base.progress import reporter
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.process import mount_namespace, proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import maps as regions
from gpusnap.runtime_shim.process.memory.maps import Region
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.process.ptrace.populate import Backing, PopulateResult
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote, enter_thread
from gpusnap.runtime_shim.records.manifest import ChunkTotals, FileRecord, Manifest, RegionRecord
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.destination import Destination, ImageDestination
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.memory.write_ahead import EarlyWriter
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.stopping.stop import run_populating

_DONTNEED = 4  # asm-generic/mman-common.h
# Bytes of memory that stay available while regions are staged.
_RESERVE = 1 << 30
_Piece = tuple[int, int, int]
_T = TypeVar("_T")


@dataclass(slots=True)
class _CapturedRegion:
    """A region of a process, and the place of its bytes."""

    region: Region
    area: Area | None
    mapped: bool = False
    """Whether the driver filled the file itself; otherwise the file is a copy."""
    table: Table | None = None


@dataclass(slots=True)
class _Process:
    """The state of one process."""

    before: tuple[regions.Mapping, ...] = ()
    """Its mappings before the driver's checkpoint."""
    populated: PopulateResult = field(default_factory=PopulateResult)
    held: tuple[_CapturedRegion, ...] | None = None
    """None before `take_out`."""
    freed: bool = False
    taken: bool = False
    """Whether it was freed once: then the journal says where its bytes are."""


class Chunks(Pages):
    """Moves the GPU memory of processes into chunks, and back."""

    def __init__(
        self,
        image_path: str,
        key: str,
        settings: Memory,
        bundle: str = "",
        *,
        destination: Destination | None = None,
        ahead: bool = False,
    ) -> None:
        """`key`: the container's. `destination`: where the chunks go; by default the image's directory.

        `ahead`: begin to write while the driver still works, because the container waits for the disk.
        """
        self._destination = destination or ImageDestination(
            image_path, container_key.id_of(key), settings, bundle
        )
        super().__init__(self._destination.place, key)
        self.name = self._destination.kind
        self._image = image_path
        self._key, self._settings = key, settings
        self._processes: dict[int, _Process] = {}
        self._stage = Stage(key)
        self._lock = threading.Lock()
        self._staged = 0
        self._progress = Progress(0)
        self._ahead = ahead and not settings.ceiling
        self._early: EarlyWriter | None = None
        """Writes chunks while the driver works."""
        self._images: tuple[FileRecord, ...] | None = None
        """CRIU's images in chunks, once they were written."""

    @property
    def _layout(self) -> Layout:
        return self._destination.layout

    def prepare(self) -> None:
        """Prepare the destination of the chunks. Raises Refused."""
        self._destination.begin()

    @contextlib.contextmanager
    def run_driver_thread(self, pid: int, tid: int) -> Iterator[PopulateResult]:
        """Let the driver's thread run for its checkpoint; make its large mappings from files if possible."""
        process = self._processes[pid] = _Process(_mappings(pid))
        lent = partial(journal.keep_thread, self._key, pid)
        backing = Backing(partial(self._watch, pid), lent)
        with run_populating(pid, tid, threads=self._settings.threads, backing=backing) as process.populated:
            yield process.populated

    def measure_populated(self, pid: int) -> int:
        """As Pages says."""
        process = self._processes.get(pid)
        return sum(area.size for area in process.populated.areas) if process is not None else 0

    def take_out(self, pids: Sequence[int]) -> None:
        """Put the regions of the processes into files, record where they are, and free them.

        Skips processes whose regions were taken before.
        """
        self._end_early()
        fresh = {pid: self._processes[pid] for pid in pids if self._processes[pid].held is None}
        for pid, process in fresh.items():
            process.held = tuple(self._capture(pid, process))
        streamed = [
            (pid, each) for pid, process in fresh.items() for each in process.held or () if each.area is None
        ]
        self._write(
            [transfer.ProcessRegion(pid, each.region.start, each.region.size) for pid, each in streamed],
            streamed,
        )
        if streamed:  # regardless of memory.sync: from now on these are the only copies
            with transfer.as_image_error(self._layout.path):
                self._layout.sync()
        self.record_places(list(self._processes))
        for process in fresh.values():
            process.freed = process.taken = True
        run_at_once(self._free, fresh).raise_first()

    def measure_taken(self, pid: int) -> int | None:
        """Return the bytes of the regions of a process."""
        return sum(each.region.size for each in self._processes[pid].held or ())

    def write(self, check: Callable[[], None] = lambda: None) -> None:
        """Write the staged regions to chunks, if this was not done yet. Raises ImageError.

        `check`: as for `write_durably`.
        """
        left = [(pid, each) for pid, each in self._all() if each.table is None]
        self._write([each.area for _, each in left if each.area is not None], left, check)

    def write_durably(self, check: Callable[[], None] = lambda: None) -> None:
        """Write the staged regions to chunks and sync them: a disk error later would cost the container."""
        self.write(check)
        if self._settings.sync:
            with transfer.as_image_error(self._layout.path):
                self._layout.create().sync()

    def give_back(self, pids: Sequence[int]) -> Mapping[int, GpusnapError]:
        """Put the freed regions of processes back; return the errors by PID."""
        wanted = {pid: p for pid, p in self._processes.items() if pid in pids and p.freed}
        layout = {pid: found for pid, p in wanted.items() if (found := _from_layout(p))}
        failures: dict[int, GpusnapError] = {}
        try:
            transfer.fill(self._layout, layout, self._settings)
        except ImageError as error:
            failures = dict.fromkeys(layout, error)
        mapped = {pid: areas for pid, p in wanted.items() if (areas := _areas(p, mapped=True))}
        failures |= transfer.map_areas(self._key, mapped)
        failures |= run_at_once(
            lambda pid: self._copy_back(pid, wanted[pid]), [pid for pid in wanted if pid not in failures]
        ).errors
        for pid in wanted.keys() - failures.keys():
            wanted[pid].freed = False
        return failures

    def _copy_back(self, pid: int, process: _Process) -> None:
        try:
            transfer.copy(pid, _areas(process, mapped=False))
        except OSError as error:
            if not proc.is_dying(pid):
                raise GpusnapError(
                    f"the GPU memory of process {pid} ({proc.comm(pid)}) cannot be returned to it: "
                    f"{reason(error)}",
                    hint="run gpusnap recover",
                    code="GPS-027",
                ) from error

    def record_places(self, pids: Sequence[int]) -> None:
        """Record in the journal where the regions are: in the layout, in the stage, or in the processes."""
        layout: dict[int, tuple[RegionRecord, ...]] = dict.fromkeys(pids, ())
        staged: dict[int, tuple[journal.StagedRegion, ...]] = {}
        for pid, process in self._processes.items():
            held = process.held or ()
            staged[pid] = tuple(
                journal.StagedRegion(each.area.path, each.region.start, each.region.size)
                for each in held
                if each.area is not None
            )
            if pid in layout:
                layout[pid] = tuple(
                    RegionRecord(region.start, table) for region, table in _from_layout(process)
                )
        journal.write(self._key, self._image, layout, staged=staged, layout=self._layout.path)
        self._destination.mark_needed()  # if gpusnap is killed before this, nothing was freed yet

    def records(self) -> Mapping[int, tuple[RegionRecord, ...]] | None:
        """Return the regions in the layout by PID, for the manifest; None until all of them are in it."""
        if any(each.table is None for _, each in self._all()):
            return None
        return {
            pid: tuple(RegionRecord(h.region.start, h.table) for h in p.held or () if h.table is not None)
            for pid, p in self._processes.items()
        }

    def commit(self, *, kept: bool) -> tuple[FileRecord, ...]:
        """Make the chunks durable and complete the layout, so that others can read it. Raises ImageError."""
        self.write()
        tables = [each.table for _, each in self._all() if each.table is not None]
        self._destination.commit(tables, kept=kept)
        # Afterwards: that they cannot be written is no reason to fail.
        return self._images if self._images is not None else self._destination.write_images(durably=True)

    def write_images(self, check: Callable[[], None] = lambda: None, *, but: Collection[str] = ()) -> None:
        """With memory.ceiling, they are written when the memory of the other writers is free again."""
        self._images = None
        if not self._settings.ceiling:
            self._images = self._destination.write_images(check, but=but)

    def forget_images(self) -> None:
        """As Pages says."""
        self._images = None

    def finish(self, record: Manifest, write: Callable[[], bool]) -> None:
        """Name the chunks, then write the manifest; remove other copies of its chunks. Raises ImageError."""
        self._destination.name(record)
        self._destination.close(record if write() else None)

    def close(self) -> None:
        """Remove the stage: the checkpoint is complete and does not need it any more."""
        self._end_early()
        self.leave()
        transfer.free(self._stage)

    def adopt(self, entry: journal.Entry) -> None:
        """Take over the regions of suspended processes that an earlier gpusnap staged or wrote to a layout.

        Raises ImageError.
        """
        with transfer.as_image_error(entry.layout):
            earlier = Layout(entry.layout)
            for process in entry.processes:
                held = [
                    _CapturedRegion(
                        Region(each.start, each.size), Area(each.path, each.start, each.size), mapped=True
                    )
                    for each in process.staged
                ]
                for region in process.regions:
                    for each in descriptors([region.table]):
                        self._layout.link_blob(each.digest, each.size, earlier)
                    held.append(
                        _CapturedRegion(Region(region.start, region.table.size), None, table=region.table)
                    )
                self._processes[process.pid] = _Process(held=tuple(held))

    def leave(self) -> None:
        """Close the files. Their contents stay staged, as recorded in the journal."""
        for _, each in self._all():
            if each.area is not None:
                each.area.close()
        for process in self._processes.values():
            for area in process.populated.areas:
                area.close()

    def discard(self, *, layout: bool, suspended: bool = False) -> None:
        """Remove the stage, with `layout` also the layout. Do nothing if a running process needs its bytes.

        `suspended`: some processes may not have continued. Then `gpusnap recover` gives all of them what the
        journal names, even if they have it. Raises ImageError.
        """
        waiting = [pid for pid, each in self._processes.items() if each.freed or (suspended and each.taken)]
        if any(map(proc.is_running, waiting)):
            return
        self.close()
        self._destination.discard(earlier=not layout)

    # Private

    def _watch(self, pid: int, address: int, size: int) -> Area:
        """Return a file for a region; its parts may be written ahead while the driver fills it."""
        area = self._area(pid, address, size)
        if self._ahead:
            with self._lock:
                if self._early is None:
                    self._early = self._start_early_writer()
            if self._early is not None:
                self._early.begin(area)
        return area

    def _start_early_writer(self) -> EarlyWriter | None:
        """Return None if nothing can be written ahead; the later writing reports the cause."""
        with contextlib.suppress(OciError), self._destination.open_known() as known:
            self._layout.create()
            return EarlyWriter(self._layout, self._settings, known, self._destination.speed)
        return None

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.end()

    def _all(self) -> list[tuple[int, _CapturedRegion]]:
        return [(pid, each) for pid, process in self._processes.items() for each in process.held or ()]

    def _area(self, pid: int, address: int, size: int) -> Area:
        """Make a file for a region. Raises OSError, also if this is not allowed."""
        if not mount_namespace.is_lasting():
            raise OSError(
                errno.EPERM, "this mount namespace is not the host's", container_key.id_of(self._key)
            )
        with self._lock:
            most = self._settings.ceiling
            if most and self._staged + size > most - _working(self._settings):
                raise OSError(errno.ENOMEM, f"it exceeds memory.ceiling, {most} bytes", self._key)
            self._staged += size
        try:
            return self._stage.area(f"{pid}-{address:x}", address, size)
        except BaseException:
            with self._lock:
                self._staged -= size
            raise

    def _capture(self, pid: int, process: _Process) -> Iterator[_CapturedRegion]:
        there = _mappings(pid)
        for area in process.populated.areas:
            covered = sum(_common(area, m) for m in there if m.name == area.path)
            if covered == area.size:
                yield _CapturedRegion(Region(area.address, area.size), area, mapped=True)
            elif not covered:  # the driver has unmapped it again: it was not for GPU memory
                self._drop(area)
            else:
                raise GpusnapError(
                    f"the GPU driver omitted {covered} of {area.size} bytes of a region in process {pid}",
                    hint="set memory.pages to criu",
                    code="GPS-513",
                )
        for region in regions.regions(process.before, there):
            yield _CapturedRegion(region, self._copy(pid, region))

    def _drop(self, area: Area) -> None:
        area.discard()
        with self._lock:
            self._staged -= area.size

    def _copy(self, pid: int, region: Region) -> Area | None:
        """Copy a region to a file; return None if there is not enough memory for both, or the copy fails."""
        if region.size > proc.available_memory() - _RESERVE:
            return None
        try:
            area = self._area(pid, region.start, region.size)
        except OSError:
            return None
        try:
            copies.read(pid, region.start, area.view(0, region.size), threads=self._settings.threads)
        except OSError:  # the process ended, or memory ran out: the later read for the chunks reports it
            self._drop(area)
            return None
        return area

    def _write(
        self,
        sources: Sequence[transfer.ProcessRegion | Area],
        into: Sequence[tuple[int, _CapturedRegion]],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if not into:
            return
        before = self._progress
        last = [Progress(0)]

        def wrote(now: Progress) -> None:
            last[0] = now
            reporter.move(now.done, now.total)
            check()

        # A linked chunk was not read. A process must not depend on it if there is no other copy.
        live = any(isinstance(source, transfer.ProcessRegion) for source in sources)
        written_before = dict[str, Chunk]()
        if self._early is not None:
            written_before = self._early.list_new() if live else self._early.end()
        if not live:  # a link from elsewhere must not take the place of what a process depends on
            tables = [each.table for _, each in self._all() if each.table is not None]
            written_before |= {chunk.plain: chunk for table in tables for chunk in table.chunks}
        with transfer.as_image_error(self._layout.path), self._destination.open_known() as known:
            self._layout.create()
            made = writing.write(
                sources,
                self._layout,
                threads=self._settings.threads or copies.cores(),
                ceiling=_working(self._settings),
                chunk_size=self._settings.chunk_size,
                level=self._settings.level,
                speed=self._destination.speed,
                known=known if not live else None,
                trust=False,  # an earlier checkpoint in the same place may have been damaged
                written_before=written_before,
                pieces=self._order(sources),
                progress=wrote,
            )
        for (_, each), table in zip(into, made, strict=True):
            each.table = table
        ahead = self._early.count_chunks(made) if self._early is not None else ChunkTotals()
        self._progress = Progress(
            before.total + last[0].total,
            before.done + last[0].done,
            before.zero + last[0].zero,
            before.known + last[0].known + ahead.known,
            before.written + last[0].written + ahead.stored,
        )
        now = self._progress
        self.written = ChunkTotals(now.written, now.known, now.zero)

    def _order(self, sources: Sequence[transfer.ProcessRegion | Area]) -> list[_Piece]:
        """Return the pieces in an order that mixes those written ahead with the others.

        Pieces that were written ahead are only hashed again. Mixed in, they do not leave the disk idle.
        """
        pieces, early = list(writing.cut(sources, self._settings.chunk_size)), self._early
        if early is None:
            return pieces
        written, other = list[_Piece](), list[_Piece]()
        for at, offset, size in pieces:
            source = sources[at]
            ahead = isinstance(source, Area) and early.is_written(source, offset)
            (written if ahead else other).append((at, offset, size))
        return interleave(other, written)

    def _free(self, pid: int) -> None:
        """Free the regions of one process. Each process has its own thread, which is the tracer."""
        found = self._processes[pid].held
        if not found:
            return
        try:
            with enter_thread(pid) as remote, journal.keep_thread(self._key, pid, remote.saved):
                for each in found:
                    _let_go(remote, each)
        except OSError as error:
            if not proc.is_dying(pid):
                raise GpusnapError(
                    f"the GPU memory of process {pid} ({proc.comm(pid)}) is written, but its RAM cannot "
                    f"be freed: {reason(error)}",
                    hint="set memory.pages to criu",
                    code="GPS-513",
                ) from error


def interleave(first: Sequence[_T], second: Sequence[_T]) -> list[_T]:
    """Merge two sequences, each in its own order and spread evenly over the result."""
    order = [(at / len(each), item) for each in (first, second) for at, item in enumerate(each)]
    return [item for _, item in sorted(order, key=operator.itemgetter(0))]


def _let_go(remote: Remote, held: _CapturedRegion) -> None:
    """Free the memory of a region in the process; its addresses stay reserved."""
    start, size = held.region.start, held.region.size
    if held.mapped:
        remote.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, transfer.EMPTY)
    else:
        remote.madvise(start, size, _DONTNEED)


def _common(area: Area, mapping: regions.Mapping) -> int:
    """Return how many bytes of a region are in a mapping."""
    return max(0, min(mapping.end, area.address + area.size) - max(mapping.start, area.address))


def _areas(process: _Process, *, mapped: bool) -> list[Area]:
    return [h.area for h in process.held or () if h.area is not None and h.mapped == mapped]


def _from_layout(process: _Process) -> list[tuple[Region, Table]]:
    return [
        (each.region, each.table)
        for each in process.held or ()
        if each.area is None and each.table is not None
    ]


def _working(settings: Memory) -> int:
    """Return how many bytes of memory.ceiling the threads that write chunks may use.

    The rest is for staged regions.
    """
    one = writing.worker_memory(settings.chunk_size, settings.level)
    return min(transfer.ceiling(settings), one * (settings.threads or copies.cores()))


def _mappings(pid: int) -> tuple[regions.Mapping, ...]:
    """Return the mappings of a process; () if it has ended. The next step reports that."""
    try:
        return regions.mappings(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ()
