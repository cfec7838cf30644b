"""An archive of `ctr images export`: an image layout with a checkpoint of containerd's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gpusnap.base.user_errors import Damaged
from gpusnap.checkpoints.formats.containerd import IMAGE_NAME
from gpusnap.checkpoints.formats.layout_archive import opened_layout
from gpusnap.oci.base.errors import ArchiveError, BlobError, LayoutError
from gpusnap.oci.layout.archive import LayoutArchive
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.tar.compression import Readable
from gpusnap.runtime_shim.base.errors import ImageError


class Archive:
    """`containerd.Source` of an archive that has one checkpoint. A `with` block closes it.

    Raises Damaged if it is truncated, ImageError, UsageError for more than one checkpoint, and
    ArchiveError, BlobError, LayoutError, DigestError.
    """

    def __init__(self, path: str) -> None:
        self.word = path
        with ExitStack() as opened:
            try:
                found = opened.enter_context(opened_layout(path))
            except ArchiveError as error:
                # containerd 2.1's transfer service may drop the end, and ctr does not report it.
                again = "export it again, with ctr images export --local"
                raise Damaged(str(error), hint=again) from error
            except BlobError:
                raise
            except LayoutError as error:
                raise ImageError(str(error), hint=_NO_IMAGE, code=error.code) from error
            if found.kind != "containerd":
                raise ImageError(
                    f"{path} does not contain a containerd checkpoint", hint=_NO_IMAGE, code="GPS-605"
                )
            self._layout, self.root = found.layout, found.root
            self.name = found.root.annotations.get(IMAGE_NAME, "")
            self._open = opened.pop_all()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def has(self, wanted: Descriptor) -> bool:
        """Return whether the archive has that blob, in that size."""
        return self._layout.has_blob(wanted.digest, wanted.size)

    @contextmanager
    def open(self, wanted: Descriptor) -> Iterator[Readable]:
        """Open one of its blobs. Raises BlobError."""
        yield _Window(self._layout, *self._layout.place(wanted.digest, wanted.size))


_NO_IMAGE = "ctr images export writes an archive of a checkpoint"


class _Window:
    """A blob in an archive, for reading in order."""

    def __init__(self, layout: LayoutArchive, at: int, size: int) -> None:
        self._layout, self._at, self._end = layout, at, at + size

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end. Raises ArchiveError."""
        left = self._end - self._at
        data = self._layout.read_at(self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data
