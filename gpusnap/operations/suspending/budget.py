"""The RAM for suspended containers: `suspend.ram`, and what happens if it is not enough."""

from __future__ import annotations

from gpusnap.operations.suspending.usage import measure_kept
from gpusnap.runtime_shim.errors import Refused
from gpusnap.runtime_shim.log import note
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.records import suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage
from gpusnap.runtime_shim.units import human

_SPILL = "spill"


def make_room(settings: Settings, need: int, *, leaving: str = "") -> None:
    """Ensure that `need` more bytes fit into suspend.ram; if the settings allow it, spill others first.

    `leaving`: the key of a container that is resumed next, and does not count. Raises Refused.
    """
    budget = settings.suspend.ram
    if not budget:
        return
    held = {each: measure_kept(each)[0] for each in suspensions.find() if each.key != leaving}
    used = sum(held.values())
    if need <= budget and settings.suspend.over == _SPILL:
        for each in sorted(held, key=lambda each: (each.since, each.name)):
            if used + need <= budget:
                break
            if each.stage is Stage.SUSPENDED and held[each]:
                # Most suspends need no room made.
                from gpusnap.runtime_shim.snapshot.suspended_containers.spill import spill

                spill(each.key, settings)
                used -= held[each]
                note(
                    f"the GPU memory of {each.name}, {human(held[each])}, was moved to the store",
                    code="GPS-216",
                )
    if used + need > budget:
        raise Refused(
            f"{human(need)} of GPU memory must move to RAM, but only {human(max(0, budget - used))} of "
            f"suspend.ram, {human(budget)}, is free",
            hint="raise suspend.ram"
            if need > budget
            else (
                "run gpusnap suspend --spill NAME to move suspended memory to the store "
                '(suspend.over = "spill" does so automatically), or raise suspend.ram'
            ),
            code="GPS-216",
        )
