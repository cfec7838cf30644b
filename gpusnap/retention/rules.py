"""Rules for keeping checkpoints, as in restic's `forget` and borg's `prune`. Times are UTC.

Each rule separately selects what it keeps; checkpoints that no rule keeps are removed. Of the hours (days,
ISO weeks, months, years) that have checkpoints, the last N count, and the newest checkpoint of each is kept.
Applied again to the remaining checkpoints, the rules keep all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.patterns import compile_later

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = compile_later(r"(?:[0-9]{1,6}[smhdw])+", re.ASCII)
_LONGEST = timedelta(days=36500)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that is subject to rules."""

    digest: str
    created: datetime
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How many checkpoints each rule keeps; 0: the rule is not set."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    within: timedelta = timedelta()
    """Keep those that are at most so much older than the newest one."""
    labels: tuple[tuple[str, str | None], ...] = ()
    """Keep those that have one of these, with this value or with any (None)."""

    def is_empty(self) -> bool:
        """Return whether no rule keeps anything."""
        return self == Rules()


# Identifies the hour, day, week, month, year of a time.
_BUCKETS: Mapping[str, Callable[[datetime], tuple[int, ...]]] = {
    "hourly": lambda at: (at.year, at.month, at.day, at.hour),
    "daily": lambda at: (at.year, at.month, at.day),
    "weekly": lambda at: at.isocalendar()[:2],
    "monthly": lambda at: (at.year, at.month),
    "yearly": lambda at: (at.year,),
}


def decide(
    found: Sequence[Candidate], rules: Rules, now: datetime | None = None
) -> dict[str, tuple[str, ...]]:
    """Return by digest the rules that keep each checkpoint of one container; empty for one to remove.

    The newest is always kept. `now`: if the newest is dated after it, by a clock that is ahead, `within`
    counts from now.
    """
    order = sorted(found, key=lambda each: (each.created, each.digest), reverse=True)
    kept: dict[str, list[str]] = {each.digest: [] for each in order}
    for each in order[: rules.last]:
        kept[each.digest].append("last")
    for name, bucket in _BUCKETS.items():
        seen: set[tuple[int, ...]] = set()
        for each in order:
            key = bucket(each.created.astimezone(UTC))
            if key not in seen and len(seen) < getattr(rules, name):
                seen.add(key)
                kept[each.digest].append(name)
    for each in order:
        newest = order[0].created if now is None else min(order[0].created, now)
        if rules.within and newest - each.created <= rules.within:
            kept[each.digest].append("within")
        for label, value in rules.labels:
            if label in each.labels and value in (None, each.labels[label]):
                kept[each.digest].append(f"label {label}" + (f"={value}" if value is not None else ""))
    if order and not kept[order[0].digest]:
        kept[order[0].digest].append("newest")
    return {digest: tuple(reasons) for digest, reasons in kept.items()}


def parse_duration(text: str) -> timedelta:
    """Parse a duration such as 30m, 12h, 7d or 1d12h (seconds to weeks: s, m, h, d, w). Raises ValueError."""
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a duration: write it as 90s, 30m, 12h, 7d, 2w or 1d12h")
    numbers = re.findall(r"([0-9]+)([smhdw])", text)
    found = timedelta(seconds=sum(int(count) * _UNITS[unit] for count, unit in numbers))
    if not timedelta() < found <= _LONGEST:
        raise ValueError(f"{text[:40]!r} is not a duration: it must be more than 0, and at most 100 years")
    return found


def parse_label(text: str) -> tuple[str, str | None]:
    """Parse KEY=VALUE, or KEY for any value."""
    key, equals, value = text.partition("=")
    return key, value if equals else None
