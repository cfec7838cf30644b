"""What a host knows of a container that is coming to it, in a file below /run, for when the other host asks.

The gpusnap that receives the container writes it, and names itself as its owner. While that lives, it
decides: a container that it restored, and that the other side did not confirm, it removes. Once it is dead,
whoever asks does so.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpusnap.engines import podman
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.errors import GpusnapError, reason
from gpusnap.runtime_shim.process import proc
from gpusnap.user_errors import NotFound

FOLDER = "/run/gpusnap/migrations"
MARK = "GPUSNAP_MIGRATION"
"""In the environment of Podman while it restores, with the migration's ID."""
# Seconds for a receiver to notice that the other side is gone and to undo what it did; Podman's own limit on
# a restore is 240 s.
PATIENCE = 300.0
_EVERY = 0.2
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

    def write(self) -> None:
        """Put it where others find it. Raises GpusnapError."""
        value = {"state": self.state, "name": self.name, "before": self.before, "owner": state_files.owner()}
        try:
            state_files.write(_path(self.id), json.dumps(value).encode())
        except OSError as error:
            raise GpusnapError(
                f"{FOLDER} cannot be written: {reason(error)}", hint="make room in /run", code="GPS-007"
            ) from error


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
        return "undone"
    if found.get("state") in ("confirmed", "undone"):
        forget(migration)
        return str(found["state"])
    while _podman_of(migration):
        if time.monotonic() > end:
            raise _busy(migration)
        time.sleep(_EVERY)
    remove_new(str(found.get("name", "")), tuple(map(str, found.get("before") or ())))
    forget(migration)
    return "undone"


def remove_new(name: str, before: tuple[str, ...]) -> None:
    """Remove a container that was restored, if it is not one that was there before. Raises GpusnapError."""
    try:
        found = podman.container(name)
    except NotFound:
        return
    if found.name == name and found.id not in before:
        podman.said("rm", "--force", "--time", "0", found.id, wanted=f"the removal of {name}")


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
