"""Archives of `ctr images export`: where their blobs are, and such as are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from archives import written
from containerd_layouts import IMAGE, Made, a_checkpoint, packed

from gpusnap.base.user_errors import Damaged
from gpusnap.checkpoints.formats.containerd import blob_of
from gpusnap.checkpoints.formats.containerd_archive import Archive
from gpusnap.checkpoints.formats.layout_archive import opened_layout, refuse_containerd
from gpusnap.oci.base.errors import BlobError
from gpusnap.oci.layout import archive as layout_archive
from gpusnap.oci.layout.archive import is_layout
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused, UsageError


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return a_checkpoint(tmp_path, gpu=False)


def test_blobs(made: Made, tmp_path: Path) -> None:
    """Any of them, in any order, more than once; the checkpoint by its name."""
    with Archive(made.written(tmp_path / "cp.tar")) as archive:
        assert (archive.root.digest, archive.name) == (digest_of(made.document), IMAGE)
        for digest, data in [*reversed(made.blobs.items()), *made.blobs.items()]:
            wanted = Descriptor("a/b", digest, len(data))
            assert archive.has(wanted)
            assert blob_of(archive, wanted) == data
        for size, words in ((1, "has .* bytes, not 1"), (0, "not 0")):
            with pytest.raises(BlobError, match=words):
                blob_of(archive, Descriptor("a/b", digest, size))
        with pytest.raises(BlobError, match="does not contain the blob"):
            blob_of(archive, Descriptor("a/b", digest_of(b"gone"), 4))


def test_kinds_of_archives(made: Made, tmp_path: Path) -> None:
    """Podman's are none."""
    path = made.written(tmp_path / "cp.tar")
    assert is_layout(path)
    with (
        opened_layout(path) as found,
        pytest.raises(Refused, match="gpusnap push reads those"),
    ):
        refuse_containerd(found)
    podmans = written(tmp_path / "podman.tar", None, None)
    assert not is_layout(podmans)
    assert not is_layout(str(tmp_path / "gone.tar"))


def test_compressed(made: Made, tmp_path: Path) -> None:
    """One cannot be read at any place."""
    path = tmp_path / "cp.tar.gz"
    path.write_bytes(gzip.compress(Path(made.written(tmp_path / "cp.tar")).read_bytes()))
    assert is_layout(str(path))
    with pytest.raises(ImageError, match="compressed") as caught:
        Archive(str(path))
    assert "gunzip" in str(caught.value)


def test_wrong_content(made: Made, tmp_path: Path) -> None:
    """A blob that its name does not fit is no blob."""
    files = made.layout()
    name = f"blobs/sha256/{digest_of(made.document)[7:]}"
    files[name] = files[name].replace(b"runc", b"rant")
    (tmp_path / "cp.tar").write_bytes(packed(files))
    with pytest.raises(BlobError, match="does not match"):
        Archive(str(tmp_path / "cp.tar"))


def changed(made: Made, path: Path, index: object) -> str:
    files = made.layout()
    files["index.json"] = index if isinstance(index, bytes) else json.dumps(index).encode()
    path.write_bytes(packed(files))
    return str(path)


def test_no_checkpoint(made: Made, tmp_path: Path) -> None:
    """Nothing in it, too much in it, or nothing that can be read."""
    path = tmp_path / "cp.tar"
    [entry] = json.loads(made.layout()["index.json"])["manifests"]
    with pytest.raises(GpusnapError, match="is an image layout without a checkpoint"):
        Archive(changed(made, path, {"schemaVersion": 2, "manifests": []}))
    other = {**entry, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    with pytest.raises(ImageError, match="is broken"):
        Archive(changed(made, path, {"schemaVersion": 2, "manifests": [other]}))
    with pytest.raises(ImageError, match="not JSON"):
        Archive(changed(made, path, b"{"))
    with pytest.raises(ImageError, match="it is too large"):
        Archive(changed(made, path, bytes((4 << 20) + 1)))
    path.write_bytes(packed({"oci-layout": b"{}"}))
    with pytest.raises(ImageError, match=r"has no index\.json"):
        Archive(str(path))


def test_two_checkpoints(made: Made, tmp_path: Path) -> None:
    """Which one is meant cannot be known."""
    second = a_checkpoint(tmp_path, gpu=False, base=False)
    files = {**made.layout(), **second.layout()}
    entries = [json.loads(each.layout()["index.json"])["manifests"][0] for each in (made, second)]
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    (tmp_path / "cp.tar").write_bytes(packed(files))
    with pytest.raises(UsageError, match="has 2 checkpoints"):
        Archive(str(tmp_path / "cp.tar"))


@pytest.mark.parametrize("left", [700, 2 << 20])
def test_cut_short(made: Made, tmp_path: Path, left: int) -> None:
    """Within a blob, or before the index."""
    path = tmp_path / "cp.tar"
    path.write_bytes(Path(made.written(path)).read_bytes()[:left])
    with pytest.raises(Damaged, match="cut short") as caught:
        Archive(str(path))
    assert "--local" in caught.value.hint


def test_names_that_lead_out(made: Made, tmp_path: Path) -> None:
    """As in any archive."""
    data = packed({"blobs/sha256/x": b""}).replace(b"blobs/sha256/x", b"blobs/../../xx")
    path = tmp_path / "cp.tar"
    # The sum of a header's bytes counts its name's.
    path.write_bytes(_summed(data))
    with pytest.raises(Damaged, match="points outside"):
        Archive(str(path))


def _summed(data: bytes) -> bytes:
    block = bytearray(data[:512])
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


def test_too_many_entries(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of where they are is bounded."""
    monkeypatch.setattr(layout_archive, "_MOST_ENTRIES", 3)
    with pytest.raises(ImageError, match="more than 3 entries"):
        Archive(made.written(tmp_path / "cp.tar"))
