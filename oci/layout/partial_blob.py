"""A blob that arrives in pieces from a source that may fail: an unfinished file and its digest so far."""

from __future__ import annotations

import hashlib

from gpusnap.oci.base.errors import BlobError, disk_error
from gpusnap.oci.base.files import write_all
from gpusnap.oci.layout.documents import Descriptor


class Incoming:
    """The blob `wanted` that is written to the file `descriptor` of the layout at `path`; for one thread."""

    def __init__(self, wanted: Descriptor, descriptor: int, path: str) -> None:
        self.wanted = wanted
        self.size = 0
        """The number of bytes that have arrived."""
        self._descriptor = descriptor
        self._path = path
        self._hashed = hashlib.sha256()

    def write(self, piece: bytes) -> None:
        """Add a piece. Raises BlobError if it is more than the blob may have; DiskFull, DiskError."""
        if self.size + len(piece) > self.wanted.size:
            raise BlobError(f"the blob {self.wanted.digest} has more than its {self.wanted.size} bytes")
        try:
            write_all(self._descriptor, piece)
        except OSError as error:
            raise disk_error(error, self._path, "a blob", self.wanted.size) from error
        self._hashed.update(piece)
        self.size += len(piece)

    def check(self) -> None:
        """Raise BlobError unless the blob is complete and matches its digest."""
        if self.size != self.wanted.size:
            raise BlobError(
                f"the blob {self.wanted.digest} ended after {self.size} of {self.wanted.size} bytes"
            )
        if f"sha256:{self._hashed.hexdigest()}" != self.wanted.digest:
            raise BlobError(
                f"the blob {self.wanted.digest} was received with content that does not match its digest"
            )
