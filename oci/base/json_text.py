"""JSON from anywhere, read in one way only: RFC 8259 leaves open what a name that stands twice means."""

from __future__ import annotations

import json
import math

TYPE_CHECKING = False  # not typing's, whose import every hook of a container would pay for
if TYPE_CHECKING:
    from typing import Any


def parse_json(data: str | bytes | bytearray) -> Any:
    """The value that a JSON text holds.

    Raises ValueError, also for a name that stands twice in one object (two parsers would see two documents),
    for NaN and Infinity, for a number beyond a double, and where it is nested too deeply.
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
        # In one pass: to count each name among all takes hours for some MiB of names.
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
