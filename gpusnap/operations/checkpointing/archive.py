"""The archive that `gpusnap checkpoint --to FILE` makes: where it may go, and how it gets its name.

gpusnap writes it beside its final place under a temporary name, so that nobody takes an incomplete file for a
checkpoint. It replaces no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.oci.base.files import name_new, sync_folder
from gpusnap.runtime_shim.base.errors import ImageError, reason

_COMPRESSION = {".tar": "none", ".tar.gz": "gzip", ".tgz": "gzip", ".tar.zst": "zstd"}


def compression(path: str) -> str:
    """Return Podman's value of --compress: by the end of the file name, else zstd."""
    return _COMPRESSION.get(ending(path), "zstd")


def ending(path: str) -> str:
    """Return the end of the name that selects a compression; "" if none does."""
    endings = sorted(_COMPRESSION, key=len, reverse=True)
    return next((each for each in endings if path.endswith(each)), "")


def put(beside: str, path: str, aside: str) -> str:
    """Make the archive durable, and give it its name, or `aside` if that name is in use by now."""
    _sync_file(beside)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            name_new(os.path.basename(beside), os.path.basename(path), folder)
        except FileExistsError:
            path = aside
            name_new(os.path.basename(beside), os.path.basename(path), folder)
        os.fsync(folder)
    finally:
        os.close(folder)
    return path


def sync(path: str) -> None:
    """Make an archive that has its name durable, with the directory that it is in. Raises OSError."""
    _sync_file(path)
    folder = os.path.dirname(path)
    for each in (folder, os.path.dirname(folder)):  # a staging directory may be new
        sync_folder(each)


def _sync_file(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def explain_write_errors(path: str) -> Iterator[None]:
    """Raise ImageError for files that the block cannot write."""
    try:
        yield
    except OSError as error:
        raise ImageError(f"{path} cannot be written: {reason(error)}", code="GPS-103") from error


def size(path: str) -> int:
    """Return how many bytes have been written."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
