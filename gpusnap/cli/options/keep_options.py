"""The options for retention rules: for `prune`, and for `schedule`, which runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import click

from gpusnap.checkpoints.labels import parse_labels
from gpusnap.retention.rules import Rules, parse_duration, parse_label

_Command = TypeVar("_Command", bound=Callable[..., Any])
_COUNT = click.IntRange(min=1, max=1_000_000)
_PERIODS = {"hourly": "hours", "daily": "days", "weekly": "weeks", "monthly": "months", "yearly": "years"}


def duration(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta:
    """Parse an option that is a duration; none is 0."""
    try:
        return parse_duration(value) if value is not None else timedelta()
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _check_labels(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Raise UsageError for a label that no checkpoint can have: its rule would keep nothing."""
    for each in value:
        parse_labels([each])
    return value


def keep_options(command: _Command) -> _Command:
    """Give a command all of them; it takes them as **keep."""
    options = [click.option("--keep-last", type=_COUNT, metavar="N", help="Keep the last N checkpoints.")]
    for name, period in _PERIODS.items():
        text = f"Keep the newest checkpoint of each of the last N {period}."
        options.append(click.option(f"--keep-{name}", type=_COUNT, metavar="N", help=text))
    options += [
        click.option(
            "--keep-within",
            callback=duration,
            metavar="DURATION",
            help="Keep all checkpoints at most this much older than the newest, such as 90s, 30m, 12h, "
            "7d, 2w.",
        ),
        click.option(
            "--keep-label",
            multiple=True,
            callback=_check_labels,
            metavar="KEY[=VALUE]",
            help="Keep all checkpoints with this label; may be repeated.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def rules(keep: Mapping[str, Any]) -> Rules:
    """Return the rules that were given."""
    return Rules(
        last=keep["keep_last"] or 0,
        **{name: keep[f"keep_{name}"] or 0 for name in _PERIODS},
        within=keep["keep_within"],
        labels=tuple(map(parse_label, keep["keep_label"])),
    )


def words(keep: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the same as options of a command line."""
    counts = [
        (f"--keep-{name}", str(keep[f"keep_{name}"]))
        for name in ("last", *_PERIODS)
        if keep[f"keep_{name}"] is not None
    ]
    within = int(keep["keep_within"].total_seconds())
    more = [("--keep-within", f"{within}s")] if within else []
    labels = [("--keep-label", each) for each in keep["keep_label"]]
    return tuple(word for pair in (*counts, *more, *labels) for word in pair)
