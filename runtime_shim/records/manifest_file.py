"""The manifest on its way to disk: prepared before the dump, named after it; see manifest.py.

Where the image's directory has a layout, its index.json gets the manifest's digest right before the manifest
has its name. Until then it has none, so a manifest that is given its name by hand is right as well.
"""

from __future__ import annotations

import contextlib
import os

from gpusnap.oci.base.files import UNFINISHED, exists, open_below, read_below, replace_below, sync_folder
from gpusnap.oci.layout.digests import digest_of
from gpusnap.runtime_shim.errors import ImageError, ManifestError, reason
from gpusnap.runtime_shim.records.manifest import (
    DIGEST,
    FOLDER,
    INDEX,
    LARGEST,
    LARGEST_INDEX,
    NAME,
    PENDING,
    Manifest,
    decode,
    digested,
    encode,
)


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
            self._sweep()
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
            if exists(self._final):
                _remove(self._final)
                sync_folder(self._folder)
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
            data = read_below(self._folder, PENDING, limit=LARGEST)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise ImageError(f"{self._pending} cannot be read: {why}") from error
        return decode(data, self._pending) if data else None

    def finish(self, manifest: Manifest) -> bool:
        """Make the checkpoint whole: `manifest` if there is room for it, else what `prepare` wrote.

        Whether it was `manifest`.
        """
        written = True
        try:
            _write(self._pending, encode(manifest))
        except OSError as error:
            if not self._prepared():
                raise ImageError(f"{self._pending} cannot be written: {reason(error)}") from error
            written = False  # only the timing of the last step is lost
        self._note_digest()
        try:
            if self._sync:
                with open_below(self._folder, PENDING)[0] as file:  # `_write` did not
                    os.fsync(file.fileno())
            os.replace(self._pending, self._final)
            if self._sync:
                sync_folder(self._folder)
        except (OSError, ValueError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise ImageError(
                f"the checkpoint is on disk, but {self._pending} cannot be renamed: {why}",
                hint=f"rename it to {NAME} by hand",
                code="GPS-515",
            ) from error
        return written

    def _note_digest(self) -> None:
        """Have the index of the layout name the manifest that is about to be whole, if there is a layout.

        Without room for that the index says nothing of the manifest, which is no error: transfer.commit wrote
        it anew. Raises ImageError where it names another, of a `finish` that was killed.
        """
        index = b""
        try:
            index = read_below(self._folder, INDEX, limit=LARGEST_INDEX)
            data = read_below(self._folder, PENDING, limit=LARGEST)
            replace_below(self._folder, INDEX, digested(index, digest_of(data)), sync=self._sync)
        except (OSError, ValueError, ManifestError) as error:
            if DIGEST.encode() in index:
                raise ImageError(f"{self._folder}/{INDEX} cannot be written: {error}") from error

    def _sweep(self) -> None:
        """Remove what a killed writer left."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                if name.startswith(UNFINISHED):
                    os.unlink(os.path.join(self._folder, name))

    def _prepared(self) -> bool:
        try:
            return os.path.getsize(self._pending) > 0
        except OSError:
            return False

    def discard(self) -> None:
        """Take back what `begin` and `prepare` made; an earlier checkpoint keeps its manifest."""
        try:
            _remove(self._pending)
            self._sweep()
            if os.path.isdir(self._folder) and not os.listdir(self._folder):
                os.rmdir(self._folder)
        except OSError as error:
            raise ImageError(f"{self._folder} cannot be removed: {reason(error)}") from error


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _write(path: str, data: bytes) -> None:
    folder, name = os.path.split(path)
    replace_below(folder, name, data, sync=False)
