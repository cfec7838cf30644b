"""Image layouts in tars, as skopeo writes them for oci-archive:FILE, made by hand."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.graph import walk
from gpusnap.oci.layout.layout import Layout

__all__ = ["oci_archive"]


def oci_archive(
    path: Path,
    layout: Layout,
    roots: Sequence[Descriptor],
    *,
    names: Mapping[str, str] | None = None,
    without: str = "",
) -> str:
    """All that is below some manifests; `names` by digest, for those that skopeo was given one for."""
    entries = []
    for root in roots:
        # containers/image, oci/layout: media type, digest and size, and a reference if there is one.
        entry: dict[str, object] = {"mediaType": root.media_type, "digest": root.digest, "size": root.size}
        if names and root.digest in names:
            entry["annotations"] = {"org.opencontainers.image.ref.name": names[root.digest]}
        entries.append(entry)
    files: dict[str, bytes] = {}
    for root in roots:
        for each, _ in walk(root, layout.read_blob):
            if each.digest != without:
                with layout.open_blob(each.digest) as file:
                    files[f"blobs/sha256/{each.digest[7:]}"] = file.read()
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for folder in ("blobs", "blobs/sha256"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(files[name]), 0o644
            tar.addfile(info, io.BytesIO(files[name]))
    return os.fspath(path)
