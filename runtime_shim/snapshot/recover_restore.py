"""What a killed restore leaves to be taken away: half a container. Its checkpoint is unharmed.

    /run/gpusnap/journal/<key>.restore      written before config.json is changed, and again at each
                                            stage; removed when the container runs with its GPU state, or
                                            has been removed
    /run/gpusnap/restored/<key>.restored    the last of it, while a container runs that Podman had restored;
                                            see restored_containers.py

The real runtime goes on when gpusnap is killed, so there may be a container whose processes stand and miss
their GPU state. Podman waits for it, and holds its lock, until it is gone: conmon reads what the container
would say. Is the runtime killed, too, it knows no such container, whose processes may stand all the same:
incomplete_restore.py finds them. `recover` lets that runtime end, and removes the container and what else is
left, but never one that runs: one that had come up just then, or a later one of the same ID. The entry may be
days old, and then says nothing of what runs; the driver does. Incomplete is only a container with a process
whose GPU state the driver has not given back: none runs like that, and no other sign counts.

But where memory was still on its way into the processes (memory/demand_paging.py), the kernel has ended those
that waited for it, and what the driver says of another one may be true of memory that never came. No process
went on by then, which the entry says (`arriving`): the container is incomplete, whatever runs in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.layout.blobs import FirstOf
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.errors import ContainerError, GpusnapError, Refused, RuntimeFailed, reason
from gpusnap.runtime_shim.gpu.api.driver import Driver, ProcessState
from gpusnap.runtime_shim.gpu.api.parallel import at_once
from gpusnap.runtime_shim.log import note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.records import manifest, manifest_file
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.runtime import bundle, conmon, container_key
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.command_line import RestoreCall
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.run import control, quiet
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.snapshot import held_threads, incomplete_restore
from gpusnap.runtime_shim.snapshot.incomplete_restore import Place
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.suspend import driver_calls
from gpusnap.runtime_shim.snapshot.suspend.gpu_state import let_finish, resume

_KIND = "restore"
_VERSION = 1
_GONE = "nothing is left of it"
RUNNING = "running: "
"""How `recover` begins what it says of a container that runs; its processes follow."""
_ANOTHER = "another container of that ID runs by now, and was left alone"
_NO_SUCH = "there is no such container"  # runtime/container.py's words for what either runtime says


class Stage(StrEnum):
    """How far a restore has come."""

    PREPARE = "prepare"
    """The runtime has not been called."""
    RESTORE = "restore"
    """It has."""
    SETTLE = "settle"
    """The container is there, `init` says which; its processes stand if they have GPU state."""
    GPUS = "gpus"
    """Only GPU state is missing."""


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore that was begun."""

    key: str
    """The container's."""
    image: str
    """The image directory."""
    owner: tuple[int, int]
    """PID and start time of the gpusnap that restores."""
    command: tuple[str, ...]
    """The real runtime with the caller's global options, as `commands` gives it."""
    bundle: str
    pid_file: str
    """Absolute; empty where the caller gave none."""
    detach: bool
    processes: tuple[int, ...]
    """Those with GPU state, by PID as the container's init sees them."""
    stage: Stage = Stage.PREPARE
    init: tuple[int, int] | None = None
    """PID and start time of the restored init, from SETTLE on."""
    config: str | None = None
    """config.json as it was, where it was changed."""
    digest: str = ""
    """Of config.json as changed: SHA-256, hexadecimal."""
    layouts: tuple[str, ...] = ()
    """Where its chunks are, if not in the image directory; the first that has one."""
    state: str = ""
    """The directory in which the real runtime keeps what it knows of the container."""
    work: str = ""
    """The directory in which CRIU works."""
    place: Place | None = None
    """By what its processes are known; None where an earlier version wrote the entry."""
    podman: tuple[str, ...] = ()
    """The Podman that has it restored, with its global options; empty where that is another's container."""
    arriving: bool = False
    """Whether processes had memory mapped that still came, and may have read what never did."""
    told: bool = False
    """Whether the engine has been told that it runs: by the exit code of this process, which comes next."""

    @property
    def container(self) -> str:
        """Its ID."""
        return container_key.id_of(self.key)

    @property
    def at_work(self) -> bool:
        """Whether that gpusnap is still there."""
        return proc.same(*self.owner)


def begun(call: RestoreCall, real: RealRuntime, record: Manifest, config: Mapping[str, Any]) -> Restore:
    """The first entry of a restore by this process; `config` is the bundle's config.json."""
    root, bundle_dir = container_key.root(call.globals.root, real.kind), str(call.bundle_dir())
    return Restore(
        key=container_key.key(root, call.container_id),
        image=str(call.images(real.kind)),
        owner=state_files.owner(),
        command=commands(call, real),
        bundle=bundle_dir,
        pid_file=os.path.abspath(call.pid_file) if call.pid_file else "",
        detach=call.detach,
        processes=tuple(process.pid for process in record.processes),
        state=os.path.join(root, call.container_id),
        work=os.path.abspath(call.work() or call.images(real.kind)),
        place=Place.of(config, bundle_dir, call.container_id),
        podman=conmon.podman_above(call.container_id),
    )


def commands(call: RestoreCall, real: RealRuntime) -> tuple[str, ...]:
    """The real runtime with the caller's global options, and with --root, for whoever asks it later.

    Without that crun takes XDG_RUNTIME_DIR of who asks: Podman's is empty, a login shell's is not.
    """
    root = container_key.root(call.globals.root, real.kind)
    return tuple(quiet(replace(call, globals=replace(call.globals, root=root)), real))


def digest(config: bytes) -> str:
    """Of config.json, as an entry has it."""
    return hashlib.sha256(config).hexdigest()


def changed(before: bytes, after: bytes) -> dict[str, str]:
    """The fields of an entry that tell of config.json's change, which comes next."""
    return {
        "config": before.decode("utf-8", "surrogateescape"),
        "digest": digest(after),
    }


def write(entry: Restore, kind: str = _KIND) -> None:
    """Write the entry, in place of an earlier one. Raises GpusnapError."""
    journal.store(entry.key, kind, {"version": _VERSION, "container": entry.container, **asdict(entry)})


def forget(key: str) -> None:
    """The container runs, or nothing is left of it."""
    journal.drop(key, _KIND)


def came_up(entry: Restore) -> None:
    """The container runs: have it on file whom to ask about it, if it is Podman's.

    Nothing is to be undone any more, so that it is only noted where there is no room for that.
    """
    if entry.podman and entry.init is not None:
        try:
            write(replace(entry, config=None, digest="", told=False), journal.RESTORED)
        except GpusnapError as error:
            note(f"who restored the container is not on file: {error.sentence()}", code="GPS-007")
            journal.drop(entry.key, journal.RESTORED)


def entries() -> tuple[Restore, ...]:
    """All restores that were begun, by container. Raises GpusnapError for one that cannot be read."""
    found = (read(key) for key in journal.noted(_KIND))
    return tuple(entry for entry in found if entry is not None)


def read(key: str, kind: str = _KIND) -> Restore | None:
    """The entry of a container, by its key, if there is one. Raises GpusnapError where it cannot be read."""
    document = journal.load(key, kind)
    if document is None:
        return None
    try:
        return _decoded(document, key)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        container = container_key.id_of(key)
        raise GpusnapError(
            f"the journal of the restore of container {container} is not as gpusnap writes it: {error}",
            hint="it was written by another version",
            code="GPS-023",
        ) from error


def _decoded(document: Any, key: str) -> Restore:
    init, config, place = document["init"], document["config"], document.get("place")
    return Restore(
        key=key,
        image=str(document["image"]),
        owner=journal.identity(document["owner"]),
        command=tuple(str(word) for word in document["command"]),
        bundle=str(document["bundle"]),
        pid_file=str(document["pid_file"]),
        detach=bool(document["detach"]),
        processes=tuple(int(pid) for pid in document["processes"]),
        stage=Stage(document["stage"]),
        init=None if init is None else journal.identity(init),
        config=None if config is None else str(config),
        digest=str(document["digest"]),
        layouts=tuple(str(path) for path in document.get("layouts", ())),
        state=str(document.get("state", "")),
        work=str(document.get("work", "")),
        place=None if place is None else Place.from_json(place),
        podman=tuple(str(word) for word in document.get("podman", ())),
        arriving=bool(document.get("arriving", False)),
        told=bool(document.get("told", False)),
    )


def recover(key: str, driver: Driver | None, *, remove: bool = True) -> str:
    """Take away what a killed restore left of a container, by its key; what was done, in words.

    A container that runs is left as it is; of its GPU processes, those that only lack the unlock get it.
    Raises Refused where it would have to be removed and `remove` is false, and GpusnapError while that
    restore is under way, where nobody can tell whether the container is complete, and where something could
    not be removed; the entry stays.
    """
    if _cut_off(key) is None:
        return _GONE
    with journal.held(key):
        if (entry := _cut_off(key)) is None:  # somebody else did it meanwhile
            return _GONE
        # Without --detach the runtime stays until the container ends; the PID file says that it is there.
        incomplete_restore.let_runtime_end(
            entry.owner, entry.container, enough=lambda: not entry.detach and _pid(entry) > 0
        )
        held_threads.give_all_back(key)  # before any of them goes on
        said = _kept(entry, driver) if entry.stage is not Stage.PREPARE else None
        if said is not None and said.startswith(RUNNING):
            _came_up_late(entry)
        if said is None:
            if not remove and entry.stage is not Stage.PREPARE:
                container = entry.container
                raise Refused(
                    f"a restore of container {container} was cut off, and what it left has to be removed",
                    hint=f"gpusnap recover {container}",
                    code="GPS-022",
                )
            said = _removed(entry)
        scratch_files.sweep(entry.owner)
        _let_go(key)
        _drop_links(entry)
        forget(key)
    return said


def _cut_off(key: str) -> Restore | None:
    """The entry of a container whose gpusnap is no more; raises GpusnapError where it is at work."""
    entry = read(key)
    if entry is not None and entry.at_work:
        raise GpusnapError(
            f"gpusnap (process {entry.owner[0]}) is still at work on container {entry.container}",
            hint="wait for it",
            code="GPS-020",
        )
    return entry


def _kept(entry: Restore, driver: Driver | None) -> str | None:
    """Why the container that has this ID now is not to be removed; None where it is, or there is none."""
    if (found := _found(entry)) is None:
        return None
    container, init = found
    if entry.init is not None and entry.init != (init.pid, init.start):
        return _ANOTHER
    if container.status == "paused":
        raise GpusnapError(
            f"container {entry.container} is paused, and does not tell whether its restore was complete",
            hint=f"unpause it, then gpusnap recover {entry.container}",
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
        standing = [pid for pid in ours if proc.stopped(pid)]
        at_once(partial(let_finish, driver), standing).raise_first()
        if standing:
            _check(entry)
        resume(driver, ours, Pages(), right=partial(transfer.own, entry.key))
    return RUNNING + " ".join(map(str, ours or [init.pid]))


def _came_up_late(entry: Restore) -> None:
    """Have it on file: whoever had it restored was told that this had failed."""
    if entry.init is None and (found := _found(entry)) is not None:
        entry = replace(entry, init=(found[1].pid, found[1].start))
    came_up(entry)


def _check(entry: Restore) -> None:
    """See that the memory of processes that have not gone on was right: a restore does so at the end."""
    layouts = entry.layouts or (os.path.join(entry.image, manifest.FOLDER),)
    if entry.layouts or manifest_file.has(layouts[0], "blobs"):
        processes = manifest_file.read(entry.image).processes
        tables = [region.table for process in processes for region in process.regions]
        transfer.check(FirstOf([Layout(path) for path in layouts]), tables, where=entry.image)


def _found(entry: Restore) -> tuple[containers.Container, proc.Process] | None:
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
            f"this host has no GPU driver now, which alone could tell whether the restore of container "
            f"{entry.container} was complete",
            hint=f"load the driver, then gpusnap recover {entry.container}",
            code="GPS-301",
        )
    driver.open()
    return {pid: driver_calls.state(driver, pid) for pid in pids}


def _removed(entry: Restore) -> str:
    """Remove what there is of the container, and put config.json back; what was there, in words."""
    said = "nothing of it had been begun"
    if entry.stage is not Stage.PREPARE:
        said = remove(entry)
    _config_back(entry)
    if entry.pid_file and not proc.running(_pid(entry)):
        with contextlib.suppress(OSError):
            os.unlink(entry.pid_file)
    if not os.path.isdir(entry.image):  # Podman removes its copy with a container that it could not import
        return f"{said}; restore it again from where the checkpoint is"
    return f"{said}; its checkpoint in {entry.image} is unharmed"


def remove(entry: Restore) -> str:
    """Remove an incomplete container, whether its runtime knows it or not; what was there, in words.

    None of its processes is left afterwards. Raises GpusnapError.
    """
    incomplete_restore.unmount_root([folder for folder in (entry.bundle, entry.state) if folder])
    known = delete(entry.command, entry.container)
    ended = incomplete_restore.end(entry.place, entry.owner, entry.container)
    if entry.work:
        incomplete_restore.unmount_yards(entry.work)
    if known:
        return "the incomplete container was removed"
    name = os.path.basename(entry.command[0])
    if ended:
        return f"{name} knows no such container, but processes of it stood there and were ended: " + (
            " ".join(map(str, ended))
        )
    if entry.place is None or not entry.place.device:
        return f"{name} knows no such container, and of processes that it left nothing is known"
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
    for name in journal.noted("thread"):
        whose, _, pid = name.rpartition(".")
        if whose == key and pid.isdigit():
            journal.given_back(key, int(pid))
    try:
        stage.remove(key)
    except OSError as error:
        container = container_key.id_of(key)
        raise GpusnapError(
            f"what is staged of container {container} cannot be removed: {reason(error)}",
            hint=f"it takes RAM; remove it from {stage.FOLDER}",
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


def _config_back(entry: Restore) -> None:
    """Unless somebody has written it since: Podman does at every start."""
    if entry.config is None:
        return
    path = os.path.join(entry.bundle, "config.json")
    try:
        with open(path, "rb") as file:
            now = digest(file.read())
        if now == entry.digest:
            bundle.put_back(entry.bundle, entry.config.encode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return  # the bundle went with its container
    except OSError as error:
        raise GpusnapError(
            f"{path}, which a restore changed, cannot be put back: {reason(error)}",
            hint="see that it can be written, and run gpusnap recover again",
        ) from error


def _pid(entry: Restore) -> int:
    """What the PID file says; 0 where it says nothing."""
    try:
        with open(entry.pid_file, encoding="ascii") as file:
            return int(file.read(16))
    except (OSError, ValueError):
        return 0
