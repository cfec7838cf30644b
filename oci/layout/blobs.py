"""Blobs to read from one layout, or from several of which any may have them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Protocol

from gpusnap.oci.base.errors import BlobError, reason
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.compression import Readable


class Blobs(Protocol):
    """The reading methods of `Layout`, for any number of threads."""

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """Open a blob; its content is not checked yet. Raises BlobError."""

    def check_blob(self, wanted: Descriptor) -> None:
        """Read a blob and compare it with its digest. Raises BlobError."""


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


class CheckedBlob:
    """A blob that is read in order; `check_end` checks it."""

    def __init__(
        self, file: Readable, wanted: Descriptor, seen: Callable[[int], object] = lambda size: None
    ) -> None:
        self._file, self._wanted, self._seen = file, wanted, seen
        self._hashed = hashlib.sha256()
        self._left = wanted.size

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end. Raises BlobError, also if the blob is too long."""
        try:
            data = self._file.read(size)
        except OSError as error:
            raise BlobError(f"the blob {self._wanted.digest} cannot be read: {reason(error)}") from error
        self._left -= len(data)
        if self._left < 0:
            raise BlobError(f"the blob {self._wanted.digest} has more than its {self._wanted.size} bytes")
        self._hashed.update(data)
        self._seen(len(data))
        return data

    def check_end(self) -> None:
        """Raise BlobError unless all of it was read, and has its digest."""
        if self._left:
            raise BlobError(
                f"the blob {self._wanted.digest} has {self._wanted.size - self._left} bytes instead of "
                f"{self._wanted.size}"
            )
        if f"sha256:{self._hashed.hexdigest()}" != self._wanted.digest:
            raise BlobError(f"the blob {self._wanted.digest} does not match its digest")
