"""gpusnap's folder of an image directory as files of that directory itself, for containerd's CRI plugin.

CheckpointContainer puts every entry of the images' tar into one directory as a file (containerd 2.0 on,
internal/cri/server/container_checkpoint_linux.go, writeCriuCheckpointData), and fails at the first folder.
What it is given therefore has no folder, and names such as

    gpusnap%2Fmanifest.json
    gpusnap%2Fblobs%2Fsha256%2F6a09e667…

They are put back before anything looks for them: by the runtime when it restores, in memory by what reads an
archive. Files are renamed only, whatever their size.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.errors import ImageError, reason
from gpusnap.runtime_shim.records.manifest import FOLDER, NAME

_SLASH = "%2F"
_BEGINNING = FOLDER + _SLASH
# What the names of our files consist of: none leads anywhere else.
_PART = compile_later(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
# Of containerd: plugins/services/tasks/local.go, for images that go into its content store, and
# internal/cri/annotations.
_TEMPORARY = "ctrd-checkpoint"
OF_CRI = "io.kubernetes.cri.container-type"
"""An annotation of every container that containerd's CRI plugin makes."""


def is_wanted(image_path: str, annotations: Mapping[str, str]) -> bool:
    """Whether containerd's CRI plugin takes the images, by their path and the container's annotations."""
    return os.path.basename(os.path.normpath(image_path)).startswith(_TEMPORARY) and OF_CRI in annotations


def name_naturally(name: str) -> str:
    """The path that a file's name stands for, relative to the image directory; others are as they are."""
    if not name.startswith(_BEGINNING):
        return name
    parts = name.split(_SLASH)
    return "/".join(parts) if all(map(_PART.fullmatch, parts)) else name


def fold(image_path: str) -> None:
    """Make files of the image directory out of those in our folder, and remove that. Raises ImageError."""
    top = os.path.join(image_path, FOLDER)
    try:
        for folder, folders, names in os.walk(top, topdown=False):
            inner = os.path.relpath(folder, image_path).split("/")
            for name in names:
                flat = os.path.join(image_path, _SLASH.join([*inner, name]))
                os.rename(os.path.join(folder, name), flat)
            for name in folders:
                os.rmdir(os.path.join(folder, name))
        os.rmdir(top)
    except OSError as error:
        raise ImageError(
            f"the files of {top} cannot be renamed to what containerd expects: {reason(error)}",
            hint="the container continues to run; checkpoint it again",
        ) from error


def unfold(image_path: str) -> None:
    """Put our folder in the image directory together again, if `fold` made files of it. Raises ImageError.

    The images may be anybody's: no link is followed below the directory, none is moved, and nothing that is
    there already gives way.
    """
    try:
        top = os.open(image_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # whoever reads the images says so
    try:
        try:
            found = [name for name in os.listdir(top) if name_naturally(name) != name]
        except OSError as error:
            raise ImageError(
                f"the images in {image_path} cannot be listed: {reason(error)}",
                hint="check that the directory is readable, then try again",
            ) from error
        # The manifest comes last: without it they are no checkpoint.
        for name in sorted(found, key=lambda name: name_naturally(name) == f"{FOLDER}/{NAME}"):
            try:
                _move(top, name, name_naturally(name).split("/"))
            except OSError as error:
                raise ImageError(
                    f"{name} in {image_path} cannot be renamed to {name_naturally(name)}: {reason(error)}",
                    hint="the images must be writable for gpusnap, and as containerd unpacked them",
                ) from error
    finally:
        os.close(top)


def _move(top: int, name: str, path: Sequence[str]) -> None:
    """Rename a file in the folder `top` to a path below it, whose folders are made where they are not."""
    if not stat.S_ISREG(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    folder = os.dup(top)
    try:
        for part in path[:-1]:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=folder)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = inner
        with suppress(FileNotFoundError):
            os.stat(path[-1], dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(name, path[-1], src_dir_fd=top, dst_dir_fd=folder)
    finally:
        os.close(folder)
