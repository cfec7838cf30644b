"""Compressed streams: whole ones come out whole, and where one is cut short it is noticed."""

from __future__ import annotations

import gzip
import io
import random
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from oci_regions import fill

from gpusnap.oci.tar.compression import Plain, as_file, compress, kind_of, packer


def read_all(data: bytes, step: int = 1 << 16) -> bytes:
    plain, found = Plain(io.BytesIO(data)), []
    while piece := plain.read(step):
        found.append(piece)
    return b"".join(found)


@st.composite
def frames(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Some zstd frames and what is in them: with checksum and size or without, empty and skippable ones."""
    packed, plain = [], []
    for at in range(draw(st.integers(1, 3))):
        # zeros make RLE blocks, random bytes raw ones; several blocks from 128 KiB on
        data = fill(
            draw(st.sampled_from([0, 1, 300, 200_000])), draw(st.sampled_from(["zero", "text", "random"]))
        )
        compressor = zstandard.ZstdCompressor(
            level=draw(st.sampled_from([1, 9])),
            write_checksum=draw(st.booleans()),
            write_content_size=draw(st.booleans()),
        )
        made = compressor.compressobj(size=len(data) if draw(st.booleans()) else -1)
        packed.append(made.compress(data) + made.flush())
        plain.append(data)
        if draw(st.booleans()):
            size = draw(st.sampled_from([0, 5]))
            packed.append((0x184D2A50 + at).to_bytes(4, "little") + size.to_bytes(4, "little") + bytes(size))
    return b"".join(packed), b"".join(plain)


@given(found=frames(), data=st.data())
def test_frames(found: tuple[bytes, bytes], data: st.DataObject) -> None:
    """Any frames are read whole; cut anywhere but between two of them, they are an error."""
    packed, plain = found
    assert read_all(packed, data.draw(st.sampled_from([1000, 1 << 16, 1 << 22]))) == plain
    end = data.draw(st.integers(4, len(packed) - 1))
    try:
        part = read_all(packed[:end])
    except (EOFError, zstandard.ZstdError):
        return
    # It was the end of a frame: what is left is frames, too.
    assert plain.startswith(part)
    assert packed[end : end + 4] == b"\x28\xb5\x2f\xfd" or packed[end + 1 : end + 4] == b"\x2a\x4d\x18"


def test_cut_anywhere() -> None:
    """One frame that lacks but a byte is not whole, with a checksum and without."""
    for checksum in (True, False):
        compressor = zstandard.ZstdCompressor(write_checksum=checksum)
        packed = compressor.compress(fill(200_000, "random") + fill(50_000, "text") + bytes(200_000))
        for end in (*range(4, 40), *range(len(packed) - 40, len(packed))):
            with pytest.raises((EOFError, zstandard.ZstdError)):
                read_all(packed[:end])


def test_flipped_bit() -> None:
    """The checksum that we write finds a bit that is wrong in the content."""
    packed = bytearray(b"".join(compress([random.Random(1).randbytes(5000)])))
    packed[2500] ^= 1
    with pytest.raises(zstandard.ZstdError):
        read_all(bytes(packed))


@pytest.mark.parametrize("kind", ["none", "zstd", "gzip"])
def test_kinds(kind: str) -> None:
    """The first bytes say what it is, and none of them is lost, however few come at once."""
    content = b"content" * 1000
    data = {"none": content, "zstd": b"".join(compress([content])), "gzip": gzip.compress(content)}[kind]

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(1, size or 0))

    found, rest = kind_of(Slow(data))
    assert found == kind
    plain, pieces = Plain(rest), []
    while piece := plain.read(1 << 16):
        pieces.append(piece)
    assert b"".join(pieces) == content


def test_skip(tmp_path: Path) -> None:
    """Only a plain file on disk can be passed over without reading."""
    assert not Plain(io.BytesIO(b"plain")).skip(1)
    assert not Plain(io.BytesIO(gzip.compress(b"packed"))).skip(1)
    (tmp_path / "file").write_bytes(b"0123456789")
    with open(tmp_path / "file", "rb") as file:
        plain = Plain(file)
        assert plain.read(2) == b"01"
        assert plain.skip(5)
        assert plain.read(9) == b"789"


@given(pieces=st.lists(st.binary(max_size=20)), sizes=st.lists(st.integers(1, 30)))
def test_as_file(pieces: list[bytes], sizes: list[int]) -> None:
    """Pieces read as a file does: in order, as much as asked for until the end."""
    file, whole, at = as_file(pieces), b"".join(pieces), 0
    for size in sizes:
        assert file.read(size) == whole[at : at + size]
        at = min(at + size, len(whole))
    assert file.read() == whole[at:]
    assert file.read() == b""


def test_packer() -> None:
    """What it makes is one frame with a checksum."""
    made = packer(level=3, threads=2)
    packed = made.compress(b"a" * 1000) + made.flush()
    assert zstandard.get_frame_parameters(packed).has_checksum
    assert read_all(packed) == b"a" * 1000
