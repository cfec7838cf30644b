"""JSON from elsewhere: parsed strictly, and converted back to JSON without loss."""

from __future__ import annotations

import json

from gpusnap.hooks.errors import HookError
from gpusnap.oci.base.json_text import parse_json

TYPE_CHECKING = False  # not from typing, because every container would have to wait for its import
if TYPE_CHECKING:
    from typing import Any


def parse(data: bytes, what: str) -> dict[str, Any]:
    """Parse the JSON object in `data`; `what` names it in the message.

    Raises HookError for anything that another parser could read differently, or that `text` could not write
    back: a duplicate name in an object, NaN, a number beyond a double.
    """
    try:
        document = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise HookError(f"{what} is not JSON: {str(error)[:200]}", code="GPS-908") from error
    if not isinstance(document, dict):
        raise HookError(f"{what} is not a JSON object", code="GPS-908")
    return document


def text(document: dict[str, Any]) -> bytes:
    """Return the document as JSON, with its names in their original order."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
