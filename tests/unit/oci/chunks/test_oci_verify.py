"""Verification: every fault of every blob is found and named, and nothing else is."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zstandard
from oci_checkpoints import blob_path, put
from oci_regions import PAGE, fill, save, text

from gpusnap.oci.base.errors import LayoutError
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks import verify as verification
from gpusnap.oci.chunks.artifact import Artifact, chunk_layers
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.chunks.verify import CheckProgress, Fault, verify
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import (
    INDEX,
    MANIFEST,
    Descriptor,
    Index,
    Manifest,
    empty_descriptor,
    encode_document,
)
from gpusnap.oci.layout.layout import Layout

CONTENTS = [b"one" * 999, b"two" * 999, b"three" * 999]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def faults(layout: Layout, root: Descriptor) -> dict[str, str]:
    return {each.descriptor.digest: each.what for each in verify(layout, root, threads=2)}


def test_all_right(layout: Layout) -> None:
    """Nothing is found where nothing is wrong, and the progress ends with everything."""
    seen: list[CheckProgress] = []
    root = put(layout, *CONTENTS)
    assert verify(layout, root, threads=3, progress=seen.append) == ()
    assert [each.blobs for each in seen] == [1, 2, 3, 4, 5]
    total = root.size + sum(map(len, CONTENTS)) + 2
    assert seen[0] == CheckProgress(1, root.size, 5, total)
    assert seen[-1] == CheckProgress(5, total, 5, total)


@pytest.mark.parametrize("at", range(3))
def test_a_flipped_bit(layout: Layout, at: int) -> None:
    """One bit in any chunk, at its beginning, middle or end, is found."""
    root = put(layout, *CONTENTS)
    digest = digest_of(CONTENTS[at])
    path = blob_path(layout, digest)
    for place in (0, len(CONTENTS[at]) // 2, -1):
        data = bytearray(CONTENTS[at])
        data[place] ^= 1 << at
        path.write_bytes(data)
        assert faults(layout, root) == {digest: "does not match its digest"}


def test_it_does_not_stop(layout: Layout) -> None:
    """Every blob that is wrong is named, each with what is wrong with it."""
    root = put(layout, *CONTENTS, b"four", b"five", b"six")
    digests = [digest_of(each) for each in (*CONTENTS, b"four", b"five")]
    blob_path(layout, digests[0]).unlink()
    os.truncate(blob_path(layout, digests[1]), 10)
    blob_path(layout, digests[2]).write_bytes(bytes(len(CONTENTS[2])))
    blob_path(layout, digests[3]).write_bytes(b"fourteen")
    blob_path(layout, digests[4]).unlink()
    blob_path(layout, digests[4]).symlink_to("/dev/zero")
    found = faults(layout, root)
    assert found.pop(digests[4]).startswith("cannot be read: the blob sha256:")
    assert found == {
        digests[0]: "missing",
        digests[1]: "truncated: has 10 of 2997 bytes",
        digests[2]: "does not match its digest",
        digests[3]: "has 8 bytes instead of 4",
    }


@pytest.mark.parametrize(
    ("harm", "what"),
    [("gone", "missing"), ("changed", "does not match its digest"), ("short", "truncated: has 3 of")],
)
def test_a_manifest_below_an_index(layout: Layout, harm: str, what: str) -> None:
    """A manifest that is wrong is named, and what the others name is checked."""
    first, second = put(layout, CONTENTS[0]), put(layout, CONTENTS[1])
    root = layout.add_blob(encode_document(Index((first, second)).to_json()), media_type=INDEX)
    path = blob_path(layout, first.digest)
    data = path.read_bytes()
    path.unlink()
    if harm != "gone":
        path.write_bytes(data.replace(b":", b";") if harm == "changed" else data[:3])
    blob_path(layout, digest_of(CONTENTS[1])).unlink()
    found = faults(layout, root)
    assert found.pop(first.digest).startswith(what)
    assert found == {digest_of(CONTENTS[1]): "missing"}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"layers":[]}', b"{" * 5000])
def test_no_manifest(layout: Layout, content: bytes) -> None:
    """A blob that is what its digest says, but no manifest, is a fault of its own."""
    [(_, what)] = faults(layout, layout.add_blob(content, media_type=MANIFEST)).items()
    assert what.startswith("is not a readable manifest: ")


def test_another_algorithm(layout: Layout) -> None:
    """What cannot be checked is not passed as right."""
    other = Descriptor("a/b", "sha512:" + "0" * 128, 1)
    root = layout.add_manifest(Manifest(empty_descriptor(), (other,)))
    layout.add_blob(b"{}")
    assert "sha512" not in faults(layout, root)[other.digest]
    assert "other than sha256" in faults(layout, root)[other.digest]


def test_sizes_that_differ(layout: Layout) -> None:
    """A blob that is named with two sizes is wrong with one of them."""
    blob = layout.add_blob(b"data", media_type="a/b")
    layout.add_blob(b"{}")
    root = layout.add_manifest(Manifest(empty_descriptor(), (blob, replace(blob, size=5))))
    assert [str(each) for each in verify(layout, root, threads=1)] == [
        f"{blob.digest}, a a/b: truncated: has 4 of 5 bytes"
    ]


def test_indexes_for_ever(layout: Layout) -> None:
    """Indexes within indexes end somewhere."""
    root = put(layout, b"x")
    for _ in range(12):
        root = layout.add_blob(encode_document(Index((root,)).to_json()), media_type=INDEX)
    [fault] = verify(layout, root, threads=1)
    assert isinstance(fault, Fault)
    assert fault.what == "is nested below more than 8 indexes"


def test_no_layout(tmp_path: Path) -> None:
    """Where no layout is, that is the error, and not a thousand missing blobs."""
    with pytest.raises(LayoutError, match="oci-layout cannot be read"):
        verify(Layout(tmp_path), empty_descriptor(), threads=1)


def test_what_tables_say(layout: Layout) -> None:
    """Compressed chunks hold what every table says that they hold, or it is a fault."""
    (table,) = save(layout, bytearray(text(3 * PAGE) + fill(PAGE, "random")))
    root = artifact.write(layout, Artifact(chunks=chunk_layers([("0", table)])))
    assert verify(layout, root, threads=2, tables=[table, table]) == ()
    first, second, *_ = table.chunks
    for wrong in (
        replace(first, plain=second.plain),
        replace(first, size=first.size - 1),
        replace(first, size=first.size + 1),
    ):
        assert {each.digest: each.what for each in told(layout, root, table, wrong)} == {
            first.blob: f"does not contain the expected chunk {wrong.plain} of {wrong.size} bytes"
        }


def test_what_is_no_zstd(layout: Layout) -> None:
    """A blob that is right, and no zstd, is named."""
    root = put(layout, b"no zstd" * 99)
    digest = digest_of(b"no zstd" * 99)
    chunk = Chunk(0, PAGE, digest_of(bytes(PAGE)), digest, 7 * 99, "zstd")
    [fault] = told(layout, root, Table(PAGE, ()), chunk)
    assert fault.digest == digest
    assert fault.what.startswith("is not valid zstd: ")


@dataclass(frozen=True)
class Told:
    digest: str
    what: str


def told(layout: Layout, root: Descriptor, *tables: Table | Chunk) -> list[Told]:
    """Faults where there are these tables, and one of a single chunk."""
    whole = [Table(each.size, (each,)) if isinstance(each, Chunk) else each for each in tables]
    found = verify(layout, root, threads=2, tables=whole)
    return [Told(each.descriptor.digest, each.what) for each in found]


def test_named_as_two_things(layout: Layout) -> None:
    """A manifest that is a layer, too, is followed all the same, in whichever order."""
    inner = put(layout, CONTENTS[0])
    layer = replace(inner, media_type="a/layer", artifact_type="")
    outer = layout.add_manifest(Manifest(empty_descriptor(), (layer,)))
    nested = layout.add_blob(encode_document(Index((inner,)).to_json()), media_type=INDEX)
    root = layout.add_blob(encode_document(Index((outer, nested)).to_json()), media_type=INDEX)
    blob_path(layout, digest_of(CONTENTS[0])).unlink()
    assert faults(layout, root) == {digest_of(CONTENTS[0]): "missing"}


@pytest.mark.parametrize("large", [False, True])
def test_large_windows_one_at_a_time(layout: Layout, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """A blob of 32 KiB has zstd take a GiB; so many at once as there are cores would be all memory."""
    content = bytes(100_000)
    blob = layout.add_blob(zstandard.compress(content))
    chunk = Chunk(0, len(content), digest_of(content), blob.digest, blob.size, "zstd")
    contents = verification.Contents([Table(len(content), (chunk,))])
    monkeypatch.setattr(verification, "LARGE_CHUNK", len(content) - large)
    seen: list[bool] = []
    real = Layout.open_blob

    def opened(self: Layout, digest: str, size: int | None = None) -> io.FileIO:
        seen.append(contents._alone.locked())
        return real(self, digest, size)

    monkeypatch.setattr(Layout, "open_blob", opened)
    assert contents.fault(layout, blob) == ""
    assert seen == [large]
    assert not contents._alone.locked()
