"""The meaning of a name without a tag: the newest checkpoint of that name.

"server", and also "server:latest", is looked up in index.json among server:TAG, each time that it is used. No
entry is kept for it. So there is nothing that two writers could move at once, that a killed writer could
leave behind, or that would keep an old checkpoint from gc. A name or a digest that is in the index exactly so
comes first: another tool may have written a tag "latest".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import Ambiguous
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.documents import Descriptor

LATEST = "latest"
CLOCKS = timedelta(hours=1)
"""Possible difference between the clocks of hosts."""
# A message lists at most this many.
_MOST = 8
# The text after the last colon of host:5000/app or of app@sha256:… is no tag.
_TAG = compile_later(r"[A-Za-z0-9][A-Za-z0-9._+-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of index.json; `name` and `created` (RFC 3339) are "" if it has none."""

    name: str
    descriptor: Descriptor
    created: str


def base(name: str) -> str:
    """Return the part of a name before its tag; all of a name without one."""
    before, colon, tag = name.rpartition(":")
    return before if colon and _TAG.fullmatch(tag) else name


def select_tagged(wanted: str, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries wanted:TAG, in their order; none if it has a tag itself, except "latest"."""
    stem = wanted.removesuffix(f":{LATEST}")
    return tuple(each for each in entries if each.name != stem and base(each.name) == stem)


def newest(wanted: str, found: Sequence[Entry], created: Callable[[Entry], str], where: str) -> Entry:
    """Return the newest of several, by when they were made (RFC 3339). `found` is in the order of the index.

    Raises Ambiguous if two are equally new, or if the time of one is not known. Nor is that of one which is
    dated in the future, by a clock that was ahead, if another one was added after it.
    """
    digests = {each.descriptor.digest for each in found}
    if len(digests) == 1:
        return found[0]
    times = {each.name: moment(created(each)) for each in found}
    unknown = [name for name, moment in times.items() if moment is None]
    if unknown:
        raise Ambiguous(
            f"{wanted!r} means the newest of {len(found)} checkpoints in {where}, but it is unknown when "
            f"{format_names(unknown)} was made"
        )
    last = max(moment for moment in times.values() if moment is not None)
    first, *others = [each for each in found if times[each.name] == last]
    if any(each.descriptor.digest != first.descriptor.digest for each in others):
        names = format_names(each.name for each in (first, *others))
        raise Ambiguous(
            f"{wanted!r} means the newest checkpoint in {where}, but these are equally new: {names}"
        )
    if last > datetime.now(UTC) + CLOCKS and found[-1].descriptor.digest != first.descriptor.digest:
        raise Ambiguous(
            f"{wanted!r} means the newest checkpoint in {where}, but {first.name} is dated in the future, "
            f"{created(first)}, and {found[-1].name} was added after it"
        )
    return first


def is_later(one: str, other: str) -> bool:
    """Whether a time (RFC 3339) is after another one; False if one of them is not known."""
    times = moment(one), moment(other)
    return times[0] is not None and times[1] is not None and times[0] > times[1]


def format_names(names: Iterable[str]) -> str:
    """Format names for a message."""
    every = sorted(names)
    more = f" and {len(every) - _MOST} more" if len(every) > _MOST else ""
    return ", ".join(every[:_MOST]) + more


def moment(text: str) -> datetime | None:
    """Parse a time (RFC 3339), in UTC even if it names no zone; None for an invalid one."""
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # one of the year 9999 may be of the year 10000 in UTC
        return None


def by_age(text: str) -> tuple[bool, datetime]:
    """Return a key to sort times (RFC 3339) by, the oldest first; invalid ones come before them."""
    found = moment(text)
    return found is not None, found or datetime.min.replace(tzinfo=UTC)
