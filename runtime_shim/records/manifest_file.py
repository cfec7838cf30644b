"""The manifest in an image's directory: reads it, prepares it before the dump, and names it afterwards.

If the image's directory has a layout, its index.json gets the manifest's digest directly before the manifest
gets its name. Until then it has none, so a manifest that somebody renames by hand is valid as well.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import Any

from gpusnap.oci.base.files import (
    UNFINISHED,
    exists,
    is_folder,
    open_below,
    read_below,
    replace_below,
    sync_folder,
)
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.layout.digests import digest_of
from gpusnap.runtime_shim.base.errors import ImageError, ManifestError, raise_as, reason
from gpusnap.runtime_shim.records.manifest import (
    DIGEST,
    FOLDER,
    INDEX,
    INVENTORY,
    LARGEST,
    LARGEST_INDEX,
    NAME,
    PENDING,
    Manifest,
)
from gpusnap.runtime_shim.records.manifest_json import decode, encode


def is_ours(image_path: str) -> bool:
    """Whether gpusnap made this image: it has gpusnap's directory, complete or not. Raises ImageError.

    An image that is taken for another tool's would be restored without its GPU memory.
    """
    with raise_as(
        ImageError,
        f"cannot determine whether gpusnap made the images in {image_path}",
        hint="check that the directory is readable, then try again",
    ):
        return is_folder(os.path.join(image_path, FOLDER))


def has(image_path: str, *names: str) -> bool:
    """Whether a file exists in the image directory, given by the parts of its path.

    Raises ImageError if this cannot be determined: a file considered missing would be removed, or made again.
    """
    path = os.path.join(image_path, *names)
    with raise_as(
        ImageError,
        f"cannot determine whether {path} exists",
        hint="check that the directory is readable, then try again",
    ):
        return exists(path)


def read(image_path: str) -> Manifest:
    """Read the manifest of an image, and compare it with its digest in the layout's index.

    Raises ManifestError if it is missing, broken, or not the one that was written; ManifestVersion.
    """
    path = os.path.join(image_path, FOLDER, NAME)
    try:
        data = read_below(image_path, f"{FOLDER}/{NAME}", limit=LARGEST)
    except FileNotFoundError:
        raise make_missing_error(image_path, _explain_what_is_left(image_path)) from None
    except (OSError, ValueError) as error:
        raise make_unreadable_error(path, error) from error
    try:
        index: bytes | None = read_below(image_path, f"{FOLDER}/{INDEX}", limit=LARGEST_INDEX)
    except FileNotFoundError:
        index = None
    except (OSError, ValueError) as error:
        raise make_unreadable_error(os.path.join(image_path, FOLDER, INDEX), error) from error
    record = decode(data, path)  # first: its own error is more helpful than a wrong digest
    check_digest(data, index, path)
    return record


def make_missing_error(where: str, hint: str = "use another copy of it") -> ManifestError:
    """The error for a checkpoint of gpusnap without a manifest."""
    return ManifestError(
        f"the checkpoint in {where} is incomplete: it has no {FOLDER}/{NAME}", hint=hint, code="GPS-602"
    )


def make_unreadable_error(path: str, error: OSError | ValueError) -> ManifestError:
    """The error for a manifest, or an index, that is no plain file, too large, or cannot be read."""
    why = reason(error)
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        why = "it is a symbolic link"
    return ManifestError(f"{path} cannot be read: {why}", hint="do not restore from it")


def replace_digest(index: bytes, digest: str) -> bytes:
    """Return the index of a layout with the digest of the manifest beside it. Raises ManifestError."""
    document = _index(index, INDEX)
    document["annotations"] = {**document.get("annotations", {}), DIGEST: digest}
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def check_digest(data: bytes, index: bytes | None, where: str) -> None:
    """Raise ManifestError if the index of the layout beside a manifest has another digest of it.

    `index` is None if there is none. Layouts of older versions of gpusnap have no digest.
    """
    if index is None:
        return
    wanted = _index(index, f"the {INDEX} beside {where}").get("annotations", {}).get(DIGEST)
    if wanted is not None and wanted != digest_of(data):
        raise ManifestError(
            f"{where} is not the manifest that was written with this checkpoint: its digest is "
            f"{digest_of(data)}, but the layout's {INDEX} has {str(wanted)[:80]}",
            hint="use another copy of the checkpoint",
        )


def _index(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = parse_json(data)
    except ValueError as error:
        raise ManifestError(f"{where} is cut short or not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("annotations", {}), dict):
        raise ManifestError(f"{where} is not the index of a layout")
    return document


def _explain_what_is_left(image_path: str) -> str:
    """Say what can be done about an image without a manifest."""
    pending = os.path.join(image_path, FOLDER, PENDING)
    if not os.path.exists(pending):
        return "use another copy of it"
    if not os.path.getsize(pending) or not os.path.exists(os.path.join(image_path, INVENTORY)):
        return "the checkpoint was interrupted while it was being written"
    # CRIU writes that file last: gpusnap was killed between the end of the dump and the renaming.
    return (
        "the checkpoint was interrupted while it was being written, but CRIU had finished: run gpusnap "
        "recover to complete it; if that does not find it (after a reboot, for example), rename "
        f"{FOLDER}/{PENDING} to {NAME}"
    )


class Draft:
    """A manifest that is being written, see manifest.py. All errors are ImageErrors."""

    def __init__(self, image_path: str, *, sync: bool = True) -> None:
        """Without `sync`, nothing is synced to disk."""
        self._sync = sync
        self._folder = os.path.join(image_path, FOLDER)
        self._final = os.path.join(self._folder, NAME)
        self._pending = os.path.join(self._folder, PENDING)

    def begin(self) -> None:
        """Make the directory. The manifest of an earlier checkpoint in the same place stays for now."""
        with raise_as(ImageError, f"{self._folder} cannot be written"):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            self._sweep()
            _write(self._pending, b"")

    def prepare(self, manifest: Manifest | None) -> None:
        """Write the manifest under its pending name, and remove an earlier one, both synced.

        To be called directly before the dump, which overwrites the images that the earlier one describes.
        None if a part of it is not known yet: then only `finish` can complete the image.
        """
        with raise_as(ImageError, f"{self._pending} cannot be written"):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            # There is space for it, which matters now; an fsync would wait for everything that was written.
            _write(self._pending, encode(manifest) if manifest is not None else b"")
            if exists(self._final):
                _remove(self._final)
                sync_folder(self._folder)

    def pending(self) -> Manifest | None:
        """Return what `prepare` wrote; None if there is none. Raises ManifestError, ImageError."""
        try:
            data = read_below(self._folder, PENDING, limit=LARGEST)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ImageError(f"{self._pending} cannot be read: {reason(error)}") from error
        return decode(data, self._pending) if data else None

    def finish(self, manifest: Manifest) -> bool:
        """Complete the checkpoint: with `manifest` if there is space for it, else with what `prepare` wrote.

        Return whether it was `manifest`.
        """
        written = True
        try:
            _write(self._pending, encode(manifest))
        except OSError as error:
            if not self._is_prepared():
                raise ImageError(f"{self._pending} cannot be written: {reason(error)}") from error
            written = False  # only the timing of the last step is lost
        self._note_digest()
        with raise_as(
            ImageError,
            f"the checkpoint is on disk, but {self._pending} cannot be renamed",
            hint=f"rename it to {NAME} manually",
            code="GPS-515",
            errors=(OSError, ValueError),
        ):
            if self._sync:
                with open_below(self._folder, PENDING)[0] as file:  # `_write` did not
                    os.fsync(file.fileno())
            os.replace(self._pending, self._final)
            if self._sync:
                sync_folder(self._folder)
        return written

    def _note_digest(self) -> None:
        """Write the digest of the new manifest into the layout's index, if there is a layout.

        Without space for that, the index has no digest, which is no error:
        snapshot/memory/chunk_layout.py wrote it anew. Raises ImageError if it has another
        digest, of a `finish` that was killed.
        """
        index = b""
        try:
            index = read_below(self._folder, INDEX, limit=LARGEST_INDEX)
            data = read_below(self._folder, PENDING, limit=LARGEST)
            replace_below(self._folder, INDEX, replace_digest(index, digest_of(data)), sync=self._sync)
        except (OSError, ValueError, ManifestError) as error:
            if DIGEST.encode() in index:
                raise ImageError(f"{self._folder}/{INDEX} cannot be written: {error}") from error

    def _sweep(self) -> None:
        """Remove what a killed writer left."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                if name.startswith(UNFINISHED):
                    os.unlink(os.path.join(self._folder, name))

    def _is_prepared(self) -> bool:
        try:
            return os.path.getsize(self._pending) > 0
        except OSError:
            return False

    def remove_manifest(self) -> None:
        """Remove the manifest of a complete checkpoint that nobody needs. Raises ImageError."""
        with raise_as(ImageError, f"{self._final} cannot be removed"):
            _remove(self._final)

    def discard(self) -> None:
        """Remove what `begin` and `prepare` made; an earlier checkpoint keeps its manifest."""
        with raise_as(ImageError, f"{self._folder} cannot be removed"):
            _remove(self._pending)
            self._sweep()
            if os.path.isdir(self._folder) and not os.listdir(self._folder):
                os.rmdir(self._folder)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _write(path: str, data: bytes) -> None:
    folder, name = os.path.split(path)
    replace_below(folder, name, data, sync=False)
