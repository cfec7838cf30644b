"""The directories with gpusnap's records of running containers, one for each; a reboot removes them.

    /run/gpusnap/containers/      0700
        ID/                       0700, made at createRuntime, removed at poststop
            gpus.json             0600, see gpusnap.hooks.record

Nothing here follows a symbolic link, and no container's ID leads out of the directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gpusnap import hooks
from gpusnap.hooks.documents import HookError
from gpusnap.oci.base.patterns import compile_later

# runc (libcontainer/factory_linux.go) and containerd (pkg/identifiers) permit no more than this.
_ID = compile_later(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,254}")
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH = 8


def check_id(container: object) -> str:
    """Return the ID of a container, which is safe as a file's name. Raises HookError for any other."""
    if not isinstance(container, str) or not _ID.fullmatch(container):
        raise HookError(f"{str(container)[:80]!r} is not a container ID", code="GPS-908")
    return container


@contextlib.contextmanager
def open_directory(*names: str, make: bool = False) -> Iterator[int]:
    """Open hooks.RECORDS, or a directory in it; with `make`, missing ones are created.

    Raises OSError.
    """
    top, above, last = _parts()
    with contextlib.ExitStack() as stack:
        descriptor = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        for name in (above, last, *names):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=descriptor)
            descriptor = os.open(name, _OPEN, dir_fd=descriptor)
            stack.callback(os.close, descriptor)
        yield descriptor


def _parts() -> tuple[str, str, str]:
    """Return hooks.RECORDS as the system's directory, and gpusnap's two below it."""
    above, last = os.path.split(hooks.RECORDS)
    top, above = os.path.split(above)
    return top, above, last


def remove_directory(container: str) -> None:
    """Remove the directory of a container with its content; a missing one is fine. Raises OSError."""
    try:
        with open_directory() as parent:
            _remove(container, parent, _DEPTH)
    except FileNotFoundError:
        return


def _remove(name: str, parent: int, depth: int) -> None:
    descriptor = os.open(name, _OPEN, dir_fd=parent)
    try:
        for inner in os.listdir(descriptor):
            try:
                os.unlink(inner, dir_fd=descriptor)
            except FileNotFoundError:  # a hook that writes it has renamed it meanwhile
                continue
            except IsADirectoryError:
                if not depth:
                    raise
                _remove(inner, descriptor, depth - 1)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=parent)
