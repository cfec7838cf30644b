"""A host's records of containers that are migrated to it, in files, for questions of the other host.

The gpusnap that receives the container writes the file, and names itself as its owner. While it lives, it
decides: it removes a container that it restored and that the other side did not confirm. After its death,
whoever asks does so. A question before the restore has begun ends the migration: a request that is still on
its way then restores nothing.

The files are on disk, beside those of outgoing migrations (gpusnap/checkpoints/migrations.py): a host that
has taken over a container says so after its next boot, too, until the other one needs no answer any more.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints import locator, migrations
from gpusnap.engines import podman, podman_objects
from gpusnap.oci.base.dataclass import asdict, dataclass, replace
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.patterns import compile_later
from gpusnap.operations import unknown_containers
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, reason
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.recovery import restored_containers

MARK = "GPUSNAP_MIGRATION"
"""In the environment of Podman while it restores, with the migration's ID."""
# Seconds for a receiver to notice that the other side is gone and to undo its work; Podman's own limit on a
# restore is 240 s.
PATIENCE = 300.0
_EVERY = 0.2
# Seconds for Podman to list its containers.
_ASKING = 60.0
# Seconds for a lock, which nobody holds for longer than it takes to write a file.
_LOCKING = 10.0
_LIMIT = 64 << 10
_ID = compile_later(r"[0-9a-f]{32}", re.ASCII)
_ENDING = ".coming"
_NAME = compile_later(r"[0-9a-f]{32}\.coming", re.ASCII)
# Seconds for which a request can be on its way.
_LATE = 86400.0


@dataclass(frozen=True, slots=True)
class Record:
    """One migration, on the receiving side."""

    id: str
    state: str
    """coming, restoring, running, confirmed or undone."""
    name: str
    """The container's name; empty for a migration that was ended by a question."""
    before: tuple[str, ...] = ()
    """The IDs of all containers before the restore."""
    container: str = ""
    """The ID of the restored container, once it is known."""
    created: str = ""
    """When Podman created that one: a container keeps its ID through each migration."""
    source: str = ""
    """The first 32 digits of the container's ID on the other host."""
    ahead: tuple[str, ...] = ()
    """The digests of checkpoints that came before the last one."""
    at_work: bool = False
    """Whether the gpusnap that receives it still exists; set by `list_records`."""

    def write(self) -> None:
        """Write it to disk. Raises GpusnapError."""
        value = asdict(self)
        del value["id"], value["at_work"]
        migrations.write(_path(self.id), value | migrations.owner())


def begin(record: Record) -> None:
    """Write the first record of a migration. Raises Refused if it has been ended, and GpusnapError.

    A container that a killed receiver left of an earlier migration is removed first: later, it could not be
    told from this one.
    """
    _sweep()
    for each in list_records({}):
        known = bool(each.source and record.source)
        same = each.source == record.source if known else each.name == record.name
        if same and each.id != record.id and each.state != "coming" and not each.at_work:
            settle(each.id)
    with _hold_lock(record.id):
        if _read(record.id) is not None:
            raise _make_given_up_error()
        record.write()


def advance(record: Record) -> None:
    """Write the next record. Raises Refused if the migration has been ended, and GpusnapError."""
    with _hold_lock(record.id):
        if (_read(record.id) or {}).get("state") in (None, "undone"):
            raise _make_given_up_error()
        record.write()


def confirm(record: Record) -> None:
    """Record that a restored container belongs to this host. Raises Refused as `advance`, and GpusnapError.

    Whoever asks meanwhile waits, and does not take it for one that a killed receiver left.
    """
    with _hold_lock(record.id):
        if (_read(record.id) or {}).get("state") != record.state:
            raise _make_given_up_error()
        Record(record.id, "confirmed", record.name).write()


def is_confirmed(migration: str) -> bool:
    """Return whether whoever asks is told that the container belongs to this host. Raises GpusnapError."""
    return (_read(migration) or {}).get("state") == "confirmed"


def end_record(record: Record) -> None:
    """Record that the receiver has undone everything. Raises GpusnapError."""
    if record.state != "coming":
        _write_undone(record)
        return
    with _hold_lock(record.id):
        if (_read(record.id) or {}).get("state") == "coming":
            _remove(record.id)  # nobody asks: nothing was restored


def forget(migration: str) -> None:
    """Forget a migration: the other host will not ask any more."""
    with suppress(GpusnapError), _hold_lock(migration):
        found = _read(migration)
        # The mark for a request that is still on its way is kept; see _sweep.
        if found is not None and found.get("name") and found.get("state") in ("confirmed", "undone"):
            _remove(migration)


def list_records(unreadable: dict[str, GpusnapError] | None = None) -> tuple[Record, ...]:
    """Return the migrations to this host that have not ended. `unreadable` and errors: as in `read_each`."""
    keys = [name.removesuffix(_ENDING) for name in migrations.names(_NAME)]
    return tuple(journal.read_each(keys, _read_unended, unreadable))


def check_id(value: object) -> str:
    """Return the ID of a migration. Raises GpusnapError if it is invalid."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise GpusnapError(
            "the other host sent no migration ID", hint="update gpusnap on both hosts", code="GPS-821"
        )
    return value


def settle(migration: str) -> str:
    """Return the result of a migration, once nobody works on it: confirmed or undone. Raises GpusnapError.

    A container that was restored and not confirmed is removed, with the checkpoints that came ahead of it.
    """
    limit = time.monotonic() + PATIENCE
    while True:
        with _hold_lock(migration):
            found = _read(migration)
            state = str((found or {}).get("state"))
            if state in ("confirmed", "undone"):
                return state
            alive = found is not None and migrations.is_alive(found.get("owner"), found.get("boot"))
            if found is None or state == "coming":
                # The receiver, if it lives, removes the checkpoints that came ahead itself.
                if found is not None and not alive:
                    remove_ahead(_record(migration, found).ahead)
                # A request that is still on its way restores nothing then.
                _write_undone(Record(migration, "undone", ""))
                return "undone"
        if not alive:
            break
        if time.monotonic() > limit:
            raise _make_busy_error(migration)
        time.sleep(_EVERY)
    record = _record(migration, found)
    remove_restored(record)
    remove_ahead(record.ahead)
    with suppress(GpusnapError):  # whoever asks next gets the same answer
        _write_undone(record)
    return "undone"


def _write_undone(record: Record) -> None:
    """Record that nothing of a migration is left here. Raises GpusnapError."""
    try:
        replace(record, state="undone").write()
    except GpusnapError as error:
        # Such as on a full disk. Without a record nothing is restored either; see `advance`.
        try:
            state_files.remove(_path(record.id))
        except OSError:
            raise error from None


def remove_ahead(digests: tuple[str, ...]) -> None:
    """Remove checkpoints that came before the last one from the store: nobody needs them any more."""
    store = locator.default_store()
    for digest in dict.fromkeys(digests):
        with suppress(OciError):
            store.remove(digest)


def remove_restored(record: Record) -> None:
    """Remove the container that was restored for a migration, with its new volumes. Raises GpusnapError.

    Its name or its ID may belong to another container by now, which was restored or started meanwhile: that
    is kept. Waits until nothing restores it any more: if Podman was killed, its runtime continues.
    """
    limit = time.monotonic() + PATIENCE
    while _is_being_restored(record.id):
        if time.monotonic() > limit:
            raise _make_busy_error(record.id)
        time.sleep(_EVERY)
    container = _end_unknown(record.id) or record.container
    try:
        found = podman.inspect_container(container or record.name)
    except NotFound:
        return
    except GpusnapError:
        if not _remove_damaged(record, container):
            raise
        return
    if container:
        ours = found.id == container and record.created in ("", found.created)
    else:
        ours = found.name == record.name and found.id not in record.before and _is_of_migration(found, record)
    if ours:
        created = podman_objects.list_created_with(found)
        podman.run_query("rm", "--force", "--time", "0", found.id, wanted=f"the removal of {record.name}")
        for volume in created if found.id not in record.before else ():
            with suppress(GpusnapError):
                podman_objects.remove_volume(volume)


def _remove_damaged(record: Record, container: str) -> bool:
    """Remove the container if a loss of power during its restore has damaged it; return whether it was that.

    Podman does not sync a container's directories: it then lists the container, but cannot inspect or start
    it. One that has not been started since that boot is `created` for Podman. Raises GpusnapError.
    """
    for each, name in podman.names(seconds=_ASKING, status="created").items():
        known = name == record.name and bool(record.source) and each.startswith(record.source)
        if (each == container or (known and not container)) and each not in record.before:
            podman.run_query("rm", "--force", "--time", "0", each, wanted=f"the removal of {record.name}")
            return True
    return False


def _end_unknown(migration: str) -> str:
    """End a container that runs without the knowledge of its Podman, which was killed; return its ID.

    Raises GpusnapError.
    """
    for entry in restored_containers.list_living():
        # Podman may know it by now, and then removes it.
        ours = entry.init is not None and _has_mark(proc.parent(entry.init[0]), migration)
        if ours and unknown_containers.end_container(entry) is not None:
            return entry.container
    return ""


def _is_of_migration(found: podman.Container, record: Record) -> bool:
    """Return whether a container's conmon, the parent of its first process, is of that migration's Podman.

    A container that does not run has none. What a killed Podman leaves has the ID of the source; if it was to
    get another name, it has a new ID (libpod, CRImportCheckpoint), and stays.
    """
    if found.init:
        return _has_mark(proc.parent(found.init), record.id)
    # One that a checkpoint ended was restored or started after that.
    return bool(record.source) and found.id.startswith(record.source) and not found.checkpointed


@contextmanager
def _hold_lock(migration: str) -> Iterator[None]:
    with state_files.lock(
        os.path.join(migrations.FOLDER, f"{migration}.lock"),
        patience=_LOCKING,
        busy=lambda: _make_busy_error(migration),
        failed=lambda error: GpusnapError(
            f"{migrations.FOLDER} cannot be written: {reason(error)}",
            hint="free some space there, and check that the file system is writable",
            code="GPS-007",
        ),
    ):
        yield


def _path(migration: str) -> str:
    return os.path.join(migrations.FOLDER, migration + _ENDING)


def _read(migration: str) -> Mapping[str, Any] | None:
    try:
        found = state_files.read(_path(migration), limit=_LIMIT)
        _check_form(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GpusnapError(
            f"{_path(migration)} cannot be read, so gpusnap cannot determine which container came from "
            f"another host: {reason(error)}",
            hint="if podman ps --all shows no container that belongs on another host, remove that file",
            code="GPS-005",
        ) from error
    return dict(found)


def _check_form(found: object) -> None:
    """Raise ValueError if a file's content is no record."""
    match found:
        case {"state": str(), "name": str(), **more}:
            if all(isinstance(more.get(each, []), list) for each in ("before", "ahead")):
                return
    raise ValueError("it is no record of a migration")


def _read_unended(migration: str) -> Record | None:
    found = _read(migration)
    if found is None or found.get("state") in ("confirmed", "undone"):
        return None
    return _record(migration, found)


def _record(migration: str, found: Mapping[str, Any]) -> Record:
    return Record(
        migration,
        found["state"],
        found["name"],
        tuple(map(str, found.get("before", ()))),
        str(found.get("container", "")),
        str(found.get("created", "")),
        str(found.get("source", "")),
        tuple(map(str, found.get("ahead", ()))),
        migrations.is_alive(found.get("owner"), found.get("boot")),
    )


def _remove(migration: str) -> None:
    with suppress(OSError):
        state_files.remove(_path(migration))


def _sweep() -> None:
    """Remove the marks for requests that cannot be on their way any more."""
    for name in migrations.names(_NAME):
        path = os.path.join(migrations.FOLDER, name)
        with suppress(GpusnapError, OSError):
            found = _read(name.removesuffix(_ENDING)) or {}
            late = found.get("boot") != state_files.boot() or time.time() - os.stat(path).st_mtime > _LATE
            if found.get("state") == "undone" and late:
                os.unlink(path)


def _is_being_restored(migration: str) -> bool:
    """Return whether a Podman, or a runtime that conmon runs for one, still restores for a migration.

    conmon and what was restored have MARK as well, for as long as the container lives.
    """
    return any(_restores(pid, migration) for pid in proc.pids())


def _restores(pid: int, migration: str) -> bool:
    """Return whether a process is its Podman at work, or the runtime of a restore below its conmon."""
    if proc.comm(pid) == "podman":
        return _has_mark(pid, migration)
    # To read the command line of just any process may block: not that of another migration's container.
    conmon = proc.parent(pid)
    ours = proc.comm(conmon) == "conmon" and _has_mark(conmon, migration)
    return ours and "--image-path" in proc.command(pid)


def _has_mark(pid: int, migration: str) -> bool:
    return proc.environment(pid).get(MARK) == migration


def _make_given_up_error() -> Refused:
    return Refused("the other host has aborted this migration", hint="migrate it again", code="GPS-823")


def _make_busy_error(migration: str) -> GpusnapError:
    return GpusnapError(
        f"the migration {migration[:8]} is still being undone after {PATIENCE:g} s",
        hint="check podman ps --all there",
        code="GPS-823",
    )
