"""A checkpoint of containerd's as an artifact: each blob in its place, or a sentence."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from containerd_layouts import BASE, IMAGE, Made, a_checkpoint, files_of, packed
from oci_regions import load

from gpusnap.checkpoints.formats import containerd_reader
from gpusnap.checkpoints.formats.containerd_archive import Archive
from gpusnap.checkpoints.formats.containerd_reader import take_in
from gpusnap.oci.base.errors import ArchiveError, BlobError
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import EMPTY
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import entries
from gpusnap.runtime_shim.base.errors import ImageError, ManifestError
from gpusnap.runtime_shim.records import manifest_json


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def taken(made: Made, folder: Path, layout: Layout, *, without: str = "") -> Artifact:
    with Archive(made.written(folder / "cp.tar", without=without)) as source:
        return take_in(source, layout)


def records(found: Artifact, layout: Layout) -> dict[str, bytes | None]:
    assert found.records is not None
    with layout.open_blob(found.records.digest, found.records.size) as file:
        return {each.name: each.content.read() if each.content else None for each in entries(file)}


def test_the_parts(tmp_path: Path, layout: Layout) -> None:
    """Manifest, chunks, what is large, and the rest."""
    made = a_checkpoint(tmp_path)
    found = taken(made, tmp_path, layout)
    files = records(found, layout)
    assert found.is_image
    document = manifest_json.decode(layout.read_blob(found.config), "m")
    tables = tuple(document.tables)
    assert load(layout, tables) == load(Layout(tmp_path / "source"), tables)
    assert {each.digest for each in found.chunks} == {
        chunk.blob for table in document.tables for chunk in table.chunks
    }
    [layer] = found.carried
    assert layout.read_blob(layer) == made.blobs[layer.digest]
    criu = str(made.member("criu.tar")["digest"])
    beside = {f"containerd/blobs/sha256/{digest_of(made.document)[7:]}": made.document}
    beside |= {
        f"containerd/blobs/sha256/{digest[7:]}": data
        for digest, data in made.blobs.items()
        if digest not in (criu, layer.digest)
    }
    assert {name: files[name] for name in beside} == beside
    assert files["checkpoint/core-1.img"] == b"core"
    assert not [name for name in files if name.startswith("checkpoint/gpusnap/")]
    assert next(iter(files)) == "containerd"
    root = artifact.write(layout, found)
    again = artifact.read(root, layout.read_blob)
    assert (again.carried, again.chunks) == (found.carried, found.chunks)
    assert again.records is not None
    assert again.records.annotations[artifact.TITLE] == "image.tar.zst"
    kept = {"sha256:" + each.name for each in Path(layout.path, "blobs", "sha256").iterdir()}
    assert kept == {each.digest for each in found.blobs()} | {root.digest}


def test_annotations(tmp_path: Path, layout: Layout) -> None:
    """The container by its configuration, the engine, and what the manifest says."""
    notes = taken(a_checkpoint(tmp_path), tmp_path, layout).annotations
    wanted = {
        "org.criu.checkpoint.container.name": "serving",
        "org.criu.checkpoint.engine.name": "containerd",
        "org.criu.checkpoint.rootfsImageName": BASE,
        "org.criu.checkpoint.runtime.name": "io.containerd.runc.v2",
        "io.gpusnap.gpus": "1 Soft H100",
        "io.gpusnap.container.id": "ab" * 32,
    }
    assert {key: notes.get(key) for key in wanted} == wanted


def test_without_gpus(tmp_path: Path, layout: Layout) -> None:
    """It is kept like any."""
    found = taken(a_checkpoint(tmp_path, gpu=False, base=False), tmp_path, layout)
    assert (found.config.media_type, found.chunks, found.carried) == (EMPTY, (), ())
    assert found.annotations["org.opencontainers.image.created"] == "2023-11-14T22:13:20Z"


def test_known(tmp_path: Path, layout: Layout) -> None:
    """What a store has is asked for, and not read: the base image's layers, too."""
    made = a_checkpoint(tmp_path)
    asked: list[str] = []

    def known(digest: str, size: int) -> bool:
        asked.append(digest)
        data = made.blobs.get(digest)
        if data is None:
            layout.link_blob(digest, size, Layout(tmp_path / "source"))
        else:
            layout.add_blob(data)
        return True

    with Archive(made.written(tmp_path / "cp.tar")) as source:
        found = take_in(source, layout, known=known)
    assert set(asked) == {each.digest for each in (*found.chunks, *found.carried)}


def test_chunks_in_a_store(tmp_path: Path, layout: Layout) -> None:
    """They need not be in the image."""
    found = taken(a_checkpoint(tmp_path, pages="store"), tmp_path, layout)
    assert found.chunks
    assert not any(layout.has_blob(each.digest, each.size) for each in found.chunks)


def test_progress(tmp_path: Path, layout: Layout) -> None:
    """By bytes of the blobs."""
    made = a_checkpoint(tmp_path)
    said: list[tuple[int, int]] = []
    with Archive(made.written(tmp_path / "cp.tar")) as source:
        take_in(source, layout, progress=lambda *step: said.append(step))
    whole = sum(map(len, made.blobs.values()))
    assert said[-1] == (whole, whole)


@pytest.mark.parametrize("kind", ["criu.tar", "checkpoint.config", "image.manifest", "layer"])
def test_a_missing_blob(tmp_path: Path, layout: Layout, kind: str) -> None:
    """It is named."""
    made = a_checkpoint(tmp_path)
    digest = str(made.member(kind)["digest"])
    with pytest.raises(BlobError, match=f"does not contain the blob {digest}"):
        taken(made, tmp_path, layout, without=digest)


@pytest.mark.parametrize("kind", ["criu.tar", "checkpoint.config", "image.manifest", "layer"])
def test_a_wrong_blob(tmp_path: Path, layout: Layout, kind: str) -> None:
    """What is not what its digest says is found, be it large or small."""
    made = a_checkpoint(tmp_path)
    digest = str(made.member(kind)["digest"])
    data = made.blobs[digest]
    made.blobs[digest] = data[:-1] + b"\1"
    with pytest.raises((BlobError, ArchiveError)):
        taken(made, tmp_path, layout)


def test_a_wrong_layer(tmp_path: Path, layout: Layout) -> None:
    """One that goes along as it is, too."""
    made = a_checkpoint(tmp_path)
    digest = max(made.blobs, key=lambda each: len(made.blobs[each]))
    made.blobs[digest] = bytes(len(made.blobs[digest]))
    with pytest.raises(BlobError, match="does not match its digest"):
        taken(made, tmp_path, layout)


def link(kind: bytes, to: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("core-9.img")
    info.type, info.linkname = kind, to
    return info


BAD: dict[str, tuple[Mapping[str, bytes | tarfile.TarInfo], type[Exception], str]] = {
    "a link in the place of a folder": (
        {"gpusnap": link(tarfile.SYMTYPE, "/etc")},
        ImageError,
        "is not a directory",
    ),
    "two manifests": ({"./gpusnap/manifest.json": b"{}"}, (ImageError), "twice"),
    "a device": ({"null": link(tarfile.CHRTYPE, "")}, ArchiveError, "a device"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_images(tmp_path: Path, layout: Layout, what: str) -> None:
    """CRIU's tar is looked at as Podman's archives are."""
    more, kind, words = BAD[what]
    for name, content in more.items():
        if isinstance(content, tarfile.TarInfo):
            content.name = name
    with pytest.raises(kind, match=words):
        taken(a_checkpoint(tmp_path, images=more), tmp_path, layout)


def test_images_that_lead_out(tmp_path: Path, layout: Layout) -> None:
    """Names and hard links."""
    with pytest.raises(ArchiveError, match="points outside"):
        taken(a_checkpoint(tmp_path, images={"../core-9.img": b""}), tmp_path, layout)
    more = {"core-9.img": link(tarfile.LNKTYPE, "../../etc/shadow")}
    with pytest.raises(ArchiveError, match="points outside"):
        taken(a_checkpoint(tmp_path, images=more), tmp_path, layout)


def test_a_broken_manifest(tmp_path: Path, layout: Layout) -> None:
    """A chunk that is missing, and no manifest at all."""
    broken = {"gpusnap/manifest.json": b"{"}
    with pytest.raises(ManifestError):
        taken(a_checkpoint(tmp_path, gpu=False, images=broken), tmp_path, layout)
    with pytest.raises(ImageError, match="is incomplete"):
        taken(a_checkpoint(tmp_path, gpu=False, images={"gpusnap/x": b""}), tmp_path, layout)
    made = a_checkpoint(tmp_path, images={"gpusnap/manifest.json": b""}, pages="store")
    with pytest.raises(ManifestError):
        taken(made, tmp_path, layout)


def test_many_small_ones(tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory together is bounded: the rest are layers."""
    monkeypatch.setattr(containerd_reader, "_MOST_SMALL", 110)
    made = a_checkpoint(tmp_path, gpu=False)
    found = taken(made, tmp_path, layout)
    assert len(found.carried) > 1
    beside = [name for name in records(found, layout) if name.startswith("containerd/blobs/sha256/")]
    assert len(beside) + len(found.carried) == len(made.blobs)


def test_the_same_twice(tmp_path: Path, layout: Layout) -> None:
    """The same image is the same artifact, whoever takes it in."""
    made = a_checkpoint(tmp_path)
    assert taken(made, tmp_path, layout) == taken(made, tmp_path, Layout(tmp_path / "again").create())


def test_no_tar(tmp_path: Path, layout: Layout) -> None:
    """CRIU's images that end before their end."""
    made = a_checkpoint(tmp_path, gpu=False)
    member = made.member("criu.tar")
    data = made.blobs.pop(str(member["digest"]))
    member.update(made.add(data[:-600], str(member["mediaType"])))
    with pytest.raises(ArchiveError, match="cut short"):
        taken(made, tmp_path, layout)
    member.update(made.add(packed({}) + b"more", str(member["mediaType"])))
    with pytest.raises(ArchiveError, match="continues after its end"):
        taken(made, tmp_path, layout)


def test_names(tmp_path: Path, layout: Layout) -> None:
    """The image's name is kept; one that nobody knows is none."""
    made = a_checkpoint(tmp_path, gpu=False)
    index = records(taken(made, tmp_path, layout), layout)["containerd/index.json"]
    assert index is not None
    assert IMAGE.encode() in index
    made.name = ""
    other = records(taken(made, tmp_path, layout), layout)["containerd/index.json"]
    assert other is not None
    assert b"annotations" not in other


def test_flat_names(tmp_path: Path, layout: Layout) -> None:
    """Of a container of Kubernetes', gpusnap's files have no folder."""
    made = a_checkpoint(tmp_path)
    member = made.member("criu.tar")
    files = files_of(made.blobs.pop(str(member["digest"])))
    flat = {name.replace("/", "%2F"): data for name, data in files.items()}
    other = a_checkpoint(tmp_path)
    member.update(made.add(packed(flat), str(member["mediaType"])))
    there = taken(other, tmp_path, Layout(tmp_path / "other").create())
    assert taken(made, tmp_path, layout).chunks == there.chunks


def test_compressed_images(tmp_path: Path, layout: Layout) -> None:
    """A few bytes that would become any number of them."""
    made = a_checkpoint(tmp_path, gpu=False)
    member = made.member("criu.tar")
    data = made.blobs.pop(str(member["digest"]))
    member.update(made.add(gzip.compress(data), str(member["mediaType"])))
    with pytest.raises(ImageError, match="are compressed"):
        taken(made, tmp_path, layout)
