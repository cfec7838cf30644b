"""How Podman, CRI-O and containerd recognize an image as a checkpoint; see single_layer_image.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from gpusnap.oci.layout.documents import Descriptor, Manifest

Format: TypeAlias = Literal["cri", "podman"]

CONFIG = "application/vnd.oci.image.config.v1+json"
CRIU = "org.criu.checkpoint."
"""The prefix of checkpointctl's annotations (lib/annotations.go)."""
PODMAN = "io.podman.annotations.checkpoint."
"""The prefix of Podman's annotations (libpod/define/annotations.go)."""
CRI_O = "io.kubernetes.cri-o.annotations.checkpoint."
"""The prefix of CRI-O's annotations (pkg/annotations)."""
CRI_NAME = CRI_O + "name"
# The annotation by which each engine recognizes an image as a checkpoint.
_MARKS: Mapping[str, Format] = {
    f"{PODMAN}runtime.name": "podman",
    CRI_NAME: "cri",
    f"{CRIU}container.name": "cri",
}


def engine_of(manifest: Manifest) -> Format | None:
    """Return the engine for which an image is a checkpoint; None for other images, and for an artifact."""
    if manifest.config.media_type != CONFIG or manifest.artifact_type:
        return None
    return next((engine for mark, engine in _MARKS.items() if manifest.annotations.get(mark)), None)


def layer_of(manifest: Manifest) -> Descriptor | None:
    """Return the layer of such an image, which is an archive of the engine; None if there are several."""
    return manifest.layers[0] if len(manifest.layers) == 1 else None
