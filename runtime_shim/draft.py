"""The manifest on its way to disk: prepared before the dump, named after it; see manifest.py."""

from __future__ import annotations

import contextlib
import os

from runtime_shim.errors import ImageError, reason
from runtime_shim.manifest import FOLDER, LARGEST, NAME, PENDING, Manifest, decode, encode

__all__ = ["Draft"]


class Draft:
    """A manifest on its way to disk, see manifest.py. All errors are ImageErrors."""

    def __init__(self, image_path: str, *, sync: bool = True) -> None:
        """Without `sync` nothing waits for the disk."""
        self._sync = sync
        self._folder = os.path.join(image_path, FOLDER)
        self._final = os.path.join(self._folder, NAME)
        self._pending = os.path.join(self._folder, PENDING)

    def begin(self) -> None:
        """Make the folder. The manifest of an earlier checkpoint in the same place stays for now."""
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            _write(self._pending, b"")
        except OSError as error:
            raise ImageError(f"{self._folder} cannot be written: {reason(error)}") from error

    def prepare(self, manifest: Manifest | None) -> None:
        """Write the manifest under its pending name, and take an earlier one away, durably.

        To be called right before the dump, which overwrites the images that the earlier one describes. None
        where something that it has to say is not known yet: then only `finish` can make the image whole.
        """
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            # There is room for it, which is what matters now; an fsync would wait for all that was written.
            _write(self._pending, encode(manifest) if manifest is not None else b"")
            if os.path.exists(self._final):
                _remove(self._final)
                _sync(self._folder)
        except OSError as error:
            raise ImageError(f"{self._pending} cannot be written: {reason(error)}") from error

    def written_at(self) -> int:
        """When `prepare` wrote the manifest, by its file system (st_mtime_ns). Raises ImageError."""
        try:
            return os.stat(self._pending).st_mtime_ns
        except OSError as error:
            raise ImageError(f"{self._pending} cannot be read: {reason(error)}") from error

    def pending(self) -> Manifest | None:
        """What `prepare` wrote; None where there is none. Raises ManifestError, ImageError."""
        try:
            with open(self._pending, "rb") as file:
                data = file.read(LARGEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ImageError(f"{self._pending} cannot be read: {reason(error)}") from error
        return decode(data, self._pending) if data else None

    def finish(self, manifest: Manifest) -> bool:
        """Make the checkpoint whole: `manifest` if there is room for it, else what `prepare` wrote.

        Whether it was `manifest`.
        """
        written = True
        better = self._pending + ".timed"
        try:
            _write(better, encode(manifest))
            os.replace(better, self._pending)
        except OSError as error:
            with contextlib.suppress(OSError):
                _remove(better)
            if not self._prepared():
                raise ImageError(f"{self._pending} cannot be written: {reason(error)}") from error
            written = False  # only the timing of the last step is lost
        try:
            if self._sync:
                _sync(self._pending)  # `prepare` did not
            os.replace(self._pending, self._final)
            if self._sync:
                _sync(self._folder)
        except OSError as error:
            raise ImageError(
                f"the checkpoint is on disk, but {self._pending} cannot be renamed: {reason(error)}",
                hint=f"rename it to {NAME} by hand",
            ) from error
        return written

    def _prepared(self) -> bool:
        try:
            return os.path.getsize(self._pending) > 0
        except OSError:
            return False

    def discard(self) -> None:
        """Take back what `begin` and `prepare` made; an earlier checkpoint keeps its manifest."""
        try:
            for path in (self._pending, self._pending + ".timed"):
                _remove(path)
            if os.path.isdir(self._folder) and not os.listdir(self._folder):
                os.rmdir(self._folder)
        except OSError as error:
            raise ImageError(f"{self._folder} cannot be removed: {reason(error)}") from error


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
