"""Chunks that are written while somebody still fills their region."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import wait_for

from gpusnap.oci.chunks import writer as writing
from gpusnap.oci.chunks.encoding import ReadSpeed
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.reader import read
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.process.memory.tmpfs import Area
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory.capture import interleave
from gpusnap.runtime_shim.snapshot.memory.write_ahead import EarlyWriter

SIZE = 64 << 10
CHUNKS = 32
MEMORY = Memory(chunk_size=SIZE, threads=6)


@pytest.fixture
def area(tmp_path: Path) -> Iterator[Area]:
    found = Area(str(tmp_path / "area"), 0x7F0000000000, SIZE * CHUNKS, new=True)
    yield found
    found.close()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def fill(area: Area, at: int, data: bytes) -> None:
    area.view(at, len(data))[:] = data


def blobs(layout: Layout) -> set[str]:
    return {f"sha256:{name}" for name in os.listdir(Path(layout.path) / "blobs" / "sha256")}


def test_what_is_there_is_written_ahead(area: Area, layout: Layout) -> None:
    """While it is filled from the beginning; then nothing is left to write but the end, and all is right."""
    early = EarlyWriter(layout, MEMORY, None)
    early.begin(area)
    content = os.urandom(SIZE * CHUNKS)
    for at in range(0, SIZE * CHUNKS, SIZE):
        fill(area, at, content[at : at + SIZE])
        # The one that is being filled is never among them.
        wait_for(lambda at=at: len(blobs(layout)) >= at // SIZE, "the chunks before it")  # type: ignore[misc]
    met = early.end()
    assert len(met) == CHUNKS - 1
    assert [early.is_written(area, at) for at in range(0, SIZE * CHUNKS, SIZE)] == [True] * (CHUNKS - 1) + [
        False
    ]
    written: list[str] = []
    limits = {"threads": 2, "ceiling": 64 << 20}
    (table,) = writing.write(
        [area],
        layout,
        chunk_size=SIZE,
        trust=False,
        written_before=met,
        on_written=written.append,
        **limits,  # type: ignore[arg-type]
    )
    assert len(written) == 1
    assert early.count_chunks([table]).stored == (CHUNKS - 1) * SIZE
    back = Area(area.path + ".back", 0, area.size, new=True)
    read([table], layout, [back], threads=2, ceiling=64 << 20)
    assert bytes(back.view(0, back.size)) == content
    back.close()


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [("", "", ""), ("abc", "", "abc"), ("", "12", "12"), ("abcd", "12", "a1bc2d"), ("ab", "1234", "a12b34")],
)
def test_both_evenly(first: str, second: str, both: str) -> None:
    """None waits until the others are done."""
    assert "".join(interleave(first, second)) == both


def test_for_the_disk_that_it_is_read_from(
    area: Area, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses encodings as the writing at the end will."""
    speed, asked = ReadSpeed(5 << 30, 2), list[object]()

    def write(*given: object, speed: object, **options: object) -> tuple[Table, ...]:
        asked.append(speed)
        return (Table(area.size, ()),)

    monkeypatch.setattr(writing, "write", write)
    early = EarlyWriter(layout, MEMORY, None, speed)
    early.begin(area)
    early.end()
    assert asked == [speed]


def test_a_wrong_guess_costs_a_blob(area: Area, layout: Layout) -> None:
    """A chunk that changes after it was written ahead is written again, as what it is."""
    early = EarlyWriter(layout, MEMORY, None)
    fill(area, 0, b"half" + bytes(SIZE - 4))
    fill(area, SIZE, b"begun")
    early.begin(area)
    wait_for(lambda: blobs(layout), "a chunk")
    met = early.end()
    content = os.urandom(SIZE)
    fill(area, 0, content)
    (table,) = writing.write(
        [area], layout, threads=2, ceiling=64 << 20, chunk_size=SIZE, trust=False, written_before=met
    )
    assert early.count_chunks([table]).stored == 0
    back = Area(area.path + ".back", 0, area.size, new=True)
    read([table], layout, [back], threads=2, ceiling=64 << 20)
    assert bytes(back.view(0, SIZE)) == content
    back.close()


def test_zeros_in_between(area: Area, layout: Layout) -> None:
    """It looks over what stays zero to what does not, and writes no zeros."""
    early = EarlyWriter(layout, MEMORY, None)
    early.begin(area)
    fill(area, 0, os.urandom(SIZE))
    fill(area, 20 * SIZE, os.urandom(SIZE))
    fill(area, 21 * SIZE, os.urandom(SIZE))
    wait_for(lambda: len(blobs(layout)) == 2, "the first and the one before the last")
    assert len(early.end()) == 2


def test_known_chunks_are_linked(area: Area, layout: Layout, tmp_path: Path) -> None:
    """Those of an earlier checkpoint are not written, and count as known."""
    content = os.urandom(4 * SIZE)
    fill(area, 0, content)
    store = Layout(tmp_path / "store").create()
    tables = writing.write([area], store, threads=2, ceiling=64 << 20, chunk_size=SIZE)
    known = Known(tmp_path / "known.json")
    known.learn(tables, store)
    early = EarlyWriter(layout, MEMORY, known)
    early.begin(area)
    wait_for(lambda: len(blobs(layout)) == 3, "all but the last")
    met = early.end()
    counted = early.count_chunks(tables)
    assert (counted.stored, counted.known) == (0, len(met) * SIZE)


def test_nothing_here_fails(area: Area, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is for the writing itself to say; so is a region that was let go of."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    early = EarlyWriter(layout, MEMORY, None)
    with monkeypatch.context() as patched:
        patched.setattr(Layout, "add_blob", full)
        fill(area, 0, os.urandom(8 * SIZE))
        early.begin(area)
        wait_for(lambda: "gpusnap-early" not in [each.name for each in threading.enumerate()], "its end")
    assert early.end() == {}
    area.close()
    early = EarlyWriter(layout, MEMORY, None)
    early.begin(area)
    assert early.end() == {}


@pytest.mark.parametrize("name", ["gpusnap-early", "gpusnap-oci"])
def test_no_more_threads(
    area: Area, layout: Layout, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """Neither one that watches nor one that writes: nothing is written ahead, and it ends without a word."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        real(thread)

    hooked: list[object] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    monkeypatch.setattr(threading.Thread, "start", start)
    fill(area, 0, os.urandom(8 * SIZE))
    early = EarlyWriter(layout, MEMORY, None)
    early.begin(area)
    assert early.end() == {}
    assert early.end() == {}
    assert (hooked, capfd.readouterr().err) == ([], "")


def test_an_empty_region(area: Area, layout: Layout) -> None:
    """Zeros all the way: there is nothing to write, and it ends when it is told to."""
    early = EarlyWriter(layout, MEMORY, None)
    early.begin(area)
    assert early.end() == {}
    assert early.end() == {}
    assert blobs(layout) == set()
