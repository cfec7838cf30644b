"""The image directory of a checkpoint: creates it, cleans it after a failed dump, syncs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeAlias

from gpusnap.oci.base.files import open_below, sync_folder
from gpusnap.runtime_shim.errors import ImageError, raise_as, reason
from gpusnap.runtime_shim.runtime.criu.images.check import is_image

EarlierImages: TypeAlias = Mapping[str, tuple[int, ...]]
"""Images by name, and what distinguishes each from a new one in its place."""

# Files that crun and runc write beside CRIU's *.img.
_RUNTIME_FILES = ("descriptors.json",)
_THREADS = 8


def make(image_path: str) -> None:
    """Make it, if it is not there. Raises ImageError."""
    with raise_as(ImageError, f"the checkpoint's directory {image_path} cannot be used"):
        os.makedirs(image_path, exist_ok=True)


def clean(image_path: str, *, since: int) -> None:
    """Remove the images written since then (st_mtime_ns). Logs stay for reading. Raises ImageError."""
    with raise_as(
        ImageError, f"the incomplete image in {image_path} cannot be removed", hint="do not restore from it"
    ):
        for entry in list(os.scandir(image_path)):
            ours = entry.name.endswith(".img") or entry.name in _RUNTIME_FILES
            # Only those written since: the caller chose the directory, and it may contain other images.
            if ours and entry.stat(follow_symlinks=False).st_mtime_ns >= since:
                os.unlink(entry.path)


def note_earlier(image_path: str) -> EarlierImages:
    """Return CRIU's images that exist before a dump. Raises ImageError."""
    with raise_as(ImageError, f"the checkpoint's directory {image_path} cannot be read"):
        return {
            entry.name: _version(entry.stat(follow_symlinks=False))
            for entry in os.scandir(image_path)
            if is_image(entry.name) and entry.is_file(follow_symlinks=False)
        }


def drop_earlier(image_path: str, there: EarlierImages) -> None:
    """After a dump, remove those images that it did not write anew. Raises ImageError.

    Podman dumps a container that continues to run into the same directory each time, and images that CRIU
    does not write anew stay: the memory of ended processes, which would be archived too. The time alone is
    not enough: if the clock was set back meanwhile, a new image looks older, and may be all that is left of
    the container.
    """
    with raise_as(
        ImageError,
        f"the files of an earlier dump in {image_path} cannot be removed",
        hint="the dump itself succeeded; the checkpoint has no manifest yet",
        code="GPS-515",
    ):
        for name, version in there.items():
            path = os.path.join(image_path, name)
            with suppress(FileNotFoundError):
                if _version(os.lstat(path)) == version:
                    os.unlink(path)


def _version(found: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes when the file is written, whatever the clock says."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def sync(image_path: str, *, but: Collection[str] = (), failed: Callable[[str], object]) -> None:
    """Sync the images, except `but`, before the manifest says that they are on disk.

    Raises ImageError. If fsync(2) itself failed, `failed` gets the reason first: the kernel then considers
    the unwritten data as written, and a second call would succeed. Nobody can write these images again.
    """

    lost: list[str] = []

    def one(name: str) -> None:
        with open_below(image_path, name)[0] as file:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                lost.append(reason(error))
                raise

    try:
        names = [
            e.name for e in os.scandir(image_path) if e.is_file(follow_symlinks=False) and e.name not in but
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(one, names))
        try:
            sync_folder(image_path)
        except OSError as error:
            lost.append(reason(error))
            raise
    except (OSError, ValueError) as error:
        if lost:
            failed(lost[0])
        raise ImageError(
            f"the images in {image_path} cannot be flushed to disk: {reason(error)}",
            hint="the dump itself succeeded; the checkpoint has no manifest yet",
            code="GPS-515",
        ) from error
