"""Writes a checkpoint of containerd's from a registry to a file for ctr, or into containerd again."""

from __future__ import annotations

import re
from contextlib import suppress

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.artifact import ArtifactParts
from gpusnap.checkpoints.formats import containerd_writer
from gpusnap.checkpoints.formats.containerd import SNAPSHOTTER, blob_of, is_checkpoint, is_name
from gpusnap.engines.ctr import InContainerd, Target, find_digest, unpack
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.documents import INDEX, Descriptor, Index, parse_document
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.archive import Writer
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, UsageError

# Snapshotters of containerd (plugins/snapshots); "" is ctr's default.
_SNAPSHOTTER = compile_later(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImportedImage:
    """An image that containerd has now, or will have after importing a file."""

    name: str
    """The name of the checkpoint's image."""
    base: str
    """The name of the base image that a restore needs."""
    base_there: bool
    """Whether containerd has the base image, too."""


def check_file(path: str) -> None:
    """Raise UsageError if an archive of that name could not be for ctr."""
    if not path.endswith(".tar"):
        raise UsageError(
            f"{path} would not be a plain tar archive, and ctr reads only those as checkpoints",
            hint="name it .tar",
        )


def check_names(of: containerd_writer.Origin, name: str) -> None:
    """Raise Refused if the name is that of the checkpoint's base image."""
    if name == of.image.base_name:
        raise Refused(
            f"the checkpoint cannot be named {name}: that is the name of its base image",
            hint="give it another name: with --to containerd:IMAGE, or with another REF",
            code="GPS-904",
        )


def check_target(to: locator.InContainerd) -> None:
    """Raise Refused if an image that is no checkpoint has the name, GpusnapError if ctr fails."""
    try:
        source = InContainerd(to.namespace, to.name)
    except NotFound:
        return
    with suppress(OciError):
        index = source.root.media_type == INDEX and blob_of(source, source.root)
        if index and is_checkpoint(Index.from_json(parse_document(index, f"the index {source.root.digest}"))):
            return
    raise Refused(
        f"containerd has an image {to.name} already, which is not a checkpoint",
        hint=f"give another name, or remove that image: ctr -n {to.namespace} images rm",
        code="GPS-904",
    )


def check_base(of: containerd_writer.Origin, to: locator.InContainerd) -> str:
    """Return the digest of the image with the base image's name; "" if there is none.

    Raises Refused if it is another image, or if the checkpoint would get that name; GpusnapError.
    """
    check_names(of, to.name)
    base, name = of.image.base, of.image.base_name
    there = find_digest(to.namespace, name) if is_name(name) else ""
    if base is not None and there not in ("", base.digest):
        raise Refused(
            f"containerd has another image {name} ({there[:19]}) than the checkpoint's base image "
            f"({base.digest[:19]})",
            hint=f"first give that image another name: ctr -n {to.namespace} images tag, then images rm",
            code="GPS-904",
        )
    return there


def write(found: ArtifactParts, layout: Layout, path: str, name: str, progress: Progress) -> ImportedImage:
    """Write an archive for `ctr images import`; return the image that it makes. `name`: of the image.

    Raises UsageError, Refused, OciError.
    """
    check_file(path)
    of = containerd_writer.origin(found, layout)
    check_names(of, name)
    with Writer(path) as writer:
        containerd_writer.give_out(found, of, layout, writer.append, name=name, progress=progress.at)
    return ImportedImage(name, of.image.base_name, of.image.base is not None)


def bring(
    found: ArtifactParts, layout: Layout, to: locator.InContainerd, progress: Progress
) -> ImportedImage:
    """Import it as an image into containerd, together with its base image if it was copied, ready for use.

    Raises Refused if another image has the name of the base image, or one that is no checkpoint has the new
    name; OciError, GpusnapError.
    """
    of = containerd_writer.origin(found, layout)
    base, name = of.image.base, of.image.base_name
    # Somebody may have made an image of that name since the first check.
    check_target(to)
    there = check_base(of, to)
    with Target(to.namespace) as target:
        containerd_writer.give_out(found, of, layout, target.append, name=to.name, progress=progress.at)
        target.append(tar.END)
    if base is not None:
        _unpack(to.namespace, base, of.image.notes.get(SNAPSHOTTER, ""))
    return ImportedImage(to.name, name, bool(there or base is not None))


def _unpack(namespace: str, base: Descriptor, snapshotter: str) -> None:
    if not _SNAPSHOTTER.fullmatch(snapshotter):
        snapshotter = ""
    try:
        unpack(namespace, base.digest, snapshotter)
    except GpusnapError as error:
        raise GpusnapError(
            f"the checkpoint is in containerd, but its base image cannot be unpacked: {error}",
            hint=f"run ctr -n {namespace} snapshots unpack {base.digest} before a restore",
            code=error.code,
        ) from error
