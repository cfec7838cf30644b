"""Memory claimed by running operations: GPU memory for restores and checkpoints, RAM for these and suspends.

NVML shows the current use, but a restore fills its GPUs minutes after it has chosen them, and a checkpoint
may need the memory again that it has freed. So each restore records what it will use, each checkpoint what it
has freed, and each adds the records of the others to NVML's figures. The sum may be too high, never too low
(except for the moment in which a checkpoint frees memory). The same holds for RAM (RAM instead of a UUID),
because the kernel would kill a process if there is too little:

    /run/gpusnap/room/        0700, gone after a reboot
        lock                  locked (flock) from before the inventory is read until the claim is written
        PID-….json            {"pid": 123, "start": 4567, "bytes": {"GPU-…": 1048576}}, one per claim
        KEY.PID.json          the same, for a process of the container KEY: what a checkpoint of it has freed

    with claim() as room:
        …                     read the inventory, plan with room.reserved
        room.record({uuid: n})  from here on others may plan
        room.change({uuid: m})  all but m bytes of it are used: those are no longer free
        …                     restore

A file counts while the process that it names lives, so a killed restore needs no cleanup. That is the one
which wrote it; for what a checkpoint has freed, it is the process that will need it again, even if gpusnap is
killed or has left it stopped (`keep_for`). `journal.remove` removes these. Files are written only under the
lock, or replaced. So a file that the holder of the lock cannot parse belongs to no living process, and is
removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, advise, reason
from gpusnap.runtime_shim.process import proc

FOLDER = "/run/gpusnap/room"
RAM = "RAM"
"""Used for this host's memory, instead of a GPU's UUID."""
SUSPENDED = "suspended"
"""Used for the part of suspend.ram that a suspend in progress will take, until it has ended."""
AHEAD = "RAM ahead"
"""Used for the RAM that a suspend in progress is going to claim, until it does."""
PATIENCE = 10.0
"""Seconds to wait for others that choose GPUs; choosing takes less than one."""
STEP = 64 << 20
"""Bytes that are filled between two calls of `change`."""
_LOCK = "lock"
# 256 GPUs make about 16 KiB.
_MAX_BYTES = 64 << 10
_MAX_GPUS = 256
# The largest PID (include/linux/threads.h, PID_MAX_LIMIT), and more memory than any GPU has.
_MAX_PID = 1 << 22
_MAX_MEMORY = 1 << 50
_MAX_START = 1 << 63


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is claimed for one process."""

    pid: int
    start: int
    bytes: Mapping[str, int]

    def is_alive(self) -> bool:
        return proc.is_still_running(self.pid, self.start)


class GpuClaim:
    """The claim of this process, see `claim`."""

    def __init__(self, folder: str, lock: contextlib.ExitStack) -> None:
        self._path = os.path.join(folder, f"{os.getpid()}-{secrets.token_hex(4)}.json")
        self._lock = lock
        self.reserved: Mapping[str, int] = _read_others(folder, tidy=True)
        """Bytes that others have claimed, by GPU UUID, or RAM."""

    def record(self, wanted: Mapping[str, int]) -> None:
        """Record `wanted`, bytes by GPU UUID, and let others choose. To be called once.

        Raises GpusnapError if it cannot be written; the lock is then still held.
        """
        try:
            self._write(wanted)
        except OSError as error:
            raise _make_unusable_error(self._path, error) from error
        self._lock.close()

    def change(self, wanted: Mapping[str, int]) -> None:
        """Claim this instead: what is still to be allocated, as the rest is used, or what was just freed.

        Without the lock: other processes read the claims before they check what is free. If it cannot be
        written, the earlier claim remains, which counts twice what is used by now.
        """
        with contextlib.suppress(OSError, GpusnapError):
            self._write(wanted)

    def _write(self, wanted: Mapping[str, int]) -> None:
        owner = state_files.owner()
        if not owner[1]:
            raise GpusnapError(f"{proc.PROC} does not show this process", hint=f"mount {proc.PROC}")
        _write_entry(self._path, owner, wanted)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # if it stays, it counts only while this process lives
            os.unlink(self._path)


@contextmanager
def claim(folder: str | None = None, *, patience: float = PATIENCE) -> Iterator[GpuClaim]:
    """Keep other restores from choosing GPUs until `record`, and from choosing these until the block ends.

    Raises GpusnapError if `folder` (FOLDER by default) cannot be used, or if others hold its lock for more
    than `patience` seconds.
    """
    folder = folder or FOLDER
    with contextlib.ExitStack() as lock:
        lock.enter_context(_hold_lock(folder, patience))
        try:
            room = GpuClaim(folder, lock)
        except OSError as error:
            raise _make_unusable_error(folder, error) from error
        try:
            yield room
        finally:
            room._leave()


def _hold_lock(folder: str, patience: float) -> contextlib.AbstractContextManager[None]:
    path = os.path.join(folder, _LOCK)
    busy = GpusnapError(
        f"another gpusnap has kept {folder} locked for more than {patience:g} s",
        hint=f"try again; run fuser {path} to see which process has it open",
    )
    _make_folder(folder)
    return state_files.lock(
        path,
        patience=patience,
        busy=lambda: busy,
        failed=lambda error: _make_unusable_error(folder, error),
    )


def read_reserved(folder: str | None = None) -> Mapping[str, int]:
    """Return the bytes that others have claimed, by GPU UUID; without the lock, and without changes.

    Empty if there is no such directory. Raises GpusnapError if it cannot be read.
    """
    folder = folder or FOLDER
    try:
        return _read_others(folder, tidy=False)
    except FileNotFoundError:
        return {}
    except OSError as error:
        lack = advise(error)
        raise GpusnapError(
            f"{folder} cannot be read: {reason(error)}",
            hint=lack or "run it as root",
            code="" if lack else "GPS-005",
        ) from error


def keep_for(key: str, pid: int, wanted: Mapping[str, int]) -> None:
    """Claim what the driver has just freed of a container's process for that, bytes by UUID.

    `key`: the container's. It counts until `release`, or until the process ends. If it cannot be written,
    nothing is claimed: the process is stopped already, and must not stay so because of this.
    """
    owner = (pid, proc.start_time(pid))
    if not owner[1]:
        return  # it has ended
    with contextlib.ExitStack() as lock, contextlib.suppress(OSError):
        with contextlib.suppress(GpusnapError):
            lock.enter_context(_hold_lock(FOLDER, PATIENCE))
        _write_entry(_get_path(key, pid), owner, wanted)


def release(key: str, pid: int) -> None:
    """Claim no longer what was claimed for a process of a container: it has it again."""
    with contextlib.suppress(OSError):
        state_files.remove(_get_path(key, pid))


def release_all(key: str) -> None:
    """Claim nothing for processes of a container any longer: they have it again, or have ended."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(FOLDER)
    for name in names:
        if re.fullmatch(rf"{re.escape(key)}\.\d+\.json(\.new)?", name, re.ASCII):
            with contextlib.suppress(OSError):  # somebody else tidies, too
                os.unlink(os.path.join(FOLDER, name))


def _get_path(key: str, pid: int) -> str:
    return os.path.join(FOLDER, f"{key}.{pid}.json")


def _write_entry(path: str, owner: tuple[int, int], wanted: Mapping[str, int]) -> None:
    pid, start = owner
    state_files.write(path, json.dumps({"pid": pid, "start": start, "bytes": dict(wanted)}).encode())


def sweep(folder: str | None = None) -> None:
    """Remove the claims of processes that have ended, which no longer count. What cannot be removed stays."""
    folder = folder or FOLDER
    if not os.path.isdir(folder):
        return
    with contextlib.suppress(GpusnapError, OSError), claim(folder):
        pass


def _make_unusable_error(path: str, error: OSError) -> GpusnapError:
    return GpusnapError(
        f"memory cannot be reserved in {path}: {reason(error)}",
        hint=advise(error) or "gpusnap needs root and a writable /run",
    )


def _make_folder(folder: str) -> None:
    try:
        state_files.make_folder(folder)
        status = os.lstat(folder)
    except OSError as error:
        raise _make_unusable_error(folder, error) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise GpusnapError(
            f"memory cannot be reserved in {folder}: other users can write to it, or it is not a directory",
            hint="remove it",
        )


def _read_others(folder: str, *, tidy: bool) -> dict[str, int]:
    """Return the bytes that living processes claim, by UUID; `tidy` removes the files of the others."""
    found: dict[str, int] = {}
    for name in sorted(os.listdir(folder)):
        if name == _LOCK:
            continue
        path = os.path.join(folder, name)
        try:
            entry = _read(path)
        except OSError as error:
            if error.errno in proc.PASSING:  # whose it is is not known, and it stays
                continue
            entry = None
        if entry is not None and entry.is_alive():
            for uuid, size in entry.bytes.items():
                found[uuid] = found.get(uuid, 0) + size
        elif tidy:
            with contextlib.suppress(OSError):  # a directory, or gone meanwhile: it does not count
                os.unlink(path)
    return found


def _read(path: str) -> _Entry | None:
    """Read an entry; None if the file contains none. Raises OSError."""
    try:
        return _decode(state_files.read(path, limit=_MAX_BYTES))
    except ValueError:
        return None


def _decode(document: Any) -> _Entry | None:
    if not isinstance(document, dict):
        return None
    pid, start, sizes = document.get("pid"), document.get("start"), document.get("bytes")
    if not isinstance(sizes, dict) or len(sizes) > _MAX_GPUS:
        return None
    sound = all(_is_whole(size, 0, _MAX_MEMORY) for size in sizes.values())
    if not sound or not _is_whole(pid, 1, _MAX_PID) or not _is_whole(start, 0, _MAX_START):
        return None
    return _Entry(pid, start, sizes)


def _is_whole(value: Any, low: int, high: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
