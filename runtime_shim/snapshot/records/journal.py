"""The journal for recovery after a kill: where the bytes are that gpusnap took out of a container.

    /run/gpusnap/journal/        0700; gone with the next boot, as the processes are
        <key>.json               written before the first process is locked, and again before a region is
                                 freed; removed when all run again, or the checkpoint is whole
        <key>.lock               held (flock) while a checkpoint of it is under way
        <key>.restore            a restore that is under way, see snapshot/restore_record.py
        <key>.<pid>.thread       a thread's own registers, while it makes system calls for us
        <key>.masks              the signal masks of threads that are held, see process/ptrace/signal_masks.py
        <key>.<pid>.idle         a process without GPU state, while it stands still for us (`leftover`)
        <key>.paused             which processes of a paused container were stopped, see paused_container.py;
                                 or that it was gpusnap who paused it, see dump_pause.py
        <key>.unsynced           the disk failed at the fsync of CRIU's images, which the next one would hide:
                                 they are not called whole
    /run/gpusnap/restored/
        <key>.restored           whom to ask about a container that runs, see restored_containers.py: it stays
                                 when nothing is under way
    /run/gpusnap/suspended/      there while a container is suspended; the launcher looks for it
        <key>.suspended          a container that `gpusnap suspend` took off its GPUs, see suspensions.py: it
                                 and <key>.json, which says where its bytes are, stay until it is resumed

A container is named by its key (runtime/container_key.py), since several engines may each have one of the
same ID. An entry names processes by PID (and the PID namespace) and start time, regions by address, and where
their bytes are, all of them in files by then: the image's layout, or files of memory.stage.
`snapshot/recover_checkpoint.py` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import ChunkError
from gpusnap.oci.base.files import exists
from gpusnap.oci.chunks.table import from_json, to_json
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.errors import GpusnapError, advise, make_other_namespace_error, reason
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace import signal_masks
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Saved
from gpusnap.runtime_shim.records.manifest import FOLDER as FOLDER_IN_IMAGE
from gpusnap.runtime_shim.records.manifest import RegionRecord
from gpusnap.runtime_shim.runtime import container_key

FOLDER = "/run/gpusnap/journal"
_VERSION = 2
_PAUSE_VERSION = 1
_MOST = 64 << 20
LOOKING = 0.3
"""Seconds that another gpusnap may have a container's lock that only looks at what is on file of it."""
UNSYNCED = "unsynced"
"""The kind of file that says that an fsync of the images has failed."""
PAUSED = "paused"
"""The kind of file that says what was stopped of a paused container."""
MASKS = "masks"
"""The kind of file that has the signal masks of threads."""
RESTORED = "restored"
"""The kind of file that says by whom a container that runs was restored."""
SUSPENDED = "suspended"
"""The kind of file that says that a container is suspended."""
_APART = (RESTORED, SUSPENDED)
"""Kinds of files that have a folder of their own, named like them."""


@dataclass(frozen=True, slots=True)
class StagedRegion:
    """A region whose bytes are in a file of memory.stage."""

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
    """As proc.Process.start: it tells the process from a later one with its PID."""
    regions: tuple[RegionRecord, ...]
    thread: Saved | None = None
    """A thread of it that was lent to us."""
    staged: tuple[StagedRegion, ...] = ()
    """Those of its regions that need not come from the layout."""
    idle: bool = False
    """It never had GPU state, and only stands still."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A paused container, as paused_container.py and dump_pause.py note it."""

    owner: tuple[int, int]
    """As Entry.owner."""
    group: str
    """The folder of its cgroup; empty where it was gpusnap that paused it."""
    thawed: bool
    """Whether it was gpusnap that thawed it."""
    stopped: tuple[tuple[int, int], ...]
    """PID and start time of what gpusnap stopped."""
    runtime: str = ""
    """The kind of the real runtime."""
    init: tuple[int, int] | None = None
    """PID and start time of the container's init, where it was gpusnap that paused it."""
    groups: tuple[str, ...] = ()
    """The folders of the cgroups of which one is frozen then."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one container."""

    key: str
    image: str
    """The image directory; empty where only the pause is to be put right."""
    owner: tuple[int, int]
    """PID and start time of the gpusnap that wrote it."""
    processes: tuple[JournalProcess, ...]
    layout: str = ""
    """Where its chunks are."""
    paused: Pause | None = None
    """Where the container was paused."""

    @property
    def container(self) -> str:
        """Its ID."""
        return container_key.id_of(self.key)

    @property
    def at_work(self) -> bool:
        """Whether that gpusnap is still there."""
        return proc.is_same(*self.owner)


def write(
    key: str,
    image: str,
    regions: Mapping[int, tuple[RegionRecord, ...]],
    *,
    staged: Mapping[int, Sequence[StagedRegion]] = MappingProxyType({}),
    layout: str = "",
) -> None:
    """Write the entry of a container, by its key, in place of an earlier one.

    By PID: the regions that are in the layout at the path `layout`, the image's folder where that is empty,
    and those that are staged. Raises GpusnapError.
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
    document = {
        "version": _VERSION,
        "container": container_key.id_of(key),
        "image": image,
        "layout": layout or os.path.join(image, FOLDER_IN_IMAGE),
        "owner": list(state_files.owner()),
        "space": _read_namespace(),
        "processes": processes,
    }
    data = json.dumps(document).encode()
    if len(data) > _MOST:
        # BLAKE3 only makes it quicker to read the chunks.
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
    """Have a thread's own registers on file while the block has it make system calls. Raises GpusnapError."""
    path = _path(key, f"{pid}.thread")
    start = state_files.owner(pid)[1]
    document = {"start": start, "tid": saved.tid, "registers": saved.registers.hex(), "mask": saved.mask}
    _write(path, json.dumps(document).encode())
    try:
        yield
    finally:
        state_files.remove(path)


@contextmanager
def keep_idle(key: str, pid: int) -> Iterator[None]:
    """Have it on file that a process without GPU state is stopped, while it is. Raises GpusnapError."""
    path = _path(key, f"{pid}.idle")
    _write(path, json.dumps({"start": state_files.owner(pid)[1]}).encode())
    try:
        yield
    finally:
        state_files.remove(path)


def remove(key: str) -> None:
    """The container needs nothing any more."""
    if not container_key.is_key(key):
        return  # nothing was ever written for such a one
    with contextlib.suppress(OSError):
        for name in os.listdir(FOLDER):
            if re.fullmatch(rf"{re.escape(key)}\.\d+\.(thread|idle)", name, re.ASCII):
                state_files.remove(os.path.join(FOLDER, name))
    state_files.remove(_path(key, UNSYNCED))
    state_files.remove(_path(key, "json"))


def threads(key: str) -> Iterator[tuple[int, int, Saved]]:
    """PID and start time of the processes with a thread of which the registers are on file, and these.

    Raises GpusnapError where one cannot be read. An earlier version had no start time on file: 0.
    """
    for name in list_noted("thread"):
        whose, _, pid = name.rpartition(".")
        if whose == key and pid.isdigit() and (saved := _read_saved(key, int(pid))) is not None:
            document = _read(_path(key, f"{pid}.thread")) or {}
            yield int(pid), int(document.get("start", 0)), saved


def drop_thread(key: str, pid: int) -> None:
    """The thread of a process has its registers again."""
    state_files.remove(_path(key, f"{pid}.thread"))


@contextmanager
def hold(key: str, *, patience: float = LOOKING) -> Iterator[None]:
    """Keep every other gpusnap from this container while the block runs. Raises GpusnapError.

    `patience`: seconds in which another one that only looks lets go of it; 0 for who only looks.
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
    """The file of the signal masks that a killed gpusnap left, if it is there."""
    return _path(key, MASKS)


def entries() -> tuple[Entry, ...]:
    """All that waits, by container. Raises GpusnapError for one that cannot be read."""
    found = (read(key) for key in sorted({*list_noted("json"), *list_noted(PAUSED), *list_noted(MASKS)}))
    return tuple(entry for entry in found if entry is not None)


def _has_held_threads(key: str) -> bool:
    """Whether threads of a container were held by a gpusnap that is no more, and not for a restore."""
    path = masks(key)
    try:
        if not exists(path, follow=False) or exists(_path(key, "restore"), follow=False):
            return False
        return any(mask.is_there for mask in signal_masks.read(path))
    except OSError as error:
        raise GpusnapError(f"{path} cannot be read: {reason(error)}", code="GPS-007") from error


def read(key: str) -> Entry | None:
    """The entry of a container, if there is one. Raises GpusnapError where it cannot be read."""
    if not container_key.is_key(key):
        return None
    path = _path(key, "json")
    paused = _pause(key)
    document = _read(path)
    if document is None:
        if paused is not None:
            return Entry(key, "", paused.owner, (), paused=paused)
        return Entry(key, "", (0, 0), ()) if _has_held_threads(key) else None
    try:
        wrote = identity(document["owner"])
        processes = tuple(_parse_suspended(key, each) for each in document["processes"])
        processes += tuple(_iterate_idle(key))
        image = str(document["image"])
        layout = str(document.get("layout") or os.path.join(image, FOLDER_IN_IMAGE))
        return Entry(key, image, wrote, processes, layout, paused)
    except (KeyError, TypeError, ValueError, IndexError, ChunkError) as error:
        raise GpusnapError(
            f"{path} was not written by this version of gpusnap: {error}",
            hint="another version wrote it",
            code="GPS-023",
        ) from error


def write_document(key: str, kind: str, document: Mapping[str, Any]) -> None:
    """Write a file of another kind beside the entries, in place of an earlier one. Raises GpusnapError."""
    _write(_path(key, kind), json.dumps({**document, "space": _read_namespace()}).encode())


def note_pause(key: str, pause: Pause) -> None:
    """Write what is to be known of a container's pause, in place of what was. Raises GpusnapError."""
    write_document(key, PAUSED, {"version": _PAUSE_VERSION, **asdict(pause)})


def note_unsynced(key: str, why: str) -> None:
    """The images of a container's checkpoint did not come to disk, whatever a later fsync says.

    Raises GpusnapError.
    """
    write_document(key, UNSYNCED, {"why": why})


def read_unsynced(key: str) -> str | None:
    """Why the images of a checkpoint did not come to disk; None where nothing is known of that."""
    document = load(key, UNSYNCED)
    return None if document is None else str(document.get("why") if isinstance(document, dict) else document)


def load(key: str, kind: str) -> Any:
    """What `write_document` wrote; None if it wrote nothing. Raises GpusnapError if it cannot be read."""
    return _read(_path(key, kind)) if container_key.is_key(key) else None


def drop(key: str, kind: str) -> None:
    """Remove what `write_document` wrote."""
    if not container_key.is_key(key):
        return
    state_files.remove(_path(key, kind))
    if kind == SUSPENDED:
        with contextlib.suppress(OSError):  # there is another
            os.rmdir(_folder(kind))


def list_noted(kind: str) -> tuple[str, ...]:
    """The keys of those with a file of a kind, in order.

    Raises GpusnapError where the journal cannot be read.
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


def identity(value: Any) -> tuple[int, int]:
    """PID and start time of a process, as a file has them. Raises TypeError, ValueError, IndexError."""
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
        if document is not None:  # else it goes on since
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
    except (OSError, ValueError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        raise GpusnapError(f"{path} cannot be read: {said}", code="GPS-023") from error
    space = document.get("space") if isinstance(document, dict) else None
    if space and space != _read_namespace():  # every PID in it would be another process, or none
        raise make_other_namespace_error(path)
    return document


def _read_namespace() -> str:
    """Our PID namespace."""
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
