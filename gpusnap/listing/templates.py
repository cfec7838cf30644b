"""`--format` of `gpusnap ls` and `gpusnap ps`: a line for each row, by a template as in Podman.

"{{.Name}} {{.Size}}" prints these fields; after "table " there is a heading, and tabs make columns. \\t and
\\n are a tab and a line break. A template contains only text and fields. Control characters in a field are
escaped: anybody may have written it, and it is one line here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

from gpusnap.listing.ages import format_age
from gpusnap.listing.filters import Line
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import UsageError, printable
from gpusnap.runtime_shim.base.units import human

_Row = TypeVar("_Row")

DIGITS = 12
TABLE = "table "
_FIELD = compile_later(r"\{\{\s*(.*?)\s*\}\}")
FIELDS: Mapping[str, Callable[[Line], str]] = {
    "Name": lambda line: line.name,
    "Digest": lambda line: line.row.digest,
    "ID": lambda line: line.row.digest.partition(":")[2][:DIGITS],
    "Created": lambda line: line.row.created,
    "CreatedSince": lambda line: format_age(line.row.created),
    "Container": lambda line: line.row.container,
    "ContainerID": lambda line: line.row.container_id,
    "GPUs": lambda line: line.row.gpus,
    "Driver": lambda line: line.row.driver,
    "Memory": lambda line: human(line.row.memory),
    "Processes": lambda line: str(line.row.processes),
    "Size": lambda line: human(line.row.size),
    "Own": lambda line: human(line.row.own),
    "Kind": lambda line: line.row.kind,
}


def template(text: str) -> Callable[[Sequence[Line]], list[str]]:
    """Return a function that makes the lines of `gpusnap ls` by a template. Raises UsageError."""
    return template_of(text, FIELDS)


def template_of(
    text: str, fields: Mapping[str, Callable[[_Row], str]]
) -> Callable[[Sequence[_Row]], list[str]]:
    """Return a function that makes lines of rows by a template of `fields`. Raises UsageError."""
    body = text.removeprefix(TABLE).replace("\\t", "\t").replace("\\n", "\n")
    example = " ".join(f"{{{{.{name}}}}}" for name in [*fields][:2])
    if not [_name(match[1], fields) for match in _FIELD.finditer(body)]:
        raise UsageError(
            f"--format {text[:80]!r} has no field",
            hint=f"write it as '{example}', with table in front for a heading, or json",
        )

    def made(found: Sequence[_Row]) -> list[str]:
        some = [_fill(body, {name: printable(get(line)) for name, get in fields.items()}) for line in found]
        heading = _fill(body, {name: name.upper() for name in fields})
        return _columns([heading, *some]) if text.startswith(TABLE) else some

    return made


def _fill(body: str, values: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: values[_name(match[1], values)], body)


def _columns(found: Sequence[str]) -> list[str]:
    """Return the lines with spaces instead of tabs, so that columns are aligned."""
    cells = [line.split("\t") for line in found]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in cells
    ]


def _name(word: str, fields: Mapping[str, object]) -> str:
    name = word.removeprefix(".")
    if not word.startswith(".") or name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        raise UsageError(
            f"--format has no field {{{{{word[:40]}}}}}",
            hint=(f"did you mean {{{{.{near[0]}}}}}? " if near else "")
            + f"the fields are {', '.join(fields)}",
        )
    return name
