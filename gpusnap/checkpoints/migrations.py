"""Records of containers that leave this host by `gpusnap migrate`, until it is known where each one runs.

    /var/lib/gpusnap/migrations/    0700; on disk, since the other host may run a container after this boot
        <migration>.leaving         the memory is being sent, and the container runs here
        <64 hex>.leaving            the digest of the checkpoint that ended the container; written before the
                                    other host is asked to restore that
        <migration>.coming          of a container that comes to this host: gpusnap/migration/records.py

While the second file exists, the container may run on the other host, and that checkpoint is not restored
here. It is removed after the other host has reported the result, and this host has acted on it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from gpusnap.oci.base.dataclass import asdict, dataclass, list_fields
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.store.tags import is_later
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, reason
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.records import journal

FOLDER = "/var/lib/gpusnap/migrations"
_ENDING = ".leaving"
_NAME = compile_later(r"(?:[0-9a-f]{32}|[0-9a-f]{64})\.leaving", re.ASCII)
_LIMIT = 64 << 10
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMigration:
    """A container that is migrated to another host."""

    id: str
    """The ID of the migration."""
    container: str
    """Its ID here."""
    name: str
    """Its name here."""
    there: str
    """Its name on the other host."""
    host: str
    """The other host, for messages."""
    route: tuple[str, ...]
    """How to connect to it: the user, the port, the ssh command, and the command of gpusnap there."""
    store: str
    """The store with the checkpoint."""
    checkpoint: str
    """The name of the checkpoint in it."""
    digest: str = ""
    """Digest of the checkpoint that ended the container; empty while the container runs here."""
    keep: bool = False
    """The ended container and its checkpoint are kept here."""
    auto_remove: bool = False
    """Podman has removed the container itself."""
    since: str = ""
    """When it began: UTC, in ISO 8601."""
    owner: tuple[int, int] = (0, 0)
    """PID and start time of the gpusnap process that migrates it."""
    boot: str = ""

    @property
    def at_work(self) -> bool:
        """Return whether the gpusnap process that migrates it still exists."""
        return is_alive(self.owner, self.boot)

    def write(self) -> None:
        """Write the record to disk, with this process as its owner. Raises GpusnapError."""
        value = {**asdict(self), "version": _VERSION, **owner()}
        write(self._path(), value)

    def remove(self) -> None:
        """Remove the record: it is known where the container runs. Raises GpusnapError.

        The other host may forget the migration next, and would then deny that the container runs there if a
        crash of this host brought the record back.
        """
        try:
            state_files.remove_durably(self._path())
        except OSError as error:
            raise GpusnapError(
                f"{self._path()} cannot be removed: {reason(error)}",
                hint="make sure that the file system is writable, then run gpusnap recover",
                code="GPS-005",
            ) from error

    def find_time(self) -> str:
        """Return when the record was written (RFC 3339); "" if it does not exist any more."""
        try:
            return datetime.fromtimestamp(os.stat(self._path()).st_mtime, UTC).isoformat()
        except OSError:
            return ""

    def _path(self) -> str:
        return _path(self.digest or self.id)


def find(digest: str) -> OutgoingMigration | None:
    """Return the migration of a checkpoint that may run on another host. Raises GpusnapError."""
    path = _path(digest)
    try:
        return _from_json(state_files.read(path, limit=_LIMIT))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if _concerns_only_root(error):
            return None
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise GpusnapError(
            f"{path} cannot be read, so gpusnap cannot determine whether the container runs on another "
            f"host: {why}",
            hint="if the container runs nowhere else, remove that file",
            code="GPS-823",
        ) from error


def host_of(digest: str) -> str:
    """Return the other host that may run the container of a checkpoint; "" if none."""
    try:
        found = find(digest)
    except GpusnapError:
        return "another host"
    return found.host if found is not None else ""


def list_outgoing(unreadable: dict[str, GpusnapError] | None = None) -> tuple[OutgoingMigration, ...]:
    """Return all migrations from this host, the oldest first. `unreadable` and errors: as in `read_each`.

    One that has both files is its second one.
    """
    keys = [name.removesuffix(_ENDING) for name in names(_NAME)]
    found = sorted(journal.read_each(keys, find, unreadable), key=lambda each: each.since)
    ended = {each.id for each in found if each.digest}
    return tuple(each for each in found if each.digest or each.id not in ended)


def check(digest: str) -> None:
    """Raise Refused if the container of a checkpoint may run on another host. Raises GpusnapError."""
    found = find(digest)
    if found is None:
        return
    if found.at_work:
        raise Refused(
            f"{found.name} is being migrated to {found.host} with the checkpoint {found.checkpoint}",
            hint="wait until gpusnap migrate has ended",
            code="GPS-823",
        )
    raise Refused(
        f"{found.name} may run on {found.host}: its migration with the checkpoint {found.checkpoint} was "
        "interrupted at an unknown step",
        hint=f"run gpusnap recover, which asks {found.host}; if that host cannot be reached and you "
        f"have verified that {found.there} does not run there, gpusnap restore --not-migrated "
        f"{found.checkpoint} continues it here",
        code="GPS-823",
    )


def check_alone(ours: OutgoingMigration) -> None:
    """Raise Refused if another gpusnap process migrates the same container; `ours` is written already.

    Of two that begin at once, at least one finds the other. Raises GpusnapError.
    """
    for each in list_outgoing({}):
        if each.container == ours.container and each.id != ours.id and each.at_work:
            raise _make_migrating_error(each)


def check_last(container: str, created: str) -> None:
    """Raise Refused if a container's checkpoint was made by its migration that has not ended.

    `created`: when it was made (RFC 3339). Call it before `check`: a migration writes its second file before
    it removes the first one. Raises GpusnapError.
    """
    for each in list_outgoing({}):
        sends = not each.digest and each.container == container and each.at_work
        if sends and not is_later(each.since, created):
            raise _make_migrating_error(each)


def _make_migrating_error(found: OutgoingMigration) -> Refused:
    return Refused(
        f"{found.name} is being migrated to {found.host}",
        hint="wait until gpusnap migrate has ended",
        code="GPS-823",
    )


def check_ahead(store: str, name: str) -> None:
    """Raise Refused if that checkpoint in a store was sent ahead by a migration that has not ended.

    Its container ran on after it. Raises GpusnapError.
    """
    for each in list_outgoing({}):
        if each.digest or (each.store, each.checkpoint) != (store, name):
            continue
        if each.at_work:
            raise Refused(
                f"{each.name} is being migrated to {each.host}, and {name} is not its last checkpoint",
                hint="wait until gpusnap migrate has ended",
                code="GPS-823",
            )
        raise Refused(
            f"the newest checkpoint of {each.name} in the store is {name}, which its interrupted migration "
            f"to {each.host} sent ahead: {each.name} ran on after it",
            hint="run gpusnap recover first, which says what continues the container; gpusnap restore "
            f"{name} restores this checkpoint all the same",
            code="GPS-823",
        )


def forget(digest: str) -> None:
    """Record that a user has checked: a checkpoint's container runs on no other host. Raises GpusnapError."""
    found = find(digest)
    if found is not None:
        found.remove()


def owner() -> dict[str, Any]:
    """Return the process that writes a file, for `is_alive`."""
    return {"owner": state_files.owner(), "boot": state_files.boot()}


def is_alive(owner: object, boot: object) -> bool:
    """Return whether the process that wrote a file still exists; this process does not count."""
    match owner:
        case (int(pid), int(start)) | [int(pid), int(start)]:
            return boot == state_files.boot() and pid != os.getpid() and proc.is_same(pid, start)
    return False


def write(path: str, value: object) -> None:
    """Write a file into the folder. Raises GpusnapError."""
    try:
        state_files.write_durably(path, json.dumps(value).encode())
    except OSError as error:
        raise GpusnapError(
            f"{FOLDER} cannot be written: {reason(error)}",
            hint="free some space there, and make sure that the file system is writable",
            code="GPS-007",
        ) from error


def names(pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the files in the folder that match a pattern, in order. Raises GpusnapError."""
    try:
        found = sorted(os.listdir(FOLDER))
    except FileNotFoundError:
        return
    except OSError as error:
        if _concerns_only_root(error):
            return
        raise GpusnapError(f"{FOLDER} cannot be read: {reason(error)}", code="GPS-005") from error
    yield from (name for name in found if pattern.fullmatch(name))


def _concerns_only_root(error: Exception) -> bool:
    """Return whether another user has asked, whose stores have no container that was migrated."""
    return isinstance(error, PermissionError) and os.geteuid() != 0


def _path(key: str) -> str:
    return os.path.join(FOLDER, key.removeprefix("sha256:") + _ENDING)


def _from_json(value: Any) -> OutgoingMigration:
    if value["version"] != _VERSION:
        raise ValueError(f"it has version {value['version']}, but this gpusnap supports only {_VERSION}")
    known = {name: value[name] for name in list_fields(OutgoingMigration)}
    pid, start = known.pop("owner")
    return OutgoingMigration(
        **{**known, "route": tuple(map(str, known["route"])), "owner": (int(pid), int(start))}
    )
