"""Runs the commands that a Podman container names for before a suspend and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpusnap.container_hooks.commands import SUSPEND, run_after, run_before, undo
from gpusnap.engines import podman
from gpusnap.progress import Progress
from gpusnap.runtime_shim.errors import GpusnapError

_PODMAN = "podman"


@contextmanager
def run_around_suspend(engine: str, asked: podman.Inspection) -> Iterator[None]:
    """Run the command before a suspend, and the one after a resume only if the block fails and it runs.

    `asked`: Podman's description of a container of its own. Raises SettingsError, ContainerError,
    Interrupted.
    """
    if engine != _PODMAN:
        yield
        return
    found, progress = asked.container(), Progress(shown=False)
    ran = run_before(found, SUSPEND, progress)
    try:
        yield
    except BaseException:
        if ran:
            undo(found, SUSPEND, progress)
        raise


def run_after_resume(engine: str, container_id: str, asked: podman.Inspection | None = None) -> None:
    """Run the command after a resume, in the resumed container. Raises SettingsError, ContainerError.

    `asked`: Podman's description, if it was requested by a name or an ID of this container. A container keeps
    its labels.
    """
    if engine == _PODMAN:
        found = _get_container(container_id, asked)
        run_after(found, SUSPEND, Progress(shown=False), done=f"{found.name} is resumed")


def _get_container(container_id: str, asked: podman.Inspection | None) -> podman.Container:
    if asked is not None:
        with suppress(GpusnapError):
            found = asked.container()
            if found.id == container_id and found.init:
                return found
    return podman.inspect_container(container_id)
