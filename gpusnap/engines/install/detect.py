"""The container engines of a host, for `gpusnap install`, and the containers that run by gpusnap-runtime."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

from gpusnap.engines.install.files import join_root
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import child_process
from gpusnap.runtime_shim.runtime import find as locate

ENGINES = ("podman", "containerd", "crio")
"""The programs by which they are recognised."""

NAMES = {"podman": "Podman", "containerd": "containerd", "crio": "CRI-O"}

_PROGRAM = "gpusnap-runtime"
_PROC = "/proc"
# Seconds for an engine's answer. Podman waits for the lock of each container that it describes.
_PATIENCE = 60.0
# If it does not exist, Podman has never had a container, and a query would make the folder.
_STORAGE = "/var/lib/containers/storage"
# containerd writes the options of a task into its bundle (runtime/v2, WriteOptions in 1.7 and since).
_BUNDLES = "/run/containerd/io.containerd.runtime.v2.task/*/*/options.json"


@dataclass(frozen=True, slots=True)
class ShimContainer:
    """A container whose runtime is gpusnap-runtime."""

    engine: str
    id: str
    name: str = ""
    """The name, if the engine reports it."""


def find(root: str = "/") -> dict[str, str]:
    """Return the path of each engine's program on the host."""
    # Of this machine's PATH, only folders that the tree has, too; sudo and su omit the folders for root.
    on_path = os.environ.get("PATH", "").split(":") if root in ("", "/") else []
    places = [*(each for each in on_path if each.startswith("/")), *locate.SYSTEM_DIRECTORIES]
    found = {}
    for engine in ENGINES:
        paths = (os.path.join(place, engine) for place in places)
        path = next((each for each in paths if os.access(join_root(root, each), os.X_OK)), "")
        if path:
            found[engine] = path
    return found


def containerd_version(path: str, root: str = "/") -> int:
    """Return the first number of containerd's version; 1 if it is unknown, as in a tree, whose programs may
    not run here: then the user has to do everything."""
    if path and root in ("", "/"):
        with suppress(GpusnapError):
            said = child_process.run([path, "--version"], seconds=_PATIENCE).out
            match = re.search(r"\sv?(\d+)\.\d+\S*", said)
            return int(match[1]) if match else 1
    return 1


def list_used() -> list[ShimContainer]:
    """Return the containers of this host whose runtime is gpusnap-runtime, of every engine that reports them.

    Raises GpusnapError if Podman is installed but does not answer.
    """
    found = [*_podman(), *_containerd()]
    known = {each.id for each in found}
    return found + [each for each in _list_monitored() if each.id not in known]


def _podman() -> Iterator[ShimContainer]:
    path = find().get("podman")
    if not path or not os.path.isdir(_STORAGE):
        return
    ids = _list_podmans(path)
    if not ids:
        return
    # If one is removed between the two calls, the second fails, but still reports the others.
    form = "{{.OCIRuntime}}\t{{.Id}}\t{{.Name}}"
    words = ("container", "inspect", "--format", form, *ids)
    done = child_process.run([path, *words], env=os.environ, seconds=_PATIENCE)
    for line in done.out.splitlines():
        runtime, _, rest = line.partition("\t")
        identity, _, name = rest.partition("\t")
        ids.discard(identity)
        if os.path.basename(runtime) == _PROGRAM:
            yield ShimContainer("podman", identity, name)
    if ids and (unknown := sorted(ids & _list_podmans(path))):
        raise GpusnapError(
            f"Podman does not report the runtime of the container {unknown[0][:12]}: {_last_line(done.err)}",
            hint=f"run podman container inspect {unknown[0][:12]}",
        )


def _list_podmans(path: str) -> set[str]:
    """Return the IDs of Podman's containers."""
    words = ("container", "ls", "--all", "--quiet", "--no-trunc")
    done = child_process.run([path, *words], env=os.environ, seconds=_PATIENCE)
    if done.code:
        raise GpusnapError(
            f"Podman cannot list its containers: {_last_line(done.err)}", hint="run podman ps --all"
        )
    return set(done.out.split())


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["nothing"])[-1]


def _containerd() -> Iterator[ShimContainer]:
    for path in sorted(glob.glob(_BUNDLES)):
        try:
            with open(path, "rb") as file:
                options = file.read(1 << 16)
        except OSError:
            continue  # the task has ended
        if _PROGRAM.encode() in options:
            yield ShimContainer("containerd", os.path.basename(os.path.dirname(path)))


def _list_monitored() -> Iterator[ShimContainer]:
    """Yield CRI-O's containers, and those of Podman's other storages, by monitor: conmon -r RUNTIME -c ID."""
    # In a chroot to a node's root, as in a pod, /proc shows the node's processes, and 1 is the node's.
    here = {_namespace("self"), _namespace("1")} - {""}
    for entry in sorted(os.listdir(_PROC)):
        if not entry.isdigit():
            continue
        try:
            # Containers of a nested host, such as a container with an engine of its own, belong to that.
            if _namespace(entry) not in here:
                continue
            with open(f"{_PROC}/{entry}/cmdline", "rb") as file:
                words = [os.fsdecode(word) for word in file.read().split(b"\0")]
        except OSError:
            continue
        if os.path.basename(words[0]) != "conmon":
            continue
        options = dict(pairwise(words))
        if os.path.basename(options.get("-r", "")) == _PROGRAM:
            yield ShimContainer("crio", options.get("-c", "?"))


def _namespace(process: str) -> str:
    """Return the PID namespace of a process; "" if unknown, for example after its end."""
    try:
        return os.readlink(f"{_PROC}/{process}/ns/pid")
    except OSError:
        return ""
