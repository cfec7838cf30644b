"""The index of known chunks: it finds what is there, forgets what is not, and survives being broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oci_regions import fill, save

from oci.digests import digest_of
from oci.errors import DiskError
from oci.known import Known, Place
from oci.layout import Layout

DATA = b"a chunk" * 99
DIGEST = digest_of(DATA)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "layout").create()
    layout.add_blob(DATA)
    return layout


def place(layout: Layout) -> Place:
    return Place(DIGEST, len(DATA), "plain", layout.path)


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
        assert again.find(chunk.plain) == Place(chunk.blob, chunk.stored, chunk.encoding, layout.path)


@pytest.mark.parametrize("harm", ["gone", "short", "link", "no layout"])
def test_a_blob_that_is_not_right(layout: Layout, tmp_path: Path, harm: str) -> None:
    """An entry whose blob has gone, or is something else, is a miss, and forgotten."""
    known = Known(tmp_path / "known.json")
    known.add(DIGEST, place(layout))
    path = Path(layout.path, "blobs/sha256", DIGEST.removeprefix("sha256:"))
    if harm == "short":
        path.write_bytes(DATA[1:])
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
    monkeypatch.setattr("oci.known.MOST_ENTRIES", 3)
    known = Known(tmp_path / "known.json")
    digests = [digest_of(bytes([at])) for at in range(5)]
    for digest in [*digests[:3], digests[0], *digests[3:]]:
        known.add(digest, place(layout))
    assert len(known) == 3
    assert [known.find(digest) is not None for digest in digests] == [True, False, False, True, True]


GOOD = {"version": 1, "layouts": ["/x"], "chunks": {DIGEST[7:]: [0, 1, "plain", DIGEST[7:]]}}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"layouts": []},
        {"layouts": ["relative"]},
        {"layouts": ["/nul\0"]},
        {"layouts": [3]},
        {"chunks": []},
        {"chunks": {DIGEST[7:]: [0, 1, "lz4", DIGEST[7:]]}},
        {"chunks": {DIGEST[7:]: [-1, 1, "zstd", DIGEST[7:]]}},
        {"chunks": {DIGEST[7:]: [0, 1, "zstd", "../../x"]}},
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
    known.add(DIGEST, Place(DIGEST, 1, "plain", "/x"))
    known.save()
    assert len(Known(path)) == 1


def test_no_folder(tmp_path: Path) -> None:
    """An index that cannot be written is an error that names its folder."""
    with pytest.raises(DiskError, match=r"index of known chunks .* cannot be written in .*none"):
        Known(tmp_path / "none/known.json").save()
