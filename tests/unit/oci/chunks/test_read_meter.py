"""What a disk delivers: bytes that came from it, against the time in which it was read."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest
from fakes import evict

from gpusnap.oci.chunks.read_meter import ReadMeter, in_page_cache

MIB = 1 << 20
LARGE = 256 * MIB
FILE = io.FileIO(os.devnull)
FILE.close()  # nothing reads it, and Python warns of files that are open at its end


class Clock:
    """One that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> ReadMeter:
    """Blobs of an odd size are in the page cache."""
    return ReadMeter(clock, lambda file, size: size % 2 == 1)


class Worker:
    """A thread that reads when it is told to: what a meter knows is by thread."""

    def __init__(self, meter: ReadMeter) -> None:
        self._meter = meter

    def begin(self, size: int) -> None:
        self._go, self._begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, args=(size,))
        self._thread.start()
        assert self._begun.wait(10)

    def end(self) -> None:
        self._go.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _read(self, size: int) -> None:
        self._meter.note_opened(FILE, size)
        with self._meter.around():
            self._begun.set()
            self._go.wait(10)


@pytest.fixture
def workers(meter: ReadMeter) -> list[Worker]:
    return [Worker(meter), Worker(meter)]


def test_two_at_once(meter: ReadMeter, workers: list[Worker], clock: Clock) -> None:
    """The time in which both read counts once, and that in which none does not at all."""
    one, two = workers
    clock.now = 10
    one.begin(LARGE)
    clock.now = 11
    two.begin(LARGE)
    clock.now = 13
    one.end()
    clock.now = 14
    two.end()
    assert meter.rate == 2 * LARGE / 4
    clock.now = 20
    one.begin(2 * LARGE)
    clock.now = 24
    one.end()
    assert meter.rate == 4 * LARGE / 8


def test_what_is_in_the_page_cache_does_not_count(
    meter: ReadMeter, workers: list[Worker], clock: Clock
) -> None:
    """Neither its bytes nor its time."""
    one, two = workers
    one.begin(LARGE)
    clock.now = 1
    one.end()
    two.begin(LARGE + 1)
    clock.now = 5
    two.end()
    assert meter.rate == LARGE


def test_little_says_nothing(meter: ReadMeter, workers: list[Worker], clock: Clock) -> None:
    """Some blobs are no measure."""
    workers[0].begin(LARGE - 2)
    clock.now = 1
    workers[0].end()
    assert meter.rate is None


def test_no_time_says_nothing(meter: ReadMeter, workers: list[Worker]) -> None:
    """A clock that stands still is no disk without end."""
    workers[0].begin(LARGE)
    workers[0].end()
    assert meter.rate is None


def test_what_failed_was_not_read(meter: ReadMeter, clock: Clock) -> None:
    """Its bytes do not count; what is around it learns of the error, and is left."""
    semaphore = threading.Semaphore(1)

    def fail() -> None:
        meter.note_opened(FILE, LARGE)
        with meter.around(semaphore):
            assert not semaphore.acquire(blocking=False)
            clock.now = 1
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert semaphore.acquire(blocking=False)
    assert meter.rate is None


def test_a_read_of_something_else(meter: ReadMeter, clock: Clock) -> None:
    """A blob counts for one read; whoever reads what nobody has named is not counted."""
    meter.note_opened(FILE, LARGE)
    for _ in range(2):
        with meter.around():
            clock.now += 1
    assert meter.rate == LARGE


@pytest.mark.parametrize(("there", "cached"), [((), False), ((0,), True), ((MIB - 1,), True)])
def test_the_page_cache(tmp_path: Path, there: tuple[int, ...], cached: bool) -> None:
    """A file that was just written is there, and not once the kernel has dropped it but for one end."""
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(MIB))
    with io.FileIO(path) as file:
        if not os.major(os.fstat(file.fileno()).st_dev):
            pytest.skip("the folder is on no disk")
        assert in_page_cache(file, MIB)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        evict(file)
        for offset in there:
            os.pread(file.fileno(), 1, offset)
        for _ in range(100):  # to ask has nothing read
            assert in_page_cache(file, MIB) == cached


@pytest.mark.parametrize("drop", [True, False])
def test_a_blob_leaves_the_page_cache_as_it_was(tmp_path: Path, drop: bool) -> None:
    """What was there before stays there; what was read from the disk stays without `drop` only."""
    meter = ReadMeter(drop=drop)
    for name, before in (("there", True), ("elsewhere", False)):
        path = tmp_path / name
        path.write_bytes(os.urandom(MIB))
        with io.FileIO(path) as file:
            if not os.major(os.fstat(file.fileno()).st_dev):
                pytest.skip("the folder is on no disk")
            os.fsync(file.fileno())
            if not before:
                evict(file)
            meter.note_opened(file, MIB)
            with meter.around():
                assert len(file.read()) == MIB
            assert in_page_cache(file, MIB) == (before or not drop)


def test_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    """It is taken for cached, so that it is not counted: here for a pipe."""
    reading, writing = os.pipe()
    with io.FileIO(reading) as file, io.FileIO(writing, "w"):
        assert in_page_cache(file, MIB)
