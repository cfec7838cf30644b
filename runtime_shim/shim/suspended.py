"""pause, resume, kill and delete of a suspended container, and of one that a killed gpusnap left.

The launcher starts Python for these commands while there is a file of the container in
/run/gpusnap/suspended; for delete also while there is one of its restore in the journal, and for resume and
delete while there is one that says that it runs after all (journal.THAWED). All of them go to the real
runtime, except these:

- `resume` of a suspended container (podman unpause, ctr task resume) is refused, with the command that
  resumes it. Its GPU processes lack their memory, which may not fit on a GPU now, and an unpause does not
  mention GPUs; and no script or restart may let half of a container run. It is also refused while the
  container is being suspended, because it may reach the runtime after the suspend.
- `pause` of one does nothing, since it is frozen. For `gpusnap checkpoint` of a suspended container, Podman
  unpauses and pauses it around its checkpoint; gpusnap requests that both do nothing (shim/overrides.py).
- `kill` of one by Podman's health check (--health-on-failure) is refused: no check can run in a frozen
  container, and Podman takes that for a failure if it was not told of the suspend, as during a checkpoint of
  the suspended container.
- `delete` of one that has ended also removes what is stored for it.
- Before a `delete` of one whose restore was killed or is being given up, its root file system is unmounted
  where the runtime has mounted it for CRIU: else `runc delete --force`, or an engine that removes the bundle
  afterwards, removes the files of the container. If that fails, the delete is refused.
- `resume` of one that `gpusnap recover` has left running succeeds, as crun's does; runc's would fail.

Nothing else here may prevent a container from being stopped and removed: after any error, the real runtime
runs, except for a `resume` of a suspended container (shim/entry.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from gpusnap.runtime_shim.base.errors import ContainerError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import cgroup_freezer, container_key
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.podman import conmon
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.gpu_processes.paused_container import answer_resume
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.recovery import restore as recover_restore
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.suspended_containers import sweep

# The real runtime is to run.
_PASS = None


def answer(command: str, words: Sequence[str], root: str | None, run: Callable[[], int]) -> int | None:
    """Return the exit code of a command, or None if the real runtime is to execute it.

    `words`: those after the command; `root`: the value of --root. `run`: executes the command with the real
    runtime, and returns its exit code. Raises ContainerError if the command is refused.
    """
    container = next((word for word in words if not word.startswith("-")), "")
    forced = not {"--force", "-f"}.isdisjoint(words)
    if _answer_by_journal(command, container, root, forced=forced):
        return 0
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
    if command == "kill":
        _refuse_health_check(found)
        return _PASS
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


def _refuse_health_check(found: Suspension) -> None:
    """Raise ContainerError if a health check of Podman's kills it; it may have begun before the suspend."""
    parent = os.getppid()
    if conmon.is_podman(parent) and "healthcheck" in proc.command(parent):
        raise ContainerError(
            f"container {found.name} is suspended, so its health check fails: it is not ended for that",
            hint=f"gpusnap resume {found.name}; podman kill ends it",
            code="GPS-206",
        )


def _answer_by_journal(command: str, container: str, root: str | None, *, forced: bool) -> bool:
    """Do what a command of a container needs that a killed gpusnap left; return whether that was all."""
    if command == "resume":
        return any(map(answer_resume, _list_noted(journal.THAWED, container, root)))
    if command == "delete":
        for key in _list_noted(restore_record.KIND, container, root):
            recover_restore.spare_files(key, forced=forced)
        for key in _list_noted(journal.THAWED, container, root):
            journal.drop(key, journal.THAWED)
    return False


def _list_noted(kind: str, container: str, root: str | None) -> list[str]:
    """Return the keys of the container's files of a kind in the journal."""
    found = [key for key in journal.list_noted(kind) if container_key.id_of(key) == container]
    known = found if root is None else _list_keys(container, root)
    return [key for key in found if key in known]


def _list_keys(container: str, root: str) -> set[str]:
    return {container_key.key(container_key.root(root, kind), container) for kind in locate.NAMES}


def _find_suspension(container: str, root: str | None) -> Suspension | None:
    """Return the record of the container, if it is suspended."""
    if root is None:
        return suspensions.find_by_container(container) if re.fullmatch(r"[\w.+-]+", container) else None
    keys = _list_keys(container, root)
    return next((found for key in keys if (found := suspensions.read(key)) is not None), None)


def _is_frozen(found: Suspension) -> bool:
    group = containers.frozen_group(found.init[0], found.container)
    return group is not None and cgroup_freezer.is_frozen(group)
