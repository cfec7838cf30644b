"""What a command has done to a container's GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import dataclass

if TYPE_CHECKING:
    from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
    from gpusnap.runtime_shim.transaction import Step

_OF_THE_DRIVER = ("driver checkpoint", "driver restore")


@dataclass(frozen=True, slots=True)
class MovedContainer:
    """A container that was taken off its GPUs, or brought back."""

    container: Suspension
    seconds: float
    steps: Sequence[Step]

    @property
    def driver_seconds(self) -> float:
        """What of that the driver took."""
        return sum(step.seconds for step in self.steps if step.name in _OF_THE_DRIVER)


@dataclass(frozen=True, slots=True)
class SpilledContainer:
    """A container that was suspended already, and whose GPU memory goes to the store."""

    name: str
    size: int | None
    """Bytes; None where that goes on in the background."""
