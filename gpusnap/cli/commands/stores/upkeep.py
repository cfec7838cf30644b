"""The commands that check stores and put them in order: verify, rm, gc, tag."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import click

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import Damaged, convert_errors
from gpusnap.checkpoints import migrations
from gpusnap.checkpoints.damage import VerifyResult
from gpusnap.checkpoints.formats.annotations import CONTAINER_ID, CREATED
from gpusnap.checkpoints.list import listing
from gpusnap.checkpoints.locator import (
    InStore,
    add_place,
    default_store,
    format_place,
    has_layout,
    in_store,
    open_store,
    parse_name,
)
from gpusnap.cli import store_tables
from gpusnap.cli import tables as show
from gpusnap.cli.completion import complete_checkpoint, complete_store, complete_stored
from gpusnap.cli.json_output import document, print_json
from gpusnap.cli.options.quiet import quiet
from gpusnap.cli.options.registry import registry_options
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import NotThere, OciError
from gpusnap.oci.chunks import artifact
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.store.gc import Collected
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import Entry, format_names
from gpusnap.operations.restoring.in_podman import (
    NeedyContainer,
    check_removal,
    find_needed,
    list_exported,
    list_restorable,
)
from gpusnap.operations.verify import verify_all, verify_one
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError

_as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.command()
@click.argument("what", nargs=-1, metavar="[WHAT]...", shell_complete=complete_checkpoint)
@click.option(
    "--all", "everything", is_flag=True, help="Check every checkpoint in this host's store, or in oci:DIR."
)
@click.option("--deep", is_flag=True, help="Read all blobs of a checkpoint in a registry.")
@registry_options
@quiet
@_as_json
def verify(what: tuple[str, ...], everything: bool, deep: bool, plain_http: bool, as_json: bool) -> None:
    """Check that checkpoints are complete and undamaged, and list every damaged blob.

    A checkpoint in a store is read completely, and compared with its digests. In an archive, its end, the
    manifest, CRIU's images and the chunks are checked; the other files have no digests. A registry is asked
    whether it has every blob; --deep reads them. The exit code is 4 if something is damaged.

    As JSON: a list of what, digest, blobs, size, read (false where content was not read), damaged (digest,
    mediaType, size, what, belongsTo), note.
    """
    if not everything and not what:
        raise click.UsageError("give at least one WHAT, or --all")
    if everything and not all(word.startswith("oci:") for word in what):
        raise click.UsageError("--all checks a whole store: oci:DIR, or this host's without a WHAT")
    found: list[VerifyResult] = []
    failures: list[GpusnapError] = []
    with Progress() as progress:
        for word in what or ("",):
            progress.stage(f"reading {word or 'the store'}")
            try:
                if everything:
                    found.append(verify_all(find_store(word or None), progress.at))
                else:
                    found.append(verify_one(word, deep=deep, plain_http=plain_http, progress=progress.at))
            except GpusnapError as error:
                failures.append(error)
    if as_json:
        print_json([document(each) for each in found])
    else:
        for each in found:
            store_tables.print_verified(show.output(), each)
    damaged = [each for each in found if each.damaged]
    if damaged:
        blobs = sum(len(each.damaged) for each in damaged)
        _tell(failures)
        raise Damaged(
            f"{blobs} damaged in {', '.join(each.what for each in damaged)}",
            hint="use another copy of it, for example with gpusnap pull, and remove this one",
        )
    _raise_first(failures)


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="WHAT...", shell_complete=complete_stored)
@click.option(
    "--all", "everything", is_flag=True, help="Remove all checkpoints with a name, if no tag is given."
)
@click.option("--gc", "at_once", is_flag=True, help="Free the disk space immediately, as `gpusnap gc` does.")
@click.option("--force", is_flag=True, help="Also remove what a container may need to continue.")
@_as_json
def rm(what: tuple[str, ...], everything: bool, at_once: bool, force: bool, as_json: bool) -> None:
    """Remove checkpoints from a store.

    A name removes that name, and the checkpoint with its last name; a digest removes the checkpoint with all
    its names. A name without a tag, such as server, removes server:TAG if there is only one; if there are
    several, nothing is removed, unless --all is given. The referrers of a checkpoint, such as a signature,
    are removed with it. The blobs stay on disk until `gpusnap gc`. After that, Podman cannot restore the
    stopped container of that checkpoint either. The only memory of a stopped container, or of an export that
    a killed command left, without Podman's records ("pages only"), is removed only with --force; so is a
    checkpoint of a container that is being migrated, or that may run on another host (see `gpusnap migrate`).

    As JSON: removed (what, store, digest, names, and left, the names that it still has), collected (null, or
    a list of the output of `gpusnap gc` without neededBy).
    """
    removed: list[_Removed] = []
    failures: list[GpusnapError] = []
    stores: dict[str, Store] = {}
    for word in what:
        try:
            removed.extend(_remove_each(word, stores, everything=everything, force=force))
        except GpusnapError as error:
            failures.append(error)
    collected = [(store, collect_store(store, dry_run=False)) for store in stores.values()] if at_once else []
    if as_json:
        gone = [collected_document(store, each, dry_run=False) for store, each in collected]
        print_json({"removed": [document(each) for each in removed], "collected": gone if at_once else None})
    else:
        _say_removed(removed, collected)
    _raise_first(failures)


@click.command()
@click.argument("store", required=False, metavar="[STORE]", shell_complete=complete_store)
@click.option("--dry-run", is_flag=True, help="Print what would be removed without removing it.")
@_as_json
def gc(store: str | None, dry_run: bool, as_json: bool) -> None:
    """Free the disk space in a store that no checkpoint needs any more.

    STORE is oci:DIR; without it, this host's store. It removes blobs that no checkpoint uses, and data that
    killed writers left. Data that another command is reading or writing, or that `gpusnap recover` needs, is
    not removed. Several hosts may share a store: suspended memory of another one is not removed either, and a
    line says whose it is. If the store is damaged, nothing is removed. Memory without a name ("pages only")
    stays, because the records of its checkpoint may be in Podman's storage or in an archive. For each stopped
    container that Podman can restore from it, also from an export that a killed command left, a line has the
    command; the last line says how much no such container needs.

    As JSON: store, dryRun, blobs, size, stagings, spared (path, why), liveBlobs, liveSize, neededBy (the
    stopped containers that need memory without a name: container, name, command; null if Podman does not
    answer, or if an export cannot be read).
    """
    place = find_store(store)
    is_new = store is None and not has_layout(place)
    found = Collected(0, 0, (), (), 0, 0) if is_new else collect_store(place, dry_run=dry_run)
    needy: list[NeedyContainer] = []
    unknown: list[str] = []
    for look in (list_restorable, list_exported):
        try:
            needy += look(place)
        except GpusnapError as error:
            said = f"cannot determine which memory without a name containers need: {error.sentence()}"
            unknown.append(said)
    if as_json:
        needed_by = None if unknown else [_describe_need(each) for each in needy]
        print_json({**collected_document(place, found, dry_run=dry_run), "neededBy": needed_by})
        for said in unknown:
            click.echo(said, err=True)
        return
    console = show.output()
    if is_new:
        show.say(console, f"nothing to remove: {place.path} has no checkpoint yet")
        return
    store_tables.print_collected(console, place.path, found, dry_run=dry_run)
    for said in unknown:
        show.say(console, said)
    for each in needy:
        command = each.make_command()
        show.say(console, f"{each.name} needs memory without a name; to continue {each.name}: {command}")
    with suppress(OciError):
        if said := store_tables.explain_pages_only(listing(place), needed=find_needed(place, needy)):
            show.say(console, said)


@click.command()
@click.argument("what", metavar="WHAT", shell_complete=complete_stored)
@click.argument("name", metavar="NAME")
@_as_json
def tag(what: str, name: str, as_json: bool) -> None:
    """Give a checkpoint in a store another name.

    WHAT keeps the names that it has; without a tag, such as server, it is the newest checkpoint of that name.
    If another checkpoint in the store has NAME, it loses the name and stays under its digest.

    As JSON: store, digest, name, movedFrom (the digest that had the name before; empty for a new name).
    """
    place = _parse_named(what)
    if name.startswith("oci:"):
        raise UsageError(
            f"{name[:120]} is in a store, but NAME is a name in the store of WHAT",
            hint=f"gpusnap copy {shlex.quote(what)} {shlex.quote(name)} copies it",
        )
    parse_name(name)
    store = open_store(place.store, write=True)
    entry = place.entry()
    with convert_errors():
        before = [each.descriptor.digest for each in store.entries() if each.name == name]
        store.tag(entry.descriptor.digest, name)
    digest, moved = entry.descriptor.digest, before[0] if before else ""
    moved = "" if moved == digest else moved
    if as_json:
        print_json({"store": store.path, "digest": digest, "name": name, "movedFrom": moved})
        return
    was = f"; previously, {store_tables.shorten_digest(moved)} had this name" if moved else ""
    show.say(show.output(), f"{name} names {store_tables.shorten_digest(digest)}{was}")


@dataclass(frozen=True, slots=True)
class _Removed:
    """What was taken out of a store's index."""

    what: str
    store: str
    digest: str
    names: tuple[str, ...]
    left: tuple[str, ...]
    """The names that the checkpoint still has."""


def find_store(word: str | None) -> Store:
    """Return the store that a word names, or this host's. Raises UsageError, NotFound."""
    if word is None:
        return default_store()
    place = in_store(word) if word.startswith("oci:") else None
    if place is None or place.wanted:
        raise UsageError(f"{word[:120]!r} is not a store", hint="a store is named oci:DIR", code="GPS-102")
    return place.store


def _parse_named(word: str) -> InStore:
    """Something in a store, by its name or digest. Raises UsageError, NotFound."""
    place = in_store(word)
    if not place.wanted:
        raise UsageError(
            f"{word} is a store", hint=f"name a checkpoint in it: {word.rstrip(':')}:NAME", code="GPS-102"
        )
    return place


def _remove_each(word: str, stores: dict[str, Store], *, everything: bool, force: bool) -> Iterator[_Removed]:
    place = _parse_named(word)
    store = open_store(place.store, write=True)
    for wanted in _to_remove(store, place.wanted, everything=everything):
        with convert_errors():
            digest = store.find_exactly(wanted).descriptor.digest
            checked = [each for each in store.entries() if each.descriptor.digest == digest]
            keeps_name = len(checked) > 1 and wanted in {each.name for each in checked}
            if checked and not keeps_name and not force:
                check_removal(store, checked[0].descriptor)
                _check_migrations(store, checked[0].descriptor)
            names = store.remove(wanted, checked)
            entries = store.entries()
            left = tuple(each.name for each in entries if each.descriptor.digest == digest)
            if not left:
                store.remove_referrers(digest)
        stores[store.path] = store
        yield _Removed(word, store.path, digest, names, left)


def _check_migrations(store: Store, root: Descriptor) -> None:
    """Refuse to remove what may be needed to continue a container here, if it does not run on another host.

    Raises GpusnapError, LayoutError.
    """
    notes: Mapping[str, str] = {}
    with suppress(OciError):  # a damaged one, or another tool's
        notes = artifact.read(root, store.read).annotations
    try:
        migrations.check_last(notes.get(CONTAINER_ID, ""), notes.get(CREATED, ""))
        migrations.check(root.digest)
    except GpusnapError as error:
        error.add_hint("gpusnap rm --force removes the checkpoint for good")
        raise


def _to_remove(store: Store, wanted: str, *, everything: bool) -> tuple[str, ...]:
    """Return the names, or the digest, that a word stands for; never one of several that it may stand for.

    Raises NotFound, GpusnapError.
    """
    exact: Entry | None = None
    with convert_errors():
        tags = tuple(dict.fromkeys(each.name for each in store.list_tagged(wanted)))
        try:
            exact = store.find_exactly(wanted)
        except NotThere:
            if not tags:
                raise
        if exact is not None and exact.name != wanted:
            store.find(wanted)  # refuses a name that is the beginning of a digest, too
            return (wanted,)
    if everything:
        return (*([wanted] if exact is not None else []), *tags)
    if exact is not None:
        return (wanted,)
    if len(tags) > 1:
        raise UsageError(
            f"{wanted} matches {len(tags)} checkpoints in {store.path}: {format_names(tags)}",
            hint="name the one to remove, or remove them all with gpusnap rm --all "
            f"{format_place(store.path, wanted)}",
        )
    return tags


def _say_removed(removed: Sequence[_Removed], collected: Sequence[tuple[Store, Collected]]) -> None:
    console = show.output()
    for each in removed:
        names = ", ".join(each.names) or "(no name)"
        show.say(console, f"removed {names}, {store_tables.shorten_digest(each.digest)}, from {each.store}")
    for store, found in collected:
        store_tables.print_collected(console, store.path, found, dry_run=False)
    for each in removed:
        if each.left:
            left = ", ".join(name or "(no name)" for name in each.left)
            show.say(console, f"{store_tables.shorten_digest(each.digest)} stays, as {left}")
    if not collected:
        for path in dict.fromkeys(each.store for each in removed if not each.left):
            show.say(console, f"{add_place('gpusnap gc', path)} frees the space that it used")


def collect_store(store: Store, *, dry_run: bool) -> Collected:
    with convert_errors(), Progress() as progress:
        progress.stage("looking for unused data")
        return open_store(store, write=True).collect(dry_run=dry_run)


def collected_document(store: Store, found: Collected, *, dry_run: bool) -> dict[str, object]:
    return {"store": store.path, "dryRun": dry_run, **document(found)}


def _describe_need(found: NeedyContainer) -> dict[str, str]:
    return {"container": found.id, "name": found.name, "command": found.make_command()}


def _tell(failures: Sequence[GpusnapError]) -> None:
    for error in failures:
        click.echo(f"gpusnap: {error.sentence()}", err=True)


def _raise_first(failures: Sequence[GpusnapError]) -> None:
    """Raise the first failure; the others are told."""
    if failures:
        _tell(failures[1:])
        raise failures[0]
