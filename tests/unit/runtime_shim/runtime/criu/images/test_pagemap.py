"""A pagemap in two: what CRIU restores, and what is taken out of it."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from criu_images import PAGE, entry, image, numbers, pagemap
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.runtime_shim.runtime.criu.images import pagemap as reader
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, Source

PRESENT, LAZY, PARENT, HOLE = 4, 6, 1, 0
Run = tuple[int, int, int]


def source(data: bytes) -> Source:
    found = Source(io.BytesIO(data), len(data))
    found.begin("pagemap")
    return found


def split(data: bytes, *spans: tuple[int, int], smallest: int = PAGE) -> reader.Split | None:
    pages = [(start * PAGE, end * PAGE) for start, end in spans]
    return reader.split(source(data), pages, number=9, smallest=smallest)


def runs(*found: Run) -> bytes:
    return pagemap(1, [(at * PAGE, count, flags) for at, count, flags in found])


def contents(found: reader.Split) -> tuple[dict[int, int], dict[int, int]]:
    """By the number of each page, the page of the first pages file that CRIU and gpusnap put there."""
    kept = [offset // PAGE + at for offset, size in found.kept for at in range(size // PAGE)]
    shown: dict[int, int] = {}
    reading = source(found.image)
    assert reader.read_number(reading) == 9
    at = 0
    while reading.count_left:
        fields = dict(_fields(reading.message()))
        if fields[4] & PRESENT:
            for page in range(fields.get(5) or fields[2]):
                shown[fields[1] // PAGE + page] = kept[at]
                at += 1
    assert at == len(kept)
    written = {
        address // PAGE + page: offset // PAGE + page
        for address, offset, size in found.taken
        for page in range(size // PAGE)
    }
    return shown, written


def _fields(message: bytes) -> Sequence[tuple[int, int]]:
    """The numbers of a message, by field."""
    found, at = [], 0
    while at < len(message):
        both = []
        for _ in range(2):
            value = shift = 0
            while True:
                byte, at = message[at], at + 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            both.append(value)
        found.append((both[0] >> 3, both[1]))
    return found


def test_a_run_in_the_middle() -> None:
    """What is behind it is found in the second pages file, at another place."""
    data = runs((10, 2, PRESENT), (100, 8, PRESENT), (200, 3, HOLE), (300, 1, PRESENT))
    found = split(data, (90, 120))
    assert found is not None
    assert found.taken == [(100 * PAGE, 2 * PAGE, 8 * PAGE)]
    assert found.kept == [(0, 2 * PAGE), (10 * PAGE, PAGE)]
    assert found.image == pagemap(9, [(10 * PAGE, 2, 4), (200 * PAGE, 3, 0), (300 * PAGE, 1, 4)])
    assert found.pages == 11


def test_a_run_over_several_mappings() -> None:
    """Of each the part that lies in it; the rest, and what is too small, stays."""
    found = split(
        runs((0, 1, PRESENT), (100, 40, LAZY)), (90, 110), (112, 114), (120, 130), smallest=4 * PAGE
    )
    assert found is not None
    assert found.taken == [
        (100 * PAGE, PAGE, 10 * PAGE),
        (120 * PAGE, 21 * PAGE, 10 * PAGE),
    ]
    assert found.image == pagemap(9, [(0, 1, 4), (110 * PAGE, 10, 6), (130 * PAGE, 10, 6)])


def test_pages_as_criu_42_counts_them() -> None:
    """The parts of a run count their pages in the field that the run had."""
    head = entry(numbers((1, 1)))
    data = image("pagemap", head, entry(numbers((1, 100 * PAGE), (2, 0), (4, 4), (5, 10))))
    found = split(data, (104, 200))
    assert found is not None
    part = numbers((1, 100 * PAGE), (2, 0), (4, 4), (5, 4))
    assert found.image == image("pagemap", entry(numbers((1, 9))), entry(part))


def test_pages_of_an_old_image() -> None:
    """Without flags all runs are present."""
    data = image("pagemap", entry(numbers((1, 1))), entry(numbers((1, 100 * PAGE), (2, 10))))
    found = split(data, (104, 200))
    assert found is not None
    part = numbers((1, 100 * PAGE), (2, 4))
    assert found.image == image("pagemap", entry(numbers((1, 9))), entry(part))


@pytest.mark.parametrize(
    "data",
    [
        runs((100, 8, PRESENT)),
        runs((1, 1, PRESENT), (10, 2, PRESENT)),
        runs((1, 1, PRESENT), (50, 1, PARENT), (100, 8, PRESENT)),
        runs((1, 1, PRESENT), (104, 8, PRESENT), (100, 8, PRESENT)),
        runs((1, 1, PRESENT), (98, 8, HOLE), (100, 8, PRESENT)),
        runs((1, 100, PRESENT), (100, 8, PRESENT)),
        pagemap(1, [(PAGE, 1, 4), (100 * PAGE + 1, 8, 4)]),
        image("pagemap", entry(numbers((1, 1))), entry(numbers((2, 1), (4, 4))), entry(numbers((1, 409600)))),
    ],
    ids=[
        "nothing left",
        "nothing there",
        "an earlier dump's",
        "not sorted",
        "overlaps",
        "overlaps too",
        "no page",
        "no address",
    ],
)
def test_left_to_criu(data: bytes) -> None:
    assert split(data, (90, 120)) is None


def test_counts_without_end() -> None:
    """A run that no file can hold is no other than one of many pages: the size of the file tells it."""
    found = split(runs((1, 1, PRESENT), (100, 1 << 50, PRESENT)), (90, 120))
    assert found is not None
    assert found.pages == (1 << 50) + 1


def test_cut_short() -> None:
    with pytest.raises(Damage):
        split(runs((1, 1, PRESENT), (100, 8, PRESENT))[:-1], (90, 120))


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 9), st.sampled_from([PRESENT, LAZY, HOLE])), min_size=1
    ),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=6),
    st.integers(1, 4),
)
def test_every_page_comes_back(
    gaps: list[tuple[int, int, int]], holes: list[tuple[int, int]], smallest: int
) -> None:
    """Whatever is taken out, each page that was present gets what it had, from one of the two."""
    found, spans, at = [], [], 0
    for gap, count, flags in gaps:
        found.append((at := at + gap, count, flags))
        at += count
    start = 0
    for gap, length in holes:
        start += gap
        spans.append((start, start + length))
        start += length
    result = split(runs(*found), *spans, smallest=smallest * PAGE)
    if result is None:
        return
    shown, written = contents(result)
    present = [(at, count) for at, count, flags in found if flags & PRESENT]
    pages = [first + page for first, count in present for page in range(count)]
    assert not shown.keys() & written.keys()
    assert shown | written == {page: at for at, page in enumerate(pages)}
    assert all(any(low <= page < high for low, high in spans) for page in written)
