"""The journal for recovery after a kill: where the memory is that gpusnap took out of a container.

    /run/gpusnap/journal/        0700; gone after a reboot, as are the processes
        <key>.json               written before the first process is locked, and again before a region is
                                 freed; removed when all processes run again, or the checkpoint is complete
        <key>.lock               locked (flock) while an operation changes the container
        <key>.restore            a restore in progress, see snapshot/restoring/record.py
        <key>.<pid>.thread       a thread's own registers, while gpusnap makes system calls with it
        <key>.masks              the signal masks of threads that are held, see process/ptrace/signal_masks.py
        <key>.<pid>.idle         a process without GPU state that gpusnap stopped (`refuse_leftover`)
        <key>.paused             which processes of a paused container were stopped, see
                                 gpu_processes/paused_container.py; or that gpusnap paused it, see
                                 gpu_processes/dump_pause.py
        <key>.thawed             a container that `recover` has left running, and that its engine may take for
                                 paused (gpu_processes/paused_container.py); it stays until the next resume
        <key>.images             which images were in the directory before CRIU began to write into it
        <ID>.pre-checkpoint      a command of the container is due, see gpusnap/container_hooks/pairs.py
        <ID>.pre-suspend
        <key>.unsynced           the disk failed at the fsync of CRIU's images, which the next fsync would not
                                 report: they do not count as complete
    /run/gpusnap/restored/
        <key>.restored           which Podman to ask about a running container, see
                                 recovery/restored_containers.py; it stays when no operation is in progress
    /run/gpusnap/suspended/      exists while a container is suspended; the launcher checks that
        <key>.suspended          a container that `gpusnap suspend` suspended, see suspensions.py: it and
                                 <key>.json, which says where its memory is, stay until it is resumed

A container is named by its key (runtime/container_key.py), because several engines may each have one with the
same ID. An entry names processes by PID (and the PID namespace) and start time, regions by address, and where
their memory is. By then all of it is in files: the image's layout, or files of memory.stage.
`snapshot/recovery/checkpoint.py` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from gpusnap.oci.base.dataclass import asdict, dataclass
from gpusnap.oci.base.errors import ChunkError
from gpusnap.oci.base.files import exists
from gpusnap.oci.chunks.table import from_json, to_json
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, OtherNamespace, advise, raise_as, reason
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.file_system import FileSystem, find_file_system
from gpusnap.runtime_shim.process.ptrace import signal_masks
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Saved
from gpusnap.runtime_shim.records.manifest import FOLDER as FOLDER_IN_IMAGE
from gpusnap.runtime_shim.records.manifest import RegionRecord
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.snapshot.records import reservations

FOLDER = "/run/gpusnap/journal"
_VERSION = 2
_PAUSE_VERSION = 1
_MOST = 64 << 20
LOOKING = 0.3
"""Seconds for which another gpusnap may hold a container's lock if it only reads the records."""
UNSYNCED = "unsynced"
"""The kind of file that records a failed fsync of the images."""
IMAGES = "images"
"""The kind of file that records the images before a dump."""
NEEDS = "needs"
"""The kind of file that records how much GPU memory processes used before they were suspended."""
PAUSED = "paused"
"""The kind of file that records which processes of a paused container were stopped."""
THAWED = "thawed"
"""The kind of file that records that a container runs which its engine may take for paused."""
MASKS = "masks"
"""The kind of file that contains the signal masks of threads."""
RESTORED = "restored"
"""The kind of file that records who restored a running container."""
SUSPENDED = "suspended"
"""The kind of file that records that a container is suspended."""
_APART = (RESTORED, SUSPENDED)
"""Kinds of files that have a directory of their own, with the same name."""
_UNREADABLE = (
    "run gpusnap recover with the version of gpusnap that wrote it; if that cannot read it either, stop the "
    "container, restore it from a checkpoint, then remove the file: nothing repairs the container after that"
)
_Record = TypeVar("_Record")


class Record:
    """What the records of a container have in common."""

    __slots__ = ()
    key: str
    """The key of the container."""
    owner: tuple[int, int]
    """PID and start time of the gpusnap that wrote it."""

    @property
    def container(self) -> str:
        """The ID of the container."""
        return container_key.id_of(self.key)

    @property
    def at_work(self) -> bool:
        """Whether the gpusnap that wrote it still runs."""
        return proc.is_same(*self.owner)

    def check_not_at_work(self) -> None:
        """Raise GpusnapError if the gpusnap that wrote it still runs, and is not this process."""
        if self.at_work and self.owner[0] != os.getpid():
            raise GpusnapError(
                f"gpusnap (process {self.owner[0]}) is still working on container {self.container}",
                hint="wait for it",
                code="GPS-020",
            )


@dataclass(frozen=True, slots=True)
class StagedRegion:
    """A region whose memory is in a file of memory.stage."""

    path: str
    start: int
    """Its address in the process."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class JournalProcess:
    """A process whose regions may have been freed."""

    pid: int
    start: int
    """As proc.Process.start: it distinguishes the process from a later one with its PID."""
    regions: tuple[RegionRecord, ...]
    thread: Saved | None = None
    """A thread of it that gpusnap used for system calls."""
    staged: tuple[StagedRegion, ...] = ()
    """Its regions whose memory is in files in RAM, and need not come from the layout."""
    idle: bool = False
    """Whether it never had GPU state, and is only stopped."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A paused container: what gpu_processes/paused_container.py and gpu_processes/dump_pause.py record."""

    owner: tuple[int, int]
    """As Entry.owner."""
    group: str
    """The directory of its cgroup; empty if gpusnap paused it."""
    thawed: bool
    """Whether gpusnap thawed it."""
    stopped: tuple[tuple[int, int], ...]
    """PID and start time of the processes that gpusnap stopped."""
    runtime: str = ""
    """The kind of the real runtime."""
    init: tuple[int, int] | None = None
    """PID and start time of the container's init, if gpusnap paused it."""
    groups: tuple[str, ...] = ()
    """The directories of its cgroups, one of which is frozen then."""


@dataclass(frozen=True, slots=True)
class Entry(Record):
    """The record of one container."""

    key: str
    image: str
    """The image directory; empty if only the pause must be undone."""
    owner: tuple[int, int]
    """PID and start time of the gpusnap that wrote it."""
    processes: tuple[JournalProcess, ...]
    layout: str = ""
    """The path of the layout with its chunks."""
    paused: Pause | None = None
    """Set if the container was paused."""
    file_system: FileSystem = FileSystem("", "")
    """That of the image; its mount is empty if an earlier version wrote the entry."""
    left_stopped: bool = False
    """Whether the container was left stopped after its dump: its checkpoint is useless if it runs on."""

    def measure_spilled(self) -> dict[int, int]:
        """Return the bytes that are in the layout, by PID."""
        return {each.pid: sum(region.table.size for region in each.regions) for each in self.processes}


def write(
    key: str,
    image: str,
    regions: Mapping[int, tuple[RegionRecord, ...]],
    *,
    staged: Mapping[int, Sequence[StagedRegion]] = MappingProxyType({}),
    layout: str = "",
) -> None:
    """Write the entry of a container, by its key; replace an earlier one.

    `regions`, by PID, are in the layout at the path `layout` (the image's directory if that is empty);
    `staged` are in files in RAM. Raises GpusnapError.
    """
    processes: list[dict[str, Any]] = [
        {
            "pid": pid,
            "start": state_files.owner(pid)[1],
            "regions": [{"start": region.start, **to_json(region.table)} for region in found],
            "staged": [[each.path, each.start, each.size] for each in staged.get(pid, ())],
        }
        for pid, found in regions.items()
    ]
    where = find_file_system(image) if image else FileSystem("", "")
    document = {
        "version": _VERSION,
        "container": container_key.id_of(key),
        "image": image,
        "layout": layout or os.path.join(image, FOLDER_IN_IMAGE),
        "mount": where.mount,
        "file-system": where.identity,
        "owner": list(state_files.owner()),
        "space": _read_namespace(),
        "processes": processes,
    }
    data = json.dumps(document).encode()
    if len(data) > _MOST:
        # BLAKE3 only makes reading the chunks faster.
        for process in processes:
            for region in process["regions"]:
                region.pop("blake3", None)
        data = json.dumps(document).encode()
    if len(data) > _MOST:
        container = container_key.id_of(key)
        raise GpusnapError(
            f"the journal of container {container} would have {len(data) >> 20} MiB, which is too large "
            "to be read",
            hint="set a larger memory.chunk-size",
        )
    _write(_path(key, "json"), data)


@contextmanager
def keep_thread(key: str, pid: int, saved: Saved) -> Iterator[None]:
    """Record a thread's own registers while the block makes system calls with it. Raises GpusnapError."""
    registers = {"tid": saved.tid, "registers": saved.registers.hex(), "mask": saved.mask}
    with _keep(key, pid, "thread", registers):
        yield


@contextmanager
def keep_idle(key: str, pid: int) -> Iterator[None]:
    """Record that a process without GPU state is stopped, while the block runs. Raises GpusnapError."""
    with _keep(key, pid, "idle", {}):
        yield


@contextmanager
def _keep(key: str, pid: int, kind: str, document: Mapping[str, Any]) -> Iterator[None]:
    path = _path(key, f"{pid}.{kind}")
    _write(path, json.dumps({"start": state_files.owner(pid)[1], **document}).encode())
    try:
        yield
    finally:
        state_files.remove(path)


def remove(key: str) -> None:
    """Remove the entry: there is nothing to recover for the container any more."""
    if not container_key.is_key(key):
        return  # no file was ever written for it
    with contextlib.suppress(OSError):
        for name in os.listdir(FOLDER):
            if re.fullmatch(rf"{re.escape(key)}\.\d+\.(thread|idle)", name, re.ASCII):
                state_files.remove(os.path.join(FOLDER, name))
    reservations.release_all(key)
    for kind in (UNSYNCED, IMAGES, NEEDS):
        state_files.remove(_path(key, kind))
    state_files.remove(_path(key, "json"))


def threads(key: str) -> Iterator[tuple[int, int, Saved]]:
    """Yield PID, start time and registers for each thread whose registers are recorded.

    Raises GpusnapError if one cannot be read. An earlier version did not record the start time: 0.
    """
    for name in list_noted("thread"):
        whose, _, pid = name.rpartition(".")
        if whose == key and pid.isdigit() and (saved := _read_saved(key, int(pid))) is not None:
            document = _read(_path(key, f"{pid}.thread")) or {}
            yield int(pid), int(document.get("start", 0)), saved


def drop_thread(key: str, pid: int) -> None:
    """Remove the record of a thread that has its registers again."""
    state_files.remove(_path(key, f"{pid}.thread"))


@contextmanager
def hold(key: str, *, patience: float = LOOKING) -> Iterator[None]:
    """Lock the container against every other gpusnap while the block runs. Raises GpusnapError.

    `patience`: seconds to wait for another gpusnap that only reads; 0 for a caller that only reads itself.
    """
    path, container = _path(key, "lock"), container_key.id_of(key)
    busy = GpusnapError(
        f"another gpusnap is still working on container {container}", hint="wait for it", code="GPS-020"
    )
    with (
        state_files.lock(
            path,
            patience=patience,
            busy=lambda: busy,
            failed=lambda error: _make_unwritable_error(path, error),
        ),
        signal_masks.keep_masks(masks(key)),
    ):
        yield


def masks(key: str) -> str:
    """Return the path of the signal masks that a killed gpusnap left, if the file exists."""
    return _path(key, MASKS)


def entries(unreadable: dict[str, GpusnapError] | None = None) -> tuple[Entry, ...]:
    """Return all entries, by container. `unreadable` and errors: as in `read_each`."""
    keys = sorted({*list_noted("json"), *list_noted(PAUSED), *list_noted(MASKS)})
    return tuple(read_each(keys, read, unreadable))


def read_each(
    keys: Iterable[str], read: Callable[[str], _Record | None], unreadable: dict[str, GpusnapError] | None
) -> Iterator[_Record]:
    """Yield the record of each container that has one, by the key.

    Raises GpusnapError for one that cannot be read. If there is a dictionary `unreadable`, its error is added
    to that instead, by key. Raises OtherNamespace in any case.
    """
    for key in keys:
        try:
            found = read(key)
        except OtherNamespace:
            raise
        except GpusnapError as error:
            if unreadable is None:
                raise
            unreadable[key] = error
            continue
        if found is not None:
            yield found


def list_layouts() -> tuple[frozenset[str], frozenset[str]]:
    """Return the layouts whose chunks the entries name, and need as they are.

    Also return the IDs of the containers whose entries cannot be read: they may name any layout with memory
    of that container. Raises GpusnapError if the journal cannot be read.
    """
    unreadable: dict[str, GpusnapError] = {}
    layouts = frozenset(entry.layout for entry in entries(unreadable) if entry.layout)
    return layouts, frozenset(map(container_key.id_of, unreadable))


def has_held_threads(key: str) -> bool:
    """Whether threads of a container do not have their masks again: their gpusnap was killed, or failed.

    False for those of a restore. Raises GpusnapError if this is not known.
    """
    path = masks(key)
    with raise_as(GpusnapError, f"{path} cannot be read", code="GPS-007"):
        if not exists(path, follow=False) or exists(_path(key, "restore"), follow=False):
            return False
        return any(mask.is_there for mask in signal_masks.read(path))


def read(key: str) -> Entry | None:
    """Read the entry of a container, if there is one. Raises GpusnapError if it cannot be read."""
    if not container_key.is_key(key):
        return None
    path = _path(key, "json")
    paused = _pause(key)
    document = _read(path)
    if document is None:
        if paused is not None:
            return Entry(key, "", paused.owner, (), paused=paused)
        return Entry(key, "", (0, 0), ()) if has_held_threads(key) else None
    try:
        check_version(document, _VERSION)
        wrote = identity(document["owner"])
        processes = tuple(_parse_suspended(key, each) for each in document["processes"])
        processes += tuple(_iterate_idle(key))
        image = str(document["image"])
        layout = str(document.get("layout") or os.path.join(image, FOLDER_IN_IMAGE))
        where = FileSystem(str(document.get("mount", "")), str(document.get("file-system", "")))
        stopped = document.get("left-stopped") is True
        return Entry(key, image, wrote, processes, layout, paused, where, stopped)
    except (KeyError, TypeError, ValueError, IndexError, ChunkError) as error:
        raise GpusnapError(
            f"{path} was not written by this version of gpusnap: {error}",
            hint="another version wrote it",
            code="GPS-023",
        ) from error


def hand_over(key: str, owner: tuple[int, int]) -> None:
    """Make another process the one at work on a container that was left stopped: PID and start time.

    Raises GpusnapError.
    """
    for kind in ("json", PAUSED):
        document = load(key, kind)
        if document is not None:
            _write(_path(key, kind), json.dumps({**document, "owner": owner, "left-stopped": True}).encode())


def write_document(key: str, kind: str, document: Mapping[str, Any]) -> None:
    """Write a file of another kind beside the entries; replace an earlier one. Raises GpusnapError."""
    _write(_path(key, kind), json.dumps({**document, "space": _read_namespace()}).encode())


def note_pause(key: str, pause: Pause) -> None:
    """Record a container's pause; replace an earlier record. Raises GpusnapError."""
    write_document(key, PAUSED, {"version": _PAUSE_VERSION, **asdict(pause)})


def note_needs(key: str, used: Mapping[int, Sequence[tuple[str, int]]]) -> None:
    """Record the GPU memory of processes, as (UUID, bytes) by PID; replace an earlier record.

    Raises GpusnapError.
    """
    each = [[*state_files.owner(pid), list(gpus)] for pid, gpus in used.items()]
    write_document(key, NEEDS, {"processes": each})


def read_needs(key: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return what `note_needs` recorded, by PID and start time; {} if another version wrote it differently.

    Raises GpusnapError if it cannot be read.
    """
    document = load(key, NEEDS)
    try:
        return {
            identity(each): [(str(uuid), int(size)) for uuid, size in each[2]]
            for each in (document or {}).get("processes", ())
        }
    except (AttributeError, TypeError, ValueError, IndexError):
        return {}


def note_unsynced(key: str, why: str) -> None:
    """Record that the images of a container's checkpoint did not reach the disk, whatever a later fsync says.

    Raises GpusnapError.
    """
    write_document(key, UNSYNCED, {"why": why})


def read_unsynced(key: str) -> str | None:
    """Return why the images of a checkpoint did not reach the disk; None if there is no record of that."""
    document = load(key, UNSYNCED)
    return None if document is None else str(document.get("why") if isinstance(document, dict) else document)


def load(key: str, kind: str) -> Any:
    """Read what `write_document` wrote; None if nothing. Raises GpusnapError if it cannot be read."""
    return _read(_path(key, kind)) if container_key.is_key(key) else None


def drop(key: str, kind: str) -> None:
    """Remove what `write_document` wrote."""
    if not container_key.is_key(key):
        return
    state_files.remove(_path(key, kind))
    if kind == SUSPENDED:
        with contextlib.suppress(OSError):  # the directory is not empty
            os.rmdir(_folder(kind))


def list_noted(kind: str) -> tuple[str, ...]:
    """Return the keys of the files of a kind, in order.

    Raises GpusnapError if the journal cannot be read.
    """
    folder = _folder(kind)
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return ()
    except OSError as error:
        lack = advise(error)
        raise GpusnapError(
            f"the journal {folder} cannot be read: {reason(error)}",
            hint=lack or "run gpusnap as root",
            code="" if lack else "GPS-005",
        ) from error
    return tuple(name.removesuffix(f".{kind}") for name in names if name.endswith(f".{kind}"))


def _pause(key: str) -> Pause | None:
    path = _path(key, PAUSED)
    document = _read(path)
    if document is None:
        return None
    try:
        check_version(document, _PAUSE_VERSION)
        stopped = tuple((int(pid), int(start)) for pid, start in document["stopped"])
        wrote = identity(document["owner"])
        group, thawed = str(document["group"]), bool(document["thawed"])
        init = identity(document["init"]) if document.get("init") is not None else None
        groups = tuple(str(folder) for folder in document.get("groups", ()))
        return Pause(wrote, group, thawed, stopped, str(document.get("runtime", "")), init, groups)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GpusnapError(
            f"{path} was not written by this version of gpusnap: {error}",
            hint="another version wrote it",
            code="GPS-023",
        ) from error


def check_version(document: Any, newest: int) -> None:
    """Check that no newer gpusnap wrote a document, whose members may mean something else there.

    Raises KeyError, TypeError, ValueError.
    """
    if int(document["version"]) > newest:
        raise ValueError(f"it has version {document['version']}, and this one reads up to {newest}")


def identity(value: Any) -> tuple[int, int]:
    """Parse PID and start time of a process in a file. Raises TypeError, ValueError, IndexError."""
    return int(value[0]), int(value[1])


def _parse_suspended(key: str, document: Any) -> JournalProcess:
    pid = int(document["pid"])
    regions = tuple(RegionRecord(int(each["start"]), from_json(each)) for each in document["regions"])
    staged = tuple(StagedRegion(str(path), int(start), int(size)) for path, start, size in document["staged"])
    return JournalProcess(pid, int(document["start"]), regions, _read_saved(key, pid), staged)


def _read_saved(key: str, pid: int) -> Saved | None:
    lent = _read(_path(key, f"{pid}.thread"))
    return Saved(int(lent["tid"]), bytes.fromhex(lent["registers"]), int(lent["mask"])) if lent else None


def _iterate_idle(key: str) -> Iterator[JournalProcess]:
    name = re.compile(rf"{re.escape(key)}\.(\d+)\.idle", re.ASCII)
    for pid in sorted(int(found[1]) for each in os.listdir(FOLDER) if (found := name.fullmatch(each))):
        document = _read(_path(key, f"{pid}.idle"))
        if document is not None:  # otherwise it has continued since
            yield JournalProcess(pid, int(document["start"]), (), _read_saved(key, pid), idle=True)


def _path(key: str, kind: str) -> str:
    if not container_key.is_key(key):
        raise GpusnapError(f"{key[:80]!r} is not a container ID")
    return os.path.join(_folder(kind), f"{key}.{kind}")


def _folder(kind: str) -> str:
    return os.path.join(os.path.dirname(FOLDER), kind) if kind in _APART else FOLDER


def _read(path: str) -> Any:
    try:
        document = state_files.read(path, limit=_MOST)
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GpusnapError(f"{path} is not valid JSON", hint=_UNREADABLE, code="GPS-023") from error
    except (OSError, ValueError) as error:
        raise GpusnapError(f"{path} cannot be read: {reason(error)}", code="GPS-023") from error
    space = document.get("space") if isinstance(document, dict) else None
    if space and space != _read_namespace():  # every PID in it would be that of another process, or of none
        raise OtherNamespace(path)
    return document


def _read_namespace() -> str:
    """Return the PID namespace of this process."""
    return proc.namespace(os.getpid(), "pid")


def _write(path: str, data: bytes) -> None:
    try:
        state_files.write(path, data)
    except OSError as error:
        raise _make_unwritable_error(path, error) from error


def _make_unwritable_error(path: str, error: OSError) -> GpusnapError:
    lack = advise(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return GpusnapError(
        f"the journal {path} cannot be written: {reason(error)}",
        hint=lack or "check that gpusnap runs as root, and that /run has free space",
        code="" if lack and not full else "GPS-007",
    )
