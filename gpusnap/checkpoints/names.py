"""What checkpoints and containers are called in a store."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from datetime import UTC, datetime

from gpusnap.oci.base.errors import StoreError
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.store.index import check_name

_CONTAINER = compile_later(r"[A-Za-z0-9._-]+", re.ASCII)
_TIME = compile_later(
    r"20\d\d-?(?:0[1-9]|1[0-2])-?(?:0[1-9]|[12]\d|3[01])(?:[-_.T]?[0-2]\d[-.]?[0-5]\d(?:[-.]?[0-5]\d)?Z?)?",
    re.ASCII,
)
_LONGEST = 200


def store_name(of: Reference) -> str:
    """What a store calls something that is pushed to a reference, or comes from there."""
    try:
        return check_name(str(of))
    except StoreError:  # names of stores are narrower: no brackets, no __
        plain = re.sub(r"[^A-Za-z0-9]*([^A-Za-z0-9])[^A-Za-z0-9]*", _replace_match, str(of)).strip("-._:@/+")
        return check_name(plain)


def _replace_match(match: re.Match[str]) -> str:
    return match[1] if match[1] in "-._:@/+" else "-"


def dated_name(container: str, container_id: str, when: datetime) -> str:
    """What a checkpoint is called where nobody says so: CONTAINER:UTC time. Raises StoreError."""
    return check_name(f"{container_name(container, container_id)}:{when.astimezone(UTC):%Y%m%d-%H%M%S}")


def is_time(tag: str) -> bool:
    """Whether a tag is a date or a time, as `dated_name` or date(1) with +%F or +%Y%m%d-%H%M writes it."""
    return _TIME.fullmatch(tag) is not None


def container_name(container: str, container_id: str) -> str:
    """What a store calls a container: its name, or its ID without one.

    A name that no store takes, such as my__app, has one like it, with a digest: my_app is another container.
    """
    with suppress(StoreError):
        if _CONTAINER.fullmatch(container):
            check_name(f"{container}:0")
            return container
    plain = re.sub(r"[^A-Za-z0-9._-]|(?<=[._-])[._-]+", "", container)[:_LONGEST].strip("._-")
    if not plain:
        return container_id[:12]
    return f"{plain}-{hashlib.sha256(container.encode(errors='replace')).hexdigest()[:6]}"
