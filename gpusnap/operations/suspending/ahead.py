"""Starts the slow requests of suspend, resume and swap before their own modules are imported.

Podman takes 40 ms to describe a container, NVIDIA's driver 0.2 to 0.5 s until it can be called (cuInit,
nvmlInit), and the modules 0.1 s. In parallel, they take as long as the longest. Nothing is decided here: each
answer is requested again or waited for where it is needed, and its error is raised there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.operations.driver import needed_driver
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu import open_driver
from gpusnap.runtime_shim.gpu.api.driver import Driver


@dataclass(frozen=True, slots=True)
class Ahead:
    """The requests that were started."""

    containers: Sequence[podman.Inspection]
    """One for each name."""
    found: Driver | None = None

    @property
    def container(self) -> podman.Inspection:
        """Return the first container."""
        return self.containers[0]

    def driver(self) -> Driver:
        """Return this host's driver; it may still be starting. Raises GpusnapError if there is none."""
        return self.found if self.found is not None else needed_driver()


@contextmanager
def start_ahead(*names: str, seconds: float | None = None) -> Iterator[Ahead]:
    """Ask Podman for containers, and start the driver, while the block runs.

    `seconds`: how long to wait for Podman's answer when it is needed.
    """
    with ExitStack() as stack:
        asked = [stack.enter_context(podman.Inspection(name, seconds=seconds)) for name in names]
        question_process.start()  # before any threads exist
        driver = None
        with suppress(GpusnapError):
            driver = needed_driver()
        stack.enter_context(open_driver(driver))
        yield Ahead(asked, driver)
