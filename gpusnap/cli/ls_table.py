"""The columns of `gpusnap ls`: one row for each name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpusnap.cli import name_rows
from gpusnap.listing.ages import format_age
from gpusnap.listing.filters import Line
from gpusnap.listing.templates import DIGITS
from gpusnap.runtime_shim.units import human

_MARKS = {"pages": "pages only", "other": "not gpusnap's", "damaged": "damaged", "image": "image"}
_COLUMNS: Mapping[str, Callable[[Line], str]] = {
    "name": lambda line: _name(line),
    "created": lambda line: format_age(line.row.created),
    "container": lambda line: line.row.container or line.row.container_id[:DIGITS],
    "GPUs": lambda line: line.row.gpus.partition(" ")[0],
    "driver": lambda line: line.row.driver,
    "memory": lambda line: human(line.row.memory) if line.row.memory else "",
    "size": lambda line: human(line.row.size) if line.row.kind != "damaged" else "",
    "own": lambda line: human(line.row.own) if line.row.kind != "damaged" else "",
    "digest": lambda line: line.row.digest.partition(":")[2][:DIGITS],
}
# What is left out where there is no room, and the spaces between columns.
_LAYOUTS = (
    ((), 2),
    (("container",), 2),
    (("container", "own"), 2),
    (("container", "own", "GPUs"), 2),
    (("container", "own", "GPUs"), 1),
)

if TYPE_CHECKING:
    from rich.console import Console


def print_rows(console: Console, found: Sequence[Line], *, without: Iterable[str] = ()) -> None:
    """The table. without: columns that say nothing here."""
    titles = [title for title in _COLUMNS if title not in without]
    cells = [{title: _COLUMNS[title](line) for title in titles} for line in found]
    name_rows.print_rows(console, titles, cells, layouts=_LAYOUTS)


def _name(line: Line) -> str:
    name = line.name or "(no name)"
    if line.row.kind in _MARKS:
        return f"{name} ({_MARKS[line.row.kind]})"
    if line.row.migrating:
        return f"{name} (may run on {line.row.migrating})"
    if line.row.subject:
        return f"{name} (refers to {line.row.subject.partition(':')[2][:DIGITS]})"
    return name
