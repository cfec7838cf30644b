"""By what Podman, CRI-O and containerd take an image for a checkpoint; see single_layer_image.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from gpusnap.oci.layout.documents import Descriptor, Manifest

Format: TypeAlias = Literal["cri", "podman"]

CONFIG = "application/vnd.oci.image.config.v1+json"
CRIU = "org.criu.checkpoint."
"""Of checkpointctl's annotations (lib/annotations.go)."""
PODMAN = "io.podman.annotations.checkpoint."
"""Of Podman's (libpod/define/annotations.go)."""
CRI_O = "io.kubernetes.cri-o.annotations.checkpoint."
"""Of CRI-O's (pkg/annotations)."""
CRI_NAME = CRI_O + "name"
# By what each engine takes an image for a checkpoint.
_MARKS: Mapping[str, Format] = {
    f"{PODMAN}runtime.name": "podman",
    CRI_NAME: "cri",
    f"{CRIU}container.name": "cri",
}


def engine_of(manifest: Manifest) -> Format | None:
    """Which engine takes an image for a checkpoint; None for an image that is none, and for an artifact."""
    if manifest.config.media_type != CONFIG or manifest.artifact_type:
        return None
    return next((engine for mark, engine in _MARKS.items() if manifest.annotations.get(mark)), None)


def layer_of(manifest: Manifest) -> Descriptor | None:
    """The layer of such an image, which is an archive of the engine's; None where there are several."""
    return manifest.layers[0] if len(manifest.layers) == 1 else None
