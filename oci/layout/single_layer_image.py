"""Checkpoints as ordinary one-layer images, which engines restore from: the archive's tar is the layer.

"podman": what `podman container checkpoint --create-image` makes. `podman container restore IMAGE` mounts the
image, looks at one annotation of its manifest, io.podman.annotations.checkpoint.runtime.name, which must be
there and be the name of the runtime that Podman is about to use (cmd/podman/utils/utils.go,
IsCheckpointImage), reads config.dump and spec.dump from it (pkg/checkpoint/checkpoint_restore.go,
CRImportCheckpoint) and copies the checkpoint's files (libpod/container_internal_common.go,
importCheckpointImage). The other annotations (libpod/define/annotations.go) are for people.

"cri": what `checkpointctl build` makes, and CRI-O and containerd's CRI look for. CRI-O takes an image for a
checkpoint by io.kubernetes.cri-o.annotations.checkpoint.name on its manifest (server/container_restore.go,
checkIfCheckpointOCIImage), containerd 2.1 to 2.3 by org.criu.checkpoint.container.name
(internal/cri/server/container_checkpoint_linux.go, the same name). Then both read config.dump and spec.dump:
CRI-O wants its own annotations in spec.dump and containerd a status.dump beside it, so each restores what it
dumped, and neither what Podman did.

Layers are tar+gzip, which every tool accepts, or tar+zstd (image-spec v1.1, layer.md), which is faster, but
has no media type in Docker's schema 2. An archive that is already compressed in that way becomes the layer
unchanged; any other is compressed anew. One pass over it computes the layer and both of its digests.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from gpusnap.oci.base.errors import ArchiveError, reason
from gpusnap.oci.base.files import open_named
from gpusnap.oci.layout.documents import Descriptor, Manifest, encode_document
from gpusnap.oci.layout.image_marks import CONFIG, CRI_O, CRIU, PODMAN, Format
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import entries
from gpusnap.oci.tar.compression import Observed, Packer, Readable, as_file, gzip_packer, kind_of, packer

Packing: TypeAlias = Literal["gzip", "zstd"]

_LAYERS: Mapping[Packing, str] = {
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
}
_CREATED = "org.opencontainers.image.created"

# checkpointctl's names of the same things, which the caller uses.
_PODMAN: Mapping[str, str] = {
    "name": "container.name",
    "rawImageName": "rawImageName",
    "rootfsImageID": "rootfsImageID",
    "rootfsImageName": "rootfsImageName",
    "podman.version": "engine.version",
    "criu.version": "criu.version",
    "runtime.name": "runtime.name",
    "runtime.version": "runtime.version",
    "conmon.version": "conmon.version",
    "host.arch": "host.arch",
    "host.kernel": "host.kernel",
    "cgroups.version": "cgroup.version",
    "distribution.name": "distribution.name",
    "distribution.version": "distribution.version",
}
_CRI: Mapping[str, str] = {
    "name": "container.name",
    "rawImageName": "rawImageName",
    "rootfsImageID": "rootfsImageID",
    "rootfsImageName": "rootfsImageName",
    "criu.version": "criu.version",
}
_NEEDED: Mapping[Format, str] = {"cri": "container.name", "podman": "runtime.name"}
# The kernel's names of architectures (uname(2)) and Go's, which image configurations have.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
_PIECE = 1 << 20


def write_image(
    layout: Layout,
    archive: str | Readable,
    *,
    format: Format,
    annotations: Mapping[str, str],
    packing: Packing = "gzip",
    threads: int = 0,
) -> Descriptor:
    """Write an archive into a layout as an image of one layer; return its descriptor for the index.

    annotations: go on the manifest. Those that begin with org.criu.checkpoint. are also written under the
    names of `format`; container.name (for "cri") or runtime.name (for "podman") must be among them. packing:
    how the layer is compressed. threads: 0 for one per core.

    Raises ArchiveError for a broken archive or if an annotation is missing, DiskFull, DiskError, LayoutError.
    """
    wanted = CRIU + _NEEDED[format]
    if not annotations.get(wanted):
        raise ArchiveError(f"an image for {format} cannot be made without the annotation {wanted}")
    layer, plain = _add_layer(layout, archive, packing, threads or len(os.sched_getaffinity(0)))
    config = layout.add_blob(encode_document(_config(annotations, plain)), media_type=CONFIG)
    # No `artifactType`: with an image's config it is none (image-spec, manifest.md).
    return layout.add_manifest(
        Manifest(config, (layer,), annotations=_make_name_annotations(format, annotations))
    )


def _make_name_annotations(format: Format, annotations: Mapping[str, str]) -> dict[str, str]:
    prefix, names = (PODMAN, _PODMAN) if format == "podman" else (CRI_O, _CRI)
    found = {prefix + name: annotations.get(CRIU + ours, "") for name, ours in names.items()}
    return dict(annotations) | {key: value for key, value in found.items() if value}


def _config(annotations: Mapping[str, str], plain: str) -> dict[str, object]:
    """Return the image's configuration (image-spec, config.md); `plain` is the digest of the layer's tar."""
    machine = annotations.get(CRIU + "host.arch", "x86_64")
    created = {"created": annotations[_CREATED]} if _CREATED in annotations else {}
    return {
        **created,
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [plain]},
        "history": [{**created, "created_by": "gpusnap", "comment": "checkpoint"}],
    }


def _add_layer(
    layout: Layout, archive: str | Readable, packing: Packing, threads: int
) -> tuple[Descriptor, str]:
    """Add the layer; return it, and the digest of its tar."""
    if not isinstance(archive, str):
        return _layer_of(layout, archive, "the archive", packing, threads)
    try:
        file = open_named(archive)
    except OSError as error:
        raise ArchiveError(f"{archive} cannot be read: {reason(error)}") from error
    with file:
        return _layer_of(layout, file, archive, packing, threads)


def _layer_of(
    layout: Layout, file: Readable, where: str, packing: Packing, threads: int
) -> tuple[Descriptor, str]:
    hashed = hashlib.sha256()
    try:
        kind, file = kind_of(file)
    except OSError as error:
        raise ArchiveError(f"{where} cannot be read: {reason(error)}") from error

    def content() -> Iterator[bytes]:
        passed: list[bytes] = []
        packs: Packer | None = None
        if kind != packing:
            packs = (gzip_packer if packing == "gzip" else packer)(threads=threads)

        def plain(piece: bytes) -> None:
            hashed.update(piece)
            if packs is not None:
                passed.append(packs.compress(piece))

        source = file if packs is not None else Observed(file, passed.append)
        for entry in entries(source, plain=plain, where=where):
            yield from _take_pieces(passed)
            while entry.content is not None and entry.content.read(_PIECE):
                yield from _take_pieces(passed)
        yield from _take_pieces(passed)
        if packs is not None:
            yield packs.flush()

    layer = layout.add_blob(as_file(content()), media_type=_LAYERS[packing])
    return layer, f"sha256:{hashed.hexdigest()}"


def _take_pieces(pieces: list[bytes]) -> list[bytes]:
    taken = list(pieces)
    pieces.clear()
    return taken
