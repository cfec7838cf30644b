"""Podman's archive: one entry read from a plain, zstd or gzip tar; what is none is refused."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from oci.archive import ArchiveError, read_member

NAME = "checkpoint/gpusnap/manifest.json"
CONTENT = b'{"version": "1.0"}' * 50


def two_frames(data: bytes) -> bytes:
    half = len(data) // 2
    compressor = zstandard.ZstdCompressor()
    return compressor.compress(data[:half]) + compressor.compress(data[half:])


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "zstd": zstandard.ZstdCompressor().compress,
    "zstd, two frames": two_frames,
    "gzip": gzip.compress,
}


def make_tar(names: tuple[str, ...] = ("config.dump", NAME, "rootfs-diff.tar")) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder = tarfile.TarInfo("checkpoint/")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(CONTENT)
            tar.addfile(entry, io.BytesIO(CONTENT))
    return buffer.getvalue()


def write(folder: Path, data: bytes) -> str:
    path = folder / "archive"
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize("how", COMPRESS)
def test_member(tmp_path: Path, how: str) -> None:
    """The entry is read however Podman compressed the archive, and no more of it than asked for."""
    path = write(tmp_path, COMPRESS[how](make_tar()))
    assert read_member(path, NAME, limit=1 << 20) == CONTENT
    assert read_member(path, NAME, limit=7) == CONTENT[:7]
    assert read_member(path, "checkpoint/none", limit=7) is None


def test_leading_dot(tmp_path: Path) -> None:
    """A leading ./ makes no difference."""
    assert read_member(write(tmp_path, make_tar(("./" + NAME,))), NAME, limit=1 << 20) == CONTENT


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """An entry that is no file holds nothing."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(NAME)
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/shadow"
        tar.addfile(entry)
    assert read_member(write(tmp_path, buffer.getvalue()), NAME, limit=1 << 20) is None


@pytest.mark.parametrize("how", COMPRESS)
def test_cut_short(tmp_path: Path, how: str) -> None:
    """Cut off anywhere before the entry's end, it is an error, never half an entry."""
    whole = COMPRESS[how](make_tar((NAME,)))
    full = tmp_path / "full"
    for end in range(0, len(whole), max(1, len(whole) // 60)):
        full.write_bytes(whole[:end])
        try:
            found = read_member(str(full), NAME, limit=1 << 20)
        except ArchiveError:
            continue
        assert found in (None, CONTENT)
        # A tar that ends before an entry's content is whole to tarfile; one that ends within must not be.
        assert found is not None or end <= 1024 or how != "plain"


@pytest.mark.parametrize(
    "data", [b"", b"no archive" * 200, b"\x28\xb5\x2f\xfd" + b"x" * 2000, b"\x1f\x8b" * 900]
)
def test_no_archive(tmp_path: Path, data: bytes) -> None:
    """What is no tar is refused by name."""
    path = write(tmp_path, data)
    with pytest.raises(ArchiveError, match=r"is not a checkpoint archive, or is cut short|cannot be read"):
        read_member(path, NAME, limit=1)


def test_broken_deflate(tmp_path: Path) -> None:
    """gzip whose data is broken in the middle is an ArchiveError too."""
    data = bytearray(gzip.compress(make_tar(tuple(f"a{n}" for n in range(200)))))
    data[40:60] = b"\xff" * 20
    with pytest.raises(ArchiveError):
        read_member(write(tmp_path, bytes(data)), NAME, limit=1)


def test_cannot_be_opened(tmp_path: Path) -> None:
    """A path that cannot be opened is named."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ArchiveError, match="cannot be read"):
            read_member(str(path), NAME, limit=1)


@given(
    at=st.integers(0, 511), value=st.binary(min_size=1, max_size=12), how=st.sampled_from(sorted(COMPRESS))
)
def test_any_damage(tmp_path_factory: pytest.TempPathFactory, at: int, value: bytes, how: str) -> None:
    """Whatever is broken in the first header, the answer is bytes, None or an ArchiveError."""
    data = bytearray(COMPRESS[how](make_tar((NAME,))))
    data[at : at + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(bytes(data))
    try:
        found = read_member(str(path), NAME, limit=1 << 20)
    except ArchiveError:
        return
    assert found is None or len(found) <= 1 << 20
