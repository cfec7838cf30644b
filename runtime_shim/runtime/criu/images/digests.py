"""The digests of CRIU's images: computed after the dump, compared during the restore.

Podman's archive has no digests, and CRIU trusts what it reads: a flipped bit in a page becomes the memory of
a process, and the container computes wrong results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from os import scandir

from gpusnap.oci.base.files import open_below
from gpusnap.runtime_shim.base.errors import ImageError, raise_as
from gpusnap.runtime_shim.records.manifest import ImageRecord

_THREADS = 8
_PIECE = 1 << 20


class Digester:
    """Makes the record of an image whose bytes are added in order."""

    def __init__(self, name: str) -> None:
        self._name, self._size, self._hash = name, 0, hashlib.sha256()

    def add(self, piece: bytes | memoryview) -> None:
        """Add the next bytes; other threads run meanwhile."""
        self._size += len(piece)
        self._hash.update(piece)

    def record(self) -> ImageRecord:
        """Return the record of everything that was added."""
        return ImageRecord(self._name, self._size, f"sha256:{self._hash.hexdigest()}")


def take(image_path: str, *, but: Collection[str] = ()) -> tuple[ImageRecord, ...]:
    """Digest all images in a directory except `but`, by name. Raises ImageError."""
    with raise_as(
        ImageError,
        f"the images in {image_path} cannot be read again",
        hint="the dump itself succeeded; the checkpoint has no manifest yet",
        code="GPS-515",
        errors=(OSError, ValueError),
    ):
        names = sorted(
            entry.name
            for entry in scandir(image_path)
            if entry.name.endswith(".img") and entry.name not in but and entry.is_file(follow_symlinks=False)
        )
        with ThreadPoolExecutor(_THREADS) as pool:
            return tuple(pool.map(lambda name: _digest_image(image_path, name), names))


def make_differs_error(name: str, where: str) -> ImageError:
    """The error for an image that is not the one of the dump; `where` names the directory or archive."""
    return ImageError(
        f"CRIU's image {name} in {where} has changed since the dump: its digest differs",
        hint="use another copy of the checkpoint",
        code="GPS-601",
    )


class Comparison:
    """Digests images in threads, while CRIU reads them as well. Close it at the end."""

    def __init__(self, image_path: str, records: Sequence[ImageRecord]) -> None:
        """`records`: of the manifest; images without a record are not compared."""
        self._where = image_path
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="gpusnap-images")
        self._running: list[Future[None]] = [self._pool.submit(self._compare, each) for each in records]

    def result(self) -> None:
        """Wait until all have been read. Raises ImageError for a missing or different one."""
        for each in self._running:
            each.result()

    def close(self) -> None:
        """Read no further image, and wait for those that are being read. May be called twice."""
        self._pool.shutdown(cancel_futures=True)

    def _compare(self, wanted: ImageRecord) -> None:
        with raise_as(
            ImageError,
            f"CRIU's image {wanted.name} in {self._where} cannot be read",
            hint="use another copy of the checkpoint",
            code="GPS-601",
            errors=(OSError, ValueError),
        ):
            found = _digest_image(self._where, wanted.name)
        if found != wanted:
            raise make_differs_error(wanted.name, self._where)


def first_other(wanted: Iterable[ImageRecord], found: Iterable[ImageRecord]) -> str:
    """Return the name of the first image that is missing or different among those found; else ""."""
    there = {each.name: each for each in found}
    return next((each.name for each in wanted if there.get(each.name) != each), "")


def _digest_image(image_path: str, name: str) -> ImageRecord:
    digester, buffer = Digester(name), bytearray(_PIECE)
    with open_below(image_path, name)[0] as file, memoryview(buffer) as view:
        while size := file.readinto(view):
            digester.add(view[:size])
    return digester.record()
