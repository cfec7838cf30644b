"""The RAM for suspended containers: `suspend.ram`, and what happens if it is not enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from gpusnap.operations.suspending.usage import measure_kept
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import suspensions
from gpusnap.runtime_shim.snapshot.records.reservations import AHEAD, RAM, SUSPENDED, claim
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension

_SPILL = "spill"


@contextmanager
def claim_room(settings: Settings, need: int, *, leaving: str = "") -> Iterator[Callable[[], object]]:
    """Ensure that `need` more bytes fit into suspend.ram; if the settings allow it, spill others first.

    They are claimed during the block: no other suspend counts on them. If suspend.ram is 0, the RAM that is
    available decides what is spilled; whether the rest fits is checked later. Call what this yields when the
    RAM is claimed for that: it would count twice. `leaving`: the key of a container that is resumed next, and
    does not count. Raises Refused, GpusnapError.
    """
    spilled: set[str] = set()
    while True:
        with ExitStack() as held:
            room = held.enter_context(claim())
            chosen = _choose_next(settings, need, room.reserved, {leaving, *spilled})
            if chosen is None:
                room.record({SUSPENDED: need, AHEAD: need})
                yield partial(room.change, {SUSPENDED: need})
                return
        # Without the lock, because this takes long. Most suspends need no room made.
        from gpusnap.runtime_shim.snapshot.suspended_containers.spill import spill

        size = human(spill(chosen.key, settings))
        spilled.add(chosen.key)
        note(f"the GPU memory of {chosen.name}, {size}, was moved to the store", code="GPS-216")


def _choose_next(
    settings: Settings, need: int, reserved: Mapping[str, int], without: Collection[str]
) -> Suspension | None:
    """Return the container to spill next; None if there is room. Raises Refused if there is none.

    `reserved`: the claims of others. `without`: the keys of containers that do not count.
    """
    budget, spills = settings.suspend.ram, settings.suspend.over == _SPILL
    if not budget and not spills:
        return None
    # For one that is being suspended, its claim counts.
    kept = {
        each: measure_kept(each)[0]
        for each in suspensions.find()
        if each.key not in without and not (each.stage is Stage.SUSPENDING and each.at_work)
    }
    free: int | None = budget - sum(kept.values()) - reserved.get(SUSPENDED, 0)
    if not budget:
        free = space.measure_room(reserved.get(RAM, 0) + reserved.get(AHEAD, 0))
    if free is None or need <= free:
        return None
    if spills:
        some = [each for each, size in kept.items() if each.stage is Stage.SUSPENDED and size]
        if free + sum(kept[each] for each in some) >= need:
            return min(some, key=lambda each: (each.since, each.name))
    if not budget:
        return None
    if need > budget:
        hint = "raise suspend.ram"
    elif spills:  # it fits, but for those that cannot be spilled now
        hint = "try again when the suspends and resumes in progress have ended: gpusnap ps shows them"
    else:
        hint = (
            "run gpusnap suspend --spill NAME to move suspended memory to the store "
            '(suspend.over = "spill" does so automatically), or raise suspend.ram'
        )
    raise Refused(
        f"{human(need)} of GPU memory must move to RAM, but only {human(max(0, free))} of suspend.ram, "
        f"{human(budget)}, is free",
        hint=hint,
        code="GPS-216",
    )
