"""A view of the checkpoint's directory in which some images are replaced.

CRIU reads its images from one directory. If one of them must be replaced, gpusnap makes another directory:
the new images are files in it, and each of the others is a symbolic link. So the checkpoint itself is never
changed, and a failed restore can be repeated.

The links are relative. Restored processes open images through a descriptor of the directory when they are
already in the container's mounts. There an absolute link would lead into the container, to whatever is at
that path, while .. leads up through the mounts of the descriptor (path_resolution(7)). CRIU's link `parent`,
to the directory of an earlier dump, is seen through a link of the view and stays relative to its own
directory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from gpusnap.runtime_shim.base.errors import ImageError, reason
from gpusnap.runtime_shim.runtime.criu import scratch_files

_MOST = 65536
"""Entries; CRIU writes about ten for each process."""


@contextmanager
def view(
    image_path: str,
    replaced: Mapping[str, bytes],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    *,
    always: bool = False,
) -> Iterator[str]:
    """Yield a directory that shows `image_path` with some images replaced, by name; it is removed afterwards.

    `replaced` has their content, `elsewhere` the paths of files.

    With nothing to replace, it is `image_path` itself, unless it must `always` be a directory of gpusnap, by
    whose name CRIU's processes are recognized (runtime/criu/scratch_files.py). Files written there are lost:
    CRIU's log must go to a work directory. Raises ImageError.
    """
    if not replaced and not elsewhere and not always:
        yield image_path
        return
    for name in (*replaced, *elsewhere):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ImageError(f"{name!r} is not a valid image name in {image_path}", code="GPS-604")
    try:
        folder = tempfile.mkdtemp(prefix=scratch_files.prefix("images"), dir=scratch_files.scratch())
    except OSError as error:
        raise _make_error(image_path, error) from error
    try:
        try:
            _fill(folder, image_path, replaced, elsewhere)
        except OSError as error:
            raise _make_error(image_path, error) from error
        yield folder
    finally:
        scratch_files.remove_folder(folder)


def _fill(folder: str, image_path: str, replaced: Mapping[str, bytes], elsewhere: Mapping[str, str]) -> None:
    real = os.path.realpath(image_path)
    names = os.listdir(real)
    if len(names) > _MOST:
        raise ImageError(
            f"{image_path} contains {len(names)} files, more than any dump ({_MOST})",
            hint="use a separate directory for the checkpoint",
        )
    there = {name: os.path.join(real, name) for name in names if name not in replaced}
    there |= {name: os.path.realpath(path) for name, path in elsewhere.items()}
    for name, path in there.items():
        os.symlink(os.path.relpath(path, os.path.realpath(folder)), os.path.join(folder, name))
    for name, content in replaced.items():
        descriptor = os.open(
            os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "wb") as file:
            file.write(content)


def _make_error(image_path: str, error: OSError) -> ImageError:
    return ImageError(
        f"the images in {image_path} cannot be prepared for the restore: {reason(error)}",
        hint=f"check that {image_path} is readable and that {scratch_files.scratch()} has free space",
    )
