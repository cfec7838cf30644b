"""An image layout in a file, such as `skopeo copy … oci-archive:FILE` writes: finds the checkpoint in it.

Its index.json may have any name for it or none: skopeo sets org.opencontainers.image.ref.name only for
oci-archive:FILE:NAME, and no other annotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from gpusnap.checkpoints.formats.containerd import is_checkpoint
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DigestError, EngineImage, LayoutError, NotACheckpoint
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.layout.archive import LayoutArchive
from gpusnap.oci.layout.documents import INDEX, Descriptor, Index, parse_document
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, UsageError

Kind: TypeAlias = Literal["checkpoint", "image", "containerd"]

_MOST_IMAGES = 1024


@dataclass(frozen=True, slots=True)
class InLayout:
    """A checkpoint in such a file."""

    layout: LayoutArchive
    root: Descriptor
    kind: Kind
    """checkpoint: an artifact of gpusnap's. image: an ordinary image that an engine restores. containerd: a
    checkpoint of ctr's."""


@contextmanager
def opened_layout(path: str) -> Iterator[InLayout]:
    """Open the only checkpoint in a file for which `is_layout` returns true.

    Raises UsageError if it has several, GpusnapError if it has none; LayoutError, ArchiveError.
    """
    with LayoutArchive(path) as layout:
        named = {each.digest: each for each in layout.read_index().manifests}
        if len(named) > _MOST_IMAGES:
            raise LayoutError(
                f"{path} has {len(named)} images, but at most {_MOST_IMAGES} are allowed", code="GPS-605"
            )
        found: list[InLayout] = []
        fault: LayoutError | DigestError | None = None
        for each in named.values():
            try:
                kind = _kind(layout, each)
            except (LayoutError, DigestError) as error:
                fault = fault or error
                continue
            if kind is not None:
                found.append(InLayout(layout, each, kind))
        if len(found) > 1:
            raise UsageError(
                f"{path} has {len(found)} checkpoints",
                hint="copy each one to its own file, or all of them to a directory: oci:DIR:NAME",
            )
        if not found:
            if fault is not None:
                raise fault
            raise GpusnapError(
                f"{path} is an image layout without a checkpoint",
                hint="name the file of a checkpoint",
                code="GPS-605",
            )
        yield found[0]


def refuse_containerd(found: InLayout) -> None:
    """Raise Refused for a checkpoint of ctr's: only a push reads those."""
    path = found.layout.path
    if found.kind == "containerd":
        raise Refused(
            f"{path} is an image layout as written by ctr images export; only gpusnap push reads those",
            hint=f"run gpusnap push {path} REF, then inspect REF",
            code="GPS-607",
        )


def _kind(layout: LayoutArchive, root: Descriptor) -> Kind | None:
    """Return the kind of an entry; None if it is no checkpoint. Raises LayoutError, DigestError."""
    try:
        artifacts.read(root, layout.read_blob)
    except EngineImage:
        return "image"
    except NotACheckpoint:
        index = layout.read_blob(root) if root.media_type == INDEX else b""
        if index and is_checkpoint(Index.from_json(parse_document(index, f"the index {root.digest}"))):
            return "containerd"
        return None
    return "checkpoint"
