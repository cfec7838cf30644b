"""pause, resume and delete, while some container is suspended.

The launcher starts Python for these three commands while /run/gpusnap/suspended exists. All of them go to the
real runtime, except these:

- `resume` of a suspended container (podman unpause, ctr task resume) is refused, with the command that
  resumes it. Its GPU processes lack their memory, which may not fit on a GPU now, and an unpause does not
  mention GPUs; and no script or restart may let half of a container run. It is also refused while the
  container is being suspended, because it may reach the runtime after the suspend.
- `pause` of one does nothing, since it is frozen. For `gpusnap checkpoint` of a suspended container, Podman
  unpauses and pauses it around its checkpoint; gpusnap requests that both do nothing (shim/overrides.py).
- `delete` of one that has ended also removes what is stored for it.

Nothing here may prevent a container from being stopped and removed: after any error, the real runtime runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gpusnap.runtime_shim.base.errors import ContainerError
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
    """Return the exit code of a command, or None if the real runtime is to execute it.

    `words`: those after the command; `root`: the value of --root. `run`: executes the command with the real
    runtime, and returns its exit code. Raises ContainerError if the command is refused.
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
        return _PASS  # it is of an earlier run of the container, and the next sweep removes it
    if found.stage in (Stage.UNDONE, Stage.RESUMED):  # gpusnap itself makes the engine do it
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
    """Return the record of the container, if it is suspended."""
    if root is None:
        return suspensions.find_by_container(container) if re.fullmatch(r"[\w.+-]+", container) else None
    keys = {container_key.key(container_key.root(root, kind), container) for kind in locate.NAMES}
    return next((found for key in keys if (found := suspensions.read(key)) is not None), None)


def _is_frozen(found: Suspension) -> bool:
    group = containers.frozen_group(found.init[0], found.container)
    return group is not None and cgroup_freezer.is_frozen(group)
