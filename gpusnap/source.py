"""Where a checkpoint comes from: an archive of Podman's, or a directory of images."""

from __future__ import annotations

import os

from oci.archive import ArchiveError, read_member
from runtime_shim import manifest
from runtime_shim.errors import ManifestError

__all__ = ["load_manifest"]

# As runtime_shim.manifest: a manifest is never near this.
_LIMIT = 64 << 20


def load_manifest(path: str) -> manifest.Manifest:
    """The manifest of a checkpoint. Raises ManifestError where there is none or it is broken."""
    if os.path.isdir(path):
        inner = os.path.join(path, "checkpoint")
        return manifest.read(inner if not manifest.belongs(path) and manifest.belongs(inner) else path)
    name = f"checkpoint/{manifest.FOLDER}/{manifest.NAME}"
    try:
        data = read_member(path, name, limit=_LIMIT)
    except ArchiveError as error:
        raise ManifestError(str(error)) from error
    if data is None:
        raise ManifestError(
            f"{path} holds no {name}",
            hint="it is the checkpoint of a container without a GPU, or not gpusnap's, or was cut short",
        )
    return manifest.decode(data, f"{path}: {name}")
