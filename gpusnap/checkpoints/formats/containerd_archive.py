"""An archive of `ctr images export`: an image layout that has a checkpoint of containerd's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.checkpoints.formats.containerd import IMAGE_NAME, blob_of, is_checkpoint
from gpusnap.oci.base.errors import ArchiveError, LayoutError
from gpusnap.oci.layout.archive import LayoutArchive
from gpusnap.oci.layout.documents import INDEX, Descriptor, Index, parse_document
from gpusnap.oci.tar.compression import Readable
from gpusnap.runtime_shim.errors import ImageError, UsageError
from gpusnap.user_errors import Damaged

__all__ = ["Archive"]

_MOST_IMAGES = 64


class Archive:
    """`containerd.Source` of an archive that has one checkpoint. Close it at the end of a `with`.

    Raises Damaged for one that is cut short, ImageError, UsageError for more than one checkpoint, and
    ArchiveError, BlobError, LayoutError, DigestError.
    """

    def __init__(self, path: str) -> None:
        self.word = path
        try:
            self._layout = LayoutArchive(path)
        except ArchiveError as error:
            # containerd 2.1's transfer service may drop the end, and ctr says nothing of it.
            raise Damaged(str(error), hint="export it again, with ctr images export --local") from error
        except LayoutError as error:
            raise ImageError(str(error), hint=_NO_IMAGE) from error
        try:
            self.root, self.name = self._checkpoint(self._layout.read_index())
        except BaseException:
            self._layout.__exit__()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._layout.__exit__()

    def has(self, wanted: Descriptor) -> bool:
        """Whether the archive has that blob, in that size."""
        return self._layout.has_blob(wanted.digest, wanted.size)

    @contextmanager
    def open(self, wanted: Descriptor) -> Iterator[Readable]:
        """One of its blobs. Raises BlobError."""
        yield _Window(self._layout, *self._layout.place(wanted.digest, wanted.size))

    def _checkpoint(self, index: Index) -> tuple[Descriptor, str]:
        """The index of the checkpoint among the archive's images, and its name."""
        images = index.manifests
        if len(images) > _MOST_IMAGES:
            raise ImageError(f"{self.word} has {len(images)} images, and {_MOST_IMAGES} are allowed")
        found: dict[str, tuple[Descriptor, str]] = {}
        for each in images:
            if each.media_type == INDEX:
                document = parse_document(blob_of(self, each), f"the index {each.digest}")
                below = Index.from_json(document)
                if is_checkpoint(below):
                    found[each.digest] = each, each.annotations.get(IMAGE_NAME, "")
        if len(found) > 1:
            raise UsageError(
                f"{self.word} has {len(found)} checkpoints", hint="export each one to a file of its own"
            )
        if not found:
            raise ImageError(
                f"{self.word} has no checkpoint of containerd's among its images", hint=_NO_IMAGE
            )
        return next(iter(found.values()))


_NO_IMAGE = "ctr images export writes an archive of a checkpoint"


class _Window:
    """A blob in an archive, to read in order."""

    def __init__(self, layout: LayoutArchive, at: int, size: int) -> None:
        self._layout, self._at, self._end = layout, at, at + size

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, none at the end. Raises ArchiveError."""
        left = self._end - self._at
        data = self._layout.read_at(self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data
