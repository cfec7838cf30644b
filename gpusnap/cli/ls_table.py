"""How `gpusnap ls` prints: one row for each name, which is never cut or broken.

Columns that a terminal has no room for are left out. Where that is not enough, a name has a line of its own,
and the rest is below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console

from gpusnap.cli.tables import plain, say
from gpusnap.listing.ages import ago
from gpusnap.listing.filters import Line
from gpusnap.listing.templates import DIGITS
from gpusnap.runtime_shim.units import human

_MARKS = {"pages": "pages only", "other": "not gpusnap's", "damaged": "damaged", "image": "image"}
_COLUMNS: Mapping[str, Callable[[Line], str]] = {
    "name": lambda line: _name(line),
    "created": lambda line: ago(line.row.created),
    "container": lambda line: line.row.container or line.row.container_id[:DIGITS],
    "GPUs": lambda line: line.row.gpus.partition(" ")[0],
    "driver": lambda line: line.row.driver,
    "memory": lambda line: human(line.row.memory) if line.row.memory else "",
    "size": lambda line: human(line.row.size) if line.row.kind != "damaged" else "",
    "own": lambda line: human(line.row.own) if line.row.kind != "damaged" else "",
    "digest": lambda line: line.row.digest.partition(":")[2][:DIGITS],
}
_RIGHT = frozenset(("GPUs", "memory", "size", "own"))
# What is left out where there is no room, and the spaces between columns.
_LAYOUTS = (
    ((), 2),
    (("container",), 2),
    (("container", "own"), 2),
    (("container", "own", "GPUs"), 2),
    (("container", "own", "GPUs"), 1),
)
_GAP = 2
_INDENT = "  "


def rows(console: Console, found: Sequence[Line], *, without: Iterable[str] = ()) -> None:
    """The table. without: columns that say nothing here."""
    titles = [title for title in _COLUMNS if title not in without]
    cells = [{title: plain(_COLUMNS[title](line)).plain for title in titles} for line in found]
    for left_out, gap in _LAYOUTS:
        shown = [title for title in titles if title not in left_out]
        widths = _widths(shown, cells)
        if sum(widths.values()) + gap * (len(shown) - 1) <= console.width:
            for each in ({title: title for title in shown}, *cells):
                say(console, _line(shown, each, widths, gap))
            return
    rest = [title for title in shown if title != "name"]
    widths = _widths(rest, cells)
    say(console, "name")
    say(console, _INDENT + _line(rest, {title: title for title in rest}, widths, _GAP))
    for each in cells:
        say(console, each["name"])
        say(console, _INDENT + _line(rest, each, widths, _GAP))


def _line(titles: Sequence[str], cells: Mapping[str, str], widths: Mapping[str, int], gap: int) -> str:
    made = (
        cells[title].rjust(widths[title]) if title in _RIGHT else cells[title].ljust(widths[title])
        for title in titles
    )
    return (" " * gap).join(made).rstrip()


def _widths(titles: Sequence[str], cells: Sequence[Mapping[str, str]]) -> dict[str, int]:
    return {title: max(len(title), *(len(each[title]) for each in cells)) for title in titles}


def _name(line: Line) -> str:
    name = line.name or "(no name)"
    if line.row.kind in _MARKS:
        return f"{name} ({_MARKS[line.row.kind]})"
    if line.row.subject:
        return f"{name} (refers to {line.row.subject.partition(':')[2][:DIGITS]})"
    return name
