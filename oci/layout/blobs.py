"""Blobs to read from one layout, or from several of which any may have them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Protocol

from gpusnap.oci.base.errors import BlobError
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout


class Blobs(Protocol):
    """The reading methods of `Layout`, for any number of threads."""

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """Open a blob; its content is not checked yet. Raises BlobError."""
        ...

    def check_blob(self, wanted: Descriptor) -> None:
        """Read a blob and compare it with its digest. Raises BlobError."""
        ...


class FirstOf:
    """The blobs of several layouts, each from the first one that has it."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = tuple(layouts)

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """Open it in the first layout that has it. Raises BlobError."""
        error = BlobError(f"the blob {digest} is in no layout")
        for layout in self._layouts:
            try:
                return layout.open_blob(digest, size)
            except BlobError as found:
                error = found
        raise error

    def check_blob(self, wanted: Descriptor) -> None:
        """Check it in the first layout that has it. Raises BlobError."""
        for layout in self._layouts:
            if layout.has_blob(wanted.digest, wanted.size):
                layout.check_blob(wanted)
                return
        raise BlobError(f"the blob {wanted.digest} of {wanted.size} bytes is in no layout")
