"""The index that containerd makes of a checkpoint: what is in it, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from containerd_layouts import BASE, IMAGE, Made, a_checkpoint

from gpusnap.checkpoints.formats import containerd
from gpusnap.checkpoints.formats.containerd import (
    Image,
    container_name,
    describe_index,
    load,
    make_named_entry,
    replace_criu_images,
    top,
)
from gpusnap.oci.base.errors import BlobError, DigestError, LayoutError
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import INDEX, Descriptor
from gpusnap.runtime_shim.base.errors import ImageError


def loaded(made: Made) -> Image:
    root = describe_index(made.document)
    every = {**made.blobs, root.digest: made.document}
    return load(root, lambda one: every[one.digest], lambda one: one.digest in every, "w")


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return a_checkpoint(tmp_path, gpu=False)


def test_what_is_in_it(made: Made) -> None:
    """CRIU's images apart, every other blob once, the base image and its name."""
    image = loaded(made)
    assert image.criu.digest == made.member("criu.tar")["digest"]
    assert {each.digest for each in image.others} == set(made.blobs) - {image.criu.digest}
    assert image.base is not None
    assert image.base_name == BASE
    assert image.config is not None
    assert container_name(made.blobs[image.config.digest]) == "serving"


def test_an_image_for_several_platforms(made: Made) -> None:
    """Of those that containerd does not have, nothing is asked."""
    manifest = made.member("image.manifest")
    there = dict(manifest)
    absent = {"mediaType": manifest["mediaType"], "digest": digest_of(b"arm"), "size": 3}
    below = made.add(json.dumps({"schemaVersion": 2, "manifests": [there, absent]}).encode(), INDEX)
    manifest.clear()
    manifest.update(below)
    found = {each.digest for each in loaded(made).others}
    assert there["digest"] in found
    assert digest_of(b"arm") not in found


WRONG: dict[str, tuple[Callable[[Made], object], type[Exception], str]] = {
    "no task": (
        lambda made: made.member("criu.tar").update(mediaType="a/b"),
        ImageError,
        "no images of CRIU",
    ),
    "two tasks": (
        lambda made: made.member("config").update(mediaType=containerd.CRIU),
        ImageError,
        "has 2 images of CRIU",
    ),
    "an ordinary image": (
        lambda made: made.index.update(manifests=[made.member("image.manifest")]),
        ImageError,
        "but an ordinary image",
    ),
    "a digest of another kind": (
        lambda made: made.member("options").update(digest="sha512:" + "0" * 128),
        DigestError,
        "is not a sha256 digest",
    ),
    "no digest": (
        lambda made: made.member("options").update(digest="../../x"),
        LayoutError,
        "is not a digest",
    ),
    "a negative size": (lambda made: made.member("options").update(size=-1), LayoutError, "is invalid: -1"),
    "an image of ctr task checkpoint": (
        lambda made: made.index.update(annotations={}),
        ImageError,
        "does not name its base image",
    ),
    "a name that is none": (
        lambda made: made.index.update(annotations={containerd.REF_NAME: "--help x"}),
        LayoutError,
        "without a valid name",
    ),
    "two sizes": (
        lambda made: made.member("options").update(digest=made.member("config")["digest"], size=1),
        LayoutError,
        "is listed with",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_broken_index(made: Made, what: str) -> None:
    """What cannot be a checkpoint is said to be none, and why."""
    change, kind, words = WRONG[what]
    change(made)
    with pytest.raises(kind, match=words):
        loaded(made)


def test_too_many_blobs(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index cannot make a push go on for ever."""
    monkeypatch.setattr(containerd, "_MOST_BLOBS", 3)
    with pytest.raises(LayoutError, match="more than 3 blobs"):
        loaded(made)


def test_nested_without_end(made: Made) -> None:
    """Nor can one that names one that names one."""
    inner = made.member("image.manifest")
    at = dict(inner)
    for _ in range(12):
        at = made.add(json.dumps({"schemaVersion": 2, "manifests": [at]}).encode(), INDEX)
    inner.clear()
    inner.update(at)
    with pytest.raises(LayoutError, match="too deeply"):
        loaded(made)


def test_another_manifest(made: Made) -> None:
    """An image of one platform is no index."""
    manifest = made.member("image.manifest")
    root = Descriptor(str(manifest["mediaType"]), str(manifest["digest"]), 1)
    with pytest.raises(ImageError, match=r"not a containerd checkpoint, but of type .*manifest"):
        load(root, lambda one: b"", lambda one: True, "w")


def test_remade(made: Made) -> None:
    """Another tar in its place, and all the rest as it was, what is not known here too."""
    image = loaded(made)
    criu = Descriptor(containerd.CRIU, digest_of(b"new"), 3)
    after = json.loads(replace_criu_images(image, criu))
    member = made.member("criu.tar")
    member["digest"], member["size"] = criu.digest, 3
    assert after == made.index


def test_the_top(made: Made) -> None:
    """The base image has an entry of its own, and with it its name."""
    image = loaded(made)
    entries = json.loads(top(image, image.root, IMAGE))["manifests"]
    assert [each["annotations"] for each in entries] == [
        {"io.containerd.image.name": BASE, "org.opencontainers.image.ref.name": "latest"},
        {"io.containerd.image.name": IMAGE, "org.opencontainers.image.ref.name": "cp"},
    ]
    with pytest.raises(LayoutError, match="not a valid image name"):
        make_named_entry(image.root, "-x")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (b'{"linux":{"cgroupsPath":"system.slice:cri:ab12"}}', "ab12"),
        (b'{"annotations":{"io.kubernetes.cri.container-name":"web"}}', "web"),
        (b"[]", ""),
        (b"{", ""),
        (b"[" * 100_000, ""),
    ],
)
def test_names_of_containers(spec: bytes, name: str) -> None:
    """From its configuration, whatever that is."""
    size = len(spec)
    varint = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
    assert container_name(b"\x12" + varint + spec) == name
    assert container_name(spec) == ""


def test_sizes_of_documents() -> None:
    """A document of any size is not taken into memory."""

    class Huge:
        word, name, root = "w", "", Descriptor(INDEX, digest_of(b""), 0)

        def has(self, wanted: Descriptor) -> bool:
            return True

        def open(self, wanted: Descriptor) -> object:
            raise AssertionError

    with pytest.raises(BlobError, match="are allowed"):
        containerd.blob_of(Huge(), Descriptor(INDEX, digest_of(b""), 1 << 40))  # type: ignore[arg-type]
