"""Memory that a process touches before it is there: it waits, and never reads what is not right."""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import random
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import a_manifest, wait_for
from holders import be_killed
from memory_target import MIB, Target

from gpusnap.oci.base.errors import BlobError, Unreachable
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.read_meter import ReadMeter
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.process.memory import userfault
from gpusnap.runtime_shim.process.memory.maps import mappings
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote
from gpusnap.runtime_shim.process.ptrace.tracee import hold
from gpusnap.runtime_shim.records.manifest import Manifest, RegionRecord
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.loading import demand_paging
from gpusnap.runtime_shim.snapshot.loading import prefetch as prefetching
from gpusnap.runtime_shim.snapshot.loading.demand_paging import DemandPaging
from gpusnap.runtime_shim.snapshot.loading.prefetch import Prefetch, PrefetchedPages
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.stopping.stop import run_only

KEY = "other"
ODD = 3216  # bytes: NVIDIA's driver maps regions that end within a page
ONE_WORKER = Memory(pages="chunks", chunk_size=MIB, threads=1, ceiling=64 * MIB)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or bool(userfault.explain_missing()),
    reason="no userfaultfd as it is needed, or not root",
)


class Gate:
    """The blobs of a layout, each of which comes when it may; what is asked for is kept in order."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.closed: set[str] = set()
        self.broken: dict[str, Exception] = {}
        self.asked: list[str] = []
        self._changed = threading.Condition()

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        with self._changed:
            self.asked.append(digest)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: digest not in self.closed, 30)
            if digest in self.broken:
                raise self.broken[digest]
        return self.layout.open_blob(digest, size)

    def check_blob(self, wanted: Descriptor) -> None:
        raise AssertionError

    def open(self, *digests: str) -> None:
        """Let these come, or all."""
        with self._changed:
            self.closed -= set(digests or self.closed)
            self._changed.notify_all()


class Region:
    """A region of a process, what it is to hold, and the chunks of that."""

    def __init__(self, target: Target, layout: Layout, content: bytes, *, level: int = 0) -> None:
        self.target, self.content = target, content
        self.start = target.number(f"new({len(content)})")
        (self.table,) = write(
            [Buffer(bytearray(content))], layout, threads=1, ceiling=64 * MIB, chunk_size=MIB, level=level
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def reads(self, offset: int = 0, size: int = 0) -> str:
        """The expression that reads a part of it."""
        size = size or len(self.content)
        return f"__import__('hashlib').sha256(ctypes.string_at({self.start + offset}, {size})).hexdigest()"

    def record(self) -> RegionRecord:
        return RegionRecord(self.start, self.table)


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as found:
        yield found


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap" / "journal"))
    monkeypatch.setattr(stage, "FOLDER", str(tmp_path / "gpusnap" / "stage"))
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert not os.path.ismount(stage.FOLDER)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if not name.startswith(("copies", "gpusnap-question"))]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(Layout(tmp_path / "layout").create())


def random_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def record_of(*processes: tuple[int, list[Region]]) -> Manifest:
    """A manifest of processes, by their PIDs in the container."""
    (first,) = a_manifest().processes
    found = tuple(
        replace(first, pid=pid, regions=tuple(each.record() for each in regions))
        for pid, regions in processes
    )
    return replace(a_manifest(), processes=found, pages="chunks")


def filling_of(gate: Gate, *processes: tuple[int, list[Region]], threads: int = 1) -> Prefetch:
    settings = replace(ONE_WORKER, threads=threads)
    return Prefetch("/nonexistent", record_of(*processes), settings, KEY, gate)


def test_its_disk_is_measured(target: Target, gate: Gate) -> None:
    """What it reads counts for the meter of the disk that the blobs are on."""
    region = Region(target, gate.layout, random_bytes(6 * MIB))
    counted: list[bool] = []

    class Meter(ReadMeter):
        def end(self, *, whole: bool) -> None:
            counted.append(whole)

    record = record_of((7, [region]))
    with Prefetch("/nonexistent", record, ONE_WORKER, KEY, gate, meter=Meter()) as prefetch:
        prefetch.deliver({7: target.pid})
        prefetch.wait_checked()
    assert counted == [True] * len(region.table.chunks)


def in_fault(target: Target) -> bool:
    """Whether the thread that reads waits in a page fault."""
    with open(f"/proc/{target.pid}/task/{target.tid}/wchan") as file:
        return file.read() == "handle_userfault"


def waits(target: Target) -> None:
    wait_for(lambda: in_fault(target), "a thread waits for a page")


def arriving(prefetch: Prefetch) -> bool:
    """Whether some of it is missing; it changes while nobody looks."""
    return prefetch.is_loading


def ended(target: Target) -> None:
    wait_for(lambda: not proc.is_running(target.pid), "the end of the process")
    assert target.process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("rest", [0, ODD])
def test_it_waits_for_what_is_not_there(target: Target, gate: Gate, rest: int) -> None:
    """A process reads its region from the first byte while the last chunk is missing, and all is right."""
    region = Region(target, gate.layout, random_bytes(6 * MIB + rest))
    gate.closed = {region.table.chunks[-1].blob}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        assert arriving(prefetch)
        target.tell(region.reads())
        waits(target)
        wait_for(lambda: prefetch.is_waiting(target.pid), "the word that it waits")
        gate.open()
        assert target._line() == region.digest
        prefetch.wait_checked()
        assert not arriving(prefetch)
        assert not prefetch.is_waiting(target.pid)
    target.stop()
    assert target.well()


def test_what_is_waited_for_comes_first(target: Target, gate: Gate) -> None:
    """A fault moves its chunk to the head, with those behind it; the others follow in order."""
    region = Region(target, gate.layout, random_bytes(8 * MIB))
    blobs = [chunk.blob for chunk in region.table.chunks]
    gate.closed = {blobs[0]}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        wait_for(lambda: gate.asked == blobs[:1], "the worker begins")
        target.tell(region.reads(5 * MIB, MIB))
        waits(target)
        wait_for(lambda: prefetch.is_waiting(target.pid), "the word that it waits")
        gate.open()
        assert target._line() == hashlib.sha256(region.content[5 * MIB : 6 * MIB]).hexdigest()
        prefetch.wait_checked()
    assert gate.asked == [blobs[0], blobs[5], *blobs[1:5], *blobs[6:]]


def test_before_it_is_waited_for(target: Target, gate: Gate) -> None:
    """What has come before the process did, and while it has it, is read without a wait."""
    region = Region(target, gate.layout, random_bytes(4 * MIB))
    gate.closed = {chunk.blob for chunk in region.table.chunks[2:]}
    with filling_of(gate, (7, [region])) as prefetch:
        wait_for(lambda: len(gate.asked) == 3, "two chunks are there")
        prefetch.deliver({7: target.pid})
        assert target.ask(region.reads(0, 2 * MIB)) == hashlib.sha256(region.content[: 2 * MIB]).hexdigest()
        gate.open()
        prefetch.wait_checked()
        assert target.ask(region.reads()) == region.digest
        assert prefetch.waits_so_far.faults == 0
        assert prefetch.waits_so_far.complete > 0


class Disk(Gate):
    """One whose blobs are opened at once, and read when they may be."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.may, self.reading = threading.Event(), 0
        self.lock = threading.Lock()

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        return Late(self, self.layout.open_blob(digest, size))

    def are_reading(self, count: int) -> bool:
        return self.reading == count


class Late(io.FileIO):
    """A blob of that disk."""

    def __init__(self, disk: Disk, file: io.FileIO) -> None:
        super().__init__(os.dup(file.fileno()))
        self.disk = disk
        file.close()

    def readinto(self, into: Any) -> int | None:
        with self.disk.lock:
            self.disk.reading += 1
        assert self.disk.may.wait(60)
        return super().readinto(into)


def test_few_reads_beside_criu(target: Target, gate: Gate) -> None:
    """CRIU does not wait behind all that the threads would read; once it is done they all do."""
    region = Region(target, gate.layout, random_bytes(8 * MIB))
    disk = Disk(gate.layout)
    threads = prefetching._PART_AT_FIRST * prefetching._READS
    with filling_of(disk, (7, [region]), threads=threads) as prefetch:
        wait_for(partial(disk.are_reading, prefetching._READS), "some read")
        assert not disk.may.wait(0.1)
        assert disk.are_reading(prefetching._READS)
        prefetch.deliver({7: target.pid})
        wait_for(partial(disk.are_reading, threads), "all read")
        disk.may.set()
        prefetch.wait_checked()
        assert target.ask(region.reads()) == region.digest


def test_few_workers_beside_criu(target: Target, gate: Gate) -> None:
    """Nor do all of them take the processors before; and a few bring the bytes meanwhile."""
    region = Region(target, gate.layout, random_bytes(8 * MIB))
    disk = Disk(gate.layout)
    with filling_of(disk, (7, [region]), threads=prefetching._PART_AT_FIRST) as prefetch:
        wait_for(partial(disk.are_reading, 1), "one reads")
        assert not disk.may.wait(0.1)
        assert disk.are_reading(1)
        prefetch.deliver({7: target.pid})
        wait_for(partial(disk.are_reading, prefetching._PART_AT_FIRST), "all read")
        disk.may.set()
        prefetch.wait_checked()
        assert target.ask(region.reads()) == region.digest


def test_nothing_was_missing(target: Target, gate: Gate) -> None:
    """Where all is there when the process comes, it has ordinary memory, and nobody watches it."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.wait_checked()
        prefetch.deliver({7: target.pid})
        assert not prefetch.is_loading
        assert target.ask(region.reads()) == region.digest
        assert prefetch.waits_so_far.complete == 0


def test_zeros(target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in no chunk reads as zeros, also where it is touched before anybody has come to it."""
    monkeypatch.setattr(demand_paging, "_ZEROS", MIB)
    content = random_bytes(MIB) + bytes(5 * MIB) + random_bytes(MIB, 2) + bytes(ODD)
    region = Region(target, gate.layout, content)
    assert len(region.table.chunks) == 2
    begin, taken = threading.Event(), []
    populate = stage.Area.populate

    def late(area: stage.Area, offset: int = 0, size: int | None = None, *, threads: int = 0) -> None:
        if not threads:  # not for a chunk
            assert begin.wait(60)
            taken.append(offset // MIB)
        populate(area, offset, size, threads=threads)

    monkeypatch.setattr(stage.Area, "populate", late)
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        target.tell(region.reads(4 * MIB, MIB))
        wait_for(lambda: prefetch.is_waiting(target.pid), "the word that it waits")
        begin.set()
        assert target._line() == hashlib.sha256(bytes(MIB)).hexdigest()
        prefetch.wait_checked()
        assert target.ask(region.reads()) == region.digest
    assert taken == [1, 4, 2, 3, 5, 7]


@pytest.mark.parametrize("waiting", [True, False])
def test_no_memory_for_zeros(
    target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch, *, waiting: bool
) -> None:
    """The restore fails with that sentence. Whoever touched them would be ended by SIGBUS."""
    if not waiting:
        monkeypatch.setattr(userfault, "explain_missing", lambda: "this kernel has no userfaultfd")
    content = random_bytes(MIB) + bytes(5 * MIB) + random_bytes(MIB, 2)
    region = Region(target, gate.layout, content)
    populate = stage.Area.populate

    def full(area: stage.Area, offset: int = 0, size: int | None = None, *, threads: int = 0) -> None:
        if not threads:  # not for a chunk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), area.path)
        populate(area, offset, size, threads=threads)

    monkeypatch.setattr(stage.Area, "populate", full)

    with filling_of(gate, (7, [region])) as prefetch:
        if waiting:
            assert prefetch._paging is not None
            prefetch._paging._over.wait(60)  # seconds before CRIU has made the process
        with pytest.raises(ImageError, match="no RAM left"):
            prefetch.deliver({7: target.pid})
        if waiting:
            ended(target)


def test_several_processes_and_regions(gate: Gate) -> None:
    """Each has its own bytes, and they come side by side: no process waits for all of another one's."""
    with Target() as one, Target() as other:
        first = [Region(one, gate.layout, random_bytes(3 * MIB, seed)) for seed in (1, 2)]
        second = [Region(other, gate.layout, random_bytes(6 * MIB, 3))]
        wanted = [each.table.chunks for each in (*first, *second)]
        gate.closed = {wanted[0][0].blob}
        with filling_of(gate, (7, first), (8, second)) as prefetch:
            prefetch.deliver({7: one.pid, 8: other.pid})
            one.tell(first[1].reads())
            waits(one)
            other.tell(second[0].reads())
            waits(other)
            gate.open()
            assert one._line() == first[1].digest
            assert other._line() == second[0].digest
            assert one.ask(first[0].reads()) == first[0].digest
            prefetch.wait_checked()
    assert sorted(gate.asked) == sorted(chunk.blob for chunks in wanted for chunk in chunks)


def test_side_by_side(gate: Gate) -> None:
    """Nobody waits: chunk after chunk of each process in turn, the regions of one in their order."""
    with Target() as one, Target() as other:
        first = [Region(one, gate.layout, random_bytes(2 * MIB, seed)) for seed in (1, 2)]
        second = [Region(other, gate.layout, random_bytes(4 * MIB, 3))]
        with filling_of(gate, (7, first), (8, second)) as prefetch:
            prefetch.wait_checked()
    a, b = ([chunk.blob for each in regions for chunk in each.table.chunks] for regions in (first, second))
    assert gate.asked == [blob for pair in zip(a, b, strict=True) for blob in pair]


@pytest.mark.parametrize("how", ["wrong", "gone"])
def test_what_is_wrong_is_never_read(target: Target, gate: Gate, how: str) -> None:
    """The process ends in its wait: not one instruction of it sees a page of that chunk."""
    region = Region(target, gate.layout, random_bytes(4 * MIB))
    chunk = region.table.chunks[2]
    gate.closed = {chunk.blob}
    blob = Path(gate.layout.path, "blobs/sha256", chunk.blob.removeprefix("sha256:"))
    if how == "wrong":
        blob.write_bytes(bytes(MIB))
    else:
        gate.broken[chunk.blob] = Unreachable("the registry cannot be reached")
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        read = blob.with_suffix(".read")
        target.tell(f"[{region.reads()}] and open({str(read)!r}, 'w')")
        waits(target)
        gate.open()
        ended(target)
        with pytest.raises(ImageError, match=chunk.blob if how == "wrong" else "cannot be reached"):
            prefetch.wait_checked()
        assert not prefetch.is_waiting(target.pid)
    assert not read.exists()


def test_one_that_is_wrong_before_the_process_is_there(target: Target, gate: Gate) -> None:
    """It is ended as well, and cannot be let go."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.broken[region.table.chunks[0].blob] = BlobError("the blob is not there")
    with filling_of(gate, (7, [region])) as prefetch:
        wait_for(lambda: gate.asked, "the worker begins")
        prefetch.deliver({7: target.pid})
        with pytest.raises(ImageError, match="not there"):
            prefetch.wait_checked()
        ended(target)


def test_given_up_before_the_process_is_there(target: Target, gate: Gate) -> None:
    """Whoever gets it all the same is ended at once: a driver's restore of it would wait for ever."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {chunk.blob for chunk in region.table.chunks}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.stop()
        with pytest.raises(ImageError, match="ended before"):
            prefetch.deliver({7: target.pid})
        ended(target)
        gate.open()


def test_what_does_not_come(target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever: after a while without a chunk the restore fails with a sentence."""
    monkeypatch.setattr(demand_paging, "_PATIENCE", 0.2)
    monkeypatch.setattr(demand_paging, "_SLOWEST", 64 * MIB)
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {region.table.chunks[1].blob}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        target.tell(region.reads())
        with pytest.raises(ImageError, match="does not arrive: no chunk of it in 0 s") as caught:
            prefetch.wait_checked()
        assert "disk or registry" in caught.value.hint
        ended(target)
        gate.open()


def test_closed_in_the_middle(target: Target, gate: Gate) -> None:
    """Whatever made the restore give up: no process outlives the descriptor that keeps it waiting."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {region.table.chunks[1].blob}
    prefetch = filling_of(gate, (7, [region]))
    prefetch.deliver({7: target.pid})
    target.tell(region.reads())
    waits(target)
    threading.Timer(0.1, gate.open).start()  # a worker cannot be called off
    prefetch._paging.fail(ImageError("gpusnap gives up"))  # type: ignore[union-attr]
    ended(target)
    prefetch.close()
    prefetch.close()


def test_close_alone_ends_it(target: Target, gate: Gate) -> None:
    """As an error on the way to the driver leads to it."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {region.table.chunks[1].blob}
    prefetch = filling_of(gate, (7, [region]))
    prefetch.deliver({7: target.pid})
    target.tell(region.reads())
    waits(target)
    paging = prefetch._paging
    assert paging is not None
    paging.close()
    ended(target)
    gate.open()
    prefetch.close()


def test_a_process_that_ends(gate: Gate) -> None:
    """Its chunks still come, and the other one gets all of its own."""
    with Target() as one, Target() as other:
        first = Region(one, gate.layout, random_bytes(2 * MIB, 1))
        second = Region(other, gate.layout, random_bytes(2 * MIB, 2))
        gate.closed = {chunk.blob for each in (first, second) for chunk in each.table.chunks}
        with filling_of(gate, (7, [first]), (8, [second])) as prefetch:
            prefetch.deliver({7: one.pid, 8: other.pid})
            one.tell(first.reads())
            waits(one)
            one.process.kill()
            one.process.wait()
            gate.open()
            prefetch.wait_checked()
            assert other.ask(second.reads()) == second.digest


def test_one_that_unmaps_it(target: Target, gate: Gate) -> None:
    """The driver needs the rest no more: that is no failure."""
    region = Region(target, gate.layout, random_bytes(4 * MIB))
    gate.closed = {chunk.blob for chunk in region.table.chunks}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        assert target.ask(f"raw(11, {region.start}, {len(region.content)})") == "(0, '')"
        gate.open()
        prefetch.wait_checked()
    assert proc.is_running(target.pid)


def test_other_memory_in_the_place_of_a_part(target: Target, gate: Gate) -> None:
    """The driver unmaps what it has read, and a library may come there: the rest is released all the same."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {chunk.blob for chunk in region.table.chunks}
    place = f"libc.mmap({region.start}, 4096, 1, {mmap.MAP_PRIVATE | 0x10}, os.open(sys.executable, 0), 0)"
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        assert target.number(place) == region.start
        target.tell(region.reads(4096, MIB - 4096))
        waits(target)
        gate.open(region.table.chunks[0].blob)
        assert target._line() == hashlib.sha256(region.content[4096:MIB]).hexdigest()
        gate.open()
        prefetch.wait_checked()


def test_more_mappings_than_a_process_may_have(
    target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros that are released between chunks that are missing split the mapping: then they are due later."""
    content = b"".join(random_bytes(MIB, seed) + bytes(MIB) for seed in range(4))
    region = Region(target, gate.layout, content)
    gate.closed = {chunk.blob for chunk in region.table.chunks}
    refused, release = [], userfault.Userfault.release

    def limited(self: userfault.Userfault, address: int, size: int) -> None:
        if size == MIB and (address - region.start) // MIB % 2 != 0:
            refused.append(address)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        release(self, address, size)

    monkeypatch.setattr(userfault.Userfault, "release", limited)
    monkeypatch.setattr(DemandPaging, "populate_zeros", lambda paging: None)
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        assert prefetch._paging is not None
        DemandPaging._fill_zeros(prefetch._paging)
        assert len(refused) == 4
        target.tell(region.reads(MIB, 2 * MIB))
        wait_for(lambda: prefetch.is_waiting(target.pid), "the word that it waits for zeros that are due")
        gate.open(*(chunk.blob for chunk in region.table.chunks[:2]))
        assert target._line() == hashlib.sha256(content[MIB : 3 * MIB]).hexdigest()
        wait_for(lambda: not prefetch.is_waiting(target.pid), "the word that nobody waits")
        assert arriving(prefetch)
        gate.open()
        prefetch.wait_checked()
        assert target.ask(region.reads()) == region.digest


def test_a_process_that_has_as_many_mappings_as_it_may(
    target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself refuses to release a piece alone, and all comes all the same."""
    with open("/proc/sys/vm/max_map_count") as file:
        most = int(file.read())
    content = b"".join(random_bytes(MIB, seed) + bytes(MIB) for seed in range(6))
    region = Region(target, gate.layout, content)
    gate.closed = {chunk.blob for chunk in region.table.chunks}
    size = 2 * most * mmap.PAGESIZE
    address = target.number(f"new({size}, PRIVATE | 0x4000)")  # MAP_NORESERVE
    monkeypatch.setattr(DemandPaging, "populate_zeros", lambda paging: None)
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        # Every second page gets another protection, until the kernel has no more mappings for it.
        call = f"libc.mprotect(ctypes.c_void_p({address} + 8192 * n), 4096, 1)"
        assert target.number(f"next(n for n in range({most}) if {call})") > 0
        assert prefetch._paging is not None
        DemandPaging._fill_zeros(prefetch._paging)
        assert prefetch._paging._regions[0].due
        assert target.ask(f"raw(11, {address}, {size})") == "(0, '')"
        gate.open()
        prefetch.wait_checked()
        assert target.ask(region.reads()) == region.digest


@pytest.mark.parametrize("level", [0, 1])
def test_a_stage_that_is_full(target: Target, gate: Gate, level: int) -> None:
    """The restore fails with a sentence; a write to memory that there is none for would end gpusnap."""
    region = Region(target, gate.layout, b"".join(bytes([n]) * MIB for n in range(1, 17)), level=level)
    gate.closed = {chunk.blob for chunk in region.table.chunks}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        subprocess.run(["mount", "-o", "remount,size=6m", stage.FOLDER], check=True, timeout=20)
        gate.open()
        with pytest.raises(ImageError, match="no RAM left"):
            prefetch.wait_checked()
        ended(target)


def test_locked_memory(target: Target, gate: Gate) -> None:
    """A process that locks all it maps has pages at once, before there is anything in them."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {region.table.chunks[1].blob}
    assert target.number("libc.mlockall(2)") == 0
    threading.Timer(0.1, gate.open).start()
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        assert target.ask(region.reads()) == region.digest
        prefetch.wait_checked()


def test_a_child_does_not_have_it(target: Target, gate: Gate) -> None:
    """A child by fork would read what is not there yet as zeros."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {chunk.blob for chunk in region.table.chunks}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        child = target.number("os.fork() or signal.pause()")
        try:
            assert not [m for m in mappings(child) if m.start <= region.start < m.end]
        finally:
            os.kill(child, signal.SIGKILL)
        assert [m for m in mappings(target.pid) if m.start <= region.start < m.end]
        gate.open()
        prefetch.wait_checked()
        assert target.ask(region.reads()) == region.digest


def test_a_thread_that_is_traced_in_its_wait(target: Target, gate: Gate) -> None:
    """It stops for its tracer, and waits on afterwards: the same page, with the same bytes."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {region.table.chunks[0].blob}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        target.tell(region.reads())
        waits(target)
        for _ in range(3):
            with hold(target.pid, target.tid) as tracee:
                tracee.to_rest()
            waits(target)
        gate.open()
        assert target._line() == region.digest
        prefetch.wait_checked()


def test_a_stopped_process_in_its_wait(target: Target, gate: Gate) -> None:
    """As driver_calls does it: one thread alone runs, and waits; the process stands before and after."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {region.table.chunks[0].blob}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        target.tell(region.reads())
        waits(target)
        os.kill(target.pid, signal.SIGSTOP)
        wait_for(lambda: proc.is_still(target.pid), "it stands")
        with run_only(target.pid, target.tid, exit_kill=True):
            waits(target)
            gate.open()
            prefetch.wait_checked()
            wait_for(lambda: target.waits(target.tid), "it has read all")
        assert proc.is_still(target.pid)
        os.kill(target.pid, signal.SIGCONT)
        assert target._line() == region.digest


def test_gpusnap_is_killed(target: Target) -> None:
    """The process ends with it: the kernel would let it read on, whatever is there."""
    os.kill(target.pid, signal.SIGSTOP)
    wait_for(lambda: proc.is_still(target.pid), "it stands")
    be_killed(run_only(target.pid, target.tid, exit_kill=True))
    ended(target)


def test_gpusnap_is_killed_later(target: Target) -> None:
    """Once the thread is let go the process outlives whoever traced it."""
    os.kill(target.pid, signal.SIGSTOP)
    wait_for(lambda: proc.is_still(target.pid), "it stands")
    with run_only(target.pid, target.tid, exit_kill=True):
        pass
    be_killed(run_only(target.pid, target.tid))
    assert proc.is_running(target.pid)


@pytest.mark.parametrize("what", ["host", "process", "register", "not pages"])
def test_without_it(target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A kernel, or a process, that has no userfaultfd: everything is there before the process may run."""
    region = Region(target, gate.layout, random_bytes(3 * MIB))
    gate.closed = {region.table.chunks[1].blob}

    def refused(*_: object) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    if what == "host":
        monkeypatch.setattr(userfault, "_open_own", refused)
    elif what == "process":
        monkeypatch.setattr(Remote, "userfaultfd", refused)
    elif what == "register":
        monkeypatch.setattr(userfault.Userfault, "register", refused)
    else:
        monkeypatch.setattr(prefetching, "has_whole_pages", lambda tables: False)
    with filling_of(gate, (7, [region])) as prefetch:
        delivered = threading.Event()

        def deliver() -> None:
            prefetch.deliver({7: target.pid})
            delivered.set()

        thread = threading.Thread(target=deliver)
        thread.start()
        wait_for(lambda: len(gate.asked) == 2, "the worker waits")
        assert not delivered.wait(0.1)
        gate.open()
        thread.join(60)
        assert delivered.is_set()
        prefetch.wait_checked()
        assert target.ask(region.reads()) == region.digest


def test_the_driver_fails_with_it(target: Target, gate: Gate) -> None:
    """It is asked again when all is there: a driver may not bear to wait where it reads."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {region.table.chunks[1].blob}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        pages = PrefetchedPages(prefetch)
        assert pages.is_loading
        assert pages.give_back([target.pid]) == {}
        again = threading.Thread(target=pages.give_back, args=([target.pid],))
        again.start()
        again.join(0.1)
        assert again.is_alive()
        gate.open()
        again.join(60)
        assert not again.is_alive()
        assert not pages.is_loading


def test_asked_to_stop(target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C does not wait for a registry: what waits for memory is ended, and the driver answers."""
    region = Region(target, gate.layout, random_bytes(2 * MIB))
    gate.closed = {region.table.chunks[1].blob}
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        target.tell(region.reads())
        waits(target)
        pages = PrefetchedPages(prefetch)
        pages.check_signals()
        assert proc.is_running(target.pid)
        monkeypatch.setattr(prefetching, "is_asked_to_stop", lambda: True)
        pages.check_signals()
        ended(target)
        gate.open()
        with pytest.raises(GpusnapError, match="ended before all GPU memory was read"):
            prefetch.wait_checked()
        pages.check_signals()


def test_let_go_of_while_a_worker_is_about_to_release(
    target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not every process can wait, none does; a worker has the descriptor, which is closed then."""
    region = Region(target, gate.layout, random_bytes(3 * MIB))
    gate.closed = {chunk.blob for chunk in region.table.chunks}
    release, late = userfault.Userfault.release, []
    with filling_of(gate, (7, [region])) as prefetch:
        prefetch.deliver({7: target.pid})
        paging = prefetch._paging
        assert paging is not None

        def after_detach(found: userfault.Userfault, address: int, size: int) -> None:
            paging.detach()
            late.append(address)
            release(found, address, size)

        monkeypatch.setattr(userfault.Userfault, "release", after_detach)
        gate.open()
        prefetch.wait_checked()
        assert late == [region.start]
        assert target.ask(region.reads()) == region.digest


def test_whatever_keeps_zeros_from_being_made(
    target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends the restore at once. Nobody else would ever say that they are missing."""
    region = Region(target, gate.layout, random_bytes(MIB) + bytes(5 * MIB))
    populate = stage.Area.populate

    def fail(area: stage.Area, offset: int = 0, size: int | None = None, *, threads: int = 0) -> None:
        if not threads:  # not for a chunk
            raise MemoryError
        populate(area, offset, size, threads=threads)

    monkeypatch.setattr(stage.Area, "populate", fail)
    with filling_of(gate, (7, [region])) as prefetch, pytest.raises(MemoryError):
        prefetch.wait_checked()


def test_no_thread_for_zeros(target: Target, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restore is refused, and by then nobody reads chunks for it any more."""
    region = Region(target, gate.layout, random_bytes(MIB) + bytes(5 * MIB))
    gate.closed = {chunk.blob for chunk in region.table.chunks}

    def none(paging: DemandPaging) -> None:
        wait_for(lambda: gate.asked, "the worker waits")
        threading.Timer(0.1, gate.open).start()
        raise GpusnapError("no thread")

    monkeypatch.setattr(DemandPaging, "populate_zeros", none)
    with pytest.raises(GpusnapError, match="no thread"):
        filling_of(gate, (7, [region]))
    assert "gpusnap-oci" not in {thread.name for thread in threading.enumerate()}


def test_whole_pages() -> None:
    """A table of somebody else's may cut a page in two, and then none of it can be released alone."""

    def chunks(*places: tuple[int, int]) -> tuple[Chunk, ...]:
        return tuple(Chunk(offset, size, "", "", size, "plain") for offset, size in places)

    assert demand_paging.has_whole_pages([Table(8192, ())])
    assert demand_paging.has_whole_pages([Table(8193, chunks((0, 4096)))])
    assert demand_paging.has_whole_pages([Table(8193, chunks((0, 8192), (8192, 1)))])
    assert not demand_paging.has_whole_pages([Table(8193, chunks((0, 4097), (4097, 4096)))])
    assert not demand_paging.has_whole_pages([Table(12288, chunks((0, 4095)))])


def test_nothing_at_all() -> None:
    """A region without a byte is complete."""
    assert DemandPaging([], []).is_complete


SIZES = (1, 100, 3216, 4095, 4096, 4097, 4096 + ODD, MIB, MIB + 1, MIB + ODD, 2 * MIB - 1)


@pytest.mark.parametrize("spare", [0, 1, 2, 3, 8, 400])
def test_many_regions_of_any_size(target: Target, gate: Gate, spare: int) -> None:
    """Each byte comes, also where there are descriptors for the regions' files and hardly one more."""
    contents = [random_bytes(size, seed) for seed, size in enumerate(SIZES * 12)]
    regions = [Region(target, gate.layout, each) for each in contents]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2 * len(regions) + spare, hard))
    try:
        with filling_of(gate, (7, regions), threads=2) as prefetch:
            prefetch.deliver({7: target.pid})
            prefetch.wait_checked()
            assert (prefetch._paging is not None) == (spare == 400)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [target.ask(each.reads()) == each.digest for each in regions] == [True] * len(regions)
