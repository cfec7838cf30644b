"""The table of docs/settings.md, by `make docs` from the code.

A key's default and whether an annotation may set it come from `setting_keys.TABLE` and the dataclasses, what
it takes from the check itself, and what it means from the docstring below its attribute. The text around the
table is written by hand, in the document: only what lies between the two marks is replaced.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpusnap.runtime_shim import setting_keys, settings

__all__ = ["Described", "described", "main", "table", "written"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
BEGIN = "<!-- The table: made by `make docs` from runtime_shim/settings.py. -->"
END = "<!-- The end of the table. -->"

# Where a docs page, or a part of this one, has more.
_MORE: Mapping[str, str] = {
    "gpu-map": "[gpus.md](gpus.md)",
    "keep-names": "[gpus.md](gpus.md)",
    "hooks": "[gpus.md](gpus.md)",
    "nvidia.allow-nccl": "[NCCL](#nccl)",
    "memory.pages": "[below](#the-gpus-memory-beside-criu)",
    "memory.ceiling": "[below](#the-gpus-memory-beside-criu)",
    "memory.sync": "[below](#the-gpus-memory-beside-criu)",
    "memory.keep": "[below](#the-next-checkpoint-of-a-container)",
    "criu.manage-cgroups": "[below](#hosts-with-cgroup-v1-beside-v2)",
    "registry.timeout": "[registries](#registries)",
    "registry.minimum-speed": "[registries](#registries)",
    "store.path": "[the store](#the-store)",
    "store.pull-from": "[the store](#the-store)",
    "store.read-rate": "[the store](#the-store)",
}
_MORE_OF_A_SECTION: Mapping[str, str] = {"amd": "[amd.md](amd.md)"}


@dataclass(frozen=True, slots=True)
class Described:
    """One key: what the table says of it."""

    key: str
    default: str
    """As TOML has it."""
    takes: str
    """What a value must be, in the words of its check; the unit is among them."""
    annotation: bool
    meaning: str
    """Empty where the attribute has no docstring."""


def described() -> tuple[Described, ...]:
    """All keys, in the order of `setting_keys.TABLE`."""
    texts = dict(_docstrings())
    defaults = settings.Settings()
    found = []
    for name, key in setting_keys.TABLE.items():
        section, _, last = name.rpartition(".")
        part = getattr(defaults, section) if section else defaults
        attribute = last.replace("-", "_")
        meaning = texts.get((type(part).__name__, attribute), "")
        found.append(
            Described(
                name, _toml(key, getattr(part, attribute)), _takes(key), key.annotation, _more(name, meaning)
            )
        )
    return tuple(found)


def table() -> str:
    """The rows of docs/settings.md, with their head and without the marks."""
    rows = ["| key | default | annotation | takes | meaning |", "|---|---|---|---|---|"]
    for each in described():
        cells = (
            f"`{each.key}`",
            f"`{each.default}`",
            "yes" if each.annotation else "",
            each.takes,
            each.meaning,
        )
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(rows) + "\n"


def written(document: str) -> str:
    """The document with its table made anew. Raises ValueError where the marks are not there once each."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"{DOCUMENT.name} does not have the two marks of its table, once each")
    before, _, rest = document.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{rest.partition(END)[2]}"


def _docstrings() -> Iterator[tuple[tuple[str, str], str]]:
    """((class, attribute), docstring) of each attribute that has one, read from the source."""
    for node in ast.parse(inspect.getsource(settings)).body:
        if isinstance(node, ast.ClassDef):
            for here, after in zip(node.body, node.body[1:], strict=False):
                match here, after:
                    case (
                        ast.AnnAssign(target=ast.Name(id=attribute)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        yield (node.name, attribute), " ".join(text.split())


def _takes(key: setting_keys.Key) -> str:
    """The words with which the check turns down what is no value: the longest, which say the most."""
    said = []
    for value in (object(), 1, ""):
        try:
            key.check(value)
        except ValueError as error:
            said.append(str(error))
    return max(said, key=len)


def _toml(key: setting_keys.Key, value: Any) -> str:
    """A default as one writes it in the file: the first form that the key's check reads as that value."""
    forms: list[Any] = [value]
    if isinstance(value, tuple):
        forms = [list(value), ""]
    elif isinstance(value, int) and value and value % (1 << 20) == 0:
        forms = [f"{value >> 20}M", value]
    for form in forms:
        try:
            if key.check(form) == value:
                return json.dumps(form)
        except ValueError:
            continue
    raise ValueError(f"no TOML is known for {value!r}")


def _more(name: str, meaning: str) -> str:
    more = _MORE.get(name) or _MORE_OF_A_SECTION.get(name.partition(".")[0])
    return f"{meaning} See {more}." if more and meaning else meaning


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> int:
    """Write the table into the document."""
    DOCUMENT.write_text(written(DOCUMENT.read_text("utf-8")), "utf-8")
    print(DOCUMENT, file=sys.stderr)
    return 0
