"""Named volumes in a checkpoint: their tars in chunks, and again the same tars."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from pathlib import Path

import pytest
from checkpoints import tar_of
from hypothesis import given, settings
from oci_regions import region

from gpusnap.checkpoints import volumes
from gpusnap.checkpoints.volumes import Volume
from gpusnap.oci.base.errors import BlobError
from gpusnap.oci.chunks import writer
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import CHUNK_SIZE
from gpusnap.oci.layout.layout import Layout
from gpusnap.operations.restoring.volumes import list_volumes
from gpusnap.runtime_shim.base.errors import ImageError

MIB = 1 << 20


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def taken(tar: bytes, layout: Layout, known: Known | None = None) -> Volume:
    table, digest = volumes.write(io.BytesIO(tar), layout, threads=2, known=known)
    return Volume("vol", digest, table)


def layers(volume: Volume) -> dict[str, int]:
    return {chunk.blob: chunk.stored for chunk in volume.table.chunks}


def again(volume: Volume, layout: Layout) -> bytes:
    return b"".join(volumes.pieces(volume.table, layout, threads=2))


def files(seed: int = 0, *, small: int = 400) -> dict[str, bytes | str | None]:
    """A volume of two large files, one of zeros, and many small ones."""
    made = random.Random(seed)
    found: dict[str, bytes | str | None] = {
        "a-large": made.randbytes(9 * MIB + 5),
        "b-zeros": bytes(20 * MIB),
        "c-large": made.randbytes(2 * MIB),
        "link": "a-large",
        "folder": None,
    }
    return found | {f"folder/{at:04}": made.randbytes(made.randrange(9000)) for at in range(small)}


def test_there_and_back(layout: Layout) -> None:
    """Every byte comes back; what stands for it in the records says all; zeros are in no chunk."""
    tar = tar_of(files())
    volume = taken(tar, layout)
    assert again(volume, layout) == tar
    assert volume.content == f"sha256:{hashlib.sha256(tar).hexdigest()}"
    assert volumes.decode("vol", volume.encode(), layers(volume), "x") == volume
    assert volumes.summary(volume.encode()) == (len(tar), volume.content)
    assert sum(chunk.size for chunk in volume.table.chunks) < len(tar) - 19 * MIB
    assert max(chunk.size for chunk in volume.table.chunks) <= CHUNK_SIZE


@settings(max_examples=30, deadline=None)
@given(content=region())
def test_what_is_no_tar(tmp_path_factory: pytest.TempPathFactory, content: bytearray) -> None:
    layout = Layout(tmp_path_factory.mktemp("layout")).create()
    assert again(taken(bytes(content), layout), layout) == content


@pytest.mark.parametrize("change", ["a file grows", "a new first file", "a small file changes"])
def test_what_has_not_changed_is_kept_once(layout: Layout, change: str) -> None:
    """A change moves the rest of the tar, and few chunks are new all the same."""
    before = files()
    first = layers(taken(tar_of(before), layout))
    after = dict(before)
    if change == "a file grows":
        content = before["a-large"]
        assert isinstance(content, bytes)
        after["a-large"] = content + b"more" * 300
    elif change == "a new first file":
        after = {"0": b"new" * 1000, **before}
    else:
        after["folder/0200"] = b"other" * 2000
    tar = tar_of(after)
    second = taken(tar, layout)
    assert again(second, layout) == tar
    new = sum(stored for blob, stored in layers(second).items() if blob not in first)
    assert 0 < new < {"a file grows": 1.8 * MIB}.get(change, 1.2 * MIB)


def test_a_size_in_a_pax_header(layout: Layout) -> None:
    """Files of 8 GiB and more have their size there: the next entry is found behind them."""
    info = tarfile.TarInfo("huge")
    info.pax_headers = {"size": str(3 * MIB)}
    content = random.Random(1).randbytes(3 * MIB)
    head = info.tobuf(tarfile.PAX_FORMAT)
    tar = head + content + tar_of(files(2, small=10))
    sizes = [len(piece) for piece in volumes.cut(io.BytesIO(tar))]
    assert sizes[:2] == [len(head), 3 * MIB]
    assert b"".join(map(bytes, volumes.cut(io.BytesIO(tar)))) == tar


@pytest.mark.parametrize("digits", [5, 18, 5000])
def test_a_size_in_an_extended_attribute(layout: Layout, digits: int) -> None:
    """Whoever writes files in a volume chooses these: the checkpoint is made, and every byte comes back."""
    info = tarfile.TarInfo("small")
    info.pax_headers = {"SCHILY.xattr.user.x": f"\n9 size={'9' * digits}\n"}
    tar = info.tobuf(tarfile.PAX_FORMAT) + tar_of(files(2, small=10))
    assert again(taken(tar, layout), layout) == tar


def test_known_chunks_are_linked(tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store has compressed is not compressed again."""
    tar = tar_of(files())
    first = taken(tar, layout)
    layout.sync()
    known = Known(tmp_path / "known.json")
    known.learn([first.table], layout)
    monkeypatch.setattr(writer._Tools, "pack", lambda *_: pytest.fail("it was compressed again"))
    other = Layout(tmp_path / "other").create()
    assert taken(tar, other, known) == first
    assert again(first, other) == tar


def test_a_damaged_chunk(layout: Layout) -> None:
    """Nothing of it is given out."""
    volume = taken(tar_of(files()), layout)
    path = Path(layout.path, "blobs/sha256", volume.table.chunks[1].blob[7:])
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(BlobError):
        again(volume, layout)


@pytest.mark.parametrize("what", ["no JSON", "no table", "another's chunk", "a wrong size"])
def test_broken_tables(layout: Layout, what: str) -> None:
    """Also one that names a chunk of somebody else's in the same store."""
    volume = taken(tar_of(files()), layout)
    known = layers(volume)
    data = volume.encode()
    if what == "no JSON":
        data = data[:-9]
    elif what == "no table":
        data = b'{"content": "x"}'
        assert volumes.summary(data) is None
    elif what == "another's chunk":
        known.popitem()
    else:
        known = {blob: size + 1 for blob, size in known.items()}
    with pytest.raises(ImageError, match="the volume vol in the store is damaged") as raised:
        volumes.decode("vol", data, known, "the store")
    assert raised.value.code == "GPS-604"


def test_names() -> None:
    """Of entries, as libpod writes them, and of a container's configuration."""
    assert volumes.name_of("volumes/a.b-c_1.tar") == "a.b-c_1"
    assert volumes.name_in_chunks("volumes/a.tar.chunks") == "a"
    for name in ("volumes/../x.tar", "volumes/a/b.tar", "volumes/a", "x/volumes/a.tar", "volumes/.tar"):
        assert volumes.name_of(name) == ""
        assert volumes.name_in_chunks(f"{name}.chunks") == ""
    assert list_volumes(b'{"namedVolumes": [{"volumeName": "a"}, {"volumeName": "b"}]}') == ("a", "b")
    for broken in (b"", b"[]", b'{"namedVolumes": 1}', b'{"namedVolumes": [{}]}', b"{}"):
        assert list_volumes(broken) == ()
