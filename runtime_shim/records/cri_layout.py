"""Renames the files of gpusnap's directory to files of the image directory, for containerd's CRI plugin.

CheckpointContainer writes every entry of the images' tar as a file into one directory (containerd 2.0 and
later, internal/cri/server/container_checkpoint_linux.go, writeCriuCheckpointData), and fails at the first
directory. So it gets no directory, but names such as

    gpusnap%2Fmanifest.json
    gpusnap%2Fblobs%2Fsha256%2F6a09e667…

They are renamed back before anything uses them: by the runtime when it restores, in memory by readers of an
archive. Files are only renamed, whatever their size.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import ImageError, raise_as
from gpusnap.runtime_shim.records.manifest import FOLDER, NAME

_SLASH = "%2F"
_BEGINNING = FOLDER + _SLASH
# The characters in the names of gpusnap's files: none leads anywhere else.
_PART = compile_later(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
# From containerd: plugins/services/tasks/local.go, for images that go into its content store, and
# internal/cri/annotations.
_TEMPORARY = "ctrd-checkpoint"
OF_CRI = "io.kubernetes.cri.container-type"
"""An annotation of every container that containerd's CRI plugin makes."""


def is_wanted(image_path: str, annotations: Mapping[str, str]) -> bool:
    """Whether containerd's CRI plugin will get the images, by their path and the annotations."""
    return os.path.basename(os.path.normpath(image_path)).startswith(_TEMPORARY) and OF_CRI in annotations


def name_naturally(name: str) -> str:
    """Return the path that a file's name means, relative to the image directory; other names unchanged."""
    if not name.startswith(_BEGINNING):
        return name
    parts = name.split(_SLASH)
    return "/".join(parts) if all(map(_PART.fullmatch, parts)) else name


def fold(image_path: str) -> None:
    """Turn the files of gpusnap's directory into files of the image directory. Raises ImageError."""
    top = os.path.join(image_path, FOLDER)
    with raise_as(
        ImageError,
        f"the files of {top} cannot be renamed to what containerd expects",
        hint="the container continues to run; checkpoint it again",
    ):
        for folder, folders, names in os.walk(top, topdown=False):
            inner = os.path.relpath(folder, image_path).split("/")
            for name in names:
                flat = os.path.join(image_path, _SLASH.join([*inner, name]))
                os.rename(os.path.join(folder, name), flat)
            for name in folders:
                os.rmdir(os.path.join(folder, name))
        os.rmdir(top)


def unfold(image_path: str) -> None:
    """Restore gpusnap's directory in the image directory, if `fold` made files of it. Raises ImageError.

    The images may come from anybody: no link is followed below the directory, none is moved, and no existing
    file is replaced.
    """
    try:
        top = os.open(image_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # the reader of the images reports it
    try:
        with raise_as(
            ImageError,
            f"the images in {image_path} cannot be listed",
            hint="check that the directory is readable, then try again",
        ):
            found = [name for name in os.listdir(top) if name_naturally(name) != name]
        # The manifest comes last: without it they are no checkpoint.
        for name in sorted(found, key=lambda name: name_naturally(name) == f"{FOLDER}/{NAME}"):
            with raise_as(
                ImageError,
                f"{name} in {image_path} cannot be renamed to {name_naturally(name)}",
                hint="the images must be writable for gpusnap, and as containerd unpacked them",
            ):
                _move(top, name, name_naturally(name).split("/"))
    finally:
        os.close(top)


def _move(top: int, name: str, path: Sequence[str]) -> None:
    """Rename a file in the directory `top` to a path below it; missing directories are created."""
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
