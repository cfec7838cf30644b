"""A registry's refusals as gpusnap's errors: a status and a JSON of errors.

    401, 403                 Unauthorized
    404                      NotInRegistry, unless the registry lacks a part of what is put there
    408, 429, 5xx but 501    worth another attempt
    any other                Rejected

The body is {"errors": [{"code", "message", "detail"}, …]} (distribution-spec v1.1, Error Codes). Its text may
come from anybody: what is shown of it is short, printable, and without the texts that Podman replaces.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from gpusnap.oci.base.errors import NotInRegistry, RegistryError, Rejected, Unauthorized
from gpusnap.oci.base.json_text import parse_json

BODY_LIMIT = 64 << 10
BLOB_LOST = "MANIFEST_BLOB_UNKNOWN"
"""What a registry says of a manifest if it lacks one of its blobs (distribution-spec, Error Codes)."""
_LONGEST = 200
_REWORDED = (
    ("no such file or directory", "it does not exist"),
    ("permission denied", "access is refused"),
    ("operation not permitted", "it is not allowed"),
    ("executable file not found", "a program is missing"),
)


def is_worth_retrying(status: int) -> bool:
    """Whether the same request may succeed the next time."""
    return status in (408, 429) or (status >= 500 and status != 501)


def make_refusal(status: int, body: bytes, what: str) -> RegistryError:
    """The error for a status; `what` says what failed: "the tags of HOST/NAME cannot be listed"."""
    code, message = _find_first_error(body)
    said = ": ".join(each for each in (code, message) if each) or f"status {status}"
    if status in (401, 403):
        return Unauthorized(f"{what}: access denied ({said}): log in as a user with access")
    if status == 404 and code != BLOB_LOST:
        return NotInRegistry(f"{what}: not found ({said})")
    return Rejected(f"{what}: {said}", status=status, says=code)


def printable(text: object, longest: int = _LONGEST) -> str:
    """Make a text from elsewhere printable."""
    found = "".join(each if each.isprintable() else " " for each in str(text)[: 4 * longest])
    found = " ".join(found.split())
    for words, ours in _REWORDED:
        found = re.sub(words, ours, found, flags=re.IGNORECASE)
    return found if len(found) <= longest else found[: longest - 1] + "…"


def parse_retry_after(text: str, date: str = "") -> float:
    """Return a Retry-After header in seconds; 0.0 if it is missing or invalid (RFC 9110, 10.2.3).

    date: the Date header of the same response. The registry's clock may be wrong, or this host's.
    """
    if re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII):
        return float(text)
    until = _parse_date(text)
    if until is None:
        return 0.0
    now = _parse_date(date)
    return max(0.0, until - (time.time() if now is None else now))


def _parse_date(text: str) -> float | None:
    """Return the time of a date in a header; None for an invalid one."""
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _find_first_error(body: bytes) -> tuple[str, str]:
    """Return code and message of the first error in a body."""
    try:
        found = parse_json(body[:BODY_LIMIT])
        first = found["errors"][0]
    except (ValueError, RecursionError, LookupError, TypeError):
        return "", ""
    if not isinstance(first, Mapping):
        return "", ""
    return printable(first.get("code") or "", 60), printable(first.get("message") or "")
