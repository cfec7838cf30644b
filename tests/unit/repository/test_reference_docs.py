"""The docs of the commands, which are made from their declarations."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from gpusnap.cli.exit_codes import MEANINGS
from gpusnap.cli.main import command
from tools.docs import reference_docs

DOCS = Path(__file__).parents[3] / "docs"


def test_the_files_are_up_to_date() -> None:
    """What lies in docs/ is what the declarations make: `make docs` writes it."""
    hint = "run: make docs"
    assert (DOCS / "commands.md").read_text("utf-8") == reference_docs.markdown(), hint
    there = {path.name: path.read_text("utf-8") for path in (DOCS / "man").iterdir()}
    assert there == reference_docs.man_pages(), hint


def test_a_page_for_each_command() -> None:
    """And the overview names all of them."""
    pages = reference_docs.man_pages()
    names = command.list_commands(click.Context(command))
    assert set(pages) == {"gpusnap.1", *(f"gpusnap-{name}.1" for name in names)}
    for name in names:
        assert rf"\fBgpusnap\-{name.replace('-', chr(92) + '-')}\fR(1)" in pages["gpusnap.1"]


def test_all_is_described() -> None:
    """Every command with every option, each with a help text that ends as a sentence does."""
    found = {each.name: each for each in reference_docs.described()}
    assert [*found] == command.list_commands(click.Context(command))
    for each in found.values():
        assert each.help, each.name
        for option in each.options:
            assert re.search(r"[.\]]$", option.help), f"{each.name} {option.form}: {option.help!r}"


def test_markdown() -> None:
    """Tables of well-formed rows, verbatim paragraphs as code, links that lead to a heading."""
    text = reference_docs.markdown()
    headings = re.findall("^## (.*)$", text, re.M)
    for link in re.findall(r"\]\(#([^)]*)\)", text):
        assert link in {heading.replace(" ", "-") for heading in headings}
    for row in (line for line in text.splitlines() if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", row)) == 3, row
    assert "    oci:DIR:NAME          in the store in the directory DIR\n" in text
    assert "\b" not in text
    for code in MEANINGS:
        assert f"| {code} | " in text


def test_man() -> None:
    """No line of text is taken for a request of roff's, and all requests are known ones."""
    pages = reference_docs.man_pages()
    lines = "".join(pages.values()).splitlines()
    requests = {line.split()[0] for line in lines if line.startswith((".", "'"))}
    assert requests == {r".\"", ".TH", ".SH", ".PP", ".TP", ".nf", ".fi"}
    assert r"\&./FILE.tar.zst" in pages["gpusnap.1"]


@pytest.mark.parametrize("name", ["gpusnap", "gpusnap-verify"])
def test_man_for_groff(name: str) -> None:
    """groff has no complaint about the page."""
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("needs groff")
    line = [groff, "-man", "-ww", "-Kutf8", "-Tutf8", str(DOCS / f"man/{name}.1")]
    done = subprocess.run(line, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.search(rb"gpusnap.verify", re.sub(b".\b", b"", done.stdout))
