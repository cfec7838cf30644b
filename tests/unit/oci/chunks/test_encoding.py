"""Which encoding a chunk gets: by what a restore takes where that is known, and else by size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planes import weights

from gpusnap.oci.chunks import encoding, planes
from gpusnap.oci.chunks.buffers import Buffer, Memory
from gpusnap.oci.chunks.encoding import ZSTD, Candidate, DecodeTimes, EncodingChooser, ReadSpeed, choose
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.reader import read
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.chunks.writer import worker_memory, write
from gpusnap.oci.layout.layout import Layout

MIB, GIB = 1 << 20, 1 << 30
CEILING = 64 * MIB
# Seconds for each byte, about those of a core of an EPYC.
PLAIN = Candidate(1, 1 / (1.5 * GIB))
PLANES = Candidate(0.68, 1 / (0.95 * GIB))
PACKED = Candidate(0.78, 1 / (0.7 * GIB))


class Fixed(DecodeTimes):
    """Times that were not measured: seconds for each byte, by what is done."""

    def __init__(self, **seconds: float) -> None:
        super().__init__()
        self.seconds = {"copy": 0.1, "hash": 0.6, "planes 2": 0.4, "planes 4": 0.4, "zstd": 0.8, **seconds}

    def of(self, what: str, left: float, size: int, prepare: Callable[[], Callable[[], object]]) -> float:
        return self.seconds[what] / GIB


def speed(disk: float, threads: int = 1, times: DecodeTimes | None = None) -> ReadSpeed:
    return ReadSpeed(disk, threads, times if times is not None else Fixed())


@pytest.mark.parametrize(
    ("disk", "threads", "chosen"),
    [
        (1 * GIB, 1, 2),  # the disk takes longer than one thread
        (1 * GIB, 12, 2),
        (2 * GIB, 12, 2),
        (5 * GIB, 1, None),  # one thread takes longer than the disk: to decode costs
        (5 * GIB, 12, 2),
        (20 * GIB, 12, None),
    ],
)
def test_a_fast_disk_and_few_threads(disk: float, threads: int, chosen: int | None) -> None:
    """Weights are plain where to decode them takes longer than the disk saves."""
    assert choose(PLAIN, {2: PLANES, ZSTD: PACKED}, speed(disk, threads)) == chosen


@pytest.mark.parametrize(("times", "chosen"), [(1.24, 2), (1.26, None)])
def test_plain_only_where_it_is_clearly_quicker(times: float, chosen: int | None) -> None:
    """It takes more room, and a user expects compression."""
    assert choose(PLAIN, {2: Candidate(0.7, PLAIN.seconds * times)}, speed(1 << 50)) == chosen


@pytest.mark.parametrize(("left", "chosen"), [(0.24, ZSTD), (0.26, None)])
def test_what_is_nearly_nothing_is_compressed(left: float, chosen: int | None) -> None:
    """However long that takes."""
    assert choose(PLAIN, {ZSTD: Candidate(left, PLAIN.seconds * 9)}, speed(1 << 50)) == chosen


@pytest.mark.parametrize(("times", "chosen"), [(1.24, ZSTD), (1.26, 4)])
def test_planes_only_where_they_are_clearly_quicker(times: float, chosen: int) -> None:
    """Than what is smaller; and plain only where it is clearly quicker than these."""
    packed = {ZSTD: Candidate(0.5, PLAIN.seconds * 1.2 * times), 4: Candidate(0.6, PLAIN.seconds * 1.2)}
    assert choose(Candidate(1, PLAIN.seconds * times * 0.99), packed, speed(1 << 50)) == chosen


def test_nothing_is_worth_it() -> None:
    """Noise is plain on any disk."""
    assert choose(PLAIN, {}, speed(1.0)) is None


_PARTS, _SECONDS = st.floats(0.25, 0.96), st.floats(1e-11, 1e-8)


@given(
    st.lists(st.tuples(_PARTS, _SECONDS), min_size=3, max_size=3),
    st.floats(1e8, 1e11),
    st.integers(1, 64),
)
def test_it_is_never_far_from_the_shortest(
    found: list[tuple[float, float]], disk: float, threads: int
) -> None:
    """No other way would be much shorter; plain is never chosen for little."""
    packed = dict(zip((2, 4, ZSTD), (Candidate(*each) for each in sorted(found)), strict=True))
    costs = {width: each.cost(speed(disk, threads)) for width, each in packed.items()}
    plain = PLAIN.cost(speed(disk, threads))
    chosen = choose(PLAIN, packed, speed(disk, threads))
    found_cost = plain if chosen is None else costs[chosen]
    assert found_cost <= 1.25 * min(plain, *costs.values())
    smallest = next(iter(packed))
    assert chosen == smallest or found_cost * 1.25 <= costs[smallest] * (1 + 1e-9)


# Measuring


def test_a_time_is_measured_once() -> None:
    """The shortest of five, for each byte; anew for data of which another tenth is left."""
    took = [9.0, 8.0, 4.0, 7.0, 5.0, 3.0, 2.0, 1.0, 6.0, 6.0]
    ticks = itertools.accumulate(tick for each in took for tick in (100.0, each))
    times = DecodeTimes(lambda: next(ticks))
    did: list[str] = []
    assert times.of("zstd", 0.41, 2, lambda: lambda: did.append("a")) == 2.0
    assert times.of("zstd", 0.49, 2, lambda: lambda: did.append("b")) == 2.0
    assert times.of("zstd", 0.51, 2, lambda: lambda: did.append("c")) == 0.5
    assert did == ["a"] * 5 + ["c"] * 5


def test_what_is_measured(layout: Layout) -> None:
    """To copy, to decode and to hash; where each takes as long, planes of weights cost 1.34 times plain."""
    ticks = itertools.count()
    times = DecodeTimes(lambda: float(next(ticks)))
    assert kinds(stored(layout, WEIGHTS, speed(1 << 60, times=times))) == ["plain"]
    assert next(ticks) == 2 * 5 * 5, "copy, hash, zstd and two widths, five times each"
    assert kinds(stored(layout, TEXT, speed(1 << 60, times=times))) == ["zstd"], "of it 1 % is left"


def test_samples_are_really_decoded(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is what a restore does."""
    found: list[int] = []
    join = planes.join

    def counted(plain: memoryview, low: memoryview, top: memoryview, width: int) -> None:
        join(plain, low, top, width)
        found.append(plain.nbytes)

    monkeypatch.setattr(planes, "join", counted)
    stored(layout, WEIGHTS, speed(1.0, times=DecodeTimes()))
    assert sum(found) == 2 * 5 * 4 * encoding.SAMPLE


@pytest.mark.parametrize("installed", [True, False])
def test_samples_are_hashed_as_by_a_restore(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """By BLAKE3 where it is installed, else by SHA-256."""
    by: list[str] = []

    def compute(plain: memoryview) -> str:
        by.append("blake3")
        return "ab" * installed

    monkeypatch.setattr(encoding, "compute_blake3", compute)
    monkeypatch.setattr(encoding, "digest_of", lambda _: by.append("sha256"))
    stored(layout, WEIGHTS, speed(1.0, times=DecodeTimes()))
    assert by == (["blake3"] * 5 if installed else ["blake3", "sha256"] * 5)


# Written


WEIGHTS = weights(MIB // 2, 2)
TEXT = (b"what a model has to say " * (MIB // 24 + 1))[:MIB]
NOISE = random.Random(1).randbytes(MIB)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def stored(layout: Layout, content: bytes, at: ReadSpeed | None, known: Known | None = None) -> Table:
    (found,) = write(
        [Buffer(bytearray(content))],
        layout,
        threads=2,
        ceiling=CEILING,
        chunk_size=MIB,
        speed=at,
        known=known,
    )
    return found


def kinds(table: Table) -> list[str]:
    return [chunk.encoding for chunk in table.chunks]


def blobs(layout: Layout) -> int:
    return len(list(Path(layout.path, "blobs/sha256").iterdir()))


@pytest.mark.parametrize(
    ("at", "chosen"),
    [
        (None, ["planes", "zstd", "plain"]),
        (speed(GIB / 2), ["planes", "zstd", "plain"]),
        (speed(20 * GIB), ["plain", "zstd", "plain"]),
        (speed(20 * GIB, 64), ["planes", "zstd", "plain"]),
    ],
    ids=["unknown", "slow", "fast", "fast, many threads"],
)
def test_there_and_back(layout: Layout, at: ReadSpeed | None, chosen: list[str]) -> None:
    """Each chunk in its encoding, and all bytes come back."""
    table = stored(layout, WEIGHTS + TEXT + NOISE, at)
    assert kinds(table) == chosen
    found = bytearray(table.size)
    read([table], layout, [Buffer(found)], threads=2, ceiling=CEILING)
    assert found == WEIGHTS + TEXT + NOISE


def test_zstd_instead_of_planes(layout: Layout) -> None:
    """Where planes take a thread longer."""
    slow = Fixed(**{"planes 2": 9.0, "planes 4": 9.0, "zstd": 0.01})
    assert kinds(stored(layout, WEIGHTS, speed(20 * GIB, times=slow))) == ["zstd"]


def test_unknown_is_by_size(layout: Layout, tmp_path: Path) -> None:
    """As on a disk beside which no decoding counts."""
    other = Layout(tmp_path / "other").create()
    content = WEIGHTS + weights(MIB // 4, 4) + TEXT + NOISE
    assert stored(layout, content, None) == stored(other, content, speed(1.0))


@pytest.mark.parametrize("first", [None, speed(20 * GIB)], ids=["planes", "plain"])
def test_a_chunk_that_is_known_stays_as_it_is(
    layout: Layout, tmp_path: Path, first: ReadSpeed | None
) -> None:
    """A disk that is found to be another one stores no chunk again."""
    table = stored(layout, WEIGHTS, first)
    known = Known(tmp_path / "known.json")
    known.learn([table], layout)
    other = Layout(tmp_path / "other").create()
    again = stored(other, WEIGHTS, None if first is not None else speed(20 * GIB), known)
    assert again == table
    assert blobs(other) == 1


def test_the_same_bytes_twice(layout: Layout) -> None:
    """Whatever the clock says: two workers that meet them at the same time choose alike."""
    rng = random.Random(7)
    lengths = DecodeTimes(lambda: rng.random())
    table = stored(layout, WEIGHTS * 8, speed(4 * GIB, times=lengths))
    assert len({(chunk.blob, chunk.encoding) for chunk in table.chunks}) == 1
    assert blobs(layout) == 1


def test_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker needs has room for a chooser, which holds no more."""
    chooser = EncodingChooser(speed(GIB))
    own = [each for each in vars(chooser).values() if isinstance(each, Memory)]
    assert GIB > encoding.MEMORY > sum(each.view.nbytes for each in own) > 0
    chooser.free()
    need = worker_memory(MIB, 1)
    monkeypatch.setattr(encoding, "MEMORY", encoding.MEMORY + GIB)
    assert worker_memory(MIB, 1) == need + GIB
