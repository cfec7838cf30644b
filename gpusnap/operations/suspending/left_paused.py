"""Finds containers of pods that containerd has left paused.

CheckpointContainer of containerd's CRI pauses the container, and resumes it in the time that its caller gave
(containerd 2.1, client/task.go, Checkpoint). When that is over, as kubelet's runtimeRequestTimeout, the
resume fails as well, and the container stays paused: CRI has no call that resumes one. A later
CheckpointContainer finds it paused and leaves it so. Only containerd knows whether a checkpoint is still in
progress after gpusnap's part of it, so these are named and not resumed.
"""

from __future__ import annotations

import os

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.operations.suspending import targets
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.snapshot.records import journal, suspensions

_NAMESPACE = "k8s.io"
"""The namespace of containerd's CRI (containerd, internal/cri/constants)."""


@dataclass(frozen=True, slots=True)
class PausedContainer:
    """A container of a pod that is paused, and that gpusnap neither suspended nor works on."""

    container: str
    """Its ID."""
    processes: tuple[int, ...]
    """The PID of its init."""

    @property
    def why(self) -> str:
        """What is known of it, and the command that resumes it."""
        return (
            "containerd has paused it, and leaves it so if the caller of a checkpoint gave up; unless one is "
            f"in progress: ctr --namespace {_NAMESPACE} tasks resume {self.container}"
        )


def list_paused() -> tuple[PausedContainer, ...]:
    """Return the paused containers of pods, without those that cannot be looked at."""
    found = []
    for namespace, container, init in targets.tasks():
        if namespace != _NAMESPACE:
            continue
        try:
            if containers.frozen_group(init, container) and _is_left(container):
                found.append(PausedContainer(container, (init,)))
        except GpusnapError:
            continue  # it is about to end
    return tuple(found)


def _is_left(container: str) -> bool:
    """Return whether gpusnap has no part in its pause. Raises GpusnapError if gpusnap works on it."""
    key = container_key.key(os.path.join(targets.CONTAINERD_ROOT, _NAMESPACE), container)
    with journal.hold(key, patience=0):
        return suspensions.find_by_container(container) is None
