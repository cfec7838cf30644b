"""The commands of `gpusnap`, by module: a module is imported when its command is run."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import click


class Group(click.Group):
    """Commands by name, of which some are loaded on first use.

    Its help has the whole first sentence of each command's, where click's own has its beginning.
    """

    def __init__(self, *arguments: Any, modules: Mapping[str, str], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._modules = modules
        """The module of each command, which has it by that name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, in order."""
        return sorted({*self._modules, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name; None if there is none."""
        module = self._modules.get(cmd_name)
        if module is None:
            return super().get_command(ctx, cmd_name)
        found = getattr(importlib.import_module(module), cmd_name.replace("-", "_"))
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is asked for. For an unknown one, the error names the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            if args[0].startswith("-") or not near or "Did you mean" in error.format_message():
                raise
            raise click.UsageError(f"No such command '{args[0]}'. Did you mean '{near[0]}'?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands in the help."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None
            first, _, _ = inspect.cleandoc(command.help or "").partition("\n\n")
            rows.append((name, first))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
