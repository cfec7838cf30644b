"""The Podman that ordered a checkpoint: gpusnap-runtime is its child.

If that Podman is killed before the dump, nobody exports the container, and Podman would remove one with --rm.
If it is Podman's API service, it keeps no copy of what it exports.
"""

from __future__ import annotations

import os
from itertools import pairwise

from gpusnap.runtime_shim.base.errors import Interrupted, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall
from gpusnap.runtime_shim.runtime.container import Container
from gpusnap.runtime_shim.runtime.podman import conmon

# Podman gives it to a container with --rm (libpod, define.InspectAnnotationAutoremove).
_REMOVED_BY_PODMAN = "io.podman.annotations.autoremove"


def find_podman(images: str, container: Container) -> int:
    """Return the PID of the Podman that ordered a checkpoint; 0 if somebody else did, -1 if it has ended.

    It may have been killed before this process could look. Only Podman has its own containers checkpointed
    into the directory in which it looks for their images (libpod, Container.CheckpointPath). A script between
    it and this process is not watched.
    """
    parent = os.getppid()
    if conmon.is_podman(parent):
        return parent
    if images != os.path.join(container.bundle, "checkpoint"):
        return 0
    if not conmon.podman_of(proc.command(proc.parent(container.pid)), container.id):
        return 0
    return -1 if _is_orphan() and not any(map(conmon.is_podman, proc.list_ancestors(os.getpid()))) else 0


def check_podman(podman: int) -> None:
    """Raise Interrupted if Podman was killed: nobody would export a container that it removes (--rm).

    podman: what `find_podman` returned.
    """
    if podman and os.getppid() != podman:
        raise Interrupted("Podman ended before the container was dumped", hint="try again", code="GPS-902")


def refuse_to_remove(call: CheckpointCall, container: Container) -> None:
    """Raise Refused if Podman's API service would have a container with --rm ended.

    The service exports it to a temporary file, sends that, and removes it, whether its client got it or not
    (podman, pkg/api/handlers/libpod, Checkpoint). Podman has removed the container by then.
    """
    if call.leave_running or container.annotations.get(_REMOVED_BY_PODMAN) != "TRUE":
        return
    podman = next(filter(conmon.is_podman, proc.list_ancestors(os.getpid())), 0)
    if podman and ("system", "service") in pairwise(proc.command(podman)):
        raise Refused(
            f"container {container.id} has --rm, so Podman would remove it when this checkpoint ends it, "
            "and Podman's API service keeps no copy of the checkpoint: if its client went away meanwhile, "
            "nothing would be left",
            hint="run gpusnap checkpoint on this host; or have the service leave the container running, and "
            "remove it afterwards",
            code="GPS-220",
        )


def _is_orphan() -> bool:
    """Return whether the process that started this one has ended: its parent is what adopts orphans.

    That is the first process, or one that asked for them (PR_SET_CHILD_SUBREAPER). Whoever starts a program
    is in the same session, unless the program begins a session of its own, as Podman's runtime does not.
    """
    parent = os.getppid()
    try:
        session = os.getsid(parent)
    except OSError:  # it has just ended
        return True
    return os.getsid(0) != os.getpid() and (parent == 1 or session != os.getsid(0))
