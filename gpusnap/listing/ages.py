"""Ages for people."""

from __future__ import annotations

from datetime import UTC, datetime

from gpusnap.oci.store.tags import moment
from gpusnap.runtime_shim.base.errors import printable

# The number of seconds from which on each unit is used.
_UNITS = (
    (2 * 365 * 86400, 365 * 86400, "year"),
    (60 * 86400, 30 * 86400, "month"),
    (14 * 86400, 7 * 86400, "week"),
    (48 * 3600, 86400, "day"),
    (3600, 3600, "hour"),
    (60, 60, "minute"),
    (1, 1, "second"),
)


def format_age(created: str, now: datetime | None = None) -> str:
    """Return a time (RFC 3339) as an age such as "3 hours ago"; any other text is made printable."""
    made = moment(created)
    if made is None:
        return printable(created)
    seconds = ((now or datetime.now(UTC)) - made).total_seconds()
    if seconds < -60:
        return f"{made:%Y-%m-%d %H:%M} UTC"  # another host's clock is ahead
    for least, unit, name in _UNITS:
        if seconds >= least:
            count = int(seconds // unit)
            return f"{count} {name}{'s' * (count > 1)} ago"
    return "just now"
