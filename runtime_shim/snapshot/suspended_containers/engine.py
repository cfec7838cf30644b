"""The engine that runs a suspended or resumed container."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import dataclass

if TYPE_CHECKING:
    from gpusnap.runtime_shim.snapshot.devices.device_access import Update


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that runs the container: how it names, pauses and resumes it, and gives it device nodes."""

    kind: str
    """podman, or containerd."""
    name: str
    namespace: str
    pause: Callable[[], object]
    """Raises AlreadyPaused."""
    go_on: Callable[[], object]
    allow: Update
    """Makes its runtime allow device nodes that the container has lost."""
