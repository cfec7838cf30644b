"""Lists what `gpusnap recover` would handle, as lines for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from gpusnap.checkpoints import locator
from gpusnap.checkpoints.migrations import OutgoingMigration
from gpusnap.container_hooks.due import DueCommand
from gpusnap.engines import podman
from gpusnap.migration.records import Record
from gpusnap.oci.base.dataclass import asdict, dataclass
from gpusnap.operations.restoring import in_podman
from gpusnap.operations.restoring.in_podman import StoppedContainer
from gpusnap.operations.suspending.left_paused import PausedContainer
from gpusnap.operations.unknown_containers import UnknownContainer
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.suspensions import THERE, Stage, Suspension
from gpusnap.runtime_shim.snapshot.recovery.bring_back import list_alive
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record

# Seconds for Podman to tell names. It may wait for a lock that somebody has who was cut off.
_PATIENCE = 3.0
_AWAKE = "it is suspended, but Podman lists it as running"
_HELD = "it is suspended, and a thread of it would receive no signal"
_FROZEN = "it is frozen: its gpusnap checkpoint was killed; gpusnap recover lets it run on"


Kind: TypeAlias = Literal[
    "checkpoint",
    "restore",
    "suspend",
    "resume",
    "leaving",
    "coming",
    "unknown",
    "suspended",
    "ended",
    "stopped",
    "paused",
    "command",
]
"""`gpusnap recover --help` explains each (commands/recover.py). The names are public and do not change."""


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """A checkpoint or restore that is under way, or was cut off; or a container that Podman does not know."""

    container: str
    kind: Kind
    at_work: bool
    """Its gpusnap is still there, and nobody else may touch the container."""
    processes: tuple[int, ...]
    """The PIDs that were suspended and that are still there; of an unknown container its init."""
    image: str
    """The image directory of a checkpoint or restore; else empty."""
    why: str = ""
    """What Podman says of an unknown container, and what is known of one that is migrated or frozen."""
    name: str = ""
    """Its engine's name for it, if that is known."""


def list_waiting(
    checkpoints: Sequence[journal.Entry],
    restores: Sequence[restore_record.Restore],
    unknown: Sequence[UnknownContainer] = (),
    moving: Sequence[Suspension] = (),
    leaving: Sequence[OutgoingMigration] = (),
    coming: Sequence[Record] = (),
    awake: Sequence[Suspension] = (),
    unnoticed: Sequence[podman.Container] = (),
    paused: Sequence[PausedContainer] = (),
    due: Sequence[DueCommand] = (),
) -> tuple[PendingOperation, ...]:
    """Return all of these, by container."""
    found = [
        PendingOperation(
            e.container,
            "checkpoint",
            e.at_work,
            tuple(p.pid for p in list_alive(e)),
            e.image,
            _FROZEN if e.left_stopped and not e.at_work else "",
        )
        for e in checkpoints
    ]
    found += [PendingOperation(e.container, "restore", e.at_work, (), e.image) for e in restores]
    found += [PendingOperation(e.container, "unknown", False, e.processes, "", e.why) for e in unknown]
    found += [
        PendingOperation(
            each.container,
            "suspend" if each.stage in THERE else "resume",
            each.at_work,
            tuple(process.pid for process in each.processes),
            "",
        )
        for each in moving
        if each.stage is not Stage.SUSPENDED
    ]
    found += [
        PendingOperation(e.container, "leaving", e.at_work, (), "", _describe_leaving(e)) for e in leaving
    ]
    found += [
        PendingOperation(e.container or e.name, "coming", e.at_work, (), "", _describe_coming(e))
        for e in coming
    ]
    found += [PendingOperation(e.container, "suspended", False, (), "", _AWAKE, e.name) for e in awake]
    found += [
        PendingOperation(e.container, "suspended", False, (), "", _HELD, e.name)
        for e in moving
        if e.stage is Stage.SUSPENDED
    ]
    found += [
        PendingOperation(e.id, "ended", False, (), e.checkpoint_path, in_podman.UNNOTICED, e.name)
        for e in unnoticed
    ]
    found += [PendingOperation(e.container, "paused", False, e.processes, "", e.why) for e in paused]
    found += [PendingOperation(e.container, "command", False, (), "", e.why, e.found.name) for e in due]
    return tuple(sorted(found, key=lambda each: (each.container, each.kind)))


class Names:
    """What people call containers. Podman is asked when the first is wanted, and not waited for long."""

    def __init__(self, known: Mapping[str, str] = MappingProxyType({})) -> None:
        """`known`: names by ID."""
        self._known = known
        self._asked: Mapping[str, str] | None = None

    def name(self, container: str) -> str:
        """Its name, or ""."""
        if container in self._known:
            return self._known[container]
        if podman.RANDOM_ID.fullmatch(container) is None:
            return ""
        if self._asked is None:
            self._asked = {}
            with suppress(GpusnapError):
                self._asked = podman.names(seconds=_PATIENCE)
        return self._asked.get(container, "")

    def format_name(self, container: str) -> str:
        """Name and short ID, or the ID alone if there is no name."""
        name = self.name(container)
        return f"{name} ({container[:12]})" if name and name != container else container


def line(each: PendingOperation, names: Names) -> str:
    """Describe one for people."""
    shown = names.format_name(each.container)
    if each.kind in ("unknown", "suspended", "ended", "stopped", "leaving", "coming", "paused", "command"):
        return f"{shown}  {each.why}"
    if each.at_work:
        state = "gpusnap is working on it"
    elif each.kind in ("suspend", "resume"):
        return f"{shown}  its {each.kind} was interrupted"
    elif each.kind == "restore":
        state = "its restore was interrupted"
    elif each.why:
        return f"{shown}  {each.why}"
    else:
        state = "its checkpoint was interrupted; processes: " + (" ".join(map(str, each.processes)) or "none")
    return f"{shown}  {state}  image: {each.image}"


def list_stopped(found: Sequence[StoppedContainer]) -> tuple[PendingOperation, ...]:
    """Return the same for containers that killed commands stopped, with memory in another store.

    Memory without a name in this host's store is also what `podman container checkpoint` leaves.
    """
    return tuple(
        PendingOperation(
            each.container.id,
            "stopped",
            False,
            (),
            each.container.checkpoint_path,
            _explain_stopped(each),
            each.container.name,
        )
        for each in found
        if not locator.is_default(each.store)
    )


def describe_stopped(found: StoppedContainer) -> str:
    """Describe for people a container that Podman can restore."""
    there = found.container
    shown = Names({there.id: there.name}).format_name(there.id)
    return f"{shown}  {_explain_stopped(found)}"


def _explain_stopped(found: StoppedContainer) -> str:
    where = "the store" if locator.is_default(found.store) else f"the store {found.store}"
    return f"Podman has its checkpoint, and its memory is in {where}; to continue it: {found.make_command()}"


def _describe_leaving(each: OutgoingMigration) -> str:
    if each.at_work:
        how = f"gpusnap is migrating {each.name} to {each.host}"
    else:
        how = f"the migration of {each.name} to {each.host} was interrupted"
    may = f"; {each.name} may run there; its checkpoint is {each.checkpoint}" if each.digest else ""
    return how + may


def _describe_coming(each: Record) -> str:
    if each.at_work:
        return f"gpusnap is receiving {each.name} from another host"
    return f"the migration of {each.name} to this host was interrupted"


def documents(found: Sequence[PendingOperation], names: Names) -> list[dict[str, Any]]:
    """For JSON: the fields of `PendingOperation`."""
    return [asdict(each) | {"name": each.name or names.name(each.container)} for each in found]
