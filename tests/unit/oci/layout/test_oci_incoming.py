"""A blob in pieces: it has its name when it is whole and right, and otherwise leaves nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oci_regions import blobs

from gpusnap.oci.base.errors import BlobError, DigestError, DiskFull, LayoutError
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout

DATA = b"the bytes of a blob" * 100
WANTED = Descriptor("a/b", digest_of(DATA), len(DATA))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@given(st.lists(st.integers(0, len(DATA)), max_size=6))
def test_any_pieces(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    """Whatever the pieces, the blob is there at the end, and not before."""
    layout = Layout(tmp_path_factory.mktemp("layout")).create()
    edges = [0, *sorted(cuts), len(DATA)]
    with layout.receive(WANTED) as incoming:
        for start, end in pairwise(edges):
            incoming.write(DATA[start:end])
            assert incoming.size == end
        assert not layout.has_blob(WANTED.digest, WANTED.size)
    layout.check_blob(WANTED)
    assert set(blobs(Path(layout.path))) == {WANTED.digest.removeprefix("sha256:")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DATA[:-1], "ended after 1899 of 1900 bytes"),
        (b"", "ended after 0 of 1900 bytes"),
        (DATA + b"x", "has more than its 1900 bytes"),
        (b"X" + DATA[1:], "was received with content that does not match its digest"),
    ],
)
def test_wrong_ones(layout: Layout, content: bytes, message: str) -> None:
    """A blob cut short, too long or of other bytes is named, and gone."""
    with (
        pytest.raises(BlobError, match=f"the blob {WANTED.digest} {message}"),
        layout.receive(WANTED) as incoming,
    ):
        incoming.write(content)
    assert blobs(Path(layout.path)) == {}


def test_the_callers_errors(layout: Layout) -> None:
    """What is raised within comes out as it is, and nothing is left."""

    def broken() -> None:
        with layout.receive(WANTED) as incoming:
            incoming.write(DATA)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        broken()
    assert blobs(Path(layout.path)) == {}


def test_in_place_of_another(layout: Layout) -> None:
    """A blob of the right size and the wrong bytes is replaced, and made durable with the rest."""
    path = Path(layout.path, "blobs/sha256", WANTED.digest.removeprefix("sha256:"))
    path.write_bytes(DATA.upper())
    with layout.receive(WANTED) as incoming:
        incoming.write(DATA)
    assert path.read_bytes() == DATA
    layout.sync()


def test_a_full_disk(small_disk: Path) -> None:
    """The message says where there is no room, and for what."""
    layout = Layout(small_disk / "layout").create()
    wanted = Descriptor("a/b", "sha256:" + "0" * 64, 4 << 20)
    with (
        pytest.raises(DiskFull, match=r"is full: a blob of 4\.0 MiB did not fit"),
        layout.receive(wanted) as incoming,
    ):
        incoming.write(bytes(4 << 20))
    assert blobs(Path(layout.path)) == {}


def test_where_there_is_no_layout(tmp_path: Path) -> None:
    """A folder that is no layout, and a digest that is not read here, are refused first."""
    with (
        pytest.raises(LayoutError, match="is not a directory of an image layout"),
        Layout(tmp_path).receive(WANTED),
    ):
        pass
    with pytest.raises(DigestError), Layout(tmp_path).receive(Descriptor("a/b", "md5:12", 1)):
        pass
