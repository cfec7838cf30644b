"""What is in checkpoints, and what two of them share."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import CHUNK, START, noise, with_memory
from fakes import a_manifest, gpu, uuid
from hypothesis import given, settings
from hypothesis import strategies as st
from oci_regions import PAGE, save

from gpusnap.checkpoints.statistics import Span, compare, compare_tables, find_shared, parts, statistics
from gpusnap.oci.chunks.table import Chunk, Table, make_table
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.records.manifest import GpuProcess, GpuRecord


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An empty one."""
    return Layout(tmp_path / "layout").create()


def test_parts(layout: Layout) -> None:
    """Regions with their process and address, then images by name; none without a manifest."""
    record = with_memory(layout, noise(1, 1), noise(2, 2), images={"pages-1.img": noise(3, 3)})
    found = [(part.process, part.name, part.table.size // CHUNK) for part in parts(record)]
    address = f"{START:x}", f"{START + (1 << 24):x}"
    assert found == [(1, address[0], 1), (1, address[1], 2), (None, "pages-1.img", 3)]
    assert parts(None) == ()


def test_statistics(layout: Layout) -> None:
    """Zeros, chunks that occur again, and blobs that are there once, whatever uses them."""
    text = bytearray(b"the same line, again and again. " * (CHUNK // 32))
    region = noise(2, 1) + bytearray(3 * CHUNK) + noise(2, 1) + text
    found = statistics(with_memory(layout, region, images={"pages-1.img": noise(2, 1)}))
    assert (found.size, found.zero, found.repeated) == (10 * CHUNK, 3 * CHUNK, 4 * CHUNK)
    assert (found.chunks, found.blobs, found.plain, found.zstd) == (7, 3, 2, 1)
    assert 2 * CHUNK < found.stored < 3 * CHUNK
    assert found.ratio == round(found.size / found.stored, 3)


def test_statistics_of_nothing() -> None:
    """No division by zero where nothing is in chunks."""
    assert statistics(None) == statistics(a_manifest())
    assert statistics(None).ratio == 0.0


def test_shared() -> None:
    """By bytes, the most first; a share of nothing is not told."""
    own = {"a": 30, "b": 50, "c": 20}
    found = find_shared(
        own, [("x", (), {"a": 30}), ("y", ("n",), {"b": 50, "a": 30, "z": 9}), ("z", (), {"q": 1})]
    )
    assert [(each.digest, each.size, each.share) for each in found] == [("y", 80, 0.8), ("x", 30, 0.3)]
    assert found[0].names == ("n",)


def model(a: bytes, b: bytes) -> Span:
    """What a comparison of page after page finds."""
    pages = range(0, min(len(a), len(b)), PAGE)
    same = sum(
        len(a[at : at + PAGE][: min(len(a), len(b)) - at])
        for at in pages
        if a[at : at + PAGE] == b[at : at + PAGE]
    )
    end = min(len(a), len(b))
    return Span(same, end - same, len(a) - end, len(b) - end)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_compare_tables(tmp_path_factory: pytest.TempPathFactory, one: list[int], other: list[int]) -> None:
    """The same as bytes that are compared chunk by chunk, zeros and ends included."""
    layout = Layout(tmp_path_factory.mktemp("layout")).create()
    memory = [
        bytearray(b"".join(bytes(PAGE) if kind == 0 else bytes(noise(1, kind)) for kind in kinds))
        for kinds in (one, other)
    ]
    a, b = save(layout, *memory)
    assert compare_tables(a, b) == model(*map(bytes, memory))


def test_compare_tables_of_other_chunk_sizes() -> None:
    """Chunks that do not lie alike are changed, where both are zero it is the same."""

    def table(size: int, *chunks: tuple[int, int]) -> Table:
        made = [
            Chunk(
                at,
                length,
                digest := f"sha256:{random.Random(at).randbytes(32).hex()}",
                digest,
                length,
                "plain",
            )
            for at, length in chunks
        ]
        return make_table(size, made)

    a, b = table(100, (0, 10), (40, 20)), table(90, (0, 20), (40, 20))
    assert compare_tables(a, b) == Span(same=70, changed=20, only_a=10)


def test_compare(layout: Layout) -> None:
    """Regions and images of A, of B, of both, and what B needs beside A."""
    first, second = noise(4, 1), noise(4, 1)
    second[CHUNK : 2 * CHUNK] = noise(1, 9)
    a = with_memory(layout, first, noise(2, 3), images={"pages-1.img": noise(1, 5)})
    b = with_memory(layout, second, images={"pages-1.img": noise(1, 5), "pages-2.img": noise(2, 6)})
    found = compare(a, b)
    assert [each.span for each in found.parts] == [
        Span(same=3 * CHUNK, changed=CHUNK),
        Span(only_a=2 * CHUNK),
        Span(same=CHUNK),
        Span(only_b=2 * CHUNK),
    ]
    assert found.total == Span(4 * CHUNK, CHUNK, 2 * CHUNK, 2 * CHUNK)
    assert (found.new.blobs, found.new.size) == (3, 3 * CHUNK)
    assert compare(a, a).new.size == 0


def test_compare_processes_and_gpus() -> None:
    """By PID and by UUID: only in one, in both, and there with another command."""
    base = a_manifest(pids=(1, 2, 3))
    other = GpuProcess(9, "python3", ("python3",), ((uuid(0), 1),))
    changed = replace(base.processes[1], command=("sleep", "601"))
    second = gpu(1)
    card = GpuRecord(second.uuid, 1, 1, second.model, "9.0", 80 << 30, 5)
    found = compare(
        base, replace(base, processes=(base.processes[0], changed, other), gpus=(*base.gpus, card))
    )
    assert found.processes_same == 1
    assert [(a.command[1], b.command[1]) for a, b in found.processes_changed] == [("600", "601")]
    assert [process.pid for process in found.processes_only_a] == [3]
    assert [process.pid for process in found.processes_only_b] == [9]
    assert [a.uuid for a, _ in found.gpus_both] == [uuid(0)]
    assert [each.uuid for each in found.gpus_only_b] == [uuid(1)]
    assert compare(None, base).processes_only_b == base.processes
    assert compare(base, None).gpus_only_a == base.gpus
