"""The index of known chunks: it finds what is there, forgets what is not, and survives being broken."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oci_regions import fill, save

from gpusnap.oci.base.errors import DiskError
from gpusnap.oci.chunks.index import Known, Place
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.layout import Layout

DATA = b"a chunk" * 99
DIGEST = digest_of(DATA)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "layout").create()
    layout.add_blob(DATA)
    return layout


def blob_path(layout: Layout, digest: str = DIGEST) -> Path:
    return Path(layout.path, "blobs/sha256", digest.removeprefix("sha256:"))


def place(layout: Layout) -> Place:
    status = blob_path(layout).stat()
    return Place(DIGEST, len(DATA), "plain", layout.path, status.st_ino, status.st_mtime_ns)


def test_save_and_load(layout: Layout, tmp_path: Path) -> None:
    """What was learnt and saved is found again, by another process too."""
    known = Known(tmp_path / "known.json")
    assert known.find(DIGEST) is None
    tables = save(layout, bytearray(fill(20000, "text") + fill(20000, "random")))
    known.learn(tables, layout)
    known.add(DIGEST, place(layout))
    known.save()
    again = Known(tmp_path / "known.json")
    assert len(again) == len(known) > 5
    assert again.find(DIGEST) == place(layout)
    for chunk in tables[0].chunks:
        found = again.find(chunk.plain)
        assert found is not None
        assert (found.blob, found.stored, found.encoding) == (chunk.blob, chunk.stored, chunk.encoding)
        assert found.layout == layout.path
    again.clear()
    assert len(again) == 0


def test_what_a_link_does_not_change(layout: Layout, tmp_path: Path) -> None:
    """More names of a blob, its mode and its being read leave it known."""
    known = Known(tmp_path / "known.json")
    known.add(DIGEST, place(layout))
    other = Layout(tmp_path / "other").create()
    other.link_blob(DIGEST, len(DATA), layout)
    blob_path(other).read_bytes()
    blob_path(other).chmod(0o400)
    assert known.find(DIGEST) is not None
    blob_path(other).unlink()
    assert known.find(DIGEST) is not None


def test_what_is_not_there_is_not_learnt(layout: Layout, tmp_path: Path) -> None:
    """Of a layout only what it has is known."""
    tables = save(layout, bytearray(fill(20000, "random")))
    gone, short, *rest = tables[0].chunks
    blob_path(layout, gone.blob).unlink()
    blob_path(layout, short.blob).write_bytes(b"")
    known = Known(tmp_path / "known.json")
    known.learn(tables, layout)
    assert len(known) == len(rest)


@pytest.mark.parametrize("harm", ["gone", "short", "changed", "another", "link", "no layout"])
def test_a_blob_that_is_not_right(layout: Layout, tmp_path: Path, harm: str) -> None:
    """An entry whose blob has gone, or is something else, is a miss, and forgotten."""
    known = Known(tmp_path / "known.json")
    known.add(DIGEST, place(layout))
    path = blob_path(layout)
    if harm == "short":
        path.write_bytes(DATA[1:])
    elif harm == "changed":
        before = path.stat().st_mtime_ns
        path.write_bytes(DATA[::-1])
        os.utime(path, ns=(before, before + 1))  # the kernel's clock may not have ticked on meanwhile
    elif harm == "another":
        shutil.copy2(path, tmp_path / "copy")
        os.utime(tmp_path / "copy", ns=(0, path.stat().st_mtime_ns))
        (tmp_path / "copy").rename(path)
    elif harm == "no layout":
        Path(layout.path).rename(tmp_path / "away")
    else:
        moved = path.rename(tmp_path / "moved")
        if harm == "link":
            path.symlink_to(moved)
    assert known.find(DIGEST) is None
    assert len(known) == 0


def test_the_oldest_go(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has a bound, and what was added or used last stays."""
    monkeypatch.setattr("gpusnap.oci.chunks.index.MOST_ENTRIES", 3)
    known = Known(tmp_path / "known.json")
    digests = [digest_of(bytes([at])) for at in range(5)]
    for digest in [*digests[:3], digests[0], *digests[3:]]:
        known.add(digest, place(layout))
    assert len(known) == 3
    assert [known.find(digest) is not None for digest in digests] == [True, False, False, True, True]


GOOD = {"version": 3, "layouts": ["/x"], "chunks": {DIGEST[7:]: [0, 1, "plain", DIGEST[7:], 2, 3]}}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"version": 2},
        {"version": 4},
        {"layouts": []},
        {"layouts": ["relative"]},
        {"layouts": ["/nul\0"]},
        {"layouts": [3]},
        {"chunks": []},
        {"chunks": {DIGEST[7:]: [0, 1, "lz4", DIGEST[7:], 2, 3]}},
        {"chunks": {DIGEST[7:]: [-1, 1, "zstd", DIGEST[7:], 2, 3]}},
        {"chunks": {DIGEST[7:]: [0, 1, "zstd", "../../x", 2, 3]}},
        {"chunks": {DIGEST[7:]: [0, 1, "zstd", DIGEST[7:]]}},
        {"chunks": {DIGEST[7:]: [0, 1, "zstd", DIGEST[7:], 2, "now"]}},
        {"chunks": {DIGEST[7:]: None}},
    ],
)
def test_broken_entries(tmp_path: Path, change: dict[str, object]) -> None:
    """An index with anything wrong in it is an empty one."""
    path = tmp_path / "known.json"
    path.write_text(json.dumps(GOOD))
    assert len(Known(path)) == 1
    path.write_text(json.dumps(GOOD | change))
    assert len(Known(path)) == 0


@given(st.binary(max_size=100))
def test_any_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """So is one of any bytes; saved, it is whole again."""
    path = tmp_path_factory.getbasetemp() / "known.json"
    path.write_bytes(data)
    known = Known(path)
    assert len(known) == 0
    known.add(DIGEST, Place(DIGEST, 1, "plain", "/x", 2, 3))
    known.save()
    assert len(Known(path)) == 1


def test_no_folder(tmp_path: Path) -> None:
    """An index that cannot be written is an error that names its folder."""
    with pytest.raises(DiskError, match=r"index of known chunks .* cannot be written in .*none"):
        Known(tmp_path / "none/known.json").save()


def test_what_somebody_else_says(tmp_path: Path) -> None:
    """Of tables from elsewhere only chunks that are their own blobs are added."""
    layout = Layout(tmp_path / "layout").create()
    (table,) = save(layout, bytearray(fill(5 * 4096, "text") + fill(5 * 4096, "random")))
    plain = {chunk.plain for chunk in table.chunks if chunk.encoding == "plain"}
    assert 0 < len(plain) < len(table.chunks)
    known = Known(tmp_path / "known.json")
    known.learn([table], layout, foreign=True)
    assert {chunk.plain for chunk in table.chunks if known.find(chunk.plain)} == plain
