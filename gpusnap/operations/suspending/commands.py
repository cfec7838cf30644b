"""The commands that a container of Podman's names for before a suspend and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.container_hooks.commands import SUSPEND, run_after, run_before, undo
from gpusnap.engines import podman
from gpusnap.progress import Progress

_PODMAN = "podman"


@contextmanager
def around_suspend(engine: str, container_id: str) -> Iterator[None]:
    """Run the one before; the one after only where the block fails and the container runs.

    Raises SettingsError, ContainerError, Interrupted.
    """
    if engine != _PODMAN:
        yield
        return
    found, progress = podman.container(container_id), Progress(shown=False)
    ran = run_before(found, SUSPEND, progress)
    try:
        yield
    except BaseException:
        if ran:
            undo(found, SUSPEND, progress)
        raise


def after_resume(engine: str, container_id: str) -> None:
    """Run the one after, in a container that runs again. Raises SettingsError, ContainerError."""
    if engine == _PODMAN:
        run_after(podman.container(container_id), SUSPEND, Progress(shown=False))
