"""Lets a process touch regions before they are filled: a thread that is too early waits for the page.

gpusnap maps files in RAM (process/memory/tmpfs.py) into the process and registers them with a userfaultfd of
the process. Workers fill the files in address order (prefetch.py). When a piece is complete and its digest is
right, it is released: from then on the process reads it like any memory. A thread that touches a piece
earlier waits in the kernel; gpusnap gets the address, and reads that piece next. So the driver's restore and
the filling together take as long as the slower of the two.

No thread may read a piece before its release. So a process must end before its userfaultfd is closed. If a
piece is wrong, or does not arrive, gpusnap kills the processes. If gpusnap is killed, the kernel kills them,
because gpusnap traces the driver's thread with exit_kill (process/ptrace/tracer.py). Until the end, the
journal says that memory is still loading. `gpusnap recover` then removes the container, whatever the driver
reports about it.

    worker ── mark_ready ──> piece ── release ──> the process continues
    driver's thread ── page fault ──> gpusnap's thread ── hurry ──> worker

A wait has no deadline of its own. The filling has one: `patience` seconds without a piece.
"""

from __future__ import annotations

import contextlib
import errno
import select
import signal
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.chunks.table import Table
from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.process.memory import maps
from gpusnap.runtime_shim.process.memory.tmpfs import Area
from gpusnap.runtime_shim.process.memory.userfault import Userfault

PAGE = 4096
# Bytes of zeros that are populated at once.
_ZEROS = 64 << 20
# How often gpusnap tries to release a range if its process unmaps parts of it at the same time.
_TRIES = 5
# Seconds between two checks of the progress of the filling.
_LOOK = 0.02
# Seconds without a piece until the filling fails, and bytes per second that are added for a large piece.
_PATIENCE, _SLOWEST = 300.0, 64 << 10


def has_whole_pages(tables: Sequence[Table]) -> bool:
    """Whether every chunk consists of whole pages, so that it can be released alone.

    The last page of a region may be partly used: NVIDIA's driver maps what it needs, to the byte, and the
    rest of that page belongs to nobody.
    """
    return all(
        c.offset % PAGE == 0 and (c.size % PAGE == 0 or c.offset + c.size == table.size)
        for table in tables
        for c in table.chunks
    )


@dataclass(frozen=True, slots=True)
class WaitTotals:
    """How long a restore waited for memory, for its timing."""

    faults: int
    """How often a thread touched memory that was not loaded."""
    complete: float
    """Seconds from the first process with mapped memory until all memory was loaded; 0 if it was before."""
    early: bool = False
    """Whether memory of a process was mapped before all of it was loaded."""


@dataclass(slots=True)
class _Region:
    """A region in pieces, and their state."""

    area: Area
    starts: list[int]
    """The offset of each piece."""
    sizes: list[int]
    ready: bytearray
    """For each piece, whether it is complete and right."""
    missing: int
    """The number of pieces that are not ready."""
    due: set[int] = field(default_factory=set)
    """Pieces that are ready, but that the kernel could not release."""
    pid: int = 0
    userfault: Userfault | None = None
    """That of the process that has mapped the region."""

    def find_piece(self, offset: int) -> int:
        """Return the piece that contains an offset."""
        return bisect_right(self.starts, offset) - 1

    def extend_to_due(self, piece: int) -> tuple[int, int]:
        """Return the first and the last of the piece and the due pieces directly before and after it."""
        first = last = piece
        while first - 1 in self.due:
            first -= 1
        while last + 1 in self.due:
            last += 1
        return first, last

    def iterate_ready_runs(self) -> Iterator[tuple[int, int]]:
        """Yield offset and size of each run of ready pieces."""
        begin = -1
        for piece, ready in enumerate(self.ready):
            if ready and begin < 0:
                begin = self.starts[piece]
            if not ready and begin >= 0:
                yield begin, self.starts[piece] - begin
                begin = -1
        if begin >= 0:
            yield begin, self.area.size - begin


@dataclass(slots=True)
class _Mapped:
    """A process that has mapped its regions."""

    userfault: Userfault
    regions: list[int]
    """Indexes into the list of all regions."""
    waits: set[tuple[int, int]] = field(default_factory=set)
    """Region and piece for each access that came too early."""


class DemandPaging:
    """Regions that are loaded into processes. Close it; after that, no thread waits for a page of them.

    `mark_ready` and `waits_so_far` can be used from any thread.
    """

    def __init__(self, areas: Sequence[Area], tables: Sequence[Table]) -> None:
        self._regions = [_make_region(area, table) for area, table in zip(areas, tables, strict=True)]
        self._zeros = deque(
            (at, offset)
            for at, table in enumerate(tables)
            for offset, _ in _iterate_slices(table.gaps())
        )  # fmt: skip
        self._lock = threading.Lock()
        self._mapped: dict[int, _Mapped] = {}
        self._left = sum(len(region.starts) for region in self._regions)
        """Pieces that are not ready, or not released yet."""
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._moved = time.monotonic()
        largest = max((chunk.stored for table in tables for chunk in table.chunks), default=0)
        self._patience = _PATIENCE + largest / _SLOWEST
        self._begun = self._complete = 0.0
        self._faults = 0
        self._threads: list[threading.Thread] = []
        if not self._left:
            self._over.set()

    @property
    def is_complete(self) -> bool:
        """Whether all memory is loaded and may be read."""
        return self._over.is_set() and self._error is None

    @property
    def waits_so_far(self) -> WaitTotals:
        """The waits so far."""
        early, complete = self._begun > 0, self._complete - self._begun
        # All of it may have been loaded before the first process mapped it.
        return WaitTotals(self._faults, max(0.0, complete) if early and self._complete else 0.0, early)

    def populate_zeros(self) -> None:
        """Populate zeros between the chunks, in a thread: the driver would take a fault for each page.

        Raises GpusnapError if no thread can be started.
        """
        if self._zeros:
            self._start(self._fill_zeros, "gpusnap-zeros")

    def mark_ready(self, at: int, offset: int) -> None:
        """Mark the piece of a region that begins at an offset as complete and right."""
        region = self._regions[at]
        piece = region.find_piece(offset)
        with self._lock:
            region.ready[piece] = 1
            region.missing -= 1
            attached = region.userfault is not None
        if attached:
            self._release_piece(at, piece)
        with self._lock:
            self._moved = time.monotonic()
            self._left -= 1
            if self._left == 0 and self._error is None:
                self._complete = time.monotonic()
                self._over.set()

    def attach(self, found: Mapping[int, tuple[Userfault, Sequence[int]]]) -> None:
        """Register the regions of processes that have mapped their files, and have not touched them yet.

        `found`: by PID, the userfaultfd and the indexes of the regions. This object closes the userfaultfds
        from now on. If the filling has already failed, the processes are killed at once, because the driver
        would wait in them forever. Raises OSError if the kernel refuses a range: no thread waits then, and
        all memory must be loaded before a process may run.
        """
        with self._lock:
            for pid, (userfault, regions) in found.items():
                self._mapped[pid] = _Mapped(userfault, list(regions))
        for userfault, regions in found.values():
            for at in regions:
                area = self._regions[at].area
                userfault.register(area.address, _round_to_pages(area.size))
        pidfd.remember((each.pid, each.start) for each in map(proc.process, found) if each is not None)
        with self._lock:
            if self._error is not None:
                self._kill()
                return
            self._moved = self._begun = time.monotonic()
            for pid, (userfault, regions) in found.items():
                for at in regions:
                    region = self._regions[at]
                    region.pid, region.userfault = pid, userfault
                    for offset, size in region.iterate_ready_runs():
                        self._release(region, offset, size)

    def is_attached(self, pids: Iterable[int]) -> bool:
        """Whether each of these processes waits for missing memory, unless it has ended."""
        return all(pid in self._mapped or not proc.is_running(pid) for pid in pids)

    def detach(self) -> None:
        """After `attach` has failed, release what it registered. No process has touched the memory."""
        with self._lock:
            for region in self._regions:
                region.pid, region.userfault = 0, None
            for mapped in self._mapped.values():
                mapped.userfault.close()
            self._mapped.clear()

    def serve(self, hurry: Callable[[int, int], None], check: Callable[[], None]) -> None:
        """Answer waiting threads, in a thread of gpusnap, until all memory is loaded.

        `hurry` is called with the index of a region and an offset that a thread waits for. If `check` raises
        an exception, that ends the filling and the processes. Raises GpusnapError if no thread can be
        started.
        """
        self._start(lambda: self._serve(hurry, check), "gpusnap-faults")

    def is_waiting(self, pid: int) -> bool:
        """Whether a thread of that process waits for a page that is still loading."""
        mapped = self._mapped.get(pid)
        return mapped is not None and bool(mapped.waits) and not self._over.is_set()

    def wait(self) -> None:
        """Return when all memory is loaded. Raises the error that ended the filling."""
        self._over.wait()
        self.check()

    def check(self) -> None:
        """Raise the error that ended the filling, if there is one."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """End the filling with an error, and kill the processes that may wait for the memory or read it."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._kill()
            self._over.set()

    def stop(self) -> None:
        """End the filling, because nobody needs the memory any more."""
        self.fail(ImageError("the restore ended before all GPU memory was read", hint="restore it again"))

    def close(self) -> None:
        """Kill the processes that miss memory, and release the others. Call it after all `mark_ready`."""
        self.stop()
        for thread in self._threads:
            thread.join()
        for mapped in self._mapped.values():
            mapped.userfault.close()

    # Private

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name)
        threads.start(thread)
        self._threads.append(thread)

    def _kill(self) -> None:
        """Kill all processes. Their threads then run no instruction and read no page (signal(7))."""
        for pid in self._mapped:
            with contextlib.suppress(OSError):
                pidfd.send(pid, signal.SIGKILL)

    def _release_piece(self, at: int, piece: int) -> None:
        """Release a ready piece, and the pieces beside it that the kernel could not release before.

        A piece that is released in the middle of a registered range takes two more mappings, and the number
        of mappings of a process is limited (vm.max_map_count). If zeros and chunks alternate, the zeros come
        first. If the kernel refuses, the piece is due: it is released with its neighbours, or with the whole
        region, which takes no further mapping.
        """
        region = self._regions[at]
        with self._lock:
            first, last = region.extend_to_due(piece)
        while True:
            offset, failed = region.starts[first], None
            try:
                self._release(region, offset, region.starts[last] + region.sizes[last] - offset)
            except OSError as error:
                failed = error
            with self._lock:
                if region.userfault is None:
                    return  # no thread waits any more, see `detach`
                if failed is None:
                    self._forget_waits(at, first, last)
                elif failed.errno != errno.ENOMEM or last - first == len(region.starts) - 1:
                    raise failed
                else:
                    region.due.add(piece)
                if region.missing or not region.due:
                    return
            first, last = 0, len(region.starts) - 1

    def _forget_waits(self, at: int, first: int, last: int) -> None:
        self._regions[at].due.difference_update(range(first, last + 1))
        waits = self._mapped[self._regions[at].pid].waits
        waits -= {each for each in waits if each[0] == at and first <= each[1] <= last}

    def _release(self, region: _Region, offset: int, size: int) -> None:
        """Release a range. Raises OSError; ENOMEM if the process would have too many mappings."""
        userfault, begin = region.userfault, region.area.address + offset
        end = begin + _round_to_pages(size)
        if userfault is None:  # see `detach`
            return
        parts = [(begin, end)]
        for attempt in range(_TRIES):
            try:
                for start, end in parts:
                    userfault.release(start, end - start)
                return
            except ProcessLookupError:
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOMEM) or attempt == _TRIES - 1:
                    raise
                if error.errno == errno.ENOMEM and size < region.area.size and not proc.is_dying(region.pid):
                    raise
            # The driver unmaps what it has read, and other memory may have these addresses now. The kernel
            # then releases no part of the range. Release the parts that are still mapped.
            parts = _list_mapped(region, begin, end)

    def _fill_zeros(self) -> None:
        while not self._over.is_set():
            with self._lock:
                if not self._zeros:
                    return
                at, offset = self._zeros.popleft()
            region = self._regions[at]
            try:
                # If the host has no memory for them, SIGBUS would kill a process that touches them.
                region.area.populate(offset, region.sizes[region.find_piece(offset)])
                self.mark_ready(at, offset)
            except BaseException as error:
                self.fail(error)

    def _serve(self, hurry: Callable[[int, int], None], check: Callable[[], None]) -> None:
        poll = select.poll()
        by_number = {mapped.userfault.fileno(): mapped for mapped in self._mapped.values()}
        for number in by_number:
            poll.register(number, select.POLLIN)
        while not self._over.is_set():
            try:
                for number, events in poll.poll(_LOOK * 1000):
                    if events & select.POLLIN:
                        self._answer(by_number[number], hurry)
                    else:
                        poll.unregister(number)  # nothing more will come from it
                check()
                if time.monotonic() - self._moved > self._patience:
                    raise _make_timeout_error(self._patience)
            except BaseException as error:
                self.fail(error)

    def _answer(self, mapped: _Mapped, hurry: Callable[[int, int], None]) -> None:
        for address in mapped.userfault.faults():
            for at in mapped.regions:
                region = self._regions[at]
                offset = address - region.area.address
                if 0 <= offset < region.area.size:
                    self._handle_early(mapped, at, region.find_piece(offset), hurry)

    def _handle_early(self, mapped: _Mapped, at: int, piece: int, hurry: Callable[[int, int], None]) -> None:
        region = self._regions[at]
        zeros = at, region.starts[piece]
        with self._lock:
            self._faults += 1
            if region.ready[piece] and piece not in region.due:
                return  # it is released, or will be in a moment
            mapped.waits.add((at, piece))
            if zeros in self._zeros:
                self._zeros.remove(zeros)
                self._zeros.appendleft(zeros)
                return
            if region.ready[piece]:
                return
        hurry(at, region.starts[piece])


def _round_to_pages(size: int) -> int:
    """Return the size in bytes, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def _make_region(area: Area, table: Table) -> _Region:
    chunks = [(chunk.offset, chunk.size) for chunk in table.chunks]
    pieces = sorted([*chunks, *_iterate_slices(table.gaps())])
    starts, sizes = [start for start, _ in pieces], [size for _, size in pieces]
    return _Region(area, starts, sizes, bytearray(len(pieces)), len(pieces))


def _iterate_slices(gaps: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for offset, size in gaps:
        for at in range(offset, offset + size, _ZEROS):
            yield at, min(_ZEROS, offset + size - at)


def _list_mapped(region: _Region, start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges from `start` to `end` in which the process still maps the file; neighbours joined."""
    try:
        found = maps.mappings(region.pid)
    except OSError:
        return []
    ranges: list[tuple[int, int]] = []
    for each in found:
        first, last = max(each.start, start), min(each.end, end)
        if each.name == region.area.path and first < last:
            if ranges and ranges[-1][1] == first:
                first = ranges.pop()[0]
            ranges.append((first, last))
    return ranges


def _make_timeout_error(seconds: float) -> GpusnapError:
    return ImageError(
        f"the GPU memory of the checkpoint does not arrive: no chunk of it in {seconds:.0f} s",
        hint="check that its disk or registry responds, then restore again",
        code="GPS-512",
    )
