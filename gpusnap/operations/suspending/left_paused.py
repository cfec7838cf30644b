"""Finds containers of pods that containerd has left paused.

CheckpointContainer of containerd's CRI pauses the container, and resumes it in the time that its caller gave
(containerd 2.1, client/task.go, Checkpoint). When that is over, as kubelet's runtimeRequestTimeout, the
resume fails as well, and the container stays paused: CRI has no call that resumes one. A later
CheckpointContainer finds it paused and leaves it so. Only containerd knows whether a checkpoint is still in
progress after gpusnap's part of it, so these are named and not resumed.

The resume may also have been cut off after the runtime's part of it. Then the container runs, but containerd
has it as paused: it refuses an exec, and with runc a resume, too ("container not paused"), until the runtime
has paused the container again.
"""

from __future__ import annotations

import os
from collections.abc import Set
from contextlib import suppress

from gpusnap.engines import ctr
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.operations.suspending import targets
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.snapshot.records import journal, suspensions

_NAMESPACE = "k8s.io"
"""The namespace of containerd's CRI (containerd, internal/cri/constants)."""
_ROOT = os.path.join(targets.CONTAINERD_ROOT, _NAMESPACE)


@dataclass(frozen=True, slots=True)
class PausedContainer:
    """A container of a pod that is paused, and that gpusnap neither suspended nor works on."""

    container: str
    """Its ID."""
    processes: tuple[int, ...]
    """The PID of its init."""
    runs: bool = False
    """Whether it runs, and is paused only by containerd's record."""

    @property
    def why(self) -> str:
        """What is known of it, and the commands that resume it."""
        resume = f"ctr --namespace {_NAMESPACE} tasks resume {self.container}"
        if self.runs:
            return (
                "it runs, but containerd has it as paused: the caller of a checkpoint gave up; unless one "
                f"is in progress: gpusnap-runtime --root {_ROOT} pause {self.container} && {resume}"
            )
        return (
            "containerd has paused it, and leaves it so if the caller of a checkpoint gave up; unless one is "
            f"in progress: {resume}"
        )


def list_paused() -> tuple[PausedContainer, ...]:
    """Return the paused containers of pods, without those that cannot be looked at."""
    tasks = [(container, init) for namespace, container, init in targets.tasks() if namespace == _NAMESPACE]
    frozen = {task: _is_frozen(*task) for task in tasks}
    found = [PausedContainer(container, (init,)) for (container, init), is_so in frozen.items() if is_so]
    running = [task for task, is_so in frozen.items() if is_so is False]
    recorded = _list_recorded() if running else ()
    for container, init in running:
        # Not if it was paused, or resumed, while containerd was asked.
        if container in recorded and _is_frozen(container, init) is False:
            found.append(PausedContainer(container, (init,), runs=True))
    return tuple(found)


def _list_recorded() -> Set[str]:
    """Return the IDs of those that are paused by containerd's record; none if it does not say."""
    with suppress(GpusnapError):
        return ctr.list_paused(_NAMESPACE)
    return frozenset()


def _is_frozen(container: str, init: int) -> bool | None:
    """Return whether a container is frozen; None if gpusnap suspended it or works on it, or it ends."""
    key = container_key.key(_ROOT, container)
    with suppress(GpusnapError), journal.hold(key, patience=0):
        if suspensions.find_by_container(container) is None:
            return containers.frozen_group(init, container) is not None
    return None
