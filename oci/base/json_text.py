"""Reads JSON from any source in only one way: RFC 8259 does not define what a duplicate name means."""

from __future__ import annotations

import json
import math

TYPE_CHECKING = False  # not from typing, because every hook of a container would have to import it
if TYPE_CHECKING:
    from typing import Any


def parse_json(data: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises ValueError, also for a duplicate name in one object (two parsers would see two documents), for NaN
    and Infinity, for a number beyond a double, and if it is nested too deeply.
    """
    try:
        return json.loads(
            data, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_parse_float
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # In one pass: comparing each name with all others takes hours for some MiB of names.
        last = {name: at for at, (name, _) in enumerate(pairs)}
        twice = next(name for at, (name, _) in enumerate(pairs) if last[name] != at)
        raise ValueError(f"an object has the member {twice[:80]!r} twice")
    return found


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _parse_float(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word[:40]} is too large a number")
    return number
