"""gpusnap ls: the checkpoints in a store, or in a repository of a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import NotFound, convert_errors
from gpusnap.checkpoints import list as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.locator import InRegistry, InStore
from gpusnap.cli import name_rows, store_tables
from gpusnap.cli import tables as show
from gpusnap.cli.completion import complete_store
from gpusnap.cli.json_output import document, print_json
from gpusnap.cli.moved import blobs
from gpusnap.cli.options.registry import registry_options
from gpusnap.listing.ages import format_age
from gpusnap.listing.filters import Line, filter_lines, rows_of
from gpusnap.listing.templates import DIGITS, template
from gpusnap.oci.base.errors import NotARegistry, NotThere, OciError, Rejected
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, SettingsError, UsageError
from gpusnap.runtime_shim.base.log import NOTE
from gpusnap.runtime_shim.base.units import human

if TYPE_CHECKING:
    from rich.console import Console

    from gpusnap.listing.registry import RemoteListing

_LIMIT = 100
_MARKS = {"pages": "pages only", "other": "not gpusnap's", "damaged": "damaged", "image": "image"}
_COLUMNS: Mapping[str, Callable[[Line], str]] = {
    "name": lambda line: _describe_name(line),
    "created": lambda line: format_age(line.row.created),
    "container": lambda line: line.row.container or line.row.container_id[:DIGITS],
    "GPUs": lambda line: line.row.gpus.partition(" ")[0],
    "driver": lambda line: line.row.driver,
    "memory": lambda line: human(line.row.memory) if line.row.memory else "",
    "size": lambda line: human(line.row.size) if line.row.kind != "damaged" else "",
    "own": lambda line: human(line.row.own) if line.row.kind != "damaged" else "",
    "digest": lambda line: line.row.digest.partition(":")[2][:DIGITS],
}
# What is left out if there is no room, and the spaces between columns.
_LAYOUTS = (
    ((), 2),
    (("container",), 2),
    (("container", "own"), 2),
    (("container", "own", "GPUs"), 2),
    (("container", "own", "GPUs"), 1),
)


@click.command()
@click.argument("place", required=False, metavar="[PLACE]", shell_complete=complete_store)
@click.option(
    "-f",
    "--filter",
    "filters",
    multiple=True,
    metavar="KEY=VALUE",
    help="Show only matches: name, container, before, since, dangling, kind.",
)
@click.option(
    "--format",
    "form",
    metavar="TEMPLATE",
    help="json, or a template of fields such as '{{.Name}} {{.Size}}'.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only digests.")
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=_LIMIT,
    show_default=True,
    metavar="N",
    help="In a repository, inspect only the last N tags by name.",
)
@registry_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def ls(
    place: str | None,
    filters: tuple[str, ...],
    form: str | None,
    quiet: bool,
    limit: int,
    plain_http: bool,
    as_json: bool,
) -> None:
    """List the checkpoints in a store or in a registry.

    PLACE is oci:DIR; without it, this host's store. HOST/REPOSITORY lists the tags of a repository in a
    registry that are checkpoints, and NAME the checkpoints of that name in this host's store. There is a row
    for each name. "size" counts all blobs of a checkpoint, "own" those that nothing else in the store uses:
    `gpusnap rm --gc` would free that much. An entry marked "pages only" is the memory of a checkpoint whose
    records are in an archive of Podman. The referrers of a checkpoint, such as a signature, are pulled and
    pushed with it. An entry marked "may run on HOST" belongs to a container whose migration to that host is
    incomplete: `gpusnap recover` asks that host, and until then it is not restored here.

    Filters are name=PATTERN (with the tag or without: name=server, name='server:2026*'), container=PATTERN,
    before= and since= (a checkpoint, a time such as 2026-11-22, or an age such as 24h or 7d), dangling=true
    or false (without or with a name), kind= (checkpoint, pages, referrer, image, other, damaged). Several
    values of one key are alternatives; all keys must match.

    Fields for --format are Name, Digest, ID, Created, CreatedSince, Container, ContainerID, GPUs, Driver,
    Memory, Processes, Size, Own, Kind. With "table " in front, a heading is printed.

    As JSON: store, checkpoints (each with digest, names, created, kind, container, containerId, gpus, driver,
    memory, processes, size, own, subject, which is the digest that a referrer refers to, fault, migrating,
    which is the host that its container may run on), blobs, size. For a repository: repository, checkpoints,
    tags, and lookedAt, the number of tags that were inspected.
    """
    if as_json + quiet + (form is not None) > 1:
        raise click.UsageError("give only one of --json, --format and --quiet")
    if form == "json":
        form, as_json = None, True
    made = template(form) if form is not None else None
    where, name = _place(place), ""
    if isinstance(where, str):
        name = where
        filters, where = (*filters, f"name={name}"), InStore(_default_store(), "")
    found: kept.Listing | RemoteListing
    with convert_errors(), Progress() as progress:
        if isinstance(where, InRegistry):
            progress.stage(f"reading {where.reference.name}")
            found = _list_registry(where, limit=limit, plain_http=plain_http, progress=progress)
        else:
            progress.stage("reading the store")
            found = _listing(where, named=place is not None)
    lines = filter_lines(found.rows, filters)
    if isinstance(where, InStore) and name and not lines:
        _say_near(where.store, name)
    if as_json:
        value = document(found)
        rows = [document(row) for row in rows_of(lines)]
        del value["rows"]
        first = "store" if "store" in value else "repository"
        print_json({first: value.pop(first), "checkpoints": rows, **value})
    elif quiet:
        for digest in dict.fromkeys(line.row.digest for line in lines):
            click.echo(digest)
    elif made is not None:
        for text in made(lines):
            click.echo(text)
    else:
        _show(found, lines, filtered=bool(filters))


def _place(word: str | None) -> InStore | InRegistry | str:
    """Return the store, repository or name to be listed. Raises UsageError, NotFound, SettingsError."""
    if word is None:
        return InStore(_default_store(), "")
    place = locator.find(word) if word.startswith("oci:") else locator.registry_or_none(word)
    if place is None:
        with suppress(UsageError):
            return locator.parse_name_or_digest(word)
    if isinstance(place, InRegistry) and not place.reference.tag and not place.reference.digest:
        return place
    if isinstance(place, InStore) and not place.wanted:
        return place
    raise UsageError(
        f"{word[:120]!r} is neither a store nor a repository",
        hint="a store is named oci:DIR, a repository HOST/REPOSITORY; gpusnap inspect shows a "
        "single checkpoint",
        code="GPS-102",
    )


def _default_store() -> Store:
    """Return this host's store; errors in other settings are only reported. Raises SettingsError."""
    try:
        return locator.default_store()
    except SettingsError:
        found, wrong = settings_file.load_only("store.path")
        for error in wrong:
            click.echo(f"warning: {error.sentence()}", err=True)
        return Store(found.store.path)


def _list_registry(place: InRegistry, *, limit: int, plain_http: bool, progress: Progress) -> RemoteListing:
    from gpusnap.listing.registry import listing as remote_listing  # with HTTP and TLS, 50 ms

    try:
        return remote_listing(place, limit=limit, plain_http=plain_http, step=progress.at)
    except NotARegistry:
        raise
    except Rejected as error:
        raise GpusnapError(
            str(error),
            hint=f"name a known tag: gpusnap inspect {place.reference.name}:TAG",
            code=error.code,
        ) from error


def _listing(place: InStore, *, named: bool) -> kept.Listing:
    with suppress(NotFound):
        return kept.listing(locator.open_store(place.store))
    if named:
        locator.open_store(place.store)
    # This host's store comes to be with the first checkpoint.
    return kept.Listing(place.store.path, (), 0, 0)


def _say_near(store: Store, name: str) -> None:
    """Say on stderr that a store has nothing of a name, and which names are like it."""
    with suppress(OciError):  # what is wrong with the store was said
        try:
            store.find_exactly(name)
        except NotThere as error:
            click.echo(f"gpusnap: {NOTE}{error}", err=True)


def _show(found: kept.Listing | RemoteListing, lines: tuple[Line, ...], *, filtered: bool) -> None:
    console = show.output()
    where = found.store if isinstance(found, kept.Listing) else found.repository
    if lines:
        without = () if isinstance(found, kept.Listing) else ("own",)
        print_rows(console, lines, without=without)
    rows = rows_of(lines)
    for row in rows:
        if row.fault:
            show.say(console, store_tables.format_fault(row.digest, row.fault))
    some = f"{len(rows)} of {len(found.rows)}" if filtered and found.rows else str(len(rows) or "no")
    one = f"{some} checkpoint{'s' * (len(found.rows if filtered else rows) != 1)}"
    if not isinstance(found, kept.Listing):
        show.say(console, f"{one} in {where}, which has {found.tags} tag{'s' * (found.tags != 1)}")
        if found.looked_at < found.tags:
            show.say(console, f"only the last {found.looked_at} tags by name were inspected; see --limit")
    elif not found.rows:
        show.say(console, f"no checkpoints in {where}")
    else:
        show.say(console, f"{one}, {human(found.size)} in {blobs(found.blobs)}, in {where}")


def print_rows(console: Console, found: Sequence[Line], *, without: Iterable[str] = ()) -> None:
    """Print the table. without: columns that say nothing here."""
    titles = [title for title in _COLUMNS if title not in without]
    cells = [{title: _COLUMNS[title](line) for title in titles} for line in found]
    name_rows.print_rows(console, titles, cells, layouts=_LAYOUTS)


def _describe_name(line: Line) -> str:
    name = line.name or "(no name)"
    if line.row.fault.startswith(kept.UNREAD):
        return f"{name} (not readable)"
    if line.row.kind in _MARKS:
        return f"{name} ({_MARKS[line.row.kind]})"
    if line.row.migrating:
        return f"{name} (may run on {line.row.migrating})"
    if line.row.subject:
        return f"{name} (refers to {line.row.subject.partition(':')[2][:DIGITS]})"
    return name
