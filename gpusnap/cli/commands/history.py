"""`gpusnap history`: the checkpoints of one container over time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import click

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import NotFound, convert_errors
from gpusnap.checkpoints.labels import written_labels
from gpusnap.checkpoints.locator import add_place, default_store, in_store, open_store
from gpusnap.cli import name_rows, store_tables
from gpusnap.cli import tables as show
from gpusnap.cli.completion import complete_stored
from gpusnap.cli.json_output import document, print_json
from gpusnap.listing.ages import format_age
from gpusnap.retention.history import Moment
from gpusnap.retention.history import history as moments
from gpusnap.runtime_shim.base.errors import UsageError
from gpusnap.runtime_shim.base.units import human

# What is left out if there is no room, and the spaces between columns.
_LAYOUTS = (
    ((), 2),
    (("driver",), 2),
    (("driver", "GPUs"), 2),
    (("driver", "GPUs", "created"), 2),
)


@click.command()
@click.argument("name", metavar="NAME", shell_complete=complete_stored)
@click.option("--json", "as_json", is_flag=True, help="Print the checkpoints as JSON.")
def history(name: str, as_json: bool) -> None:
    """Show the checkpoints of a container over time, the newest last.

    NAME is the name of a container or of one of its checkpoints; in another store, oci:DIR:NAME. "new" counts
    the blobs that no earlier checkpoint of the container has: the disk space that this one added. "pause" is
    how long the processes were stopped or, if the checkpoint stopped the container, how long that took.

    As JSON: store, container, checkpoints (each with digest, names, created, age in seconds, containerId,
    size, new, pause in seconds or null, gpus, driver, labels, fault, migrating, which is the host that the
    container may run on).
    """
    place = in_store(name) if name.startswith("oci:") else None
    store, word = (place.store, place.wanted) if place is not None else (default_store(), name)
    if not word:
        raise UsageError(
            "no container is named", hint="write NAME, or oci:DIR:NAME; gpusnap ls lists the containers"
        )
    with convert_errors(), Progress() as progress:
        progress.stage("reading the store")
        found = moments(open_store(store), word)
    if not found:
        raise NotFound(
            f"{store.path} has no checkpoint of the container {word}",
            hint=f"{add_place('gpusnap ls', store.path)} lists the checkpoints and their containers",
            code="GPS-701",
        )
    now = datetime.now(UTC)
    if as_json:
        rows = [document(each) | {"age": _age(each, now)} for each in found]
        print_json({"store": store.path, "container": word, "checkpoints": rows})
        return
    _say(found, now)


def _say(found: Sequence[Moment], now: datetime) -> None:
    console = show.output()
    cells = [_cells(each, now) for each in found]
    titles = [title for title in cells[0] if title != "labels" or any(row["labels"] for row in cells)]
    name_rows.print_rows(console, titles, cells, layouts=_LAYOUTS)
    for each in found:
        if each.fault:
            show.say(console, store_tables.format_fault(each.digest, each.fault))
    new = human(sum(each.new for each in found))
    one = "1 checkpoint" if len(found) == 1 else f"{len(found)} checkpoints"
    show.say(console, f"{one}, {new} in all")


def _cells(each: Moment, now: datetime) -> dict[str, str]:
    """A row, by column."""
    return {
        "created": each.created[:16].replace("T", " "),
        "age": format_age(each.created, now) if each.created else "",
        "name": _name(each),
        "size": human(each.size),
        "new": human(each.new),
        "pause": f"{each.pause:.2f} s" if each.pause is not None else "",
        "GPUs": each.gpus.partition(" ")[0],
        "driver": each.driver.rpartition(" ")[2],
        "labels": written_labels(each.labels),
    }


def _name(each: Moment) -> str:
    name = ", ".join(each.names) or store_tables.shorten_digest(each.digest)
    return f"{name} (may run on {each.migrating})" if each.migrating else name


def _age(of: Moment, now: datetime) -> int | None:
    """Return seconds; None if it does not say when it was made."""
    with suppress(ValueError, TypeError):
        return round((now - datetime.fromisoformat(of.created)).total_seconds())
    return None
