"""Finds containers of pods that containerd has left paused.

CheckpointContainer of containerd's CRI pauses the container, and resumes it in the time that its caller gave
(containerd 2.1, client/task.go, Checkpoint). When that is over, as kubelet's runtimeRequestTimeout, the
resume fails as well, and the container stays paused: CRI has no call that resumes one. A later
CheckpointContainer finds it paused and leaves it so. Only containerd knows whether a checkpoint is still in
progress after gpusnap's part of it, so these are named and not resumed.

A pause and a resume may also have been cut off after the runtime's part of it, and then containerd has the
container as running although it is frozen, or as paused although it runs. ctr cannot resume the first. It
refuses an exec in the second, and with runc a resume, too ("container not paused"), until the runtime has
paused the container again. If the pod's shim was killed, containerd no longer has its containers, and leaves
their processes as they are (docs/kubernetes.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
    frozen: bool = True
    """Whether it is frozen; otherwise it is paused only by containerd's record."""
    recorded: bool = True
    """Whether it is paused by containerd's record, or containerd did not say."""
    listed: bool = True
    """Whether containerd has it, or did not say."""

    @property
    def why(self) -> str:
        """What is known of it, and the commands that resume it, or end it."""
        runtime = f"gpusnap-runtime --root {_ROOT}"
        if not self.listed:
            return (
                "it is frozen, and containerd no longer has it, as its shim has ended; "
                f"to end it: {runtime} delete --force {self.container}"
            )
        resume = f"ctr --namespace {_NAMESPACE} tasks resume {self.container}"
        if not self.recorded:
            what = "it is frozen, but containerd has it as running: a checkpoint was cut off"
            resume = f"{runtime} resume {self.container}"
        elif not self.frozen:
            what = "it runs, but containerd has it as paused: the caller of a checkpoint gave up"
            resume = f"{runtime} pause {self.container} && {resume}"
        else:
            what = "containerd has paused it, and leaves it so if the caller of a checkpoint gave up"
        return f"{what}; unless one is in progress: {resume}"


def list_paused() -> tuple[PausedContainer, ...]:
    """Return the paused containers of pods, without those that cannot be looked at."""
    tasks = [(container, init) for namespace, container, init in targets.tasks() if namespace == _NAMESPACE]
    before = {task: frozen for task in tasks if (frozen := _is_frozen(*task)) is not None}
    states = _list_states() if before else None
    found = []
    for (container, init), frozen in before.items():
        state = (states or {}).get(container, "")
        listed = states is None or container in states
        # Not if it was paused, or resumed, while containerd was asked.
        if (frozen or state == "PAUSED") and _is_frozen(container, init) is frozen:
            found.append(PausedContainer(container, (init,), frozen, state != "RUNNING", listed))
    return tuple(found)


def _list_states() -> Mapping[str, str] | None:
    """Return the states of containerd's record by ID; None if it does not say."""
    with suppress(GpusnapError):
        return ctr.list_states(_NAMESPACE)
    return None


def _is_frozen(container: str, init: int) -> bool | None:
    """Return whether a container is frozen; None if gpusnap suspended it or works on it, or it ends."""
    key = container_key.key(_ROOT, container)
    with suppress(GpusnapError), journal.hold(key, patience=0):
        if suspensions.find_by_container(container) is None:
            return containers.frozen_group(init, container) is not None
    return None
