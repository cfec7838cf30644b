"""Results of commands that move a container's GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import dataclass

if TYPE_CHECKING:
    from gpusnap.runtime_shim.base.transaction import Step
    from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension

_OF_THE_DRIVER = ("driver checkpoint", "driver restore")


@dataclass(frozen=True, slots=True)
class MovedContainer:
    """A container that was suspended or resumed."""

    container: Suspension
    seconds: float
    steps: Sequence[Step]

    @property
    def driver_seconds(self) -> float:
        """Return the driver's share of the time."""
        return sum(step.seconds for step in self.steps if step.name in _OF_THE_DRIVER)


@dataclass(frozen=True, slots=True)
class SpilledContainer:
    """A container that was already suspended, and whose GPU memory is moved to the store."""

    name: str
    size: int | None
    """Bytes; None if that continues in the background."""
