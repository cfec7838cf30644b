"""Tables of chunks, and the regions that they stand for: what is read is what was written."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oci_regions import PAGE, fill, load, region, save, text

from gpusnap.oci.base.errors import ChunkError, OciError
from gpusnap.oci.chunks.buffers import Buffer, File, Memory, is_zero
from gpusnap.oci.chunks.table import Chunk, Encoding, Table, descriptors, from_json, make_table, to_json
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.layout import Layout

A, B = digest_of(b"a"), digest_of(b"b")
PACKED = Chunk(0, PAGE, A, B, 100, "zstd")
PLAIN = Chunk(PAGE, PAGE, A, A, PAGE, "plain")


def in_json(table: Table) -> Table:
    return from_json(json.loads(json.dumps(to_json(table))))


@settings(max_examples=60, deadline=None)
@given(
    regions=st.lists(region(), max_size=3),
    chunk_size=st.integers(1, 4).map(lambda pages: pages * PAGE),
    level=st.sampled_from([0, 1, 3]),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    regions: list[bytearray],
    chunk_size: int,
    level: int,
) -> None:
    """Regions of any size and content come back as they were."""
    layout = Layout(tmp_path_factory.mktemp("layout")).create()
    tables = save(layout, *regions, chunk_size=chunk_size, level=level)
    for table, data in zip(tables, regions, strict=True):
        assert in_json(table) == table
        for chunk in table.chunks:
            assert chunk.offset % chunk_size == 0
            assert chunk.plain == digest_of(data[chunk.offset : chunk.offset + chunk.size])
        assert all(not any(data[offset : offset + size]) for offset, size in table.gaps())
        assert sum(size for _, size in table.gaps()) + sum(c.size for c in table.chunks) == len(data)
    assert load(layout, tables) == regions


def test_encodings(tmp_path: Path) -> None:
    """Zeros have no entry, what zstd makes smaller is packed, what it does not is plain."""
    size = 1 << 20
    data = bytearray(fill(size, "text") + fill(size, "random") + bytes(size))
    (table,) = save(Layout(tmp_path).create(), data, chunk_size=size)
    assert [chunk.encoding for chunk in table.chunks] == ["zstd", "plain"]
    assert table.chunks[0].stored < size / 20
    assert list(table.gaps()) == [(2 * size, size)]
    (table,) = save(Layout(tmp_path).create(), data, chunk_size=size, level=0)
    assert [chunk.encoding for chunk in table.chunks] == ["plain", "plain"]


def test_the_sample_is_not_the_last_word(tmp_path: Path) -> None:
    """Where the sample is of text and the rest is not, the chunk is stored plain all the same."""
    size, piece = 4 << 20, 64 << 10
    data = bytearray(fill(size, "random"))
    for at in range(4):
        begin = at * ((size - piece) // 3)
        data[begin : begin + piece] = text(piece)
    data[: size // 2 - piece] = fill(size // 2 - piece, "random", 1)
    (table,) = save(Layout(tmp_path).create(), data, chunk_size=size)
    assert load(Layout(tmp_path), (table,)) == [data]
    assert table.chunks[0].stored <= size


def test_zstd_reads_them(tmp_path: Path) -> None:
    """A packed blob is one zstd frame that says its size, as any zstd program reads it."""
    import zstandard

    data = bytearray(text(10 * PAGE))
    (table,) = save(Layout(tmp_path).create(), data, chunk_size=16 * PAGE)
    with Layout(tmp_path).open_blob(table.chunks[0].blob) as file:
        packed = file.read()
    assert zstandard.frame_content_size(packed) == len(data)
    assert zstandard.ZstdDecompressor().decompress(packed) == data


def test_descriptors() -> None:
    """Each blob is one layer, in the order of first use, its media type that of its encoding."""
    table = make_table(4 * PAGE, [PACKED, PLAIN, replace(PACKED, offset=3 * PAGE)])
    assert [(each.digest, each.size) for each in descriptors([table, table])] == [(B, 100), (A, PAGE)]
    assert [each.media_type[-5:] for each in descriptors([table])] == ["+zstd", "nk.v1"]
    assert table.stored == PAGE + 200


@pytest.mark.parametrize(
    ("size", "chunks", "words"),
    [
        (-1, [], "a region cannot have -1 bytes"),
        (1 << 60, [], "a region cannot have"),
        (PAGE, [replace(PACKED, offset=-1)], "chunk 0 at -1 begins before"),
        (9 * PAGE, [PACKED, replace(PLAIN, offset=PAGE - 1)], "chunk 1 at 4095 begins before"),
        (9 * PAGE, [PLAIN, PACKED], "chunk 1 at 0 begins before"),
        (PAGE - 1, [PACKED], "chunk 0 at 0 extends beyond the end"),
        (PAGE, [replace(PACKED, size=0)], "size of 0"),
        (1 << 40, [replace(PACKED, size=1 << 31)], "size of 2147483648"),
        (PAGE, [replace(PACKED, stored=0)], "blob of 0 bytes"),
        (PAGE, [replace(PACKED, stored=PAGE + 1)], "blob of 4097 bytes"),
        (PAGE, [replace(PACKED, blob="sha256:../../x")], "an invalid digest"),
        (PAGE, [replace(PACKED, plain="sha512:" + "0" * 128)], "an invalid digest"),
        (9 * PAGE, [replace(PLAIN, blob=B)], "stored plain, but"),
        (9 * PAGE, [replace(PLAIN, stored=5)], "stored plain, but"),
        (PAGE, [replace(PACKED, encoding=cast(Encoding, "lz4"))], "unknown encoding 'lz4'"),
    ],
)
def test_bad_tables(size: int, chunks: list[Chunk], words: str) -> None:
    """Every number that cannot be right is refused, with the chunk that has it."""
    with pytest.raises(ChunkError, match=words):
        make_table(size, chunks)


def test_too_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More chunks than any region has are refused before they are looked at."""
    monkeypatch.setattr("gpusnap.oci.chunks.table.MOST_CHUNKS", 1)
    with pytest.raises(ChunkError, match="2 chunks exceeds"):
        make_table(9 * PAGE, [PACKED, PLAIN])
    with pytest.raises(ChunkError, match="list of at most"):
        from_json({"size": 9 * PAGE, "digest": "sha256", "chunks": [[], []]})


HEX = A.removeprefix("sha256:")


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"size": 1, "chunks": []},
        {"size": 1, "digest": "md5", "chunks": []},
        {"size": "1", "digest": "sha256", "chunks": []},
        {"size": True, "digest": "sha256", "chunks": []},
        {"size": 1, "digest": "sha256"},
        *(
            {"size": 4 * PAGE, "digest": "sha256", "chunks": [row]}
            for row in (
                None,
                [],
                [0, PAGE],
                [False, PAGE, HEX],
                [0, PAGE, HEX, 5],
                [0.0, PAGE, HEX],
                [0, PAGE, HEX, 5, HEX, 5],
            )
        ),
    ],
)
def test_bad_json(value: object) -> None:
    """What is no table in JSON is refused."""
    with pytest.raises(ChunkError):
        from_json(value)


def test_a_large_table_is_small() -> None:
    """12 GiB in chunks of 16 MiB take less than 200 KiB of JSON."""
    size = 16 << 20
    chunks = [Chunk(at * size, size, A, B, size - 1, "zstd") for at in range(768)]
    assert len(json.dumps(to_json(make_table(12 << 30, chunks)))) < 200 << 10


@given(size=st.integers(0, 300), at=st.integers(0, 299), value=st.integers(1, 255))
def test_is_zero(size: int, at: int, value: int) -> None:
    """One byte anywhere that is not zero is seen; zeros behind the end are not looked at."""
    data = bytearray(size + 1)
    data[size] = 1
    assert is_zero(memoryview(data)[:size])
    if at < size:
        data[at] = value
        assert not is_zero(memoryview(data)[:size])


@given(st.integers(0, 300), st.integers(0, 299), st.integers(0, 8))
def test_is_zero_anywhere_in_memory(size: int, place: int, offset: int) -> None:
    """One other byte anywhere is seen, also where the buffer begins at an odd address."""
    data = bytearray(size + 8)
    view = memoryview(data)[offset : offset + size]
    data[:offset] = b"\1" * offset
    data[offset + size :] = b"\1" * (8 - offset)
    assert is_zero(view)
    if place < size:
        view[place] = 0x80
        assert not is_zero(view)


def test_buffers(tmp_path: Path) -> None:
    """Regions in memory and in files give and take parts, and refuse what does not fit."""
    with open(tmp_path / "file", "w+b") as file, mmap.mmap(-1, 100) as memory:
        file.truncate(100)
        for part in (Buffer(memory), Buffer(bytearray(100)), File(file.fileno(), 100)):
            part.write(90, memoryview(bytearray(b"0123456789")))
            into = memoryview(bytearray(5))
            part.read(92, into)
            assert (bytes(into), part.size) == (b"23456", 100)
            with pytest.raises(OciError, match=r"do not fit|ends at 100"):
                part.read(98, into)
        del part
    with pytest.raises(TypeError, match="writable"):
        Buffer(memoryview(b"constant"))


def test_memory_is_given_back() -> None:
    """Freed memory reads as zeros, though somebody still has a view of it."""
    memory = Memory(PAGE)
    view = memory.view
    view[:] = os.urandom(PAGE)
    memory.free()
    assert is_zero(view)
