"""JSON from elsewhere: read strictly, and turned back into JSON without loss."""

from __future__ import annotations

import json

from gpusnap.hooks.errors import HookError
from gpusnap.oci.base.json_text import parse_json

TYPE_CHECKING = False  # not typing's, whose import every container would pay for
if TYPE_CHECKING:
    from typing import Any


def parse(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`; `what` names it in the message.

    Raises HookError for anything that another parser could read differently, or that `text` could not give
    back: a name that stands twice in an object, NaN, a number beyond a double.
    """
    try:
        document = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise HookError(f"{what} is not JSON: {str(error)[:200]}", code="GPS-908") from error
    if not isinstance(document, dict):
        raise HookError(f"{what} is not a JSON object", code="GPS-908")
    return document


def text(document: dict[str, Any]) -> bytes:
    """The document as JSON, its names in the order in which they came."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
