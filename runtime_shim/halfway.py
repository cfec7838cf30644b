"""What a killed restore leaves to be taken away: half a container. Its checkpoint is unharmed.

    /run/gpusnap/journal/<container>.restore    written before config.json is changed, and again at each
                                                stage; removed when the container runs with its GPU state, or
                                                has been removed

The real runtime goes on when gpusnap is killed, so there may be a container whose processes stand and miss
their GPU state. Podman waits for it, and holds its lock, until it is gone: conmon reads what the container
would say. `recover` lets that runtime end, and removes the container and what else is left, but never one
that runs: one that had come up just then, or a later one of the same ID.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from runtime_shim import bundle, journal, leavings, proc
from runtime_shim import container as containers
from runtime_shim.argv import RestoreCall
from runtime_shim.errors import ContainerError, GpusnapError, RuntimeFailed, reason
from runtime_shim.gpu.driver import Driver, ProcessState
from runtime_shim.invoke import control, quiet
from runtime_shim.manifest import Manifest
from runtime_shim.memory import stage
from runtime_shim.real import RealRuntime
from runtime_shim.suspension import InCriu, resume

__all__ = ["Restore", "Stage", "begun", "changed", "delete", "entries", "forget", "read", "recover", "write"]

_KIND = "restore"
_VERSION = 1
_GONE = "nothing is left of it"


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

    container: str
    image: str
    """The image directory."""
    owner: tuple[int, int]
    """PID and start time of the gpusnap that restores."""
    command: tuple[str, ...]
    """The real runtime with the caller's global options."""
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

    @property
    def at_work(self) -> bool:
        """Whether that gpusnap is still there."""
        return proc.same(*self.owner)


def begun(call: RestoreCall, real: RealRuntime, record: Manifest) -> Restore:
    """The first entry of a restore by this process."""
    own = proc.process(os.getpid())
    return Restore(
        container=call.container_id,
        image=str(call.images(real.kind)),
        owner=(os.getpid(), own.start if own is not None else 0),
        command=tuple(quiet(call, real)),
        bundle=str(call.bundle_dir()),
        pid_file=os.path.abspath(call.pid_file) if call.pid_file else "",
        detach=call.detach,
        processes=tuple(process.pid for process in record.processes),
    )


def changed(before: bytes, after: bytes) -> dict[str, str]:
    """The fields of an entry that tell of config.json's change, which comes next."""
    return {
        "config": before.decode("utf-8", "surrogateescape"),
        "digest": hashlib.sha256(after).hexdigest(),
    }


def write(entry: Restore) -> None:
    """Write the entry, in place of an earlier one. Raises GpusnapError."""
    journal.store(entry.container, _KIND, {"version": _VERSION, **asdict(entry)})


def forget(container: str) -> None:
    """The container runs, or nothing is left of it."""
    journal.drop(container, _KIND)


def entries() -> tuple[Restore, ...]:
    """All restores that were begun, by container. Raises GpusnapError for one that cannot be read."""
    found = (read(container) for container in journal.containers(_KIND))
    return tuple(entry for entry in found if entry is not None)


def read(container: str) -> Restore | None:
    """The entry of a container, if there is one. Raises GpusnapError where it cannot be read."""
    document = journal.load(container, _KIND)
    if document is None:
        return None
    try:
        return _decoded(document)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GpusnapError(
            f"the journal of the restore of container {container} is not as gpusnap writes it: {error}",
            hint="it was written by another version",
        ) from error


def _decoded(document: Any) -> Restore:
    init, config = document["init"], document["config"]
    return Restore(
        container=str(document["container"]),
        image=str(document["image"]),
        owner=_identity(document["owner"]),
        command=tuple(str(word) for word in document["command"]),
        bundle=str(document["bundle"]),
        pid_file=str(document["pid_file"]),
        detach=bool(document["detach"]),
        processes=tuple(int(pid) for pid in document["processes"]),
        stage=Stage(document["stage"]),
        init=None if init is None else _identity(init),
        config=None if config is None else str(config),
        digest=str(document["digest"]),
    )


def _identity(value: Any) -> tuple[int, int]:
    return int(value[0]), int(value[1])


def recover(container: str, driver: Driver | None) -> str:
    """Take away what a killed restore left of a container; what was done, in words.

    A container that runs is left as it is, one whose GPU processes only lack the unlock gets it. Raises
    GpusnapError while that restore is under way, and where something could not be removed; the entry stays.
    """
    if (entry := read(container)) is None:
        return _GONE
    if entry.at_work:
        raise GpusnapError(
            f"gpusnap (process {entry.owner[0]}) is still at work on container {container}",
            hint="wait for it",
        )
    with journal.held(container):
        if (entry := read(container)) is None:  # somebody else did it meanwhile
            return _GONE
        # Without --detach the runtime stays until the container ends; the PID file says that it is there.
        leavings.let_end(entry.owner, container, enough=lambda: not entry.detach and _pid(entry) > 0)
        said = _kept(entry, driver) if entry.stage is not Stage.PREPARE else None
        if said is None:
            said = _removed(entry)
        leavings.sweep(entry.owner)
        _let_go(container)
        forget(container)
    return said


def _kept(entry: Restore, driver: Driver | None) -> str | None:
    """Why the container that has this ID now is not to be removed; None where it is, or there is none."""
    try:
        found = containers.find(entry.command, entry.container)
    except ContainerError:
        return None
    init = proc.process(found.pid) if found.pid else None
    if init is None:
        return None
    if entry.init is not None and entry.init != (init.pid, init.start):
        return "another container of that ID runs by now, and was left alone"
    if found.status == "paused":
        raise GpusnapError(
            f"container {entry.container} is paused, and does not tell whether its restore was complete",
            hint="unpause it and try again, or remove it",
        )
    members = containers.processes(init.pid, entry.container)
    inner = containers.inner_pids(init.pid, members)
    ours = [member.pid for member in members if inner[member.pid] in entry.processes]
    if any(proc.stopped(pid) for pid in ours):
        return None  # as CRIU restores them, and until the driver has restored their state
    if entry.processes and driver is not None:
        return _with_gpu(entry, driver, ours)
    # Without GPU processes nothing stands, and nothing tells it from a later one of that ID.
    ready = entry.init is None or entry.stage is Stage.GPUS
    return "running: " + str(init.pid) if ready else None


def _with_gpu(entry: Restore, driver: Driver, pids: Sequence[int]) -> str | None:
    driver.open()
    states = [driver.state(pid) for pid in pids]
    if ProcessState.CHECKPOINTED in states:
        return None  # somebody let it go on
    if entry.init is None:
        return "another container of that ID runs by now, and was left alone"
    if entry.stage is not Stage.GPUS or len(pids) < len(entry.processes) or None in states:
        return None
    resume(driver, pids, InCriu())  # one may still be locked
    return "running: " + " ".join(map(str, pids))


def _removed(entry: Restore) -> str:
    """Remove what there is of the container, and put config.json back."""
    if entry.stage is not Stage.PREPARE:
        delete(entry.command, entry.container)
    _config_back(entry)
    if entry.pid_file and not proc.running(_pid(entry)):
        with contextlib.suppress(OSError):
            os.unlink(entry.pid_file)
    return f"the incomplete container was removed; its checkpoint in {entry.image} is unharmed"


def _let_go(container: str) -> None:
    """Remove what was staged for the restore, and noted of threads."""
    if journal.read(container) is not None:
        return  # of a checkpoint, which recover.py puts right
    for name in journal.containers("thread"):
        whose, _, pid = name.rpartition(".")
        if whose == container and pid.isdigit():
            journal.given_back(container, int(pid))
    try:
        stage.remove(container)
    except OSError as error:
        raise GpusnapError(
            f"what is staged of container {container} cannot be removed: {reason(error)}",
            hint=f"it takes RAM; remove it from {stage.FOLDER}",
        ) from error


def delete(command: Sequence[str], container: str) -> None:
    """Kill and remove a container, if there is one. Raises RuntimeFailed."""
    done = control([*command, "delete", "--force", container])
    if done.code != 0 and "not exist" not in done.err and "no such file" not in done.err.lower():
        raise RuntimeFailed(f"container {container} could not be removed: {done.err.strip()}")


def _config_back(entry: Restore) -> None:
    """Unless somebody has written it since: Podman does at every start."""
    if entry.config is None:
        return
    path = os.path.join(entry.bundle, "config.json")
    try:
        with open(path, "rb") as file:
            now = hashlib.sha256(file.read()).hexdigest()
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
