"""The record of a running restore: what was begun, and how far it has come.

    /run/gpusnap/journal/<key>.restore      written before config.json is changed, and again at each
                                            stage; removed when the container runs with its GPU state, or
                                            has been removed
    /run/gpusnap/restored/<key>.restored    the last version, while a container runs that Podman had restored;
                                            see recovery/restored_containers.py

recovery/restore.py reads what a killed restore has left here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from gpusnap.oci.base.dataclass import asdict, dataclass, replace
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime.command_line import RestoreCall
from gpusnap.runtime_shim.runtime.criu.run import make_quiet_command
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.runtime.podman import conmon
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.restoring.place import Place

KIND = "restore"
"""The kind of file in the journal that records a restore."""
_VERSION = 1


class Stage(StrEnum):
    """How far a restore has come."""

    PREPARE = "prepare"
    """The runtime has not been called yet."""
    RESTORE = "restore"
    """The runtime has been called."""
    SETTLE = "settle"
    """The container exists (`init` says which); its processes are stopped if they have GPU state."""
    GPUS = "gpus"
    """Only GPU state is missing."""


@dataclass(frozen=True, slots=True)
class Restore(journal.Record):
    """A restore that was begun."""

    key: str
    """The key of the container."""
    image: str
    """The image directory."""
    owner: tuple[int, int]
    """PID and start time of the gpusnap that restores."""
    command: tuple[str, ...]
    """The real runtime with the caller's global options, as `commands` returns it."""
    bundle: str
    pid_file: str
    """Absolute; empty if the caller gave none."""
    detach: bool
    processes: tuple[int, ...]
    """The processes with GPU state, by their PIDs in the namespace of the container's init."""
    stage: Stage = Stage.PREPARE
    init: tuple[int, int] | None = None
    """PID and start time of the restored init, from SETTLE on."""
    config: str | None = None
    """The original config.json, if it was changed."""
    digest: str = ""
    """The SHA-256 of the changed config.json, hexadecimal."""
    layouts: tuple[str, ...] = ()
    """The layouts with its chunks, if not in the image directory; the first that has a chunk is used."""
    state: str = ""
    """The directory in which the real runtime keeps its records of the container."""
    work: str = ""
    """The directory in which CRIU works."""
    place: Place | None = None
    """How its processes are recognized; None if an earlier version wrote the entry."""
    podman: tuple[str, ...] = ()
    """The Podman that requested the restore, with its global options; empty if another engine did."""
    arriving: bool = False
    """Whether memory was mapped before it was loaded, so that processes may have read wrong memory."""
    told: bool = False
    """Whether the engine knows that it runs: by the exit code of this process, which is the next step."""


def make_record(call: RestoreCall, real: RealRuntime, record: Manifest, config: Mapping[str, Any]) -> Restore:
    """Make the first entry of a restore by this process; `config`: the bundle's config.json."""
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
        work=os.path.realpath(call.work() or call.images(real.kind)),
        place=Place.from_config(config, bundle_dir, call.container_id),
        podman=conmon.podman_above(call.container_id),
    )


def commands(call: RestoreCall, real: RealRuntime) -> tuple[str, ...]:
    """Return the real runtime with the caller's global options, and with --root, for later calls.

    Without --root, crun uses XDG_RUNTIME_DIR of the caller: it is empty for Podman, but not in a login shell.
    """
    root = container_key.root(call.globals.root, real.kind)
    return tuple(make_quiet_command(replace(call, globals=replace(call.globals, root=root)), real))


def digest(config: bytes) -> str:
    """Return the digest of config.json for an entry."""
    return hashlib.sha256(config).hexdigest()


def describe_change(before: bytes, after: bytes) -> dict[str, str]:
    """Return the fields of an entry for the change of config.json that follows."""
    return {
        "config": before.decode("utf-8", "surrogateescape"),
        "digest": digest(after),
    }


def write(entry: Restore, kind: str = KIND) -> None:
    """Write the entry; replace an earlier one. Raises GpusnapError."""
    journal.write_document(
        entry.key, kind, {"version": _VERSION, "container": entry.container, **asdict(entry)}
    )


def forget(key: str) -> None:
    """Remove the entry: the container runs, or nothing is left of it."""
    journal.drop(key, KIND)


def record_start(entry: Restore) -> None:
    """Record for a running container of Podman which Podman to ask about it.

    Nothing is undone any more, so if there is no room for the record, that is only reported.
    """
    if entry.podman and entry.init is not None:
        try:
            write(replace(entry, config=None, digest="", told=False), journal.RESTORED)
        except GpusnapError as error:
            note(
                f"the program that restored the container cannot be recorded: {error.sentence()}",
                code="GPS-007",
            )
            journal.drop(entry.key, journal.RESTORED)


def entries(unreadable: dict[str, GpusnapError] | None = None) -> tuple[Restore, ...]:
    """Return all entries, by container. `unreadable` and errors: as in `journal.read_each`."""
    return tuple(journal.read_each(journal.list_noted(KIND), read, unreadable))


def read(key: str, kind: str = KIND) -> Restore | None:
    """Read the entry of a container by its key, if there is one. Raises GpusnapError if this fails."""
    document = journal.load(key, kind)
    if document is None:
        return None
    try:
        journal.check_version(document, _VERSION)
        return _decode(document, key)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        container = container_key.id_of(key)
        raise GpusnapError(
            f"the journal of the restore of container {container} was not written by this version of "
            f"gpusnap: {error}",
            hint="another version wrote it",
            code="GPS-023",
        ) from error


def _decode(document: Any, key: str) -> Restore:
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
