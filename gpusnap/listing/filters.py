"""`gpusnap ls --filter`: which checkpoints are shown.

    name=PATTERN       that name, with its tag or without, or shell patterns (name=server, name=server:2026*)
    container=PATTERN  the name of the container, or the beginning of its ID
    before=, since=    what was made before or after a checkpoint, a time (2026-11-22, RFC 3339), or so
                       long ago (30m, 24h, 7d)
    dangling=true      what has no name; dangling=false, what has one
    kind=KIND          checkpoint, pages, referrer, image, other, damaged

As for Podman, several values of one key are alternatives, and all keys have to fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import get_args

from gpusnap.checkpoints.list import Kind, Row
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.store.tags import base, moment
from gpusnap.runtime_shim.base.errors import UsageError

KEYS = ("name", "container", "before", "since", "dangling", "kind")
_AGO = compile_later(r"([0-9]{1,6})([smhdw])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DIGITS = compile_later(r"(?:sha256:)?([0-9a-f]{6,64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the list: a checkpoint under one of its names; the name is empty if it has none."""

    name: str
    row: Row


def lines(rows: Iterable[Row]) -> tuple[Line, ...]:
    """Return a line for each name."""
    return tuple(Line(name, row) for row in rows for name in row.names or ("",))


def filter_lines(rows: Sequence[Row], words: Sequence[str], now: datetime | None = None) -> tuple[Line, ...]:
    """Return the lines that match all filters. Raises UsageError."""
    found = lines(rows)
    tests: dict[str, list[Callable[[Line], bool]]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS:
            raise UsageError(
                f"{word[:80]!r} is not a filter", hint=f"write KEY=VALUE; the keys are {', '.join(KEYS)}"
            )
        tests.setdefault(key, []).append(_test(key, value, found, now or datetime.now(UTC)))
    return tuple(line for line in found if all(any(test(line) for test in some) for some in tests.values()))


def rows_of(found: Iterable[Line]) -> tuple[Row, ...]:
    """Return each checkpoint once, with its remaining names."""
    rows: dict[str, Row] = {}
    names: dict[str, list[str]] = {}
    for line in found:
        rows.setdefault(line.row.digest, line.row)
        names.setdefault(line.row.digest, []).extend([line.name] * bool(line.name))
    return tuple(replace(row, names=tuple(names[digest])) for digest, row in rows.items())


def _test(key: str, value: str, found: Sequence[Line], now: datetime) -> Callable[[Line], bool]:
    match key:
        case "name":
            return lambda line: any(fnmatchcase(each, value) for each in (line.name, base(line.name)))
        case "container":
            return lambda line: (
                fnmatchcase(line.row.container, value)
                or (len(value) > 5 and line.row.container_id.startswith(value))
            )
        case "dangling":
            wanted = _check_choice(key, value, ("true", "false")) == "true"
            return lambda line: (not line.name) == wanted
        case "kind":
            kind = _check_choice(key, value, get_args(Kind))
            return lambda line: line.row.kind == kind
    limit = _time(key, value, found, now)

    def fits(line: Line) -> bool:
        made = moment(line.row.created)
        return made is not None and (made < limit if key == "before" else made > limit)

    return fits


def _check_choice(key: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise UsageError(f"unknown filter {key}={value[:80]}", hint=f"{key}= takes {', '.join(known)}")
    return value


def _time(key: str, value: str, found: Sequence[Line], now: datetime) -> datetime:
    """Return when a checkpoint was made, or the time that a value says."""
    if ago := _AGO.fullmatch(value):
        try:
            return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        except OverflowError as error:
            raise UsageError(
                f"the filter {key}={value} is before the year 1", hint="write a shorter time, such as 520w"
            ) from error
    digits = _DIGITS.fullmatch(value)
    same = [line for line in found if line.name and line.name == value]
    if not same and digits:
        same = [line for line in found if line.row.digest.startswith(f"sha256:{digits[1]}")]
    if not same:
        same = [line for line in found if line.name and base(line.name) == value.removesuffix(":latest")]
    times = [made for line in same if (made := moment(line.row.created)) is not None]
    if times:
        return max(times)
    made = moment(value) if not same else None
    if made is None:
        raise UsageError(
            f"the filter {key}={value[:80]} is neither a checkpoint in the list nor a time",
            hint="write a name or a digest, a time such as 2026-11-22, or an age such as 24h or 7d",
        )
    return made
