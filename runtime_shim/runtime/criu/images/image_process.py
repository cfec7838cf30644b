"""Has the images of a restore decoded in a child process, which imports pycriu on another core.

That takes 0.05 to 0.1 s of computing, for which the restore would wait. If there is no child process, it is
done in a thread of this one; without a thread there would be no deadline, so the restore fails. A child that
is killed is replaced, once. It only reads, so nothing is lost with it: the restore fails, and can be
repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.base.question_process import Companion
from gpusnap.runtime_shim.records.manifest import DriverMount

if TYPE_CHECKING:
    from gpusnap.runtime_shim.runtime.criu.images.written_file import WrittenFile

T = TypeVar("T")

_PATIENCE = 180.0
"""Seconds for all questions together. Less than Podman gives a restore (240 s), so that gpusnap says why."""
_process = Companion()
_spent = [0.0]
"""Seconds for which questions were asked. One restore is made by a process."""


def prepare() -> None:
    """Import pycriu there, ahead of the first question, which raises the same errors. Raises Refused."""
    ask("the package pycriu", _load)


def check(images: str, architecture: str, elsewhere: Mapping[str, int]) -> tuple[WrittenFile, ...]:
    """Check the images of a directory; see check.py. Raises ImageError, and GpusnapError if a child fails."""
    return ask(f"CRIU's images in {images}", _check, images, architecture, dict(elsewhere))


def has_closed_connections(images: str) -> bool:
    """Whether the image was dumped with tcp-close; see inventory.py. Raises ImageError."""
    return ask(f"CRIU's images in {images}", _has_closed_connections, images)


def list_masked_paths(images: str, kind: str, root: str | None) -> tuple[DriverMount, ...]:
    """Return the mounts of masked paths to declare; see masked_paths.py. Raises ImageError."""
    return ask(f"CRIU's images in {images}", _list_masked_paths, images, kind, root)


def ask(what: str, function: Callable[..., T], *arguments: object) -> T:
    """Have the child process call a function of a module, within the time that is left; `what`: for messages.

    Raises ImageError when that is over, GpusnapError if a child fails, and what the function raises.
    """
    began = time.monotonic()
    try:
        return _process.ask(function, *arguments, within=max(_PATIENCE - _spent[0], 0.0), what=what)
    except TimeoutError as error:
        raise ImageError(
            f"{what} could not be read within {_PATIENCE:.0f} s",
            hint="check that the disk or the file server responds, then restore again",
        ) from error
    finally:
        _spent[0] += time.monotonic() - began


# What the child process is asked for. It imports the modules, so that this one need not.


def _load() -> None:
    from gpusnap.runtime_shim.runtime.criu.images import check, masked_paths, pycriu_package  # noqa: F401

    pycriu_package.load()


def _check(images: str, architecture: str, elsewhere: Mapping[str, int]) -> tuple[WrittenFile, ...]:
    from gpusnap.runtime_shim.runtime.criu.images import check

    return check.check(images, architecture, elsewhere)


def _has_closed_connections(images: str) -> bool:
    from gpusnap.runtime_shim.runtime.criu.images import inventory

    return inventory.has_closed_connections(images)


def _list_masked_paths(images: str, kind: str, root: str | None) -> tuple[DriverMount, ...]:
    from gpusnap.runtime_shim.runtime.criu.images import masked_paths

    return masked_paths.mounts(images, kind, root)
