"""Removes what a killed restore left: an incomplete container. Its checkpoint is unharmed.

The record of the restore says what was begun, and how far it came (restoring/record.py).

The real runtime continues when gpusnap is killed, so a container may exist whose processes are stopped
without their GPU state. Podman waits for it and holds its lock until it is gone: conmon reads what the
container would print. If the runtime is killed too, it knows no such container, but the processes may still
exist, stopped; incomplete_restore.py finds them. `recover` lets that runtime end, and removes the container
and other leftovers.

`recover` never removes a running container: it may have been completed just then, or be a later one with the
same ID. The entry may be days old, so only the driver shows the current state. A container is incomplete only
if the driver has not restored the GPU state of one of its processes, because no container runs like that. No
other sign counts.

If a checkpoint or a suspend of the container has begun since, its GPU state is missing for that reason: the
restore was complete, and only its entry is removed. The journal and the record of the suspension show that.

There is one exception. If memory of the processes was still loading (loading/demand_paging.py), the kernel
has killed those that waited for it, and the driver's answer for another process may refer to memory that was
never loaded. No process had continued by then, as the entry says (`arriving`), so the container is
incomplete, whatever runs in it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial

from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.layout.blobs import FirstOf
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, Refused, RuntimeFailed, reason
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest, manifest_file
from gpusnap.runtime_shim.runtime import bundle
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.run import control
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import resume
from gpusnap.runtime_shim.snapshot.memory import chunk_layout, transfer
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.recovery import held_threads, incomplete_restore
from gpusnap.runtime_shim.snapshot.recovery.bring_back import list_alive
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.restoring.record import Restore, Stage

_GONE = "nothing is left of it"
RUNNING = "running: "
"""How the result of `recover` begins for a running container; the names of its processes follow."""
_COMPLETE = "it was complete, because a checkpoint or a suspend of it has begun since; it was not touched"
_ANOTHER = "another container with that ID is running now, and was not touched"
_NO_SUCH = "there is no such container"  # the text of runtime/container.py for either runtime's error


def recover(key: str, driver: Driver | None, *, remove: bool = True) -> str:
    """Remove what a killed restore left of a container, by its key; return what was done, in words.

    A running container is not changed, except that its GPU processes that only lack the unlock get it. Raises
    Refused if it would have to be removed and `remove` is false; GpusnapError while that restore is in
    progress, if it cannot be determined whether the container is complete, and if something could not be
    removed; the entry stays.
    """
    if _cut_off(key) is None:
        return _GONE
    with journal.hold(key):
        if (entry := _cut_off(key)) is None:  # somebody else did it meanwhile
            return _GONE
        if _was_taken_since(key):
            _record_late_start(entry)
            scratch_files.sweep(entry.owner)
            _drop_links(entry)
            restore_record.forget(key)
            return _COMPLETE
        # Without --detach the runtime runs until the container ends; the PID file says that it is restored.
        incomplete_restore.let_runtime_end(
            entry.owner, entry.container, enough=lambda: not entry.detach and _pid(entry) > 0
        )
        held_threads.give_all_back(key)  # before any of them continues
        said = _explain_kept(entry, driver) if entry.stage is not Stage.PREPARE else None
        if said is not None and said.startswith(RUNNING):
            _record_late_start(entry)
        if said is None:
            if not remove and entry.stage is not Stage.PREPARE:
                container = entry.container
                raise Refused(
                    f"a restore of container {container} was interrupted, and its remains must be removed",
                    hint=f"gpusnap recover {container}",
                    code="GPS-022",
                )
            said = _remove_container(entry)
        scratch_files.sweep(entry.owner)
        _let_go(key)
        _drop_links(entry)
        restore_record.forget(key)
    return said


def _cut_off(key: str) -> Restore | None:
    """Return the entry of a container whose gpusnap has ended; raise GpusnapError if it still works."""
    entry = restore_record.read(key)
    if entry is not None:
        entry.check_not_at_work()
    return entry


def _was_taken_since(key: str) -> bool:
    """Whether a checkpoint or a suspend of the restored container has begun. Raises GpusnapError."""
    found, taken = suspensions.read(key), journal.read(key)
    return (found is not None and found.is_alive) or (taken is not None and bool(list_alive(taken)))


def _explain_kept(entry: Restore, driver: Driver | None) -> str | None:
    """Say why the current container with this ID is not removed; None if it is, or if there is none."""
    if (found := _find_container(entry)) is None:
        return None
    container, init = found
    if entry.init is not None and entry.init != (init.pid, init.start):
        return _ANOTHER
    if container.status == "paused":
        raise GpusnapError(
            f"container {entry.container} is paused, so gpusnap cannot determine whether its restore was "
            "complete",
            hint=f"unpause it, then run gpusnap recover {entry.container}",
            code="GPS-203",
        )
    if entry.arriving:
        return None  # none of them has continued
    members = containers.processes(init.pid, entry.container)
    inner = containers.inner_pids(init.pid, members)
    states = _states(entry, driver, [m.pid for m in members if inner[m.pid] in entry.processes])
    if ProcessState.CHECKPOINTED in states.values():
        return None
    if entry.init is None and entry.processes:
        return _ANOTHER
    # Only those that are left: processes may have ended since, or no longer use the GPU.
    ours = [pid for pid, state in states.items() if state in (ProcessState.RUNNING, ProcessState.LOCKED)]
    if driver is not None and ours:
        standing = [pid for pid in ours if proc.is_stopped(pid)]
        run_at_once(partial(driver_calls.let_finish, driver), standing).raise_first()
        if standing:
            _check(entry)
        resume(driver, ours, Pages(), right=partial(transfer.replace_staged_memory, entry.key))
    return RUNNING + " ".join(map(str, ours or [init.pid]))


def _record_late_start(entry: Restore) -> None:
    """Record it for later commands: the caller of the restore was told that it failed."""
    if entry.init is None and (found := _find_container(entry)) is not None:
        entry = replace(entry, init=(found[1].pid, found[1].start))
    restore_record.record_start(entry)


def _check(entry: Restore) -> None:
    """Check the memory of processes that have not continued, as a restore does at its end."""
    layouts = entry.layouts or (os.path.join(entry.image, manifest.FOLDER),)
    if entry.layouts or manifest_file.has(layouts[0], "blobs"):
        processes = manifest_file.read(entry.image).processes
        tables = [region.table for process in processes for region in process.regions]
        chunk_layout.check(FirstOf([Layout(path) for path in layouts]), tables, where=entry.image)


def _find_container(entry: Restore) -> tuple[containers.Container, proc.Process] | None:
    """Return the current container with this ID and its init; None if the runtime knows no running one."""
    try:
        found = containers.find(entry.command, entry.container)
    except ContainerError as error:
        if is_missing(error):
            return None
        raise  # it may be running
    init = proc.process(found.pid) if found.pid else None
    return (found, init) if init is not None else None


def is_missing(error: GpusnapError) -> bool:
    """Whether the runtime said that there is no such container."""
    return _NO_SUCH in str(error)


def _states(entry: Restore, driver: Driver | None, pids: Sequence[int]) -> Mapping[int, ProcessState | None]:
    """Ask the driver for the states of processes, also of stopped ones. Raises GpusnapError."""
    if not pids:
        return {}
    if driver is None:
        raise GpusnapError(
            "this host currently has no GPU driver, which is needed to determine whether the restore of "
            f"container {entry.container} was complete",
            hint=f"load the driver, then run gpusnap recover {entry.container}",
            code="GPS-301",
        )
    driver.open()
    return {pid: driver_calls.state(driver, pid) for pid in pids}


def _remove_container(entry: Restore) -> str:
    """Remove the rest of the container, and restore config.json; return what there was, in words."""
    said = "it had not been started"
    if entry.stage is not Stage.PREPARE:
        said = remove(entry)
    _put_config_back(entry)
    if entry.pid_file and not proc.is_running(_pid(entry)):
        with contextlib.suppress(OSError):
            os.unlink(entry.pid_file)
    if not os.path.isdir(entry.image):  # Podman removes its copy with a container that it could not import
        return f"{said}; restore it again from its checkpoint"
    return f"{said}; its checkpoint in {entry.image} is unharmed"


def remove(entry: Restore) -> str:
    """Remove an incomplete container, whether or not its runtime knows it; return what there was, in words.

    None of its processes exists afterwards. Raises GpusnapError.
    """
    _unmount_root(entry)
    known = delete(entry.command, entry.container)
    ended = incomplete_restore.kill_restored(entry.place, entry.owner, entry.container)
    if entry.work:
        incomplete_restore.unmount_yards(entry.work)
    if known:
        return "the incomplete container was removed"
    name = os.path.basename(entry.command[0])
    if ended:
        return f"{name} knows no such container, but processes of it existed and were killed: " + (
            " ".join(map(str, ended))
        )
    if entry.place is None or not entry.place.device:
        return f"{name} knows no such container, and it is unknown whether processes of it are left"
    return f"{name} knows no such container, and no process of it was found"


def spare_files(key: str, *, forced: bool) -> None:
    """Unmount the root file system that a restore has mounted for CRIU: the container will be deleted.

    A restore that still works fails then, or CRIU has its own mounts by now; so only if it is `forced`.
    Raises ContainerError if it stays mounted.
    """
    entry = restore_record.read(key)
    if entry is not None and (forced or not entry.at_work):
        _unmount_root(entry)


def _unmount_root(entry: Restore) -> None:
    incomplete_restore.unmount_root([folder for folder in (entry.bundle, entry.state) if folder])


def _drop_links(entry: Restore) -> None:
    """Remove the staging directory in which the restore held a store's chunks."""
    for path in entry.layouts[:-1]:
        with contextlib.suppress(OciError):  # not in a store; or gc finds it
            Store(entry.layouts[-1]).adopt(path).close()


def _let_go(key: str) -> None:
    """Remove the files in RAM of the restore, and the records of threads."""
    if journal.read(key) is not None:
        return  # they belong to a checkpoint, which checkpoint.py beside it handles
    for name in journal.list_noted("thread"):
        whose, _, pid = name.rpartition(".")
        if whose == key and pid.isdigit():
            journal.drop_thread(key, int(pid))
    transfer.remove_staged(key)


def delete(command: Sequence[str], container: str) -> bool:
    """Kill and remove a container; return whether there was one. Raises RuntimeFailed."""
    try:
        containers.find(command, container)
        known = True
    except GpusnapError as error:
        known = not is_missing(error)
    done = control([*command, "delete", "--force", container])
    missing = "not exist" in done.err or "no such file" in done.err.lower()
    if done.code != 0 and not missing:
        raise RuntimeFailed(f"container {container} could not be removed: {done.err.strip()}", code="GPS-022")
    return known and not missing


def deletion(command: Sequence[str], container: str) -> str:
    """Return the command line that removes a container, whether or not an engine knows it."""
    return shlex.join([*command, "delete", "--force", container])


def _put_config_back(entry: Restore) -> None:
    """Restore config.json, unless somebody has written it since: Podman does at every start."""
    if entry.config is None:
        return
    path = os.path.join(entry.bundle, "config.json")
    try:
        with open(path, "rb") as file:
            now = restore_record.digest(file.read())
        if now == entry.digest:
            bundle.put_back(entry.bundle, entry.config.encode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return  # the bundle was removed with its container
    except OSError as error:
        raise GpusnapError(
            f"{path}, which a restore changed, cannot be reverted: {reason(error)}",
            hint="check that it is writable, then run gpusnap recover again",
        ) from error


def _pid(entry: Restore) -> int:
    """Read the PID file; 0 if it contains no PID."""
    try:
        with open(entry.pid_file, encoding="ascii") as file:
            return int(file.read(16))
    except (OSError, ValueError):
        return 0
