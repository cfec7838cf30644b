"""The image directory of a checkpoint: creates it, cleans it after a failed dump, syncs it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import open_below, sync_folder
from gpusnap.runtime_shim.base.errors import ImageError, raise_as, reason
from gpusnap.runtime_shim.process.file_system import find_file_system
from gpusnap.runtime_shim.runtime.criu.images.check import is_image

# Files that crun and runc write beside CRIU's *.img.
_RUNTIME_FILES = ("descriptors.json",)
_THREADS = 8


@dataclass(frozen=True, slots=True)
class EarlierImages:
    """The images that were in a directory before a dump."""

    folder: tuple[str, int]
    """The file system (FileSystem.identity) and the inode of the directory: a copy of it is another one."""
    versions: Mapping[str, tuple[int, ...]]
    """By name, what distinguishes each from a new one in its place."""

    @classmethod
    def from_json(cls, document: Any) -> EarlierImages:
        """Return what dataclasses.asdict made. Raises ValueError if it is no such thing."""
        try:
            file_system, inode = document["folder"]
            versions = {str(name): tuple(map(int, each)) for name, each in document["versions"].items()}
            return cls((str(file_system), int(inode)), versions)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it does not list images: {error!r}") from error


def make(image_path: str) -> None:
    """Make it, if it is not there. Raises ImageError."""
    with raise_as(ImageError, f"the checkpoint's directory {image_path} cannot be used"):
        os.makedirs(image_path, exist_ok=True)


def clean(image_path: str, there: EarlierImages) -> bool:
    """Remove the images that were not there before a dump. Logs stay for reading. Raises ImageError.

    The caller chose the directory, and it may contain other images, so those stay. In another directory, such
    as a copy, they cannot be told from new ones: nothing is removed, and False is returned.
    """
    with raise_as(
        ImageError, f"the incomplete image in {image_path} cannot be removed", hint="do not restore from it"
    ):
        if _identify(image_path) != there.folder:
            return False
        for entry in list(os.scandir(image_path)):
            new = _version(entry.stat(follow_symlinks=False)) != there.versions.get(entry.name)
            if new and _is_of_a_dump(entry.name):
                os.unlink(entry.path)
    return True


def note_earlier(image_path: str) -> EarlierImages:
    """Return the images that exist before a dump, and files that look like some. Raises ImageError."""
    with _explain_read_errors(image_path):
        return EarlierImages(_identify(image_path), list_versions(image_path))


def list_versions(image_path: str) -> Mapping[str, tuple[int, ...]]:
    """Return `EarlierImages.versions` alone. Raises ImageError."""
    with _explain_read_errors(image_path):
        return {
            entry.name: _version(entry.stat(follow_symlinks=False))
            for entry in os.scandir(image_path)
            if _is_of_a_dump(entry.name)
        }


def _explain_read_errors(image_path: str) -> raise_as:
    return raise_as(ImageError, f"the checkpoint's directory {image_path} cannot be read")


def drop_earlier(image_path: str, there: EarlierImages) -> None:
    """After a dump, remove those of CRIU's images that it did not write anew. Raises ImageError.

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
        for name, version in there.versions.items():
            path = os.path.join(image_path, name)
            with suppress(FileNotFoundError):
                found = os.lstat(path)
                if is_image(name) and stat.S_ISREG(found.st_mode) and _version(found) == version:
                    os.unlink(path)


def list_earlier(image_path: str, there: EarlierImages) -> frozenset[str]:
    """Return the names of those that a dump has not written anew. Raises ImageError."""
    now = list_versions(image_path)
    return frozenset(name for name, version in there.versions.items() if now.get(name) == version)


def _is_of_a_dump(name: str) -> bool:
    return name.endswith(".img") or name in _RUNTIME_FILES


def _identify(image_path: str) -> tuple[str, int]:
    return find_file_system(image_path).identity, os.stat(image_path).st_ino


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
            sync_folder(os.path.dirname(os.path.abspath(image_path)))  # it may be new
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
