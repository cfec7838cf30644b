"""Names of checkpoints and containers in a store."""

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
    """Return the name in a store for a checkpoint that is pushed to, or pulled from, a reference."""
    try:
        return check_name(str(of))
    except StoreError:  # names in stores are more restricted: no brackets, no __
        plain = re.sub(r"[^A-Za-z0-9]*([^A-Za-z0-9])[^A-Za-z0-9]*", _replace_match, str(of)).strip("-._:@/+")
        return check_name(plain)


def _replace_match(match: re.Match[str]) -> str:
    return match[1] if match[1] in "-._:@/+" else "-"


def dated_name(container: str, container_id: str, when: datetime) -> str:
    """Return the default name of a checkpoint: CONTAINER:UTC time. Raises StoreError."""
    return check_name(f"{container_name(container, container_id)}:{when.astimezone(UTC):%Y%m%d-%H%M%S}")


def is_time(tag: str) -> bool:
    """Return whether a tag is a date or a time of `dated_name` or of date(1) with +%F or +%Y%m%d-%H%M."""
    return _TIME.fullmatch(tag) is not None


def container_name(container: str, container_id: str) -> str:
    """Return a container's name in a store: its own name, or its ID if it has none.

    A name that no store accepts, such as my__app, is changed and gets a digest: my_app is another container.
    """
    with suppress(StoreError):
        if _CONTAINER.fullmatch(container):
            check_name(f"{container}:0")
            return container
    plain = re.sub(r"[^A-Za-z0-9._-]|(?<=[._-])[._-]+", "", container)[:_LONGEST].strip("._-")
    if not plain:
        return container_id[:12]
    return f"{plain}-{hashlib.sha256(container.encode(errors='replace')).hexdigest()[:6]}"
