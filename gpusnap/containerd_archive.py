"""An archive of `ctr images export`: an image layout in a plain tar, read at any place."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpusnap.containerd import IMAGE_NAME, blob_of, is_checkpoint
from gpusnap.failures import Damaged
from oci.archive import entries
from oci.compression import Readable, kind_of
from oci.digests import PREFIX, encoded
from oci.errors import ArchiveError, BlobError, DigestError, reason
from oci.manifest import DOCUMENT_LIMIT, INDEX, Descriptor, Index, parse_document
from runtime_shim.errors import ImageError, Refused, UsageError

__all__ = ["Archive", "check_no_layout", "is_layout"]

_BLOBS = "blobs/sha256/"
_INDEX = "index.json"
# The first entry of such an archive is one of these, and of Podman's none.
_FIRST = ("blobs", "blobs/sha256", "oci-layout", _INDEX, "manifest.json")
_MOST_ENTRIES = 1 << 16
_MOST_IMAGES = 64


def is_layout(path: str) -> bool:
    """Whether an archive is an image layout, by its first entry; False for one that cannot be read."""
    with suppress(ArchiveError):
        for entry in entries(path):
            return entry.name in _FIRST or entry.name.startswith(_BLOBS)
    return False


def check_no_layout(path: str) -> None:
    """Raise Refused for an archive that is an image layout: only a push reads those."""
    if is_layout(path):
        raise Refused(
            f"{path} is an image layout, as ctr images export writes it, and gpusnap push alone reads those",
            hint=f"gpusnap push {path} REF, and then look at REF",
        )


class Archive:
    """`gpusnap.containerd.Source` of an archive that has one checkpoint. Close it at the end of a `with`.

    Raises Damaged for one that is cut short, ImageError, UsageError for more than one checkpoint, and
    ArchiveError, BlobError, LayoutError, DigestError.
    """

    def __init__(self, path: str) -> None:
        self.word = path
        try:
            self._file = open(path, "rb")
        except OSError as error:
            raise ArchiveError(f"{path} cannot be read: {reason(error)}") from error
        try:
            # By digest: where the content begins, and its size.
            self._blobs: dict[str, tuple[int, int]] = {}
            try:
                index = self._scan()
            except ArchiveError as error:
                # containerd 2.1's transfer service may drop the end, and ctr says nothing of it.
                raise Damaged(str(error), hint="export it again, with ctr images export --local") from error
            self.root, self.name = self._checkpoint(index)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def has(self, wanted: Descriptor) -> bool:
        """Whether the archive has that blob, in that size."""
        return self._blobs.get(wanted.digest, (0, -1))[1] == wanted.size

    @contextmanager
    def open(self, wanted: Descriptor) -> Iterator[Readable]:
        """One of its blobs; one at a time. Raises BlobError."""
        at, size = self._blobs.get(wanted.digest, (0, -1))
        if size < 0:
            raise BlobError(f"{self.word} lacks the blob {wanted.digest} of {wanted.size} bytes")
        if size != wanted.size:
            raise BlobError(f"the blob {wanted.digest} in {self.word} has {size} bytes, not {wanted.size}")
        yield _Window(self._file, at, size, self.word)

    def _scan(self) -> bytes:
        """Note where each blob is, and return index.json."""
        if kind_of(self._file)[0] != "none":
            raise ImageError(
                f"{self.word} is a compressed image layout, which can only be read plain",
                hint="decompress it first, with zstd -d or gunzip",
            )
        index: bytes | None = None
        # Straight from the file, entries are where it is when they are given.
        for count, entry in enumerate(entries(self._file, where=self.word)):
            if count >= _MOST_ENTRIES:
                raise ImageError(f"{self.word} has more than {_MOST_ENTRIES} entries", hint=_NO_IMAGE)
            if entry.content is None:
                continue
            if entry.name == _INDEX:
                if index is not None or entry.info.size > DOCUMENT_LIMIT:
                    raise ImageError(f"{self.word} has {_INDEX} twice, or a huge one", hint=_NO_IMAGE)
                index = entry.content.read()
            elif entry.name.startswith(_BLOBS):
                digest = PREFIX + entry.name.removeprefix(_BLOBS)
                with suppress(DigestError):
                    encoded(digest)
                    self._blobs.setdefault(digest, (self._file.tell(), entry.info.size))
        if index is None:
            raise ImageError(f"{self.word} is no image layout: it has no {_INDEX}", hint=_NO_IMAGE)
        return index

    def _checkpoint(self, index: bytes) -> tuple[Descriptor, str]:
        """The index of the checkpoint among the archive's images, and its name."""
        what = f"{_INDEX} in {self.word}"
        images = Index.from_json(parse_document(index, what)).manifests
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
    """A part of a file, to read in order."""

    def __init__(self, file: io.BufferedReader, at: int, size: int, where: str) -> None:
        self._file, self._at, self._end, self._where = file, at, at + size, where

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, none at the end. Raises ArchiveError."""
        count = self._end - self._at if size < 0 else min(size, self._end - self._at)
        try:
            self._file.seek(self._at, os.SEEK_SET)
            data = self._file.read(count)
        except OSError as error:
            raise ArchiveError(f"{self._where} cannot be read: {reason(error)}") from error
        self._at += len(data)
        return data
