"""Reading regions back: only what the digests say, before there are targets too, in the memory allowed."""

from __future__ import annotations

import gc
import io
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import zstandard
from oci_regions import CEILING, PAGE, Far, fill, load, save

from gpusnap.oci.base.errors import BlobError, Cancelled, CeilingError, ChunkError, OciError, Stalled
from gpusnap.oci.base.threads import Crew
from gpusnap.oci.chunks import reader
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.reader import Reader, read
from gpusnap.oci.chunks.table import MEDIA_TYPES, Chunk, Table
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout

KINDS = ("text", "random", "zero")
MIXED = bytearray(b"".join(fill(PAGE, kind, at) for at in range(8) for kind in KINDS))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        threading.Event().wait(0.005)


def failed(reading: Reader) -> bool:
    try:
        reading.check()
    except OciError:
        return True
    return False


def path_of(layout: Layout, chunk: Chunk) -> Path:
    return Path(layout.path, "blobs/sha256", chunk.blob.removeprefix("sha256:"))


def truncate(path: Path, _other: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path, _other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path: Path, other: Path) -> None:
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def link(path: Path, other: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def remove(path: Path, _other: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [truncate, flip, swap, link, remove])
@pytest.mark.parametrize("at", [0, 1])
def test_harmed_blobs(layout: Layout, harm: Callable[[Path, Path], None], at: int) -> None:
    """A blob cut short, changed, exchanged, linked or gone is refused by its digest, packed or plain."""
    tables = save(layout, MIXED)
    chunk = tables[0].chunks[at]
    assert chunk.encoding == ("zstd", "plain")[at]
    harm(path_of(layout, chunk), path_of(layout, tables[0].chunks[at + 2]))
    with pytest.raises(BlobError, match=f"{chunk.blob}|{tables[0].chunks[at + 2].blob}"):
        load(layout, tables)


def packed_as(layout: Layout, packed: bytes, size: int, plain: bytes) -> Table:
    """A table whose only chunk is in that blob, whatever it holds."""
    blob = layout.add_blob(packed, media_type=MEDIA_TYPES["zstd"])
    return Table(size, (Chunk(0, size, digest_of(plain), blob.digest, blob.size, "zstd"),))


def test_bombs(layout: Layout) -> None:
    """Frames that hold more, less or other than the chunk, or are none, fill nothing."""
    data = fill(4 * PAGE, "text")
    compressor = zstandard.ZstdCompressor()
    unsized = zstandard.ZstdCompressor(write_content_size=False)
    good = compressor.compress(data)
    bombs = {
        "larger": compressor.compress(bytes(64 << 20)),
        "larger, size not said": unsized.compress(bytes(64 << 20)),
        "smaller": compressor.compress(data[:-1]),
        "other": compressor.compress(data[::-1]),
        "cut": good[:-3],
        "no frame": b"no frame of zstd",
        "a window of 2 GiB": b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x00" * 20,
    }
    for packed in bombs.values():
        target = bytearray(4 * PAGE)
        table = packed_as(layout, packed, 4 * PAGE, data)
        with pytest.raises(ChunkError, match=r"is not valid zstd|does not contain the chunk at 0"):
            read([table], layout, [Far(target)], threads=1, ceiling=CEILING)
        assert target == bytes(4 * PAGE)
    table = packed_as(layout, unsized.compress(data), 4 * PAGE, data)
    assert load(layout, (table,)) == [data]


def test_tables_are_checked(layout: Layout) -> None:
    """A table that was not validated is, before any worker starts."""
    before = threading.active_count()
    bad = Table(PAGE, (Chunk(0, 2 * PAGE, "", "", 1, "zstd"),))
    with pytest.raises(ChunkError, match="chunk 0 at 0"):
        Reader([bad], layout, threads=2, ceiling=CEILING)
    assert threading.active_count() == before


def test_targets_are_checked(layout: Layout) -> None:
    """Targets of another number or size are refused."""
    tables = save(layout, MIXED)
    for targets in ([], [Buffer(bytearray(len(MIXED) - 1))]):
        with pytest.raises(ChunkError, match=r"targets|does not fit a target"):
            read(tables, layout, targets, threads=2, ceiling=CEILING)


class Staged:
    """How many slots a reading has made, seen at mmap."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.lengths: list[int] = []
        self.size = size
        self._real = mmap.mmap
        monkeypatch.setattr(mmap, "mmap", self._mapped)

    def _mapped(self, descriptor: int, length: int, **options: int) -> mmap.mmap:
        self.lengths.append(length)
        return self._real(descriptor, length, **options)

    def slots(self) -> int:
        return sum(length == self.size for length in self.lengths)


def test_reads_ahead(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there are targets, as many chunks are read as the ceiling holds; then the rest follows."""
    data = bytearray(b"".join(fill(PAGE, "random", at) for at in range(40)))
    tables = save(layout, data)
    staged = Staged(monkeypatch, PAGE)
    target = bytearray(len(data))
    with Reader(tables, layout, threads=3, ceiling=10 * PAGE + 7) as reading:
        wait_for(lambda: staged.slots() == 10)
        reading.check()
        assert target == bytes(len(data))
        reading.deliver([Buffer(target)])
    assert target == data
    assert staged.slots() == 10


def test_staged_bytes_need_no_file(layout: Layout) -> None:
    """What was read ahead is safe in memory: its blobs may go."""
    tables = save(layout, MIXED)
    target = bytearray(len(MIXED))
    with Reader(tables, layout, threads=2, ceiling=CEILING) as reading:
        wait_for(lambda: sum(part.chunk.size for part, _ in reading._staged) == 16 * PAGE)
        for chunk in tables[0].chunks:
            path_of(layout, chunk).unlink()
        reading.deliver([Buffer(target)])
    assert target == MIXED


def test_many_regions(layout: Layout) -> None:
    """Each region goes to its own target."""
    regions = [bytearray(fill(3 * PAGE + at, "random", at)) for at in range(5)]
    tables = save(layout, *regions)
    targets = [bytearray(len(each)) for each in regions]
    with Reader(tables, layout, threads=4, ceiling=CEILING) as reading:
        reading.deliver([Buffer(each) for each in targets])
    assert targets == regions


def test_zeros_are_not_written(layout: Layout) -> None:
    """Targets have them: what is in no chunk stays as it is."""
    tables = save(layout, MIXED, bytearray(5 * PAGE))
    dirty = load(layout, tables, dirt=7)
    assert dirty[1] == bytes([7]) * 5 * PAGE
    assert dirty[0][2 * PAGE : 3 * PAGE] == bytes([7]) * PAGE


def test_a_huge_region_of_zeros_costs_nothing(layout: Layout) -> None:
    """A table may speak of any number of zeros: nothing is made of them before there is a target."""
    with (
        Reader([Table(1 << 47, ())], layout, threads=2, ceiling=PAGE) as reading,
        pytest.raises(ChunkError, match="does not fit"),
    ):
        reading.deliver([Buffer(bytearray(PAGE))])


class Failing(Far):
    """A region of which one part cannot be written."""

    def write(self, offset: int, data: memoryview) -> None:
        if offset == 9 * PAGE:
            raise OSError(3, "the process has gone")
        super().write(offset, data)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_target_that_fails(layout: Layout, threads: int) -> None:
    """What a target raises comes out as it is, and ends all workers."""
    tables, before = save(layout, MIXED), threading.active_count()
    with pytest.raises(OSError, match="the process has gone"):
        read(tables, layout, [Failing(bytearray(len(MIXED)))], threads=threads, ceiling=CEILING)
    assert threading.active_count() == before


def test_checked_later(layout: Layout) -> None:
    """verify finds each wrong chunk that `verify_later` left, unless zstd has failed at it before."""
    tables = save(layout, MIXED)

    def read_it(region: bytearray) -> None:
        targets = [Buffer(region)]
        with Reader(
            tables, layout, threads=2, ceiling=CEILING, targets=targets, verify_later=True
        ) as reading:
            reading.wait()
            reading.verify()

    for chunk in tables[0].chunks:
        path = path_of(layout, chunk)
        data = path.read_bytes()
        flip(path, Path())
        with pytest.raises(BlobError, match="does not match"):
            read_it(bytearray(len(MIXED)))
        path.write_bytes(data)
    region = bytearray(len(MIXED))
    read_it(region)
    assert region == MIXED


class Held:
    """Blobs of a layout that are not opened before they may; and how often it was tried."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.may = threading.Semaphore(0)
        self.tried = 0
        self.lock = threading.Lock()

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        with self.lock:
            self.tried += 1
        assert self.may.acquire(timeout=30)
        return self.layout.open_blob(digest, size)

    def was_tried(self, times: int) -> bool:
        return self.tried == times

    def check_blob(self, wanted: Descriptor) -> None:
        self.layout.check_blob(wanted)


def test_behind_another(layout: Layout) -> None:
    """It opens no blob before the other one has begun with its last chunk; then it does not wait."""
    first, second = Held(layout), Held(layout)
    tables = save(layout, MIXED)
    count = len(tables[0].chunks)
    assert count > 1
    ahead, region = bytearray(len(MIXED)), bytearray(len(MIXED))
    with (
        Reader(tables, first, threads=1, ceiling=CEILING, targets=[Buffer(ahead)]) as one,
        Reader(tables, second, threads=2, ceiling=CEILING, targets=[Buffer(region)], after=one) as two,
    ):
        for number in range(1, count):
            wait_for(partial(first.was_tried, number))
            assert not one.has_started_all
            assert second.tried == 0
            first.may.release()
        wait_for(partial(first.was_tried, count))
        assert one.has_started_all
        assert not one.is_complete
        second.may.release(count)
        two.wait()
        first.may.release()
        one.wait()
    assert ahead == region == MIXED


@pytest.mark.parametrize("end", ["failed", "closed"])
def test_behind_one_that_ended(layout: Layout, end: str) -> None:
    """Whatever became of that: it is read all the same."""
    tables = save(layout, MIXED)
    region = bytearray(len(MIXED))
    held = Held(layout)
    with (
        Reader(tables, held, threads=1, ceiling=CEILING, targets=[Buffer(bytearray(len(MIXED)))]) as one,
        Reader(tables, layout, threads=1, ceiling=CEILING, targets=[Buffer(region)], after=one) as two,
    ):
        wait_for(partial(held.was_tried, 1))
        if end == "failed":
            held.layout = Layout("/nowhere")
            held.may.release()
        else:
            threading.Thread(target=one.close).start()
            wait_for(lambda: one.has_started_all)
            held.may.release()
        two.wait()
    assert region == MIXED


class Ahead:
    """A reading that others are behind; who looked at it."""

    def __init__(self) -> None:
        self.begun_now = threading.Event()
        self.looked: set[int] = set()
        self.looks = 0

    @property
    def has_started_all(self) -> bool:
        self.looked.add(threading.get_ident())
        self.looks += 1
        return self.begun_now.is_set()


def test_one_worker_looks(layout: Layout) -> None:
    """Whether the reading that it is behind has got so far; the others do not take the processor for that."""
    ahead, region = Ahead(), bytearray(len(MIXED))
    with Reader(
        save(layout, MIXED), layout, threads=4, ceiling=CEILING, targets=[Buffer(region)], after=ahead
    ) as reading:
        wait_for(lambda: ahead.looks > 3)
        assert len(ahead.looked) == 1
        ahead.begun_now.set()
        reading.wait()
    assert len(ahead.looked) == 1
    assert region == MIXED


class Turns:
    """So many at once; how many asked, and how many there were."""

    def __init__(self, count: int) -> None:
        self.semaphore = threading.Semaphore(count)
        self.asked = self.inside = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.asked += 1
        assert self.semaphore.acquire(timeout=30)
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
        self.semaphore.release()


def test_few_at_work(layout: Layout) -> None:
    """No more workers than have their turn; all of them open their blobs, which may come from far."""
    held, turns, region = Held(layout), Turns(1), bytearray(len(MIXED))
    tables = save(layout, MIXED)
    count = len(tables[0].chunks)
    assert count >= 4
    turns.semaphore.acquire()
    with Reader(tables, held, threads=4, ceiling=CEILING, targets=[Buffer(region)], turns=turns) as reading:
        wait_for(partial(held.was_tried, 4))
        held.may.release(count)
        wait_for(lambda: turns.asked == 4)
        assert region == bytes(len(MIXED))
        turns.semaphore.release()
        reading.wait()
    assert (turns.asked, turns.most) == (count, 1)
    assert region == MIXED


def test_turns_of_one_that_is_closed(layout: Layout) -> None:
    """Who waits for a turn gets one, and ends without having done anything."""
    turns, region = Turns(1), bytearray(len(MIXED))
    turns.semaphore.acquire()
    reading = Reader(
        save(layout, MIXED), layout, threads=4, ceiling=CEILING, targets=[Buffer(region)], turns=turns
    )
    wait_for(lambda: turns.asked == 4)
    closing = threading.Thread(target=reading.close)
    closing.start()
    wait_for(lambda: reading.has_started_all)
    turns.semaphore.release()
    closing.join(30)
    assert not closing.is_alive()
    assert (turns.asked, bytes(region)) == (4, bytes(len(MIXED)))


def test_checked_later_though_compressed(layout: Layout) -> None:
    """A frame that holds something else than the chunk is found by verify."""
    data = fill(4 * PAGE, "text")
    table = packed_as(layout, zstandard.ZstdCompressor().compress(data[::-1]), 4 * PAGE, data)
    target = Buffer(bytearray(4 * PAGE))
    with Reader([table], layout, threads=1, ceiling=CEILING, targets=[target], verify_later=True) as reading:
        reading.wait()
        with pytest.raises(ChunkError, match="does not contain the chunk at 0"):
            reading.verify()


def test_an_early_error_is_told_early(layout: Layout) -> None:
    """A broken blob is known before there are targets: check raises it, and deliver does."""
    tables = save(layout, MIXED)
    flip(path_of(layout, tables[0].chunks[0]), Path())
    with Reader(tables, layout, threads=2, ceiling=CEILING) as reading:
        wait_for(lambda: failed(reading))
        with pytest.raises(BlobError):
            reading.deliver([Buffer(bytearray(len(MIXED)))])


def test_closed_early(layout: Layout) -> None:
    """A reading that is closed leaves no thread, and does not pretend to have delivered."""
    before = threading.active_count()
    reading = Reader(save(layout, MIXED), layout, threads=2, ceiling=CEILING)
    reading.close()
    reading.close()
    assert threading.active_count() == before
    with pytest.raises(Cancelled):
        reading.deliver([Buffer(bytearray(len(MIXED)))])


def test_ceiling(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and workers stay under the ceiling; one too low for a single chunk is an error."""
    data = bytearray(b"".join(fill(1 << 20, kind, at) for at in range(6) for kind in ("text", "random")))
    tables = save(layout, data, chunk_size=1 << 20)
    staged = Staged(monkeypatch, 1 << 20)
    packed = max(chunk.stored for chunk in tables[0].chunks if chunk.encoding == "zstd")
    need = (1 << 20) + packed
    with pytest.raises(CeilingError, match="is not enough for the largest chunk"):
        read(tables, layout, [Far(data)], threads=4, ceiling=need - 1)
    assert staged.lengths == []
    target = bytearray(len(data))
    read(tables, layout, [Far(target)], threads=4, ceiling=need)
    assert (target, sum(staged.lengths)) == (data, need)
    staged.lengths.clear()
    read(tables, layout, [Far(target)], threads=4, ceiling=3 * need)
    assert sum(staged.lengths) <= 3 * need
    staged.lengths.clear()
    target[:] = bytes(len(target))
    read(tables, layout, [Buffer(target)], threads=1, ceiling=packed)
    assert (target, sum(staged.lengths)) == (data, packed), "memory of ours needs no slots"
    with pytest.raises(CeilingError, match="is not enough for the largest chunk"):
        read(tables, layout, [Buffer(target)], threads=1, ceiling=packed - 1)


def test_no_descriptor_is_left(layout: Layout) -> None:
    """Whether it went well or not, no descriptor stays open."""
    tables = save(layout, MIXED)
    layout.close()  # what was written stays open until it is durable
    gc.collect()  # those of other tests
    before = len(os.listdir("/proc/self/fd"))
    load(layout, tables)
    path_of(layout, tables[0].chunks[0]).unlink()
    with pytest.raises(OciError):
        load(layout, tables)
    wrong = replace(tables[0].chunks[0], plain=digest_of(b""))
    layout.add_blob(MIXED[:PAGE])
    with pytest.raises(OciError):
        load(layout, (Table(PAGE, (wrong,)),))
    layout.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("large", [False, True])
def test_large_windows_one_at_a_time(layout: Layout, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """A blob of 32 KiB has zstd take a GiB; so many at once as there are threads would be all memory."""
    size = 4 * PAGE
    content = bytearray(fill(size, "text"))
    tables = save(layout, content, chunk_size=size)
    monkeypatch.setattr(reader, "LARGE_CHUNK", size - large)
    seen: list[bool] = []
    locks: list[threading.Lock] = []
    real = reader._fetch

    class Locks:
        Lock = staticmethod(lambda: locks.append(threading.Lock()) or locks[-1])  # type: ignore[func-returns-value]
        Condition = threading.Condition

    def fetch(*words: object, **more: object) -> None:
        seen.append(any(each.locked() for each in locks))
        real(*words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "threading", Locks)
    monkeypatch.setattr(reader, "_fetch", fetch)
    into = bytearray(size)
    read(tables, layout, [Buffer(into)], threads=2, ceiling=CEILING)
    assert into == content
    assert seen == [large]


def test_a_small_chunk_has_no_large_window(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large another chunk is, beside which it stands."""
    monkeypatch.setattr(reader, "LARGE_CHUNK", 64 << 10)
    content = fill(1 << 20, "text")
    parameters = zstandard.ZstdCompressionParameters(window_log=20, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    blob = layout.add_blob(packer.compress(content[:PAGE]) + packer.flush())
    small = Chunk(0, PAGE, digest_of(content[:PAGE]), blob.digest, blob.size, "zstd")
    (large,) = save(layout, bytearray(content), chunk_size=1 << 20)
    tables = [Table(PAGE, (small,)), large]
    targets = [Buffer(bytearray(PAGE)), Buffer(bytearray(1 << 20))]
    with (
        pytest.raises(ChunkError, match="not valid zstd"),
        Reader(tables, layout, threads=2, ceiling=64 << 20) as reading,
    ):
        reading.deliver(targets)


class Silent:
    """Blobs of a file system that does not answer before `answered`."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.answered = layout, threading.Event()

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        self.answered.wait(60)
        return self.layout.open_blob(digest, size)

    def check_blob(self, wanted: Descriptor) -> None:
        self.layout.check_blob(wanted)


def test_blobs_that_never_come(layout: Layout) -> None:
    """The wait ends, and a worker that comes back later writes nothing."""
    before = set(threading.enumerate())
    tables, silent, target = save(layout, MIXED), Silent(layout), bytearray(len(MIXED))
    with pytest.raises(Stalled, match="nothing could be read"):
        read(tables, silent, [Far(target)], threads=2, ceiling=CEILING, patience=0.01)
    silent.answered.set()
    for worker in set(threading.enumerate()) - before:
        worker.join(60)
    assert target == bytes(len(MIXED))


def test_pieces_are_progress(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large blob from a slow disk counts as it arrives, not only as a whole."""
    monkeypatch.setattr(reader, "_PIECE", PAGE)
    content = bytearray(fill(8 * PAGE, "random"))
    tables, target = save(layout, content, chunk_size=8 * PAGE), bytearray(len(content))
    moved: list[None] = []
    monkeypatch.setattr(Crew, "note_progress", lambda crew: moved.append(None))
    read(tables, layout, [Far(target)], threads=1, ceiling=CEILING, patience=60)
    assert (target, len(moved)) == (content, 8)
