"""An artifact as a layout for ctr again: the same blobs, and CRIU's images with all that was in them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from containerd_layouts import BASE, IMAGE, Made, a_checkpoint, files_of, packed

from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints.artifact import ArtifactParts
from gpusnap.checkpoints.formats import containerd_writer
from gpusnap.checkpoints.formats.containerd_archive import Archive
from gpusnap.checkpoints.formats.containerd_reader import take_in
from gpusnap.checkpoints.formats.containerd_writer import give_out, origin
from gpusnap.oci.base.errors import BlobError, LayoutError
from gpusnap.oci.chunks import artifact
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.compression import as_file, compress
from gpusnap.runtime_shim.base.errors import ImageError


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def kept_of(made: Made, folder: Path, layout: Layout) -> ArtifactParts:
    with Archive(made.written(folder / "cp.tar")) as source:
        return kept.load(artifact.write(layout, take_in(source, layout)), layout)


def given(
    found: ArtifactParts, layout: Layout, progress: Callable[[int, int], object] = lambda done, whole: None
) -> bytes:
    out: list[bytes] = []
    of = origin(found, layout)
    give_out(found, of, layout, out.append, name=IMAGE, progress=progress)
    return b"".join(out) + tar.END


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("base", [True, False])
def test_there_and_back(tmp_path: Path, layout: Layout, gpu: bool, base: bool) -> None:
    """Every blob but CRIU's comes back as it was, with every digest right, under its name."""
    made = a_checkpoint(tmp_path, gpu=gpu, base=base)
    found = kept_of(made, tmp_path, layout)
    said: list[tuple[int, int]] = []
    data = given(found, layout, lambda *step: said.append(step))
    assert said[-1][0] == said[-1][1]
    files = files_of(data)
    for name, content in files.items():
        if name.startswith("blobs/"):
            assert digest_of(content) == f"sha256:{name.removeprefix('blobs/sha256/')}"
    old = str(made.member("criu.tar")["digest"])
    assert {f"blobs/sha256/{digest[7:]}" for digest in made.blobs if digest != old} <= files.keys()
    assert list(files)[-2:] == ["index.json", "oci-layout"]

    top = json.loads(files["index.json"])["manifests"]
    names = [each["annotations"]["io.containerd.image.name"] for each in top]
    assert names == ([BASE] if base else []) + [IMAGE]
    index = json.loads(files[f"blobs/sha256/{top[-1]['digest'][7:]}"])
    assert len(index["manifests"]) == len(json.loads(made.document)["manifests"])
    [criu] = [each for each in index["manifests"] if "criu.tar" in each["mediaType"]]
    inner, before = files_of(files[f"blobs/sha256/{criu['digest'][7:]}"]), files_of(made.blobs[old])
    assert {name: inner.get(name) for name in before} == before
    assert all(name.startswith("gpusnap/") for name in inner.keys() - before.keys())

    # Taken in again it is the same.
    (tmp_path / "back.tar").write_bytes(data)
    with Archive(str(tmp_path / "back.tar")) as source:
        again = take_in(source, Layout(tmp_path / "again").create())
    assert (again.config, again.chunks, again.carried, again.annotations) == (
        *(found.artifact.config, found.artifact.chunks),
        *(found.artifact.carried, found.artifact.annotations),
    )


def test_chunks_from_a_store(tmp_path: Path, layout: Layout) -> None:
    """Those that were not in the image are in it now: no store is needed to restore it."""
    found = kept_of(a_checkpoint(tmp_path, pages="store"), tmp_path, layout)
    for each in found.artifact.chunks:
        layout.link_blob(each.digest, each.size, Layout(tmp_path / "source"))
    [images] = [data for data in files_of(given(found, layout)).values() if b"inventory.img" in data[:4096]]
    inner = files_of(images)
    for each in found.artifact.chunks:
        assert digest_of(inner[f"gpusnap/blobs/sha256/{each.digest[7:]}"]) == each.digest


def test_links(tmp_path: Path, layout: Layout) -> None:
    """Hard links among the images lead where they did."""
    link = tarfile.TarInfo("core-2.img")
    link.type, link.linkname = tarfile.LNKTYPE, "core-1.img"
    made = a_checkpoint(tmp_path, gpu=False, images={"core-2.img": link})
    files = files_of(given(kept_of(made, tmp_path, layout), layout))
    tars = [data for name, data in files.items() if b"core-2.img" in data and name.startswith("blobs")]
    with tarfile.open(fileobj=io.BytesIO(tars[0])) as found:
        member = found.getmember("core-2.img")
        assert (member.islnk(), member.linkname) == (True, "core-1.img")


def with_records(found: ArtifactParts, layout: Layout, data: bytes) -> ArtifactParts:
    blob = layout.add_blob(as_file(compress([data])), media_type=artifact.IMAGE)
    return replace(found, artifact=replace(found.artifact, records=blob))


@pytest.mark.parametrize("kind", ["checkpoint.config", "layer", "image.manifest"])
def test_a_missing_blob(tmp_path: Path, layout: Layout, kind: str) -> None:
    """Whoever pushed it may have left it out."""
    made = a_checkpoint(tmp_path, gpu=False)
    found = kept_of(made, tmp_path, layout)
    gone = str(made.member(kind)["digest"])
    layers = files_of_records(found, layout)
    layers.pop(f"containerd/blobs/sha256/{gone[7:]}")
    with pytest.raises(BlobError, match=rf"{gone} \(\d+ bytes, .*\) is not in the checkpoint"):
        given(with_records(found, layout, packed(layers)), layout)


def test_a_missing_layer(tmp_path: Path, layout: Layout) -> None:
    """One that would be a layer of the artifact's own."""
    found = kept_of(a_checkpoint(tmp_path, gpu=False), tmp_path, layout)
    with pytest.raises(BlobError, match="is not in the checkpoint"):
        given(replace(found, artifact=replace(found.artifact, carried=())), layout)


def files_of_records(found: ArtifactParts, layout: Layout) -> dict[str, bytes | tarfile.TarInfo]:
    assert found.artifact.records is not None
    data = layout.read_blob(found.artifact.records)
    return {**files_of(zstandard.ZstdDecompressor().decompressobj().decompress(data))}


FOREIGN: dict[str, tuple[str, bytes, type[Exception], str]] = {
    "what is nobody's": ("etc/passwd", b"x", ImageError, "not one of containerd's"),
    "a manifest of its own": ("checkpoint/gpusnap/manifest.json", b"{}", ImageError, "does not belong there"),
    "a chunk of its own": ("checkpoint/gpusnap/blobs/sha256/x", b"", ImageError, "does not belong there"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_records(tmp_path: Path, layout: Layout, what: str) -> None:
    """Records hold nothing but what belongs there."""
    name, data, kind, words = FOREIGN[what]
    found = kept_of(a_checkpoint(tmp_path), tmp_path, layout)
    files = {**files_of_records(found, layout), name: data}
    with pytest.raises(kind, match=words):
        given(with_records(found, layout, packed(files)), layout)


def test_a_link_out_of_the_images(tmp_path: Path, layout: Layout) -> None:
    """In the archive it would lead elsewhere."""
    link = tarfile.TarInfo("checkpoint/x")
    link.type, link.linkname = tarfile.LNKTYPE, "containerd/index.json"
    found = kept_of(a_checkpoint(tmp_path, gpu=False), tmp_path, layout)
    files = {**files_of_records(found, layout), "checkpoint/x": link}
    with pytest.raises(ImageError, match="points outside CRIU's images"):
        given(with_records(found, layout, packed(files)), layout)


def test_no_image_in_the_records(tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, two, or such a large one as nobody needs."""
    found = kept_of(a_checkpoint(tmp_path, gpu=False), tmp_path, layout)
    with pytest.raises(LayoutError, match="name no containerd image"):
        given(with_records(found, layout, packed({"checkpoint/x": b""})), layout)
    files = files_of_records(found, layout)
    index = json.loads(bytes(files["containerd/index.json"]))  # type: ignore[arg-type]
    files["containerd/index.json"] = json.dumps({**index, "manifests": index["manifests"] * 2}).encode()
    with pytest.raises(LayoutError, match="name 2 containerd images"):
        given(with_records(found, layout, packed(files)), layout)
    monkeypatch.setattr(containerd_writer, "_MOST_BESIDE", 100)
    with pytest.raises(LayoutError, match="more than 100 bytes"):
        given(found, layout)


def test_wrong_records(tmp_path: Path, layout: Layout) -> None:
    """They are checked before anything is made of them."""
    found = kept_of(a_checkpoint(tmp_path, gpu=False), tmp_path, layout)
    assert found.artifact.records is not None
    real = found.artifact.records
    right = layout.read_blob(real)
    digest = digest_of(b"another")
    path = Path(layout.path, "blobs", "sha256", digest[7:])
    path.write_bytes(right)
    wrong = Descriptor(artifact.IMAGE, digest, len(right))
    with pytest.raises(BlobError, match="does not match its digest"):
        given(replace(found, artifact=replace(found.artifact, records=wrong)), layout)
