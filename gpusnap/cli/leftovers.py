"""What a killed gpusnap has left of containers, for `gpusnap recover` to list and to repair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from gpusnap.checkpoints import migrations
from gpusnap.checkpoints.migrations import OutgoingMigration
from gpusnap.container_hooks import due as due_commands
from gpusnap.container_hooks.due import DueCommand
from gpusnap.engines import podman
from gpusnap.migration import records
from gpusnap.migration.records import Record
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.operations.restoring import in_podman
from gpusnap.operations.suspending import left_paused
from gpusnap.operations.suspending import recover as suspending
from gpusnap.operations.suspending.left_paused import PausedContainer
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.recovery import restored_containers
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record

Action: TypeAlias = tuple[str, Callable[[], str]]
"""A container, and what recovers it and says so."""


@dataclass(frozen=True, slots=True)
class Migrations:
    """Migrations that have not ended: from this host, and to it."""

    leaving: tuple[OutgoingMigration, ...]
    coming: tuple[Record, ...]

    def select(self, wanted: str) -> Migrations:
        """Return those of a container, by its ID or name."""
        return Migrations(
            tuple(each for each in self.leaving if wanted in (each.container, each.name)),
            tuple(each for each in self.coming if wanted in (each.container, each.name)),
        )

    def ids(self) -> list[str]:
        """Return the containers' IDs, or names: one has no ID here before it is restored."""
        return [each.container for each in self.leaving] + [
            each.container or each.name for each in self.coming
        ]

    def list_actions(self) -> Sequence[Action]:
        """Return what recovers those whose gpusnap was killed, with the container of each."""
        from gpusnap.migration import unfinished

        leaving = [each for each in self.leaving if not each.at_work]
        coming = [each for each in self.coming if not each.at_work]
        return [(each.container, partial(unfinished.recover_leaving, each)) for each in leaving] + [
            (each.container or each.name, partial(unfinished.recover_coming, each)) for each in coming
        ]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What gpusnap and Podman have recorded of containers that may need recovery, by kind."""

    checkpoints: tuple[journal.Entry, ...]
    restores: tuple[restore_record.Restore, ...]
    restored: tuple[restore_record.Restore, ...]
    """Of containers that run: their Podman may not know of them."""
    suspensions: tuple[Suspension, ...]
    """Of those that are to be recovered."""
    migrations: Migrations
    unnoticed: tuple[podman.Container, ...]
    paused: tuple[PausedContainer, ...]
    due: tuple[DueCommand, ...]
    unreadable: Mapping[str, GpusnapError]
    """Why a container's records cannot be read, by its key."""
    lost: Mapping[str, GpusnapError]
    """Why the record of a migration cannot be read; it may be that of any container."""

    @classmethod
    def find(
        cls, suspended: Sequence[Suspension], unreadable: dict[str, GpusnapError], *, paused: bool
    ) -> Leftovers:
        """Find them. `suspended` containers, and those whose records are `unreadable`, are known already.

        `paused`: whether to find those that containerd has left paused, too. Raises GpusnapError.
        """
        apart = {each.key for each in suspended} | unreadable.keys()
        lost: dict[str, GpusnapError] = {}
        checkpoints = tuple(entry for entry in journal.entries(unreadable) if entry.key not in apart)
        restores, restored = restore_record.entries(unreadable), restored_containers.list_living()
        leaving = migrations.list_outgoing(lost)
        # A container that is being migrated may run on another host, and nobody knows which one that is if a
        # record cannot be read.
        unnoticed = in_podman.list_unnoticed() if not lost else ()
        moves = Migrations(leaving, records.list_records(lost))
        moved = set(moves.ids())
        return cls(
            checkpoints,
            restores,
            restored,
            tuple(each for each in suspended if suspending.needs_recovery(each)),
            moves,
            tuple(each for each in unnoticed if each.id not in moved),
            left_paused.list_paused() if paused else (),
            due_commands.list_due(unreadable),
            unreadable,
            lost,
        )

    def ids(self) -> list[str]:
        """Return the IDs of the containers; a migration may have a name only."""
        noted = (*self.checkpoints, *self.restores, *self.restored, *self.suspensions)
        return [
            *(each.container for each in noted),
            *(each.container for each in self.paused),
            *(each.container for each in self.due),
            *(each.id for each in self.unnoticed),
            *map(container_key.id_of, self.unreadable),
            *self.migrations.ids(),
        ]

    def select(self, wanted: str) -> Leftovers:
        """Return those of a container, by its ID; without migrations whose record cannot be read."""
        return Leftovers(
            tuple(each for each in self.checkpoints if each.container == wanted),
            tuple(each for each in self.restores if each.container == wanted),
            tuple(each for each in self.restored if each.container == wanted),
            tuple(each for each in self.suspensions if each.container == wanted),
            self.migrations.select(wanted),
            tuple(each for each in self.unnoticed if each.id == wanted),
            tuple(each for each in self.paused if each.container == wanted),
            tuple(each for each in self.due if each.container == wanted),
            {key: error for key, error in self.unreadable.items() if container_key.id_of(key) == wanted},
            {},
        )

    def is_empty(self) -> bool:
        """Return whether there is nothing."""
        return not self.ids() and not self.lost

    def list_unreadable(self) -> list[Action]:
        """Return what says why records cannot be read; no other container has to wait for that."""
        errors = [*((container_key.id_of(key), error) for key, error in self.unreadable.items())]
        return [(of, partial(_fail, error)) for of, error in [*errors, *self.lost.items()]]


def _fail(error: GpusnapError) -> str:
    raise error
