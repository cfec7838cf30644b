"""Reads the text of a CDI file as plain values: mappings, lists, strings, and the other types of JSON.

YAML is read from PyYAML's events, as of YAML 1.1, and only as far as a CDI file needs it. There may be no
alias, no tag, no second document, and no duplicate field. Nesting and size are limited, so a small file stays
small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpusnap.oci.base.patterns import compile_later

_DEPTH = 32
_NODES = 500_000
_NULL = ("", "~", "null", "Null", "NULL")
# YAML 1.1's, as CDI's library reads them: file modes are written 0666.
_WHOLE = compile_later(r"(?P<octal>0[0-7]{1,22})|0o[0-7]{1,22}|0x[0-9A-Fa-f]{1,16}|0|[1-9][0-9]{0,19}")


class Unquoted(str):
    """A YAML scalar without quotes: the field decides what it means."""

    __slots__ = ()

    def parse_whole(self) -> int | None:
        """Return the whole number that it may mean; None if it is none."""
        found = _WHOLE.fullmatch(self)
        return int(self, 8 if found["octal"] else 0) if found else None


def from_yaml(text: str) -> Any:
    """Return the value of a YAML text: mappings, lists, None, strings, and `Unquoted` ones.

    Raises ValueError, and ImportError if PyYAML is missing.
    """
    import yaml

    try:
        # Events, not yaml.load, which expands aliases, and whose C stack overflows if the nesting is too
        # deep.
        return _Document(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))).content()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def make_printable(value: object) -> str:
    """Return the content of the file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}…"


class _Document:
    """Plain values from PyYAML's events: no alias, no tag, no key twice."""

    def __init__(self, events: Iterator[Any]) -> None:
        self.events = events
        self.line = 0
        self.left = _NODES

    def content(self) -> Any:
        self._read_next()  # the stream's start
        if self._read_next()[0] == "StreamEnd":
            raise ValueError("is empty")
        content = self._node(*self._read_next(), depth=0)
        self._read_next()  # the document's end
        if self._read_next()[0] != "StreamEnd":
            raise self._make_error("contains a second document")
        return content

    def _read_next(self) -> tuple[str, Any]:
        event = next(self.events)
        self.line = event.start_mark.line + 1
        self.left -= 1
        if not self.left:
            raise self._make_error(f"contains more than {_NODES} nodes")
        return type(event).__name__.removesuffix("Event"), event

    def _make_error(self, what: str) -> ValueError:
        return ValueError(f"line {self.line}: {what}")

    def _node(self, kind: str, event: Any, *, depth: int) -> Any:
        if kind == "Alias":
            raise self._make_error("aliases are not allowed in a CDI file")
        if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise self._make_error(f"the tag {make_printable(event.tag)} is not allowed in a CDI file")
        if kind == "Scalar":
            plain = event.tag is None and event.implicit[0]
            return (None if event.value in _NULL else Unquoted(event.value)) if plain else event.value
        if depth == _DEPTH:
            raise self._make_error("nested too deeply")
        return self._items(depth + 1) if kind == "SequenceStart" else self._fields(depth + 1)

    def _items(self, depth: int) -> list[Any]:
        found = []
        while (entry := self._read_next())[0] != "SequenceEnd":
            found.append(self._node(*entry, depth=depth))
        return found

    def _fields(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while (entry := self._read_next())[0] != "MappingEnd":
            key = self._node(*entry, depth=depth)
            if not isinstance(key, str):
                raise self._make_error("a field's name is not a string")
            if key in found:
                raise self._make_error(f"the field {make_printable(key)} is listed twice")
            found[str(key)] = self._node(*self._read_next(), depth=depth)
        return found
