"""Checkpoints as ordinary images, which `gpusnap push --format podman` and Podman itself make.

Their only layer is one of Podman's archives, compressed or not, for `podman container restore --import`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gpusnap.oci.base.errors import EngineImage
from gpusnap.oci.layout.digests import get_hex
from gpusnap.oci.layout.documents import Descriptor, Manifest, parse_document
from gpusnap.oci.layout.image_marks import engine_of, layer_of
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import Refused


def archive_of(root: Descriptor, read: Callable[[Descriptor], bytes]) -> Descriptor:
    """Return the layer with Podman's archive. Raises EngineImage, Refused for another image; LayoutError."""
    manifest = Manifest.from_json(parse_document(read(root), f"the manifest {root.digest}"))
    if engine_of(manifest) != "podman":
        raise EngineImage(
            f"{root.digest} is a checkpoint as an image, which Kubernetes restores",
            engine="cri",
            manifest=root.digest,
        )
    layer = layer_of(manifest)
    if layer is None:
        raise Refused(
            f"{root.digest} is a checkpoint as an image of {len(manifest.layers)} layers, which Podman alone "
            "restores",
            hint="run podman pull, then podman container restore IMAGE",
            code="GPS-606",
        )
    return layer


def blob_path(layout: Layout, digest: str) -> str:
    """Return the path of a blob in the folder of a layout."""
    return os.path.join(layout.path, "blobs", "sha256", get_hex(digest))
