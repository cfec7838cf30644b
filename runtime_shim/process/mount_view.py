"""Shows the mounts of a container at a path, to one thread of gpusnap and the children that it starts."""

from __future__ import annotations

import os
from contextlib import ExitStack

from gpusnap.runtime_shim.process import mount_namespace


def show_mounts(pid: int, path: str) -> None:
    """Show what process `pid` sees from its root at `path`, to the calling thread and its children only.

    Call it in a thread that ends afterwards. Raises OSError; the thread cannot be used then.
    """
    places = "/proc/thread-self/ns/mnt", f"/proc/{pid}/ns/mnt"
    with ExitStack() as stack:
        spaces = []
        for place in places:
            spaces.append(os.open(place, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, spaces[-1])
        own, theirs = spaces
        mount_namespace.join(theirs, places[1])
        tree = mount_namespace.open_tree("/", recursive=True)
        stack.callback(os.close, tree)
        mount_namespace.join(own, places[0])
        mount_namespace.leave()
        mount_namespace.make_slaves()
        mount_namespace.move_mount(tree, path)
