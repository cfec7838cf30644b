"""`gpusnap explain`: the cause and the cure of an error, by its code."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from gpusnap.base.user_errors import NotFound

if TYPE_CHECKING:
    from gpusnap.error_codes.entry import ErrorCode

_WIDEST = 100


def _complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    from gpusnap.error_codes import CODES  # texts that no other command needs

    return [
        CompletionItem(code, help=each.name) for code, each in CODES.items() if code.startswith(begun.upper())
    ]


@click.command()
@click.argument("code", required=False, metavar="[CODE]", shell_complete=_complete)
def explain(code: str | None) -> None:
    """Explain the error CODE: what causes it, and what to do about it. Without CODE, list all codes.

    CODE is the code in brackets at the end of a message, such as GPS-312, or the code's name, such as
    lock-timeout. docs/errors.md has the same, with every message.
    """
    from gpusnap.error_codes import find

    if code is None:
        click.echo("\n".join(_list()))
        return
    found = find(code)
    if found is None:
        raise NotFound(f"there is no error code {code[:40]!r}", hint="gpusnap explain lists them")
    click.echo("\n".join(_explanation(found)))


def _list() -> Iterator[str]:
    from gpusnap.error_codes import CODES, GROUPS

    for digit, title in GROUPS.items():
        yield from ("", title) if digit > min(GROUPS) else (title,)
        yield from (f"  {c}  {each.name}" for c, each in CODES.items() if c.startswith(f"GPS-{digit}"))


def _explanation(found: ErrorCode) -> Iterator[str]:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    yield f"{found.code} {found.name}"
    for title, text in (("Cause", found.cause), ("What to do", found.cure)):
        yield from ("", *textwrap.wrap(f"{title}: {text}", width, break_on_hyphens=False))
