"""`gpusnap recover`: repairs what a killed gpusnap left."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import click

from gpusnap.base.privileges import require_root
from gpusnap.base.user_errors import convert_errors
from gpusnap.checkpoints.list import listing
from gpusnap.cli import recover_list, store_tables
from gpusnap.cli.json_output import print_json
from gpusnap.cli.leftovers import Action, Leftovers
from gpusnap.cli.options.container_names import check_not_empty
from gpusnap.cli.recover_list import Names
from gpusnap.container_hooks import due as due_commands
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.files import exists
from gpusnap.oci.store.gc import Spared
from gpusnap.oci.store.paths import PRECIOUS
from gpusnap.oci.store.store import Store
from gpusnap.operations import unknown_containers
from gpusnap.operations.checkpointing import left_exports
from gpusnap.operations.checkpointing.left_exports import LeftExport
from gpusnap.operations.driver import needed_driver
from gpusnap.operations.restoring import in_podman
from gpusnap.operations.restoring.in_podman import NeedyContainer, StoppedContainer
from gpusnap.operations.suspending import left_paused, targets
from gpusnap.operations.suspending import recover as suspending
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu import find_driver
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.snapshot.left_stopped import bring_back
from gpusnap.runtime_shim.snapshot.memory import chunk_cache, handover
from gpusnap.runtime_shim.snapshot.memory.destination import is_of_another_host, is_of_checkpoint
from gpusnap.runtime_shim.snapshot.records import journal, reservations, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.recovery import checkpoint as recovery
from gpusnap.runtime_shim.snapshot.recovery import restore as recover_restore
from gpusnap.runtime_shim.snapshot.recovery import restored_containers
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.suspended_containers.spilled import is_of_another
from gpusnap.runtime_shim.snapshot.suspended_containers.sweep import sweep as sweep_suspended

# Seconds for Podman to describe a container. A checkpoint or restore of it may be in progress.
_PATIENCE = 15.0
# Libpod's ContainerStateConfigured, as it prints it.
_CREATED = "created"
_NOTHING = "nothing to recover"
# After a line about memory that no container is known to need.
_NO_CONTAINER = "no container needs recovery"


@dataclass(frozen=True, slots=True)
class _StoppedContainers:
    """Those that Podman can restore, with memory in the stores of killed commands."""

    found: tuple[StoppedContainer, ...]
    unknown: Mapping[str, GpusnapError]
    """The stores of which this could not be determined, and why."""

    @property
    def each_once(self) -> tuple[StoppedContainer, ...]:
        """One for each container: if several stores have its memory, with the first of these stores."""
        return tuple({each.container.id: each for each in reversed(self.found)}.values())[::-1]

    @property
    def stores(self) -> set[str]:
        """The stores in which there is, or may be, memory of such a container."""
        return {each.store for each in self.found} | self.unknown.keys()

    @classmethod
    def find(cls, stores: Sequence[str]) -> _StoppedContainers:
        """Find those with memory in these stores, of which the first is this host's."""
        found: list[StoppedContainer] = []
        unknown: dict[str, GpusnapError] = {}
        for path in stores:
            try:
                with convert_errors():
                    found += in_podman.list_restorable(Store(path))
            except GpusnapError as error:
                unknown[path] = error
        return cls(tuple(found), unknown)

    def tell(self) -> None:
        """Say how each continues."""
        for stopped in self.each_once:
            click.echo(recover_list.describe_stopped(stopped), err=True)
        self.tell_unknown()

    def tell_unknown(self) -> None:
        """Say what could not be determined."""
        for path, error in self.unknown.items():
            said = f"cannot determine whether a stopped container needs memory in {path}"
            click.echo(f"{said}: {error.sentence()}", err=True)


@click.command()
@click.argument("container", required=False, metavar="[CONTAINER]", callback=check_not_empty)
@click.option("--list", "only_list", is_flag=True, help="List what needs recovery without changing anything.")
@click.option("--json", "as_json", is_flag=True, help="With --list: print it as JSON.")
@click.option("--left-stopped", is_flag=True, hidden=True, help="Only let the one with that ID run on.")
def recover(container: str | None, only_list: bool, as_json: bool, left_stopped: bool) -> None:
    """Clean up after a killed gpusnap or Podman, for all containers or for CONTAINER.

    CONTAINER is its ID, the beginning of it, or Podman's name. After a killed checkpoint, the processes are
    stopped and their GPU memory is in RAM or in files: they are resumed. After a killed restore, the
    incomplete container is removed, so that it can be restored again. If Podman was killed too, it may keep a
    container that never ran, with the state created, as after `podman create`: the next restore reports it,
    and `podman rm` removes it. A running container is not touched. A suspend that was killed is undone, and a
    resume is completed; a suspended container stays suspended. After a killed `gpusnap migrate`, the other
    host is asked by ssh whether the container runs there: if so, its checkpoint is removed here; if not, it
    can be restored here. On the other host, the received data is removed.

    If Podman was killed before it cleaned up after a checkpoint, it does not restore the container: gpusnap
    recover runs `podman container cleanup`, or `podman stop` if Podman lists it as running for ever. A
    container with a restart policy is not cleaned up, and the commands for it are printed.

    If only the command `gpusnap checkpoint` was killed, Podman and its runtime continue and complete the
    checkpoint: then there is nothing to recover, and `podman container restore NAME` restores the container.
    One with --rm runs on instead, without a checkpoint; it stays frozen until gpusnap recover if all
    processes of the command were killed. gpusnap recover lists those whose memory is in this host's store or
    in the one of a killed `--to oci:DIR`, with the command that restores each. It shows how much memory of
    failed checkpoints is left in this host's store (see `gpusnap gc`), and names what other hosts have left
    in the stores, and checkpoints that a restart of this host cut off. Memory that a killed command was
    about to store with its records is stored without them. What Podman exported for a killed command is
    named, with what can be done with it: of a container with --rm, the export is all that is left beside the
    memory. This includes other stores, and archives of --to FILE, also after a reboot; one whose file system
    is not mounted is named.

    If Podman was killed during a restore, the container may run without Podman's knowledge. It is reported;
    only `gpusnap recover CONTAINER` kills it, and it must then be restored again. A container that Podman
    lists as running or paused is never killed.

    If gpusnap was killed between the two commands of a container that names some (`io.gpusnap.pre-checkpoint`
    and the like), or before the one after a restore or a resume, that one is run. If this is not possible
    now, because the container is paused, suspended or stopped, it is named, with what runs it. A command that
    fails is run again by the next recover.

    A pod's container that containerd has paused is named, with the command that resumes it: containerd leaves
    it paused if the caller of a checkpoint, such as kubelet, did not wait for its end. So is one whose
    state in containerd's record is not the real one.

    As JSON: a list with container, kind, at_work (the gpusnap that works on it still runs), processes (PIDs),
    image (the directory of a checkpoint or a restore), why (in words) and name for each container that is not
    as it should be. The kind is `checkpoint`, `restore`, `suspend` or `resume`: that was interrupted, or is
    in progress if at_work is true; `leaving` or `coming`: likewise a migration to or from another host;
    `unknown`: the container was restored and runs, but Podman does not list it as running; `suspended`: it is
    suspended, but Podman lists it as running, or a thread of it would receive no signal; `ended`: it has
    ended, but Podman was killed before it cleaned up; `stopped`: a killed `gpusnap checkpoint --to
    oci:DIR` stopped it, and Podman can restore it (why has the command); `paused`: containerd has paused a
    pod's container, or has it as paused (why has the command); `command`: a killed gpusnap has not run the
    container's own command after a checkpoint, a suspend or a restore (why names it). Later versions may add
    kinds. What else is left in stores and archives is not in the list.
    """
    if as_json and not only_list:
        raise click.UsageError("--json requires --list")
    require_root("recover")
    if left_stopped:  # operations/checkpointing/guardian.py
        bring_back(container or "", needed_driver, settings_file.load().memory)
        due_commands.run_all(container or "")
        return
    sweep_suspended()
    unreadable: dict[str, GpusnapError] = {}
    suspended = tuple(suspensions.find(unreadable))
    asleep = [each for each in suspended if each.stage is Stage.SUSPENDED]
    # Paused ones for the list, or a choice; otherwise they are listed when all is recovered.
    found = Leftovers.find(suspended, unreadable, paused=only_list or container is not None)
    if container is None and not only_list:
        _pause_again(asleep)
    if container is not None:
        stores = _list_stores()
        ids = [*found.ids(), *(each.container for each in suspended), *_list_handed_over(stores)]
        container = unknown_containers.choose_id(container, ids)
        for error in found.lost.values():  # it may be of this container
            click.echo(error.sentence(), err=True)
        found = found.select(container)
        if found.is_empty():
            failures: list[GpusnapError] = []
            stored = not only_list and _store_memory(stores, Names(), failures, container)
            _say_nothing(container, stores, known=container in ids, as_json=as_json, is_done=stored)
            if failures:
                raise failures[0]
            return
    if only_list:
        _list(found, asleep if container is None else None, as_json=as_json)
    elif container is not None and replace(found, restored=()).is_empty():
        _end_unknown(container, found.restored)
    else:
        _recover_and_say(container, found)


def _list_stores() -> list[str]:
    """Return the paths of this host's store and those of killed commands, but for missing ones."""
    return left_exports.list_stores(settings_file.load().store.path, left_exports.list_missing())


def _list_handed_over(stores: Sequence[str]) -> list[str]:
    """Return the IDs of containers whose memory killed commands were to take over."""
    found: list[str] = []
    for path in stores:
        with suppress(OciError):
            found += [each.container for each in handover.list_left(Store(path))]
    return found


def _pause_again(suspended: Sequence[Suspension]) -> None:
    """Have Podman show these as paused, and say of which it did not."""
    for each in suspended:
        with suppress(GpusnapError):
            if suspending.pause_again(each):
                shown = Names({each.container: each.name}).format_name(each.container)
                click.echo(f"{shown}  it is suspended, and marked as paused in Podman again")


def _say_nothing(
    container: str, stores: Sequence[str], *, known: bool, as_json: bool = False, is_done: bool = False
) -> None:
    """Say that nothing of a container was interrupted, and how it continues if only Podman can restore it.

    `known`: gpusnap has a record of it. `is_done`: something was recovered. Raises NotFound if there is no
    such container, nor an export of one, GpusnapError if Podman does not answer.
    """
    exported = in_podman.find_exported(container, stores)
    there: podman.Container | None = None
    try:
        with podman.Inspection(container, seconds=_PATIENCE) as asked:
            there = asked.container()
    except GpusnapError:
        if not (known or exported or targets.is_task(container)):
            raise
    stopped = _StoppedContainers((), {})
    if there is not None and there.status not in ("running", "paused"):
        every = _StoppedContainers.find(stores)
        stopped = _StoppedContainers(
            tuple(each for each in every.found if each.container.id == there.id), every.unknown
        )
    if as_json:
        print_json(recover_list.documents(recover_list.list_stopped(stopped.each_once), Names()))
        stopped.tell_unknown()
        return
    for each in exported:
        click.echo(each.left.said, err=True)
    stopped.tell()
    if there is not None and there.status == _CREATED:
        click.echo(
            f"{_NOTHING}; Podman lists {there.name} as created: if a killed Podman left it during a restore, "
            f"podman rm {there.name} removes it",
            err=True,
        )
    elif not (stopped.stores or exported or is_done):
        click.echo(_NOTHING, err=True)


def _list(found: Leftovers, asleep: Sequence[Suspension] | None, *, as_json: bool) -> None:
    """`asleep`: those that are suspended; None if one container alone is asked for."""
    unknown, open_ones = unknown_containers.list_unknown(found.restored)
    path = settings_file.load().store.path
    awake = [each for each in asleep or () if suspending.is_awake(each)]
    waits = recover_list.list_waiting(
        found.checkpoints,
        found.restores,
        unknown,
        found.suspensions,
        found.migrations.leaving,
        found.migrations.coming,
        awake,
        found.unnoticed,
        found.paused,
        found.due,
    )
    names = Names({each.container: each.name for each in found.suspensions})
    stopped, left, memory = _StoppedContainers((), {}), tuple[LeftExport, ...](), False
    stores = [path]
    missing = left_exports.list_missing() if asleep is not None else ()
    begun = left_exports.list_begun() if asleep is not None else ()
    if asleep is not None:
        stores = left_exports.list_stores(path, missing)
        stopped = _StoppedContainers.find(stores)
    if as_json:
        waits = (*waits, *recover_list.list_stopped(stopped.each_once))
        print_json(recover_list.documents(waits, names))
        stopped.tell_unknown()
    else:
        for each in waits:
            click.echo(recover_list.line(each, names))
        for line in open_ones:
            click.echo(line, err=True)
        if asleep is not None:
            left = _tell_exports(path, begun, missing)
            stopped.tell()
            memory = any([_tell_others(stores), _tell_memory(Store(path), stopped.found)])
    failures = _do_all(names, found.list_unreadable())
    if failures:
        raise failures[0]
    if not (waits or open_ones or left or stopped.stores or as_json):
        click.echo(_NO_CONTAINER if memory else _NOTHING, err=True)


def _tell_exports(
    path: str, begun: Sequence[LeftExport], missing: Sequence[LeftExport]
) -> tuple[LeftExport, ...]:
    """Say what Podman exported for commands that were killed, in their stores or elsewhere, and return it.

    `path`: of this host's store. `begun`, `missing`: what `left_exports` has listed before.
    """
    left = [*missing, *left_exports.list_left_beside(missing)]
    for store in left_exports.list_stores(path, missing):
        with suppress(GpusnapError):  # a store that cannot be read hides no other one
            left += left_exports.list_left(store)
    found = {each.archive for each in left}
    left += [each for each in begun if each.archive not in found]
    for each in left:
        click.echo(each.said, err=True)
    return tuple(left)


def _tell_memory(store: Store, stopped: Sequence[StoppedContainer]) -> bool:
    """Say how much memory without a name the store has that no container needs; whether any.

    `stopped`: containers of Podman's that need some.
    """
    said, needy = "", list[NeedyContainer](stopped)
    with suppress(OciError):
        if exists(store.path):
            try:
                needy += in_podman.list_exported(store)
            except GpusnapError as error:
                click.echo(error.sentence(), err=True)
            needed = in_podman.find_needed(store, needy)
            said = store_tables.explain_pages_only(listing(store), needed=needed)
    if said:
        click.echo(said, err=True)
    return bool(said)


def _tell_others(stores: Sequence[str]) -> bool:
    """Say what is left in these stores that only others can repair, or nobody; whether there is some.

    It is what other gpusnaps have there, such as those of other hosts, and the memory of checkpoints that a
    restart of this host cut off: no journal entry names it any more.
    """
    found: dict[str, str] = {}
    for path in stores:
        with suppress(OciError, GpusnapError):
            store = Store(path)
            handed_over, of_others = store.list_handed_over(), handover.list_of_others(store)
            layouts, unreadable = journal.list_layouts()
            for layout, why in store.list_precious(PRECIOUS).items():
                name = os.path.basename(layout)
                known = layout in layouts or unreadable or name in handed_over
                cut_off = is_of_checkpoint(why) and not known
                if cut_off or name in of_others or is_of_another(why) or is_of_another_host(why):
                    found[layout] = why
    for layout, why in found.items():
        click.echo(store_tables.describe_spared(Spared(layout, why)), err=True)
    return bool(found)


def _recover_and_say(container: str | None, found: Leftovers) -> None:
    """Recover all that was cut off, then say what runs without its Podman's knowledge.

    Raises the first failure when all is done.
    """
    names = Names({each.container: each.name for each in found.suspensions})
    places = _list_stores() if found.unnoticed else []
    actions: list[Action] = [
        *((each.container, partial(_recover_restore, each)) for each in found.restores),
        *((each.container, partial(_recover_checkpoint, each)) for each in found.checkpoints),
        *((each.container, partial(suspending.recover, each)) for each in found.suspensions),
        *found.migrations.list_actions(),
        *((each.id, partial(in_podman.note_end, each, places)) for each in found.unnoticed),
        *found.list_unreadable(),
        *((each.container, partial(due_commands.run, each)) for each in found.due),
    ]
    failures = _do_all(names, actions)
    restored_containers.sweep()
    up = (each for each in restored_containers.list_living() if container in (None, each.container))
    unknown, open_ones = unknown_containers.list_unknown(up)
    paused = [each for each in left_paused.list_paused() if container in (None, each.container)]
    for where, why in [(e.container, e.why) for e in unknown] + [(e.container, e.why) for e in paused]:
        click.echo(f"{names.format_name(where)}  {why}")
    for line in open_ones:
        click.echo(line, err=True)
    reservations.sweep()
    scratch_files.sweep_all()
    if container is None:
        recovery.sweep()
        due_commands.sweep()
        settings = settings_file.load()
        sweep_suspended(settings.store.path)
        chunk_cache.remove_stale(settings.memory)
        begun, missing = left_exports.list_begun(), left_exports.list_missing()
        stores = left_exports.list_stores(settings.store.path, missing)
        stored = _store_memory(stores, names, failures)
        left_exports.remove_empty(missing)
        left = _tell_exports(settings.store.path, begun, missing)
        stopped = _StoppedContainers.find(stores)
        if not failures:
            left_exports.forget(left, stopped.stores)
        stopped.tell()
        memory = any([_tell_others(stores), _tell_memory(Store(settings.store.path), stopped.found)])
        if not (actions or stored or unknown or paused or open_ones or left or stopped.stores or failures):
            click.echo(_NO_CONTAINER if memory else _NOTHING, err=True)
    else:
        _store_memory(_list_stores(), names, failures, container)
    if failures:
        raise failures[0]


def _store_memory(
    stores: Sequence[str], names: Names, failures: list[GpusnapError], container: str | None = None
) -> bool:
    """Keep memory in the stores that commands were to keep there, and were killed; whether there was some.

    `container`: the ID of the only container whose memory is kept; None for all. Adds to `failures` what
    fails.
    """
    done = False
    for place in stores:
        try:
            with convert_errors():
                for record in handover.commit_left(Store(place), container):
                    done = True
                    shown = names.format_name(record.container)
                    click.echo(f"{shown}  the memory of its checkpoint is in the store {place}")
        except GpusnapError as error:
            if failures:  # the first one is the command's own error
                click.echo(error.sentence(), err=True)
            failures.append(error)
    return done


def _end_unknown(container: str, up: Sequence[restore_record.Restore]) -> None:
    """End those of that ID that Podman does not know, or say that there is none. Raises GpusnapError."""
    done = [said for said in map(unknown_containers.end_container, up) if said is not None]
    for said in done:
        click.echo(f"{container}  {said}")
    if not done:
        _say_nothing(container, _list_stores(), known=True)


def _recover_restore(entry: restore_record.Restore) -> str:
    said = recover_restore.recover(entry.key, find_driver())
    if not said.startswith(recover_restore.RUNNING) or entry.podman:  # Podman is asked next
        return said
    # Whoever had it restored was told that this failed, and may take it for a container that does not run.
    ends = recover_restore.deletion(entry.command, entry.container)
    return f"{said}; if its engine does not list it as running, this stops it: {ends}"


def _recover_checkpoint(entry: journal.Entry) -> str:
    return recovery.recover(entry, needed_driver(), settings_file.load().memory)


def _do_all(names: Names, actions: Sequence[Action]) -> list[GpusnapError]:
    """Do all that can be done; return the failures. If there are several actions, they are also printed."""
    failures: list[GpusnapError] = []
    for container, action in actions:
        try:
            said = action()
            click.echo(f"{names.format_name(container)}  {said}")
        except GpusnapError as error:
            failures.append(error)
            if len(actions) > 1:
                click.echo(f"{names.format_name(container)}  {error.sentence()}", err=True)
    return failures
