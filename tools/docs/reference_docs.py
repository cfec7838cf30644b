"""docs/commands.md and docs/man, made by `make docs` from the declarations.

The man pages, one for each command, are made here too: they are the same text with other marks around it,
some fifty lines. click-man leaves the exit codes out, and would be one more package to have for a build.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from gpusnap.cli import main as cli
from gpusnap.cli.exit_codes import MEANINGS
from gpusnap.cli.group import Group
from gpusnap.runtime_shim._version import __version__

__all__ = ["Described", "Option", "Paragraph", "described", "main", "man_pages", "markdown"]

DOCS = Path(__file__).parents[2] / "docs"
_NAME = "gpusnap"
_HEAD = "Made by `make docs` from the declarations of the commands; edit those."
_FILES = {
    "/etc/gpusnap/gpusnap.toml": "The settings; see docs/settings.md.",
    "/var/lib/gpusnap": "This host's store, unless store.path says otherwise.",
    "/run/gpusnap": "State of running operations, for gpusnap recover.",
}
_SEE_ALSO = (
    "podman-container-checkpoint(1)",
    "podman-container-restore(1)",
    "containers-auth.json(5)",
    "criu(8)",
)


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of a help text; one that is verbatim keeps its lines."""

    text: str
    verbatim: bool


@dataclass(frozen=True, slots=True)
class Option:
    """An option as it is typed, and what it does."""

    form: str
    help: str


@dataclass(frozen=True, slots=True)
class Described:
    """A command: its line, its help and its options."""

    name: str
    usage: str
    help: tuple[Paragraph, ...]
    options: tuple[Option, ...]


def described() -> tuple[Described, ...]:
    """All commands, by name."""
    assert isinstance(cli.command, Group)
    context = click.Context(cli.command)
    found = ((name, cli.command.get_command(context, name)) for name in cli.command.list_commands(context))
    return tuple(_described(name, each) for name, each in found if each is not None)


def markdown() -> str:
    """docs/commands.md."""
    return "\n".join(_markdown()) + "\n"


def man_pages() -> dict[str, str]:
    """The files of docs/man by name, for man(1) (groff_man(7)): gpusnap.1, and one for each command."""
    found = {f"{_NAME}.1": _overview()} | {f"{_NAME}-{each.name}.1": _page(each) for each in described()}
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


# What is declared


def _described(name: str, declared: click.Command) -> Described:
    words = [f"{_NAME} {name}"]
    arguments = [each for each in declared.params if isinstance(each, click.Argument)]
    options = [each for each in declared.params if isinstance(each, click.Option) and not each.hidden]
    words += ["[OPTIONS]"] if options else []
    words += [_argument(each) for each in arguments]
    found = tuple(_option(each) for each in options)
    return Described(name, " ".join(words), tuple(_paragraphs(declared.help or "")), found)


def _argument(declared: click.Argument) -> str:
    if declared.metavar is not None:
        return declared.metavar
    name = (declared.name or "").upper()
    name = name if declared.required else f"[{name}]"
    return f"{name}..." if declared.nargs == -1 else name


def _option(declared: click.Option) -> Option:
    form = ", ".join((*declared.opts, *declared.secondary_opts))
    if not declared.is_flag:
        form += f" {declared.metavar or _values(declared)}"
    text = declared.help or ""
    if declared.show_default:
        text += f" [default: {declared.default}]"
    return Option(form, text)


def _values(declared: click.Option) -> str:
    if isinstance(declared.type, click.Choice):
        return "|".join(str(choice) for choice in declared.type.choices)
    return declared.type.name.upper()


def _paragraphs(text: str) -> Iterator[Paragraph]:
    for part in re.split(r"\n[ ]*\n", inspect.cleandoc(text)):
        if part.startswith("\b"):
            yield Paragraph(part.removeprefix("\b").strip("\n"), True)
        elif part.strip():
            yield Paragraph(" ".join(part.split()), False)


# Markdown


def _markdown() -> Iterator[str]:
    yield from ("# The commands", "", f"<!-- {_HEAD} -->", "")
    for paragraph in _paragraphs(cli.command.help or ""):
        yield from (*_marked(paragraph), "")
    found = described()
    yield from ("| | |", "|---|---|")
    for each in found:
        first = each.help[0].text if each.help else ""
        yield f"| [`{_NAME} {each.name}`](#{_NAME}-{each.name}) | {_cell(first)} |"
    for each in found:
        yield from ("", f"## {_NAME} {each.name}", "", f"    {each.usage}")
        for paragraph in each.help:
            yield from ("", *_marked(paragraph))
        yield from ("", "| option | what |", "|---|---|") if each.options else ()
        for option in each.options:
            yield f"| `{_cell(option.form)}` | {_cell(option.help)} |"
    yield from ("", "## Exit codes", "", "| code | what |", "|---|---|")
    for code, meaning in MEANINGS.items():
        yield f"| {code} | {_cell(meaning)} |"


def _marked(paragraph: Paragraph) -> Iterator[str]:
    if paragraph.verbatim:
        yield from ("    " + line for line in paragraph.text.splitlines())
    else:
        yield paragraph.text.replace("<", "&lt;").replace("*", r"\*")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


# The man page


def _overview() -> Iterator[str]:
    yield from _begin(_NAME, "checkpoint and restore containers that use GPUs")
    yield from (".SH SYNOPSIS", rf"\fB{_NAME}\fR COMMAND [OPTIONS] [ARGUMENTS]", ".SH DESCRIPTION")
    yield from _set(_paragraphs(cli.command.help or ""))
    yield ".SH COMMANDS"
    for each in described():
        yield from (".TP", rf"\fB{_roff(f'{_NAME}-{each.name}')}\fR(1)", _roff(_first_sentence(each)))
    yield ".SH EXIT STATUS"
    for code, meaning in MEANINGS.items():
        yield from (".TP", str(code), _roff(meaning))
    yield ".SH FILES"
    for path, what in _FILES.items():
        yield from (".TP", _roff(path), _roff(what))
    yield from (".SH SEE ALSO", _roff(", ".join(_SEE_ALSO)))


def _page(found: Described) -> Iterator[str]:
    first = _first_sentence(found)
    yield from _begin(f"{_NAME}-{found.name}", first[:1].lower() + first[1:].rstrip("."))
    yield from (".SH SYNOPSIS", rf"\fB{_roff(found.usage)}\fR", ".SH DESCRIPTION")
    yield from _set(found.help)
    yield from (".SH OPTIONS",) if found.options else ()
    for option in found.options:
        yield from (".TP", rf"\fB{_roff(option.form)}\fR", _roff(option.help))
    yield from (".SH EXIT STATUS", _roff(f"See {_NAME}(1)."))
    yield from (".SH SEE ALSO", _roff(f"{_NAME}(1)"))


def _begin(name: str, what: str) -> Iterator[str]:
    yield r".\" " + _HEAD
    yield f'.TH {name.upper()} 1 "" "{_NAME} {__version__}"'
    yield from (".SH NAME", rf"{_roff(name)} \- {_roff(what)}")


def _first_sentence(found: Described) -> str:
    return re.split(r"(?<=\.)\s", found.help[0].text, maxsplit=1)[0] if found.help else ""


def _set(paragraphs: Iterator[Paragraph] | tuple[Paragraph, ...]) -> Iterator[str]:
    for paragraph in paragraphs:
        yield ".PP"
        if paragraph.verbatim:
            yield from (".nf", *map(_roff, paragraph.text.splitlines()), ".fi")
        else:
            yield _roff(paragraph.text)


def _roff(text: str) -> str:
    """Text as roff takes it: nothing in it is a request, and `code` is bold."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    escaped = re.sub("`([^`]*)`", r"\\fB\1\\fR", escaped)
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main() -> int:
    """Write all of them, and remove the pages of commands that are no more."""
    pages = man_pages()
    (DOCS / "man").mkdir(exist_ok=True)
    for path in (DOCS / "man").glob("*.1"):
        if path.name not in pages:
            path.unlink()
    for name, content in {
        "commands.md": markdown(),
        **{f"man/{each}": pages[each] for each in pages},
    }.items():
        (DOCS / name).write_text(content, "utf-8")
    print(f"{DOCS}/commands.md and {len(pages)} pages in {DOCS}/man", file=sys.stderr)
    return 0
