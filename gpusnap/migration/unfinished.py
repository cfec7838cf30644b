"""Completes an interrupted migration: asks the other host about the container, and does what follows.

On the host that the container leaves, its note (gpusnap/checkpoints/migrations.py) is kept until then. The
remains are removed first, and the note last: if the process is killed in between, the next one continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gpusnap.base.user_errors import NotFound, convert_errors
from gpusnap.checkpoints.migrations import OutgoingMigration
from gpusnap.checkpoints.names import container_name
from gpusnap.engines import podman
from gpusnap.migration import records
from gpusnap.migration.blobs import check_answer
from gpusnap.migration.link import Destination, Route, connect
from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.errors import NotThere, OciError
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import Entry, by_age, is_later
from gpusnap.operations.restoring import in_podman
from gpusnap.runtime_shim.base.errors import GpusnapError

AHEAD = "migrating"
"""The tag of checkpoints that are sent ahead, until the migration ends."""


def ahead_name(container: str, container_id: str) -> str:
    """Return the name of a container's checkpoint that is sent ahead."""
    return f"{container_name(container, container_id)}:{AHEAD}"


def encode_route(route: Route) -> tuple[str, ...]:
    """Return a route for a note."""
    return route.to.host, route.to.user, str(route.to.port), route.ssh, route.program


def read_route(written: tuple[str, ...]) -> Route:
    """Return the route of a note. Raises GpusnapError."""
    try:
        host, user, port, ssh, program = written
        return Route(to=Destination(host, user, int(port)), ssh=ssh, program=program)
    except ValueError as error:
        raise GpusnapError(f"the migration record names no host: {error}", code="GPS-005") from error


def ask(leaving: OutgoingMigration) -> str:
    """Ask the other host about a container: confirmed or undone. Raises GpusnapError."""
    return str(_ask(leaving, "settle")["state"])


def tell_settled(leaving: OutgoingMigration) -> None:
    """Tell the other host to forget it; if that fails, it keeps its record."""
    with suppress(GpusnapError):
        _ask(leaving, "forget")


def _ask(leaving: OutgoingMigration, what: str) -> Mapping[str, Any]:
    route = read_route(leaving.route)
    with connect(route) as channel, channel.keep_alive():
        channel.send({"ask": what, "migration": leaving.id})
        return check_answer(channel.receive(), str(route.to))


def clear(leaving: OutgoingMigration) -> bool:
    """Remove what is left here of a container that runs on the other host. Raises GpusnapError.

    Returns whether the container stays, because it has been started here again, or has come back.
    """
    stays = False
    if not leaving.keep:
        if not leaving.auto_remove:
            stays = not _remove_container(leaving)
        with convert_errors():
            _remove_checkpoint(leaving.store, leaving.digest)
    _remove_notes(leaving)
    return stays


def remove_name(store: Store, name: str) -> None:
    """Remove a checkpoint from a store, unless it has another name; if that fails, `gpusnap ls` shows it."""
    with suppress(OciError):
        store.remove(name)


def recover_leaving(leaving: OutgoingMigration) -> str:
    """Complete a migration whose gpusnap was killed; return what was done. Raises GpusnapError."""
    store, ahead = Store(leaving.store), ahead_name(leaving.name, leaving.container)
    if not leaving.digest:
        here = _explain_here(leaving, store)
        if here:
            remove_name(store, ahead)
        else:  # such as after a loss of power: this checkpoint may be all that is left
            here = _explain_ahead(leaving, store, ahead)
        leaving.remove()
        return f"{leaving.name} was not migrated to {leaving.host}{here}"
    remove_name(store, ahead)
    if not _is_kept(store, leaving.digest):
        _remove_notes(leaving)
        return f"the checkpoint {leaving.checkpoint}, of the migration to {leaving.host}, no longer exists"
    state = ask(leaving)
    if state == "confirmed":
        back = clear(leaving)
        tell_settled(leaving)
        stays = "stays here" if leaving.keep else "is removed here"
        said = f"{leaving.name} was migrated to {leaving.host}; its checkpoint {leaving.checkpoint} {stays}"
        if back:
            said += "; the container here stays: it may have been started after that (podman ps shows it)"
        return said
    _remove_notes(leaving)
    continues = f"gpusnap restore {leaving.checkpoint} continues it here"
    return f"{leaving.name} does not run on {leaving.host}; {continues}"


def _remove_notes(leaving: OutgoingMigration) -> None:
    """Remove the note of a migration, and first that from before its last checkpoint, if it is left.

    Raises GpusnapError.
    """
    replace(leaving, digest="").remove()
    leaving.remove()


def _explain_here(leaving: OutgoingMigration, store: Store) -> str:
    """Say what became here of a container that the other host was not asked to restore.

    Its last checkpoint may have been killed, too: then an earlier one in the store is not what continues it.
    Returns "" if nothing is known but what was sent ahead.
    """
    with suppress(GpusnapError):
        found = podman.inspect_container(leaving.container)
        if found.status in ("running", "paused"):
            return f", and is {found.status} here"
        if found.checkpointed:
            return f"; {podman.to_restore(found)} continues it"
    exported = in_podman.find_exported(leaving.container, [leaving.store])
    if exported and is_later(exported[-1].created, leaving.since):
        return f"; {exported[-1].left.said}"
    made: tuple[Entry, ...] = ()
    with suppress(OciError):
        made = store.list_tagged(container_name(leaving.name, leaving.container))
    ahead = ahead_name(leaving.name, leaving.container)
    since = [each for each in made if each.name != ahead and is_later(each.created, leaving.since)]
    if since:
        newest = max(since, key=lambda each: by_age(each.created)).name
        return f"; if it does not run here, gpusnap restore {newest} continues it"
    return ""


def _explain_ahead(leaving: OutgoingMigration, store: Store, ahead: str) -> str:
    """Say what continues a container of which the checkpoint that was sent ahead may be all that is left."""
    kept = first = ""
    with suppress(GpusnapError):
        first = f"podman rm {podman.inspect_container(leaving.container).name} && "
    with suppress(OciError):
        if is_later(store.find_exactly(ahead).created, leaving.since):
            kept = f"{first}gpusnap restore {ahead} continues it from the checkpoint that was sent ahead"
    with suppress(GpusnapError):  # Podman has forgotten its own checkpoint, if the host was restarted
        for each in in_podman.list_restorable(store):
            if each.id == leaving.container:
                instead = f"; if that fails, {kept}" if kept else ""
                return f"; {each.make_command()} continues it{instead}"
    if kept:
        return f"; if it does not run here, and gpusnap recover names nothing newer of it, {kept}"
    return "; if it does not run here, gpusnap recover names what is left of it"


def recover_coming(record: records.Record) -> str:
    """Undo what a killed receiver left on this host; return what was done. Raises GpusnapError."""
    records.settle(record.id)
    return f"the migration of {record.name} to this host was interrupted; what had been received is removed"


def _remove_container(leaving: OutgoingMigration) -> bool:
    """Remove the container that the last checkpoint ended; return False if it was started since then.

    It may have come back with the same ID: a container keeps that through a checkpoint and a restore.
    """
    try:
        found = podman.inspect_container(leaving.container)
    except NotFound:
        return True
    # Podman forgets at a reboot of the host that it was checkpointed.
    if not found.checkpointed or is_later(found.checkpointed_at, leaving.find_time()):
        return False
    podman.remove(leaving.container)
    return True


def _remove_checkpoint(store: str, digest: str) -> None:
    with suppress(NotThere):
        Store(store).remove(digest)


def _is_kept(store: Store, digest: str) -> bool:
    try:
        return any(each.descriptor.digest == digest for each in store.entries())
    except OciError as error:
        raise GpusnapError(f"{store.path} cannot be read: {error}", code="GPS-005") from error
