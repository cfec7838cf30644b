"""Links between the documents of this checkout."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Links and pictures; their text may hold brackets, an address no blanks.
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")


def documents() -> list[str]:
    """All documents in Markdown, those included that are not committed yet."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = listed.stdout.split() or [os.path.relpath(each, ROOT) for each in ROOT.glob("docs/*.md")]
    return sorted({"README.md", *found})


def plain(text: str) -> str:
    """Without blocks of code and what is between backquotes, where brackets mean something else."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ {4,}(?![-*|\d]).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"(`+)(?!`).*?\1", "x", text)


@cache
def anchors(path: Path) -> frozenset[str]:
    """What the headings of a document can be linked by, as GitHub and GitLab make it."""
    found: list[str] = []
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.*?)\s*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = sum(
            each == name or re.fullmatch(rf"{re.escape(name)}-\d+", each) is not None for each in found
        )
        found.append(f"{name}-{number}" if number else name)
    return frozenset(found)


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name: str) -> None:
    """Each relative link is to a file or folder that is there, and its anchor to a heading of it."""
    document = ROOT / name
    broken = []
    for link in _LINK.findall(plain(document.read_text("utf-8"))):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.is_relative_to(ROOT) or not target.exists():
            broken.append(f"{link}: there is no {path}")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{link}: {target.name} has no such heading")
    assert not broken, f"{name} has links that lead nowhere: " + "; ".join(broken)


def test_every_document_is_reached() -> None:
    """Each page of docs/ is linked from README.md."""
    linked = set(_LINK.findall((ROOT / "README.md").read_text("utf-8")))
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT))
        assert name in linked, f"README.md has no link to {name}"


def test_anchors(tmp_path: Path) -> None:
    """Punctuation goes, blanks become hyphens, a second heading of the same words gets a number."""
    page = tmp_path / "page.md"
    page.write_text("# Hosts with v1 & v2, `memory.keep`\n## More\n```\n# no heading\n```\n## More\n")
    assert anchors(page) == {"hosts-with-v1--v2-memorykeep", "more", "more-1"}
