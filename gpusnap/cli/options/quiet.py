"""The option --quiet of commands that show what they do."""

from __future__ import annotations

import click

from gpusnap.base.progress import Progress


def _set(_context: click.Context, _option: click.Parameter, value: bool) -> None:
    Progress.quiet = value


quiet = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_set,
    help="Print only the result, not the progress.",
)
