"""pause, resume and delete, while some container is suspended.

The launcher leaves these three commands to Python as long as /run/gpusnap/suspended is there. All but these
go on to the real runtime:

- `resume` of a suspended container (podman unpause, ctr task resume) is refused, with the command that
  resumes it. Its GPU processes miss their memory, which may not fit on a GPU now, and an unpause says nothing
  of GPUs; and no script or restart may let half of a container run. So is one while it is being suspended,
  which may come to the runtime when the suspend is done.
- `pause` of one has nothing to do, since it is frozen. `gpusnap checkpoint` of a suspended container has
  Podman unpause and pause it around its checkpoint, and orders that both do nothing (shim/overrides.py).
- `delete` of one that has ended also lets go of what is kept for it.

Nothing here may keep a container from being stopped and removed: whatever else fails, the real runtime runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gpusnap.runtime_shim.errors import ContainerError
from gpusnap.runtime_shim.runtime import cgroup_freezer, container_key
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import sweep

# The real runtime is to run.
_PASS = None


def answer(command: str, words: Sequence[str], root: str | None, run: Callable[[], int]) -> int | None:
    """What becomes of a command: an exit code, or None where the real runtime is to take its line.

    `words` are those behind the command, `root` is the value of --root. `run` has the real runtime take the
    line, and gives its exit code. Raises ContainerError where the command is refused.
    """
    container = next((word for word in words if not word.startswith("-")), "")
    found = _find_suspension(container, root)
    if found is None:
        return _PASS
    if command == "delete":
        code = run()
        if not found.is_alive:
            with journal.hold(found.key):
                sweep.remove(found)
        return code
    if not found.is_alive:
        return _PASS  # it is of an earlier run of the container, and whoever sweeps next removes it
    if found.stage in (Stage.UNDONE, Stage.RESUMED):  # gpusnap itself has the engine do it
        return _PASS
    if found.stage is Stage.SUSPENDING:
        if command == "pause" or not found.at_work:
            return _PASS
        raise ContainerError(
            f"container {found.name} is being suspended",
            hint=f"wait until that has finished, then run gpusnap resume {found.name}",
            code="GPS-206",
        )
    if overrides.is_ordered_to_stay(found.container):
        return 0
    if command == "pause":
        return 0 if _is_frozen(found) else _PASS
    raise ContainerError(
        f"container {found.name} is suspended: its GPU memory is in RAM or in the store",
        hint=f"gpusnap resume {found.name}",
        code="GPS-206",
    )


def _find_suspension(container: str, root: str | None) -> Suspension | None:
    """What is on file of the container that is meant."""
    if root is None:
        return suspensions.find_by_container(container) if re.fullmatch(r"[\w.+-]+", container) else None
    keys = {container_key.key(container_key.root(root, kind), container) for kind in locate.NAMES}
    return next((found for key in keys if (found := suspensions.read(key)) is not None), None)


def _is_frozen(found: Suspension) -> bool:
    group = containers.frozen_group(found.init[0], found.container)
    return group is not None and cgroup_freezer.is_frozen(group)
