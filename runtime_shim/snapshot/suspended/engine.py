"""Who runs a container that is suspended and resumed."""

from __future__ import annotations

from collections.abc import Callable

from gpusnap.oci.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Engine:
    """Who runs the container: its name there, and how it is paused and let go on."""

    kind: str
    """podman, or containerd."""
    name: str
    namespace: str
    pause: Callable[[], object]
    go_on: Callable[[], object]
