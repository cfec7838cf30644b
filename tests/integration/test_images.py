"""Checkpoints in the forms that other tools take: archives put together again, images of one layer.

What containerd's CRI plugin does with a "cri" image is in test_cri.py, for hosts that have one; Debian has no
CRI-O. Here that image goes through skopeo and into Podman's storage, and checkpointctl reads the archives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import shimhost
from support import Container, good, podman, run, until

from gpusnap.checkpoints.formats.podman import give_out, take_in
from gpusnap.checkpoints.formats.podman_reader import ArchiveContents
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.layout.blobs import FirstOf
from gpusnap.oci.layout.documents import Descriptor, Index
from gpusnap.oci.layout.image_marks import Format
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.single_layer_image import write_image
from gpusnap.oci.store.store import Store
from gpusnap.oci.tar.archive import Compression

WORK = ("--mib", "24")
NAME = "org.opencontainers.image.ref.name"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@pytest.fixture
def images() -> Iterator[None]:
    """The image that a test brings into Podman's storage is removed."""
    yield
    podman("rmi", "--force", "localhost/checkpoint:1")


def checkpointed(folder: Path, *words: str) -> Path:
    """The archive of a container that has gone."""
    container, archive = Container.start("w", *WORK), folder / "checkpoint.tar"
    good(container.checkpoint(archive, *words))
    container.remove()
    return archive


def ticks_on(container: Container) -> None:
    """As `goes_on`, for one whose log begins with the restore: Podman takes none from an image."""
    until(container.ticks, f"the first tick of {container.name}")
    container.goes_on()


def parts(taken: ArchiveContents) -> Artifact:
    return Artifact(taken.config, taken.records, taken.rootfs, taken.chunks, taken.annotations)


def image(archive: Path, folder: Path, layout: Layout, kind: Format) -> Descriptor:
    """An image of that archive in the layout, named "1"."""
    notes = take_in(str(archive), Layout(folder / "parts").create()).annotations
    root = write_image(layout, str(archive), format=kind, annotations=notes, threads=2)
    named = Descriptor(root.media_type, root.digest, root.size, {NAME: "1"})
    layout.commit(Index((named,)))
    return root


@pytest.mark.parametrize("compress", ["none", "zstd", "gzip"])
def test_archive_again(crun: None, tmp_path: Path, layout: Layout, compress: str) -> None:
    """An archive that went into a layout and came out is one that Podman imports, GPU memory and all."""
    archive = checkpointed(tmp_path, "--compress", compress)
    taken = take_in(str(archive), layout)
    assert taken.chunks
    assert taken.annotations["io.gpusnap.gpus"].startswith("2 Soft H100")
    archive.unlink()
    out = tmp_path / "again.tar"
    packed: Compression = "none" if compress == "none" else "zstd"
    give_out(parts(taken), layout, str(out), config=layout.read_blob(taken.config), compress=packed)
    seen = json.loads(good(run("/usr/local/bin/gpusnap", "inspect", "--json", out)))
    assert seen["container"]["id"] == taken.annotations["io.gpusnap.container.id"]
    Container.restore("w", out).goes_on()


def test_podman_image(crun: None, images: None, tmp_path: Path, layout: Layout) -> None:
    """`podman container restore IMAGE` takes the image, and the container ticks on."""
    archive = checkpointed(tmp_path)
    image(archive, tmp_path, layout, "podman")
    good(run("skopeo", "copy", f"oci:{layout.path}:1", "containers-storage:localhost/checkpoint:1"))
    found = json.loads(good(podman("image", "inspect", "localhost/checkpoint:1")))[0]
    assert found["Annotations"]["io.podman.annotations.checkpoint.name"] == "w"
    good(podman("container", "restore", "localhost/checkpoint:1"))
    ticks_on(Container("w"))


def test_podman_image_of_another_runtime(crun: None, images: None, tmp_path: Path, layout: Layout) -> None:
    """What Podman compares is the name of the runtime: the annotation is the one that counts."""
    archive = checkpointed(tmp_path)
    image(archive, tmp_path, layout, "podman")
    good(podman("pull", f"oci:{layout.path}:1"))
    found = json.loads(good(podman("images", "--format", "json")))
    named = next(each for each in found if each["Digest"] == layout.read_index().manifests[0].digest)
    try:
        refused = podman("container", "restore", named["Id"], runtime="runc")
        assert refused.code != 0
        assert 'requires runtime: "gpusnap-runtime"' in refused.err
        good(podman("container", "restore", named["Id"]))
        ticks_on(Container("w"))
    finally:
        podman("rm", "--force", "--time", "0", "w")
        podman("rmi", "--force", named["Id"])


def test_cri_image(crun: None, images: None, tmp_path: Path, layout: Layout) -> None:
    """The image has the annotations that CRI-O and containerd look for once it is in an engine's storage."""
    archive = checkpointed(tmp_path, "--compress", "none")
    root = image(archive, tmp_path, layout, "cri")
    good(run("skopeo", "copy", f"oci:{layout.path}:1", f"oci:{tmp_path / 'copy'}:1"))
    assert Layout(tmp_path / "copy").read_index().manifests[0].digest == root.digest
    seen = json.loads(good(run("skopeo", "inspect", "--raw", f"oci:{tmp_path / 'copy'}:1")))
    assert seen["annotations"]["org.criu.checkpoint.container.name"] == "w"
    good(run("skopeo", "copy", f"oci:{layout.path}:1", "containers-storage:localhost/checkpoint:1"))
    found = json.loads(good(podman("image", "inspect", "localhost/checkpoint:1")))[0]
    assert found["Annotations"]["io.kubernetes.cri-o.annotations.checkpoint.name"] == "w"
    mounted = Path(good(podman("image", "mount", "localhost/checkpoint:1")))
    try:
        assert json.loads((mounted / "config.dump").read_bytes())["name"] == "w"
        assert (mounted / "checkpoint" / "gpusnap" / "manifest.json").exists()
    finally:
        good(podman("image", "unmount", "localhost/checkpoint:1"))


def test_checkpointctl(crun: None, tmp_path: Path, layout: Layout) -> None:
    """checkpointctl reads what was put together again as it reads Podman's own."""
    archive = checkpointed(tmp_path)
    taken = take_in(str(archive), layout)
    out = tmp_path / "again.tar"
    give_out(parts(taken), layout, str(out), config=layout.read_blob(taken.config))
    shown = [good(run("checkpointctl", "inspect", "--format", "json", each)) for each in (archive, out)]
    before, after = (json.loads(each)[0] for each in shown)
    for each in (before, after):
        each.pop("checkpoint_size", None)
    assert {k: v for k, v in before.items() if k in ("container_name", "image", "id", "runtime")} == {
        k: v for k, v in after.items() if k in ("container_name", "image", "id", "runtime")
    }
    assert before["container_name"] == "w"
    assert "w" in good(run("checkpointctl", "show", out))


def test_store_mode(crun: None, tmp_path: Path, layout: Layout) -> None:
    """An archive whose chunks are in a store becomes one that needs no store."""
    store = tmp_path / "store"
    shimhost.write_settings(f'runtime = "crun"\n[memory]\npages = "store"\n[store]\npath = "{store}"\n')
    archive = checkpointed(tmp_path)
    taken = take_in(str(archive), layout)
    out = tmp_path / "again.tar"
    blobs = FirstOf([layout, Store(store).layout])
    give_out(parts(taken), blobs, str(out), config=layout.read_blob(taken.config))
    archive.unlink()
    store.rename(tmp_path / "elsewhere")
    Container.restore("w", out).goes_on()
