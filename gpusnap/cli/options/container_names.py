"""The names of containers that a command is given."""

from __future__ import annotations

from typing import TypeVar

import click

from gpusnap.runtime_shim.base.errors import UsageError

T = TypeVar("T", str | None, tuple[str, ...])


def check_not_empty(_context: click.Context, _argument: click.Parameter, value: T) -> T:
    """Refuse an empty name, such as that of a variable that is not set. Raises UsageError."""
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise UsageError("the name of a container is empty", hint="podman ps --all lists the containers")
    return value
