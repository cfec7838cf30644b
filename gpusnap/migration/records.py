"""What a host knows of a container that is coming to it, in a file below /run, for when the other host asks.

The gpusnap that receives the container writes it, and names itself as its owner. While that lives, it
decides: a container that it restored, and that the other side did not confirm, it removes. Once it is dead,
whoever asks does so. Whoever asks before a restore has begun ends the migration: a request that was still on
its way then restores nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.errors import GpusnapError, Refused, reason
from gpusnap.runtime_shim.process import proc
from gpusnap.user_errors import NotFound

FOLDER = "/run/gpusnap/migrations"
MARK = "GPUSNAP_MIGRATION"
"""In the environment of Podman while it restores, with the migration's ID."""
# Seconds for a receiver to notice that the other side is gone and to undo what it did; Podman's own limit on
# a restore is 240 s.
PATIENCE = 300.0
_EVERY = 0.2
# Seconds for a lock that nobody has for longer than it takes to write a file.
_LOCKING = 10.0
_LIMIT = 64 << 10
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Record:
    """One migration, as the receiver has it."""

    id: str
    state: str
    """restoring, running, confirmed or undone."""
    name: str
    """Of the container."""
    before: tuple[str, ...] = ()
    """The IDs of all containers before the restore."""
    container: str = ""
    """The ID of the restored one, once it is known."""

    def write(self) -> None:
        """Put it where others find it. Raises GpusnapError."""
        value = {
            "state": self.state,
            "name": self.name,
            "before": self.before,
            "container": self.container,
            "owner": state_files.owner(),
        }
        try:
            state_files.write(_path(self.id), json.dumps(value).encode())
        except OSError as error:
            raise GpusnapError(
                f"{FOLDER} cannot be written: {reason(error)}", hint="make room in /run", code="GPS-007"
            ) from error


def begin(record: Record) -> None:
    """Write the first record of a migration. Raises Refused where it has been ended, and GpusnapError."""
    with _locked(record.id):
        if _read(record.id) is not None:
            raise Refused(
                "the other host has given up this migration", hint="migrate it again", code="GPS-823"
            )
        record.write()


def forget(migration: str) -> None:
    """Nobody will ask any more."""
    with suppress(OSError):
        state_files.remove(_path(migration))


def check_id(value: object) -> str:
    """The ID of a migration. Raises GpusnapError for what is none."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise GpusnapError("the other host sent no migration's ID", hint="update both hosts", code="GPS-821")
    return value


def settle(migration: str) -> str:
    """What has become of a migration, once nobody works on it: confirmed or undone. Raises GpusnapError.

    A container that was restored and not confirmed is removed.
    """
    end = time.monotonic() + PATIENCE
    while (found := _read(migration)) is not None and _alive(found.get("owner")):
        if time.monotonic() > end:
            raise _busy(migration)
        time.sleep(_EVERY)
    if found is None:
        with _locked(migration):
            found = _read(migration)
            if found is None:
                Record(migration, "undone", "").write()
                return "undone"
        return settle(migration)
    if found.get("state") in ("confirmed", "undone"):
        if found.get("name"):  # the word for a request that is still on its way stays
            forget(migration)
        return str(found["state"])
    while _podman_of(migration):
        if time.monotonic() > end:
            raise _busy(migration)
        time.sleep(_EVERY)
    before = tuple(map(str, found.get("before") or ()))
    name, container = str(found.get("name", "")), str(found.get("container", ""))
    remove_restored(Record(migration, "restoring", name, before, container))
    forget(migration)
    return "undone"


def remove_restored(record: Record) -> None:
    """Remove the container that was restored for a migration. Raises GpusnapError.

    Its name may be that of another one by now, which came or was started meanwhile: that one stays.
    """
    try:
        found = podman.container(record.container or record.name)
    except NotFound:
        return
    if record.container:
        ours = found.id == record.container
    else:
        ours = found.name == record.name and found.id not in record.before and _came_by(found, record.id)
    if ours:
        podman.said("rm", "--force", "--time", "0", found.id, wanted=f"the removal of {record.name}")


def _came_by(found: podman.Container, migration: str) -> bool:
    """Whether a container's conmon, the parent of its first process, is of that migration's Podman.

    One that does not run has none, and is what a killed Podman left.
    """
    return not found.init or proc.environment(proc.parent(found.init)).get(MARK) == migration


@contextmanager
def _locked(migration: str) -> Iterator[None]:
    with state_files.locked(
        f"{_path(migration)}.lock",
        patience=_LOCKING,
        busy=lambda: _busy(migration),
        failed=lambda error: GpusnapError(
            f"{FOLDER} cannot be written: {reason(error)}", hint="make room in /run", code="GPS-007"
        ),
    ):
        yield


def _path(migration: str) -> str:
    return os.path.join(FOLDER, f"{migration}.json")


def _read(migration: str) -> Mapping[str, Any] | None:
    try:
        found = state_files.read(_path(migration), limit=_LIMIT)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GpusnapError(f"{_path(migration)} cannot be read: {error}", code="GPS-005") from error
    return found if isinstance(found, dict) else {}


def _alive(owner: object) -> bool:
    match owner:
        case [int(pid), int(start)]:
            return pid != os.getpid() and proc.same(pid, start)
    return False


def _podman_of(migration: str) -> bool:
    """Whether a Podman still restores for it; conmon, and what the container runs, have the mark as well."""
    return any(
        proc.comm(pid) == "podman" and proc.environment(pid).get(MARK) == migration for pid in proc.pids()
    )


def _busy(migration: str) -> GpusnapError:
    return GpusnapError(
        f"the migration {migration[:8]} is still being undone after {PATIENCE:g} s",
        hint="see there what podman ps --all says",
        code="GPS-823",
    )
