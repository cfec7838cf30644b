"""Makes the manifest of an archive that contains everything, for hosts and tools that have no store.

A checkpoint that was made into a store has CRIU's images of memory in chunks as well. In an archive they are
images again, where checkpointctl, crit and Podman expect them. So the manifest in it is one of
`memory.pages = "chunks"`: the GPUs' memory is in chunks beside the images, and nothing else is.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.records import manifest, manifest_json
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.snapshot.loading import source
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.destination import ImageDestination


def make_whole(config: bytes, record: Manifest) -> tuple[bytes, Manifest]:
    """Return the manifest of the same checkpoint with all of it in one archive, encoded and decoded."""
    if record.pages != "store" and not record.files:
        return config, record
    document = parse_json(config)
    document.pop("files", None)
    document["pages"] = ImageDestination.kind
    data = json.dumps(document).encode() + b"\n"
    return data, manifest_json.decode(data, manifest.NAME)


@contextmanager
def rebuild_image(one: FileRecord, blobs: Blobs, threads: int) -> Iterator[str]:
    """Rebuild the file of an image that is in chunks, and check it. Raises ImageError, SettingsError."""
    folder = tempfile.TemporaryDirectory(prefix=scratch_files.prefix("image"), dir=scratch_files.find_large())
    with folder as path:
        ceiling = transfer.ceiling(settings_file.load().memory)
        source.rebuild([one], blobs, path, threads=threads, ceiling=ceiling)
        yield os.path.join(path, one.name)
