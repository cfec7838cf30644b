"""JSON from elsewhere: read strictly, and turned back into JSON without loss."""

from __future__ import annotations

import json
import math

from gpusnap.hooks.errors import HookError

TYPE_CHECKING = False  # not typing's, whose import every container would pay for
if TYPE_CHECKING:
    from typing import Any

__all__ = ["parse", "text"]


def parse(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`; `what` names it in the message.

    Raises HookError for anything that another parser could read differently, or that `text` could not give
    back: a name that stands twice in an object, NaN, a number beyond a double.
    """
    try:
        document = json.loads(
            data.decode("utf-8"), parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_object
        )
    except (ValueError, RecursionError) as error:
        raise HookError(f"{what} is not JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict):
        raise HookError(f"{what} is not a JSON object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def text(document: dict[str, Any]) -> bytes:
    """The document as JSON, its names in the order in which they came."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
