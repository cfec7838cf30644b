"""What a hook reads: files of unknown type and JSON from elsewhere, checked before anything believes it.

The schemas of the input and the output are config, state and gpus (.schema.json, beside this).
"""

from __future__ import annotations

import os
import stat

from gpusnap.runtime_shim.base.errors import GpusnapError, reason

# Of `json` and of `typing`, too: a container without a GPU does not wait for what it does not need.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class HookError(GpusnapError):
    """The input of a hook is invalid, or its record cannot be written.

    gpusnap.hooks.main turns it into a line on stderr; no container fails.
    """


def read_file(path: str, limit: int, *, directory: int | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes, without waiting.

    `directory`: a descriptor that `path` is relative to. Raises HookError for anything else there;
    FileNotFoundError passes through.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with os.fdopen(os.open(path, flags, dir_fd=directory), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise HookError(f"{path} is not a regular file", code="GPS-908")
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        raise HookError(f"{path} cannot be read: {said}", code="GPS-908") from error
    if len(data) > limit:
        raise HookError(f"{path} is larger than {limit >> 10} KiB", code="GPS-908")
    return data


def parse(data: bytes, what: str) -> dict[str, Any]:
    """Parse the JSON object in `data`; `what` names it in the message.

    Raises HookError for anything that another parser could read differently, or that `encode` could not write
    back: a duplicate name in an object, NaN, a number beyond a double.
    """
    from gpusnap.oci.base.json_text import parse_json

    try:
        document = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise HookError(f"{what} is not JSON: {str(error)[:200]}", code="GPS-908") from error
    if not isinstance(document, dict):
        raise HookError(f"{what} is not a JSON object", code="GPS-908")
    return document


def encode(document: dict[str, Any]) -> bytes:
    """Return the document as JSON, with its names in their original order."""
    import json

    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def check_schema(document: dict[str, Any], name: str, what: str) -> None:
    """Raise HookError if `document` does not follow NAME.schema.json; `what` names it in the message."""
    import json
    from importlib import resources

    # It takes 0.1 s.
    import jsonschema

    text = resources.files("gpusnap.hooks").joinpath(f"{name}.schema.json").read_text("utf-8")
    error = next(iter(jsonschema.Draft202012Validator(json.loads(text)).iter_errors(document)), None)
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "the top level"
        raise HookError(
            f"{what} does not follow the specification: at {place}, {error.message[:200]}", code="GPS-908"
        )
