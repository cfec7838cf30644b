"""Starts the slow requests of suspend, resume and swap before their own modules are imported.

Podman takes 40 ms to describe a container, NVIDIA's driver 0.2 to 0.5 s until it can be called (cuInit,
nvmlInit), and the modules 0.1 s. In parallel, they take as long as the longest. Nothing is decided here: each
of them is asked again, or waited for, where its answer counts, and fails there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.operations.driver import needed_driver
from gpusnap.runtime_shim import question_process
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.opening import open_driver


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was asked for."""

    containers: Sequence[podman.Inspection]
    """One for each name."""
    found: Driver | None = None

    @property
    def container(self) -> podman.Inspection:
        """The first."""
        return self.containers[0]

    def driver(self) -> Driver:
        """This host's driver; it may be starting. Raises GpusnapError where there is none."""
        return self.found if self.found is not None else needed_driver()


@contextmanager
def start_ahead(*names: str, seconds: float | None = None) -> Iterator[Ahead]:
    """Have Podman asked for containers, and the driver start, while the block runs.

    `seconds`: how long Podman's answer is waited for where it is needed.
    """
    with ExitStack() as stack:
        asked = [stack.enter_context(podman.Inspection(name, seconds=seconds)) for name in names]
        question_process.start()  # before there are threads
        driver = None
        with suppress(GpusnapError):
            driver = needed_driver()
        stack.enter_context(open_driver(driver, host=True))
        yield Ahead(asked, driver)
