"""Lets a process touch regions before they are filled: a thread that is too early waits for the page.

The files of a stage are mapped into the process and registered with its userfaultfd, and workers fill the
files in address order (prefetch.py). When a piece is complete and its digest is right, it is released: from
then on the process reads it like any memory. A thread that touches a piece before waits in the kernel;
gpusnap gets the address, and reads that piece next. So the driver's restore and the filling take as long as
the slower of the two.

Nobody may read what is not released, so a process ends before its userfaultfd does: where a piece turns out
wrong, or no longer comes, the processes are killed; and where gpusnap is killed, the kernel does so, by the
driver's thread that we trace (process/ptrace/tracer.py, exit_kill). The journal says until the end that
memory was coming, and then `gpusnap recover` takes the container away, whatever the driver says of it.

    worker ── ready ──> piece ── release ──> the process goes on
    driver's thread ── page fault ──> our thread ── hurry ──> worker

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
from dataclasses import field

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.chunks.table import Table
from gpusnap.runtime_shim import threads
from gpusnap.runtime_shim.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.process.memory import maps
from gpusnap.runtime_shim.process.memory.tmpfs import Area
from gpusnap.runtime_shim.process.memory.userfault import Userfault

PAGE = 4096
# Bytes of zeros that are populated at a time.
_ZEROS = 64 << 20
# How often a range is released whose process unmaps parts of it at the same time.
_TRIES = 5
# Seconds between two looks whether the filling gets on.
_LOOK = 0.02
# Seconds without a piece, and bytes per second that a piece of any size may take.
_PATIENCE, _SLOWEST = 300.0, 64 << 10


def has_whole_pages(tables: Sequence[Table]) -> bool:
    """Whether every chunk consists of whole pages: no other one can be released alone.

    The last page of a region may be a part: NVIDIA's driver maps what it needs, to the byte, and the rest of
    that page is nobody's.
    """
    return all(
        c.offset % PAGE == 0 and (c.size % PAGE == 0 or c.offset + c.size == table.size)
        for table in tables
        for c in table.chunks
    )


@dataclass(frozen=True, slots=True)
class WaitTotals:
    """What a restore had to wait for, for its timing."""

    faults: int
    """How often a thread touched what was not there."""
    complete: float
    """Seconds from the first process that had its memory mapped until all of it was there; 0 before."""
    early: bool = False
    """Whether a process had its memory mapped before all of it was there."""


@dataclass(slots=True)
class _Region:
    """A region in pieces, and how far it is."""

    area: Area
    starts: list[int]
    """Offset of each piece."""
    sizes: list[int]
    ready: bytearray
    """By piece, whether it is whole and right."""
    missing: int
    """Pieces that are not ready."""
    due: set[int] = field(default_factory=set)
    """Pieces that are ready, and that the kernel could not release."""
    pid: int = 0
    userfault: Userfault | None = None
    """Of the process that has it mapped."""

    def piece(self, offset: int) -> int:
        """The piece that holds an offset."""
        return bisect_right(self.starts, offset) - 1

    def with_due(self, piece: int) -> tuple[int, int]:
        """The piece, and the due ones right before and behind it: the first and the last."""
        first = last = piece
        while first - 1 in self.due:
            first -= 1
        while last + 1 in self.due:
            last += 1
        return first, last

    def runs(self) -> Iterator[tuple[int, int]]:
        """Offset and size of each run of ready pieces."""
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
    """A process that has its regions mapped."""

    userfault: Userfault
    regions: list[int]
    """By place in the list of all."""
    waits: set[tuple[int, int]] = field(default_factory=set)
    """Region and piece that a thread of it has touched too early."""


class DemandPaging:
    """Regions on their way into processes. To be closed; then no thread waits for a page of them.

    `ready` and `waits` are for any thread.
    """

    def __init__(self, areas: Sequence[Area], tables: Sequence[Table]) -> None:
        self._regions = [_region(area, table) for area, table in zip(areas, tables, strict=True)]
        self._zeros = deque(
            (at, offset)
            for at, table in enumerate(tables)
            for offset, _ in _in_slices(table.gaps())
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
        """Whether all of it is there and may be read."""
        return self._over.is_set() and self._error is None

    @property
    def waits_so_far(self) -> WaitTotals:
        """What was waited for so far."""
        early, complete = self._begun > 0, self._complete - self._begun
        # It may have been whole before a process had it.
        return WaitTotals(self._faults, max(0.0, complete) if early and self._complete else 0.0, early)

    def populate_zeros(self) -> None:
        """Have pages of zeros where no chunk is, in a thread of ours: the driver would find them one by one.

        Raises GpusnapError where there is no thread.
        """
        if self._zeros:
            self._start(self._fill_zeros, "gpusnap-zeros")

    def ready(self, at: int, offset: int) -> None:
        """The piece of a region that begins at an offset is whole and right."""
        region = self._regions[at]
        piece = region.piece(offset)
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
        """Processes have the files of these regions mapped, and have not touched them yet: let them.

        By PID; the userfaultfds are closed with this from now on. Where the filling has ended by an error,
        they are ended at once: the driver would wait in them for what no longer comes. Raises OSError where
        the kernel does not take one: no thread waits then, and all has to be there before one may run.
        """
        with self._lock:
            for pid, (userfault, regions) in found.items():
                self._mapped[pid] = _Mapped(userfault, list(regions))
        for userfault, regions in found.values():
            for at in regions:
                area = self._regions[at].area
                userfault.register(area.address, _to_page(area.size))
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
                    for offset, size in region.runs():
                        self._release(region, offset, size)

    def is_attached(self, pids: Iterable[int]) -> bool:
        """Whether each of these processes waits for what is not there, unless it has ended."""
        return all(pid in self._mapped or not proc.is_running(pid) for pid in pids)

    def detach(self) -> None:
        """After `attach` has failed: let go of what it had taken. Nobody has touched anything."""
        with self._lock:
            for region in self._regions:
                region.pid, region.userfault = 0, None
            for mapped in self._mapped.values():
                mapped.userfault.close()
            self._mapped.clear()

    def serve(self, hurry: Callable[[int, int], None], check: Callable[[], None]) -> None:
        """Answer those that wait, in a thread of ours, until all is there.

        `hurry` is called with the place of a region and an offset that somebody waits for; what `check`
        raises ends the filling, and the processes. Raises GpusnapError where there is no thread.
        """
        self._start(lambda: self._serve(hurry, check), "gpusnap-faults")

    def is_waiting(self, pid: int) -> bool:
        """Whether a thread of that process waits for a page that still comes."""
        mapped = self._mapped.get(pid)
        return mapped is not None and bool(mapped.waits) and not self._over.is_set()

    def wait(self) -> None:
        """Return when all of it is there. Raises what ended the filling."""
        self._over.wait()
        self.check()

    def check(self) -> None:
        """Raise what ended the filling, if something did."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """It does not come: the processes that might wait for it, or read it, are ended."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._kill()
            self._over.set()

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self.fail(ImageError("the restore ended before all GPU memory was read", hint="restore it again"))

    def close(self) -> None:
        """End the processes that miss some of it, and let go of the others. After the last `ready`."""
        self.stop()
        for thread in self._threads:
            thread.join()
        for mapped in self._mapped.values():
            mapped.userfault.close()

    # Within

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name)
        threads.start(thread)
        self._threads.append(thread)

    def _kill(self) -> None:
        """From here on no thread of them runs an instruction of its own (signal(7)): none reads a page."""
        for pid in self._mapped:
            with contextlib.suppress(OSError):
                pidfd.send(pid, signal.SIGKILL)

    def _release_piece(self, at: int, piece: int) -> None:
        """Release a piece that is ready, and those beside it that the kernel could not release.

        One that is released within a range that is not takes two mappings more, and a process may have so
        many (vm.max_map_count): where zeros and chunks alternate, the zeros are there first. Then it is due
        with its neighbours, or with all of the region, which takes no mapping more.
        """
        region = self._regions[at]
        with self._lock:
            first, last = region.with_due(piece)
        while True:
            offset, failed = region.starts[first], None
            try:
                self._release(region, offset, region.starts[last] + region.sizes[last] - offset)
            except OSError as error:
                failed = error
            with self._lock:
                if region.userfault is None:
                    return  # nobody waits any more, see `detach`
                if failed is None:
                    self._released(at, first, last)
                elif failed.errno != errno.ENOMEM or last - first == len(region.starts) - 1:
                    raise failed
                else:
                    region.due.add(piece)
                if region.missing or not region.due:
                    return
            first, last = 0, len(region.starts) - 1

    def _released(self, at: int, first: int, last: int) -> None:
        self._regions[at].due.difference_update(range(first, last + 1))
        waits = self._mapped[self._regions[at].pid].waits
        waits -= {each for each in waits if each[0] == at and first <= each[1] <= last}

    def _release(self, region: _Region, offset: int, size: int) -> None:
        """Raises OSError; ENOMEM where it takes more mappings than the process may have."""
        userfault, begin = region.userfault, region.area.address + offset
        end = begin + _to_page(size)
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
                if error.errno == errno.ENOMEM and size < region.area.size and proc.is_running(region.pid):
                    raise
            # The driver unmaps what it has read, and something else may have these addresses by now, of which
            # the kernel takes none. The rest is to be released all the same.
            parts = _still_mapped(region, begin, end)

    def _fill_zeros(self) -> None:
        while not self._over.is_set():
            with self._lock:
                if not self._zeros:
                    return
                at, offset = self._zeros.popleft()
            region = self._regions[at]
            try:
                # Without memory for them whoever touches them would be ended by SIGBUS.
                region.area.populate(offset, region.sizes[region.piece(offset)])
                self.ready(at, offset)
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
                        poll.unregister(number)  # it can tell nothing any more
                check()
                if time.monotonic() - self._moved > self._patience:
                    raise _too_slow(self._patience)
            except BaseException as error:
                self.fail(error)

    def _answer(self, mapped: _Mapped, hurry: Callable[[int, int], None]) -> None:
        for address in mapped.userfault.faults():
            for at in mapped.regions:
                region = self._regions[at]
                offset = address - region.area.address
                if 0 <= offset < region.area.size:
                    self._early(mapped, at, region.piece(offset), hurry)

    def _early(self, mapped: _Mapped, at: int, piece: int, hurry: Callable[[int, int], None]) -> None:
        region = self._regions[at]
        zeros = at, region.starts[piece]
        with self._lock:
            self._faults += 1
            if region.ready[piece] and piece not in region.due:
                return  # it is released by now, or about to be
            mapped.waits.add((at, piece))
            if zeros in self._zeros:
                self._zeros.remove(zeros)
                self._zeros.appendleft(zeros)
                return
            if region.ready[piece]:
                return
        hurry(at, region.starts[piece])


def _to_page(size: int) -> int:
    """Bytes of whole pages: of what the end of a region is in."""
    return -(-size // PAGE) * PAGE


def _region(area: Area, table: Table) -> _Region:
    chunks = [(chunk.offset, chunk.size) for chunk in table.chunks]
    pieces = sorted([*chunks, *_in_slices(table.gaps())])
    starts, sizes = [start for start, _ in pieces], [size for _, size in pieces]
    return _Region(area, starts, sizes, bytearray(len(pieces)), len(pieces))


def _in_slices(gaps: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for offset, size in gaps:
        for at in range(offset, offset + size, _ZEROS):
            yield at, min(_ZEROS, offset + size - at)


def _still_mapped(region: _Region, start: int, end: int) -> list[tuple[int, int]]:
    """Where from `start` to `end` the process still has the file, neighbours together."""
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


def _too_slow(seconds: float) -> GpusnapError:
    return ImageError(
        f"the GPU memory of the checkpoint does not arrive: no chunk of it in {seconds:.0f} s",
        hint="check that its disk or registry responds, then restore again",
        code="GPS-512",
    )
