"""Blobs that the kernel is asked for before the runtime needs them."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import a_manifest, wait_for

from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.layout import Layout
from gpusnap.operations.restoring import read_ahead
from gpusnap.operations.restoring.read_ahead import reading_ahead
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest, RegionRecord

KIB = 1 << 10


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def table(layout: Layout, seed: int) -> Table:
    content = bytearray(random.Random(seed).randbytes(8 * KIB))
    (found,) = write([Buffer(content)], layout, threads=1, ceiling=64 << 20, chunk_size=4 * KIB, level=0)
    return found


@pytest.fixture
def record(layout: Layout) -> Manifest:
    """Two processes of one region, and CRIU's pages."""
    (process,) = a_manifest().processes
    processes = tuple(
        replace(process, pid=pid, regions=(RegionRecord(1 << 30, table(layout, pid)),)) for pid in (1, 2)
    )
    return replace(a_manifest(), processes=processes, files=(FileRecord("pages-1.img", table(layout, 3)),))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of the blobs that the kernel was asked for, in order."""
    found: list[str] = []

    def advise(descriptor: int, offset: int, size: int, advice: int) -> None:
        assert (offset, size, advice) == (0, 4 * KIB, os.POSIX_FADV_WILLNEED)
        found.append("sha256:" + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


def expected(record: Manifest) -> list[str]:
    """CRIU's pages first, then the processes' chunks side by side."""
    (pages,) = (each.table for each in record.files)
    one, other = (process.regions[0].table for process in record.processes)
    pairs = zip(one.chunks, other.chunks, strict=True)
    return [chunk.blob for chunk in (*pages.chunks, *(chunk for pair in pairs for chunk in pair))]


def test_in_the_order_of_the_runtime(layout: Layout, record: Manifest, asked: list[str]) -> None:
    """All of them, while the block runs."""
    with reading_ahead(layout, record):
        wait_for(lambda: len(asked) == 6, "all six")
    assert asked == expected(record)


def test_piece_by_piece(layout: Layout, record: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others want of the disk does not wait behind all of the memory."""
    seen: list[tuple[str, int, int]] = []
    pread = os.pread

    def advise(_: int, start: int, size: int, __: int) -> None:
        seen.append(("ask", start, size))

    def read(descriptor: int, size: int, start: int) -> bytes:
        if size == 1:
            seen.append(("wait", start, size))
        return pread(descriptor, size, start)

    monkeypatch.setattr(read_ahead, "_PIECE", 3 * KIB)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "pread", read)
    with reading_ahead(layout, record):
        wait_for(lambda: len(seen) == 6 * 4, "all six")
    once = [("ask", 0, 3 * KIB), ("wait", 3 * KIB - 1, 1), ("ask", 3 * KIB, KIB), ("wait", 4 * KIB - 1, 1)]
    assert seen == once * 6


def test_a_blob_that_is_not_there(layout: Layout, record: Manifest, asked: list[str]) -> None:
    """It is fetched from a registry later, or said to be missing by who needs it."""
    first, *others = expected(record)
    os.unlink(Path(layout.path, "blobs/sha256", first.removeprefix("sha256:")))
    with reading_ahead(layout, record):
        wait_for(lambda: len(asked) == 5, "the others")
    assert asked == others


def test_no_more_than_there_is_room_for(
    layout: Layout, record: Manifest, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read first would have to go for what is read last."""
    monkeypatch.setattr(proc, "available_memory", lambda: 16 * KIB + 2 * 3 * 4 * KIB)
    with reading_ahead(layout, record):
        wait_for(lambda: len(asked) == 3, "three")
    assert asked == expected(record)[:3]


def test_it_ends_with_the_block(layout: Layout, record: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads for a restore that is over."""
    begun, go_on, count = threading.Event(), threading.Event(), [0]

    def advise(*_: int) -> None:
        count[0] += 1
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    with reading_ahead(layout, record):
        assert begun.wait(60)
        threading.Timer(0.05, go_on.set).start()
    assert count[0] <= 2
    assert not [each for each in threading.enumerate() if each.name == "gpusnap-read-ahead"]


def test_a_disk_that_hangs(layout: Layout, record: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that never comes keeps nobody: the restore is over without it."""
    begun, go_on = threading.Event(), threading.Event()

    def advise(*_: int) -> None:
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(read_ahead, "_ENDING", 0.05)
    with reading_ahead(layout, record):
        assert begun.wait(60)
    (left,) = [each for each in threading.enumerate() if each.name == "gpusnap-read-ahead"]
    assert left.daemon, "Python would wait for it at its end"
    go_on.set()
    left.join(60)


def test_nothing_to_read(layout: Layout, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint without a GPU has no manifest of ours; and a host may give no thread."""
    with reading_ahead(layout, None):
        pass

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with reading_ahead(layout, None):
        pass
    assert asked == []
