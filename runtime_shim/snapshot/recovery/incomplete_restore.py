"""Finds what an incomplete restore left of a container that its runtime does not know.

crun and runc record a container when CRIU is done with it. If they or CRIU are killed before, the processes
restored so far stay stopped, and `delete` says that there is no such container. gpusnap finds them by what
was known before the restore began:

    marked      CRIU, and processes that do not have their own environment yet (runtime/criu/scratch_files.py)
    own         a process that began after the restore, whose root is the container's root file system, and
                whose cgroup is the container's own or the one in which gpusnap was called, where CRIU leaves
                processes if it is told to ignore cgroups; and the descendants of such a process

Only a process that is both is killed, by pidfd: another container may have the same root file system, and a
cgroup with the same name may belong to another engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, reason
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.snapshot.restoring.place import Place

_PATIENCE = 30.0  # seconds that killed processes may take to end
_INTERVAL = 0.01
_ROOT = "criu-root"
"""Where crun (in the bundle) and runc (in its state) mount the root file system for CRIU.

src/libcrun/criu.c, libcrun_container_restore_linux_criu; libcontainer/criu_linux.go, Restore.
"""
_YARD = ".criu.cgyard."
"""The prefix of the directory in which CRIU mounts control groups, where it works (criu/cgroup.c)."""
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8  # linux/fs.h
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18  # linux/mount.h

_libc = ctypes.CDLL(None, use_errno=True)


def find(place: Place, since: int) -> tuple[proc.Process, ...]:
    """Return the container's processes that began at or after `since` (clock ticks after boot), by PID."""
    fresh = {each.pid: each for each in map(proc.process, proc.pids()) if each and each.start >= since}
    fresh = {pid: each for pid, each in fresh.items() if pid != os.getpid() and place.contains(pid)}
    roots = [pid for pid in fresh if place.is_root_of(pid)]
    found = proc.add_descendants(roots, proc.parents(), fresh.__contains__)
    return tuple(fresh[pid] for pid in sorted(found))


def let_runtime_end(
    owner: tuple[int, int], container: str, *, enough: Callable[[], bool] = lambda: False
) -> None:
    """Wait for the runtime that a killed gpusnap called for a container, as `scratch_files.let_end`.

    Do not wait for CRIU alone: nobody takes over what it restores.
    """
    scratch_files.let_end(owner, container, enough=lambda: enough() or not _list_runtimes(owner, container))


def kill_restored(place: Place | None, owner: tuple[int, int], container: str) -> tuple[int, ...]:
    """Kill CRIU and the restored processes, and wait until they have ended; return their PIDs.

    `owner`: PID and start time of the gpusnap that restored. While a runtime that it called exists, that
    runtime handles its CRIU. Raises GpusnapError if some do not end.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _PATIENCE
    while left := _list_left(place, owner, container):
        pidfd.remember((each.pid, each.start) for each in left)
        for each in left:
            pidfd.send(each.pid, signal.SIGKILL)
        killed.update(each.pid for each in left)
        if time.monotonic() > deadline:
            raise GpusnapError(
                f"processes that were restored for container {container} were killed but do not exit: "
                f"{' '.join(str(each.pid) for each in left)}",
                hint="check /proc/PID/stack for what they wait for; then run gpusnap recover",
                code="GPS-025",
            )
        time.sleep(_INTERVAL)
    return tuple(sorted(killed))


def unmount_root(folders: Sequence[str]) -> None:
    """Unmount its root file system, which a killed runtime leaves mounted in one of these directories.

    Call it before `delete`: runc removes its directory with everything in it, which would be the container's
    files. Raises ContainerError.
    """
    for folder in folders:
        with _renamed_as_well(folder) as places:
            for place in places:
                _unmount(os.path.join(place, _ROOT))


def unmount_yards(folder: str) -> None:
    """Unmount the control groups that a killed CRIU leaves mounted where it worked, unless one works there.

    Raises ContainerError.
    """
    with _renamed_as_well(folder) as places:
        if any(_is_working_in(pid, places) for pid in proc.pids()):
            return
        for path in {mount.destination for mount in proc.mounts("self")}:
            if os.path.dirname(path) in places and os.path.basename(path).startswith(_YARD):
                _unmount(path)


@contextlib.contextmanager
def _renamed_as_well(folder: str) -> Iterator[tuple[str, str]]:
    """The directory, and what containerd has renamed it to; in the end that is removed, if it is empty.

    containerd renames the directories of a task to remove them. It cannot remove one in which something is
    mounted, and then makes no other task of that name (core/runtime/v2/bundle.go, atomicDelete).
    """
    folder = os.path.realpath(folder)
    parent, name = os.path.split(folder)
    renamed = os.path.join(parent, f".{name}")
    yield folder, renamed
    with contextlib.suppress(OSError):
        os.rmdir(renamed)


def _is_working_in(pid: int, folders: Collection[str]) -> bool:
    try:
        return proc.comm(pid) == "criu" and os.readlink(f"/proc/{pid}/cwd") in folders
    except OSError:
        return False


def _unmount(path: str) -> None:
    """Unmount everything at a path, with the mounts below it, and remove the directory."""
    name = os.fsencode(path)
    while any(mount.destination == path for mount in proc.mounts("self")):
        # Make it private first, so that mounts below it are not unmounted elsewhere as well.
        done = _libc.mount(None, name, None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
        if done < 0 or _libc.umount2(name, _MNT_DETACH | _UMOUNT_NOFOLLOW) < 0:
            error = OSError(ctypes.get_errno(), "umount2")
            raise ContainerError(
                f"{path}, which a killed runtime left mounted, cannot be unmounted: {reason(error)}",
                hint=f"run umount -l {path}, then gpusnap recover",
            ) from error
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _list_left(place: Place | None, owner: tuple[int, int], container: str) -> list[proc.Process]:
    marked: list[proc.Process] = []
    if not _list_runtimes(owner, container):
        marked = [each for each in map(proc.process, scratch_files.children(owner)) if each is not None]
    own = find(place, owner[1]) if place is not None else ()
    return list({each.pid: each for each in (*marked, *own)}.values())


def _list_runtimes(owner: tuple[int, int], container: str) -> list[int]:
    """Return the PIDs of the real runtime that a gpusnap called for a container and that still run."""
    return [pid for pid in scratch_files.children(owner) if container in proc.command(pid)]
