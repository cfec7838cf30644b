"""Floating-point numbers in planes: where they are smaller, back bit for bit, and never beyond bounds."""

from __future__ import annotations

import array
import random
import struct
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.oci.base.errors import ChunkError
from gpusnap.oci.chunks import planes
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.reader import read
from gpusnap.oci.chunks.table import Chunk, Table, descriptors, from_json, to_json
from gpusnap.oci.chunks.verify import Contents
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.layout import Layout

MIB = 1 << 20
CEILING = 64 << 20


def weights(count: int, width: int, seed: int = 1) -> bytes:
    """Numbers as a model's weights are: normal distribution, sigma 0.02; bf16 is a float's upper half."""
    rng = random.Random(seed)
    floats = array.array("f", (rng.gauss(0, 0.02) for _ in range(count))).tobytes()
    if width == 4:
        return floats
    half = bytearray(2 * count)
    half[0::2], half[1::2] = floats[2::4], floats[3::4]
    return bytes(half)


@pytest.fixture(params=[True, False], ids=["native", "slices"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With the loops in C, and without."""
    wanted: bool = request.param
    if wanted and planes._native() is None:
        pytest.skip("native/planes.so is not built: run `make native`")
    if not wanted:
        monkeypatch.setattr(planes, "_native", lambda: None)
    return wanted


def packed(plain: bytes, width: int) -> bytearray:
    """A blob of these numbers."""
    room, top = bytearray(2 * len(plain) + 1000), bytearray(len(plain))
    views = memoryview(bytearray(plain)), memoryview(room), memoryview(top)
    used = planes.encode(views[0], width, views[1], views[2], zstandard.ZstdCompressor())
    assert used > 0
    return room[:used]


def unpacked(blob: bytearray, size: int, before: bytes = b"\0") -> bytes:
    """What a blob holds, in memory that has had another byte everywhere."""
    plain, top = bytearray(before * size), bytearray(size // 2)
    tools = zstandard.ZstdDecompressor(max_window_size=max(size, 1024))
    planes.decode(memoryview(blob), memoryview(plain), memoryview(top), tools)
    return bytes(plain)


@pytest.mark.parametrize("width", planes.WIDTHS)
def test_there_and_back(native: bool, width: int) -> None:
    """Every bit, both ways alike."""
    plain = random.Random(width).randbytes(4096 * 3) + weights(4096, width)
    blob = packed(plain, width)
    assert unpacked(blob, len(plain)) == plain
    assert planes.size_of(bytes(blob)) == len(plain)
    assert bytes(planes.unpack(bytes(blob), len(plain)) or b"") == plain


@pytest.mark.parametrize("width", planes.WIDTHS)
def test_the_compressor_of_planes(native: bool, width: int) -> None:
    """Smaller than with zstd as it is, and anybody's zstd reads it; its memory is what is said."""
    plain = weights(1 << 18, width)
    room, top = memoryview(bytearray(len(plain))), memoryview(bytearray(len(plain)))
    own = planes.make_compressor()
    used = planes.encode(memoryview(bytearray(plain)), width, room, top, own)
    assert 0 < used < 0.99 * len(packed(plain, width))
    assert unpacked(bytearray(room[:used]), len(plain)) == plain
    assert own.memory_size() <= planes.COMPRESSOR_MEMORY < 2 << 20


def test_runs_of_zeros(native: bool) -> None:
    """Numbers of which many are zero in a row take hardly any room for these."""
    dense = weights(1 << 16, 2)
    plain = dense + bytes(3 * len(dense))
    room, top = memoryview(bytearray(len(plain))), memoryview(bytearray(len(plain)))
    sizes = [
        planes.encode(memoryview(bytearray(data)), 2, room, top, planes.make_compressor()) - len(data) // 2
        for data in (plain, dense)
    ]
    assert 0 < sizes[0] < 1.05 * sizes[1]


def test_both_ways_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one writes the other reads."""
    plain = random.Random(3).randbytes(4096)
    found = {width: packed(plain, width) for width in planes.WIDTHS}
    monkeypatch.setattr(planes, "_native", lambda: None)
    assert {width: packed(plain, width) for width in planes.WIDTHS} == found


def test_what_does_not_fit(native: bool) -> None:
    """No more is written than there is room for."""
    plain, top = memoryview(bytearray(random.Random(1).randbytes(4096))), memoryview(bytearray(4096))
    for size in (0, 10, planes.HEAD, 2048, 4000):
        room = memoryview(bytearray(size))
        assert planes.encode(plain, 2, room, top, zstandard.ZstdCompressor()) == 0


@given(st.data())
def test_a_blob_from_anybody(data: st.DataObject) -> None:
    """Whatever it says, it fills all of the memory or is refused."""
    blob = packed(weights(1024, 2), 2)
    for _ in range(data.draw(st.integers(0, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    del blob[data.draw(st.just(len(blob)) | st.integers(0, len(blob))) :]
    size = data.draw(st.just(2048) | st.sampled_from([2, 1000, 2047, 4096]))
    try:
        assert unpacked(blob, size) == unpacked(blob, size, b"\xff")
    except (ChunkError, zstandard.ZstdError):
        assert planes.unpack(bytes(blob), size) is None


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (struct.pack("<IIIQ", 0x184D2A58, 12, 2, 8), "is not declared"),
        (struct.pack("<IIIQ", 0x184D2A57, 12, 3, 8), "is not declared"),
        (struct.pack("<IIIQ", 0x184D2A57, 12, 2, 9), "is not declared"),
        (struct.pack("<IIIQ", 0x184D2A57, 12, 2, 8), "its planes end at"),
        (struct.pack("<IIIQ", 0x184D2A57, 12, 2, 8) + bytes(4), "is too short"),
        (b"", "is not declared"),
    ],
)
def test_a_wrong_head(head: bytes, said: str) -> None:
    """One sentence each."""
    with pytest.raises(ChunkError, match=said):
        unpacked(bytearray(head), 8)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def stored(layout: Layout, content: bytes, *, level: int = 1, known: Known | None = None) -> Table:
    (found,) = write(
        [Buffer(bytearray(content))],
        layout,
        threads=1,
        ceiling=CEILING,
        chunk_size=MIB,
        level=level,
        known=known,
    )
    return found


def loaded(layout: Layout, table: Table) -> bytes:
    found = bytearray(table.size)
    read([table], layout, [Buffer(found)], threads=2, ceiling=CEILING)
    return bytes(found)


def test_weights_are_smaller(layout: Layout, native: bool) -> None:
    """bf16 by 28 % at least; float32 less, and each in its own planes."""
    bf16, single = weights(MIB // 2, 2), weights(MIB // 4, 4)
    table = stored(layout, bf16 + single)
    assert [chunk.encoding for chunk in table.chunks] == ["planes", "planes"]
    assert table.chunks[0].stored <= 0.72 * MIB
    assert table.chunks[1].stored <= 0.88 * MIB
    assert loaded(layout, table) == bf16 + single


def test_the_others_are_as_before(layout: Layout) -> None:
    """Text is zstd's, noise is plain, and nothing is encoded at level 0."""
    text = (b"what a model has to say " * (MIB // 24 + 1))[:MIB]
    noise = random.Random(1).randbytes(MIB)
    assert [chunk.encoding for chunk in stored(layout, text + noise).chunks] == ["zstd", "plain"]
    assert [chunk.encoding for chunk in stored(layout, weights(MIB // 2, 2), level=0).chunks] == ["plain"]


def test_a_table_in_json(layout: Layout) -> None:
    """The encoding is said in the row, and in the blob's media type; a row of another one is refused."""
    table = stored(layout, weights(MIB // 2, 2))
    document = to_json(table)
    assert from_json(document) == table
    assert [each.media_type for each in descriptors([table])] == ["application/vnd.gpusnap.chunk.v1+planes"]
    rows = document["chunks"]
    assert isinstance(rows, list)
    rows[0][-1] = "spheres"
    with pytest.raises(ChunkError, match="has an invalid format"):
        from_json(document)


def test_an_unchanged_chunk_is_linked(layout: Layout, tmp_path: Path) -> None:
    """It is known by the digest of its plain bytes, with its encoding."""
    table = stored(layout, weights(MIB // 2, 2))
    known = Known(tmp_path / "known.json")
    known.learn([table], layout)
    known.save()
    other = Layout(tmp_path / "other").create()
    again = stored(other, weights(MIB // 2, 2), known=Known(tmp_path / "known.json"))
    assert again == table
    assert loaded(other, again) == weights(MIB // 2, 2)


def test_a_lie(layout: Layout) -> None:
    """A blob that is right, of a table that is not: restore and verify say so."""
    table = stored(layout, weights(MIB // 2, 2))
    (chunk,) = table.chunks
    (blob,) = descriptors([table])
    assert Contents([table]).fault(layout, blob) == ""
    for lie in (
        Chunk(0, MIB, digest_of(memoryview(bytearray(b"else"))), chunk.blob, chunk.stored, "planes"),
        Chunk(0, MIB - 4096, chunk.plain, chunk.blob, chunk.stored, "planes"),
        Chunk(0, MIB, chunk.plain, chunk.blob, chunk.stored, "zstd"),
    ):
        wrong = Table(MIB, (lie,))
        assert Contents([wrong]).fault(layout, blob) != ""
        with pytest.raises(ChunkError, match=chunk.blob):
            loaded(layout, wrong)
