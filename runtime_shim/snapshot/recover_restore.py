"""Removes what a killed restore left: half a container. Its checkpoint is unharmed.

Its record says what was begun, and how far it came (restore_record.py).

The real runtime continues when gpusnap is killed, so a container may exist whose processes are stopped
without their GPU state. Podman waits for it and holds its lock until it is gone: conmon reads what the
container would print. If the runtime is killed too, it knows no such container, but the processes may still
be there, stopped; incomplete_restore.py finds them. `recover` lets that runtime end, and removes the
container and other leftovers. It never removes a container that runs: one that had come up just then, or a
later one with the same ID. The entry may be days old, so it does not show what runs now; the driver does. A
container is incomplete only if the driver has not given back the GPU state of one of its processes: no
container runs like that, and no other sign counts.

There is one exception. If memory was still arriving in the processes (loading/demand_paging.py), the kernel
has ended those that waited for it, and the driver's answer for another one may refer to memory that never
came. No process had continued by then, as the entry says (`arriving`), so the container is incomplete,
whatever runs in it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from gpusnap.oci.base.errors import OciError
from gpusnap.oci.layout.blobs import FirstOf
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.errors import ContainerError, GpusnapError, Refused, RuntimeFailed, reason
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.records import manifest, manifest_file
from gpusnap.runtime_shim.runtime import bundle, container_key
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.run import control
from gpusnap.runtime_shim.snapshot import held_threads, incomplete_restore, restore_record
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import let_finish, resume
from gpusnap.runtime_shim.snapshot.memory import chunk_layout, transfer
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.restore_record import Restore, Stage

_GONE = "nothing is left of it"
RUNNING = "running: "
"""How `recover` begins what it says of a container that runs; its processes follow."""
_ANOTHER = "another container with that ID is running now, and was not touched"
_NO_SUCH = "there is no such container"  # runtime/container.py's words for what either runtime says


def recover(key: str, driver: Driver | None, *, remove: bool = True) -> str:
    """Take away what a killed restore left of a container, by its key; what was done, in words.

    A container that runs is left as it is; of its GPU processes, those that only lack the unlock get it.
    Raises Refused where it would have to be removed and `remove` is false, and GpusnapError while that
    restore is under way, where nobody can tell whether the container is complete, and where something could
    not be removed; the entry stays.
    """
    if _cut_off(key) is None:
        return _GONE
    with journal.hold(key):
        if (entry := _cut_off(key)) is None:  # somebody else did it meanwhile
            return _GONE
        # Without --detach the runtime stays until the container ends; the PID file says that it is there.
        incomplete_restore.let_runtime_end(
            entry.owner, entry.container, enough=lambda: not entry.detach and _pid(entry) > 0
        )
        held_threads.give_all_back(key)  # before any of them goes on
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
    """The entry of a container whose gpusnap is no more; raises GpusnapError where it is at work."""
    entry = restore_record.read(key)
    if entry is not None and entry.at_work:
        raise GpusnapError(
            f"gpusnap (process {entry.owner[0]}) is still working on container {entry.container}",
            hint="wait for it",
            code="GPS-020",
        )
    return entry


def _explain_kept(entry: Restore, driver: Driver | None) -> str | None:
    """Why the container that has this ID now is not to be removed; None where it is, or there is none."""
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
        return None  # none of them has gone on
    members = containers.processes(init.pid, entry.container)
    inner = containers.inner_pids(init.pid, members)
    states = _states(entry, driver, [m.pid for m in members if inner[m.pid] in entry.processes])
    if ProcessState.CHECKPOINTED in states.values():
        return None
    if entry.init is None and entry.processes:
        return _ANOTHER
    # Of those that are left: processes may have ended since, or be done with the GPU.
    ours = [pid for pid, state in states.items() if state in (ProcessState.RUNNING, ProcessState.LOCKED)]
    if driver is not None and ours:
        standing = [pid for pid in ours if proc.is_stopped(pid)]
        run_at_once(partial(let_finish, driver), standing).raise_first()
        if standing:
            _check(entry)
        resume(driver, ours, Pages(), right=partial(transfer.replace_staged_memory, entry.key))
    return RUNNING + " ".join(map(str, ours or [init.pid]))


def _record_late_start(entry: Restore) -> None:
    """Have it on file: whoever had it restored was told that this had failed."""
    if entry.init is None and (found := _find_container(entry)) is not None:
        entry = replace(entry, init=(found[1].pid, found[1].start))
    restore_record.record_start(entry)


def _check(entry: Restore) -> None:
    """See that the memory of processes that have not gone on was right: a restore does so at the end."""
    layouts = entry.layouts or (os.path.join(entry.image, manifest.FOLDER),)
    if entry.layouts or manifest_file.has(layouts[0], "blobs"):
        processes = manifest_file.read(entry.image).processes
        tables = [region.table for process in processes for region in process.regions]
        chunk_layout.check(FirstOf([Layout(path) for path in layouts]), tables, where=entry.image)


def _find_container(entry: Restore) -> tuple[containers.Container, proc.Process] | None:
    """The container that has this ID now and its init; None where the runtime knows none that runs."""
    try:
        found = containers.find(entry.command, entry.container)
    except ContainerError as error:
        if is_missing(error):
            return None
        raise  # for all that we know it runs
    init = proc.process(found.pid) if found.pid else None
    return (found, init) if init is not None else None


def is_missing(error: GpusnapError) -> bool:
    """Whether the runtime said that there is no such container."""
    return _NO_SUCH in str(error)


def _states(entry: Restore, driver: Driver | None, pids: Sequence[int]) -> Mapping[int, ProcessState | None]:
    """What the driver says of processes, those that stand included. Raises GpusnapError."""
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
    """Remove what there is of the container, and put config.json back; what was there, in words."""
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
    """Remove an incomplete container, whether its runtime knows it or not; what was there, in words.

    None of its processes is left afterwards. Raises GpusnapError.
    """
    incomplete_restore.unmount_root([folder for folder in (entry.bundle, entry.state) if folder])
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


def _drop_links(entry: Restore) -> None:
    """Remove the staging folder in which the restore held a store's chunks."""
    for path in entry.layouts[:-1]:
        with contextlib.suppress(OciError):  # none of a store's; or gc finds it
            Store(entry.layouts[-1]).adopt(path).close()


def _let_go(key: str) -> None:
    """Remove what was staged for the restore, and noted of threads."""
    if journal.read(key) is not None:
        return  # of a checkpoint, which recover_checkpoint.py puts right
    for name in journal.list_noted("thread"):
        whose, _, pid = name.rpartition(".")
        if whose == key and pid.isdigit():
            journal.drop_thread(key, int(pid))
    try:
        stage.remove(key)
    except OSError as error:
        container = container_key.id_of(key)
        raise GpusnapError(
            f"temporary files of container {container} cannot be removed: {reason(error)}",
            hint=f"they use RAM; remove them from {stage.FOLDER}",
            code="GPS-027",
        ) from error


def delete(command: Sequence[str], container: str) -> bool:
    """Kill and remove a container; whether there was one. Raises RuntimeFailed."""
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
    """The command line that removes a container, whether an engine knows of it or not."""
    return shlex.join([*command, "delete", "--force", container])


def _put_config_back(entry: Restore) -> None:
    """Unless somebody has written it since: Podman does at every start."""
    if entry.config is None:
        return
    path = os.path.join(entry.bundle, "config.json")
    try:
        with open(path, "rb") as file:
            now = restore_record.digest(file.read())
        if now == entry.digest:
            bundle.put_back(entry.bundle, entry.config.encode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return  # the bundle went with its container
    except OSError as error:
        raise GpusnapError(
            f"{path}, which a restore changed, cannot be reverted: {reason(error)}",
            hint="check that it is writable, then run gpusnap recover again",
        ) from error


def _pid(entry: Restore) -> int:
    """What the PID file says; 0 where it says nothing."""
    try:
        with open(entry.pid_file, encoding="ascii") as file:
            return int(file.read(16))
    except (OSError, ValueError):
        return 0
