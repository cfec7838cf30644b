"""Podman's own archive of a checkpoint that is in a store. A restore writes one, and so does an export."""

from __future__ import annotations

from gpusnap.checkpoints.artifact import ArtifactParts
from gpusnap.checkpoints.formats import podman
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import Compression
from gpusnap.progress import Progress


def write_archive(
    found: ArtifactParts,
    layout: Layout,
    path: str,
    *,
    compress: Compression = "none",
    embed: bool = True,
    volumes: bool = True,
    progress: Progress,
) -> None:
    """Write Podman's archive of a checkpoint, self-contained with `embed`; `volumes`: with their files.

    Raises OciError, ImageError.
    """
    podman.give_out(
        found.artifact,
        layout,
        path,
        config=found.config,
        compress=compress,
        embed=embed,
        volumes=volumes,
        progress=progress.chunks,
    )
