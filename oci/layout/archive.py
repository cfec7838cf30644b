"""Reads an image layout in a plain tar: skopeo calls it oci-archive, and ctr images export writes it.

image-spec v1.1, image-layout.md: index.json, oci-layout and blobs/sha256/. Entries may be in any order, and
others are ignored. The archive may come from anybody.
"""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import suppress

from gpusnap.oci.base.errors import ArchiveError, BlobError, DigestError, LayoutError, NotACheckpoint, reason
from gpusnap.oci.base.files import open_named, write_all
from gpusnap.oci.layout.digests import PREFIX, get_hex
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, Index, parse_document
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import entries
from gpusnap.oci.tar.compression import kind_of

_BLOBS = "blobs/sha256/"
_INDEX = "index.json"
# The first entry of such an archive is one of these, and that of Podman's checkpoints never is.
_FIRST = ("blobs", "blobs/sha256", "oci-layout", _INDEX, "manifest.json")
# 4 TiB of GPU memory have this many chunks of 8 MiB.
_MOST_ENTRIES = 1 << 19
_PIECE = 1 << 20
# A blob up to this size is copied to memory, a larger one to a file without a name.
_SMALL = 32 << 20


def is_layout(path: str) -> bool:
    """Whether an archive is an image layout, by its first entry; False for one that cannot be read."""
    with suppress(ArchiveError):
        for entry in entries(path):
            return entry.name in _FIRST or entry.name.startswith(_BLOBS)
    return False


class LayoutArchive(Layout):
    """The layout in the archive at `path`; only its reading methods can be called. Threads may share it.

    Close it at the end of a `with`. Raises ArchiveError for one that cannot be read or is truncated,
    LayoutError for one that is no layout, or compressed.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path
        try:
            self._file = open_named(path)
        except OSError as error:
            raise ArchiveError(f"{path} cannot be read: {reason(error)}") from error
        try:
            # By digest: the start of the content, and its size.
            self._places: dict[str, tuple[int, int]] = {}
            self._index = self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> LayoutArchive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check(self) -> None:
        """Do nothing: it was checked when it was opened."""

    def read_index(self) -> Index:
        """The index of the layout. Raises LayoutError."""
        return Index.from_json(parse_document(self._index, f"{_INDEX} in {self.path}"))

    def has_blob(self, digest: str, size: int) -> bool:
        """As Layout.has_blob."""
        return self._places.get(digest, (0, -1))[1] == size

    def place(self, digest: str, size: int | None = None) -> tuple[int, int]:
        """Return where in the file a blob begins, and its size. Raises BlobError, also for another size."""
        at, found = self._places.get(digest, (0, -1))
        if found < 0:
            of = f" of {size} bytes" if size is not None else ""
            raise BlobError(f"{self.path} does not contain the blob {digest}{of}")
        if size not in (None, found):
            raise BlobError(f"the blob {digest} in {self.path} has {found} bytes, not {size}")
        return at, found

    def read_at(self, at: int, size: int) -> bytes:
        """Return bytes of the file, fewer only at its end. Raises ArchiveError."""
        try:
            return os.pread(self._file.fileno(), size, at)
        except OSError as error:
            raise ArchiveError(f"{self.path} cannot be read: {reason(error)}") from error

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """As Layout.open_blob: a copy of the blob, in memory or in a file without a name in TMPDIR."""
        at, left = self.place(digest, size)
        with self._explain_write_errors(left, "a copy of a blob"):
            file = _new_file(left)
        try:
            while left:
                piece = self.read_at(at, min(left, _PIECE))
                if not piece:
                    raise BlobError(f"the blob {digest} in {self.path} is truncated")
                with self._explain_write_errors(left, "a copy of a blob"):
                    write_all(file.fileno(), piece)
                at += len(piece)
                left -= len(piece)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def _scan(self) -> bytes:
        """Record where each blob is, and return index.json."""
        if kind_of(self._file)[0] != "none":
            raise NotACheckpoint(
                f"{self.path} is a compressed image layout, which cannot be read: decompress it first, "
                "with zstd -d or gunzip"
            )
        index: bytes | None = None
        # Directly from the file, so that the position is at each entry's content.
        for count, entry in enumerate(entries(self._file, where=self.path)):
            if count >= _MOST_ENTRIES:
                raise LayoutError(f"{self.path} has more than {_MOST_ENTRIES} entries")
            if entry.content is None:
                continue
            if entry.name == _INDEX:
                if index is not None or entry.info.size > DOCUMENT_LIMIT:
                    raise LayoutError(f"{self.path} contains {_INDEX} twice, or it is too large")
                index = entry.content.read()
            elif entry.name.startswith(_BLOBS):
                digest = PREFIX + entry.name.removeprefix(_BLOBS)
                with suppress(DigestError):
                    get_hex(digest)
                    self._places.setdefault(digest, (self._file.tell(), entry.info.size))
        if index is None:
            raise LayoutError(f"{self.path} is not an image layout: it has no {_INDEX}")
        return index


def _new_file(size: int) -> io.FileIO:
    if size <= _SMALL:
        return io.FileIO(os.memfd_create("gpusnap-blob"), "r+b")
    folder = os.environ.get("TMPDIR") or "/var/tmp"
    file = tempfile.TemporaryFile(dir=folder, prefix="gpusnap-", buffering=0)
    assert isinstance(file, io.FileIO)
    return file
