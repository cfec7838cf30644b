"""The JSON Schemas of the hooks' input and output: config, state and gpus (.schema.json, beside this)."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from gpusnap.hooks.errors import HookError


def check(document: dict[str, Any], name: str, what: str) -> None:
    """Raise HookError if `document` does not follow NAME.schema.json; `what` names it in the message."""
    # Imported here: it takes 0.1 s, and a container without a GPU must not wait for it.
    import jsonschema

    text = resources.files("gpusnap.hooks").joinpath(f"{name}.schema.json").read_text("utf-8")
    error = next(iter(jsonschema.Draft202012Validator(json.loads(text)).iter_errors(document)), None)
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "the top level"
        raise HookError(
            f"{what} does not follow the specification: at {place}, {error.message[:200]}", code="GPS-908"
        )
