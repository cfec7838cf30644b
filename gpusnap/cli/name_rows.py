"""Rows for `gpusnap ls`, `history`, `prune` and `ps`, with a name each, which is never cut or broken.

Columns for which the terminal has no room are left out. If that is not enough, a name gets its own line, and
the rest is below it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from gpusnap.cli.tables import make_plain, say

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 2
_INDENT = "  "
_RIGHT = frozenset(("GPUs", "age", "memory", "new", "own", "pause", "size", "RAM", "store"))


def print_rows(
    console: Console,
    titles: Sequence[str],
    found: Sequence[Mapping[str, str]],
    *,
    layouts: Sequence[tuple[Collection[str], int]],
) -> None:
    """Print the table. One of the titles is "name".

    layouts: the columns to leave out and the spaces between columns; the first that fits is taken. If none
    does, the columns of the last one are printed below the names.
    """
    cells = [{title: make_plain(each[title]).plain for title in titles} for each in found]
    shown = list(titles)
    for left_out, gap in layouts:
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
