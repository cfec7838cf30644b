"""One-layer images of an archive: both digests from one pass, and the annotations that engines look for."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import zstandard
from archives import COMPRESS, written
from oci_regions import text

from gpusnap.oci.base.errors import ArchiveError
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import MANIFEST, Descriptor, Manifest
from gpusnap.oci.layout.image_marks import CRI_NAME, PODMAN, Format
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.single_layer_image import Packing, write_image

NOTES = {
    "org.opencontainers.image.created": "2026-02-03T04:05:06Z",
    "org.criu.checkpoint.container.name": "serving",
    "org.criu.checkpoint.runtime.name": "gpusnap-runtime",
    "org.criu.checkpoint.rootfsImageName": "localhost/base:latest",
    "org.criu.checkpoint.cgroup.version": "v2",
    "org.criu.checkpoint.host.arch": "aarch64",
    "io.gpusnap.gpus": "1 Soft H100",
}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def parts(layout: Layout, root: Descriptor) -> tuple[Manifest, dict[str, object], bytes]:
    """Manifest, configuration, and the layer's bytes."""
    manifest = layout.read_manifest(root)
    config = json.loads(layout.read_blob(manifest.config))
    with layout.open_blob(manifest.layers[0].digest, manifest.layers[0].size) as file:
        return manifest, config, file.read()


@pytest.mark.parametrize("format", ["podman", "cri"])
@pytest.mark.parametrize("how", COMPRESS)
@pytest.mark.parametrize("as_stream", [True, False])
@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_digests(
    tmp_path: Path, layout: Layout, how: str, format: Format, as_stream: bool, packing: Packing
) -> None:
    """The layer's tar is the archive's to the byte; diff_id and digest are right; what fits stays."""
    plain = Path(written(tmp_path / "in.tar", None, None)).read_bytes()
    path = tmp_path / "archive"
    path.write_bytes(COMPRESS[how](plain))
    source = io.BytesIO(path.read_bytes()) if as_stream else str(path)
    root = write_image(layout, source, format=format, annotations=NOTES, packing=packing, threads=2)
    manifest, config, layer = parts(layout, root)
    assert config["rootfs"] == {"type": "layers", "diff_ids": [digest_of(plain)]}
    assert (config["architecture"], config["os"]) == ("arm64", "linux")
    assert (root.media_type, manifest.artifact_type, len(manifest.layers)) == (MANIFEST, "", 1)
    assert manifest.config.media_type == "application/vnd.oci.image.config.v1+json"
    kind = manifest.layers[0].media_type
    if packing == "gzip":
        assert (kind, gzip.decompress(layer)) == ("application/vnd.oci.image.layer.v1.tar+gzip", plain)
    else:
        reader = zstandard.ZstdDecompressor().stream_reader(layer, read_across_frames=True)
        assert (kind, reader.read()) == ("application/vnd.oci.image.layer.v1.tar+zstd", plain)
    assert (layer == path.read_bytes()) == how.startswith(packing)


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_same_bytes(tmp_path: Path, layout: Layout, packing: Packing) -> None:
    """The same archive makes the same image, whatever the number of threads."""
    path = written(tmp_path / "in.tar", None, None, more={"checkpoint/pages-9.img": text(9 << 20, 1)})
    first = write_image(layout, path, format="podman", annotations=NOTES, packing=packing, threads=1)
    assert write_image(layout, path, format="podman", annotations=NOTES, packing=packing, threads=3) == first


def test_gzip_unless_asked_otherwise(tmp_path: Path, layout: Layout) -> None:
    """What Docker's schema and older tools take; several members, which all of them read as one stream."""
    path = written(tmp_path / "in.tar", None, None, more={"checkpoint/pages-9.img": text(3 << 20, 1)})
    manifest = layout.read_manifest(write_image(layout, path, format="podman", annotations=NOTES))
    assert manifest.layers[0].media_type == "application/vnd.oci.image.layer.v1.tar+gzip"
    layer = layout.read_blob(manifest.layers[0])
    done = subprocess.run(["gzip", "-dc"], input=layer, capture_output=True, check=True)
    assert done.stdout == Path(path).read_bytes()


def test_annotations(tmp_path: Path, layout: Layout) -> None:
    """What the caller says is there under the names of each format, what it does not say is not."""
    path = written(tmp_path / "in.tar", None, None)
    podman = layout.read_manifest(write_image(layout, path, format="podman", annotations=NOTES))
    assert podman.annotations == NOTES | {
        f"{PODMAN}name": "serving",
        f"{PODMAN}runtime.name": "gpusnap-runtime",
        f"{PODMAN}rootfsImageName": "localhost/base:latest",
        f"{PODMAN}cgroups.version": "v2",
        f"{PODMAN}host.arch": "aarch64",
    }
    cri = layout.read_manifest(write_image(layout, path, format="cri", annotations=NOTES))
    assert cri.annotations[CRI_NAME] == cri.annotations["org.criu.checkpoint.container.name"] == "serving"


@pytest.mark.parametrize(("format", "key"), [("podman", "runtime.name"), ("cri", "container.name")])
def test_what_engines_need(tmp_path: Path, layout: Layout, format: Format, key: str) -> None:
    """Without the annotation by which the engine knows a checkpoint there is no image."""
    notes = {name: text for name, text in NOTES.items() if not name.endswith(key)}
    with pytest.raises(ArchiveError, match=rf"without the annotation org\.criu\.checkpoint\.{key}"):
        write_image(layout, written(tmp_path / "in.tar", None, None), format=format, annotations=notes)
    assert not os.listdir(Path(layout.path, "blobs", "sha256"))


@pytest.mark.parametrize("how", COMPRESS)
def test_broken(tmp_path: Path, layout: Layout, how: str) -> None:
    """An archive that is cut short makes no image, and leaves no blob."""
    data = COMPRESS[how](Path(written(tmp_path / "in.tar", None, None)).read_bytes())
    for end in (0, 3, len(data) // 2, len(data) - 1):
        with pytest.raises(ArchiveError, match="cut short"):
            write_image(layout, io.BytesIO(data[:end]), format="cri", annotations=NOTES)
    with pytest.raises(ArchiveError, match="cannot be read: it does not exist"):
        write_image(layout, str(tmp_path / "none"), format="cri", annotations=NOTES)
    assert not os.listdir(Path(layout.path, "blobs", "sha256"))


def test_large(tmp_path: Path, layout: Layout) -> None:
    """64 MiB of zeros are a small layer."""
    path = written(tmp_path / "in.tar", None, None, more={"checkpoint/pages-9.img": bytes(64 << 20)})
    manifest = layout.read_manifest(write_image(layout, path, format="podman", annotations=NOTES))
    assert manifest.layers[0].size < 1 << 20
