"""The site: every document is in its navigation, and links that leave docs/ become words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.docs.site import rewritten

ROOT = Path(__file__).parents[3]


def test_every_document_is_in_the_navigation() -> None:
    """Once; and what is in it is there."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = re.findall(r"^ +- ([\w/-]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted({*there, "index.md"})


@pytest.mark.parametrize(
    ("source", "text", "becomes"),
    [
        ("", "[a](docs/install.md#x)", "[a](install.md#x)"),
        ("", "![p](docs/demo.svg)", "![p](demo.svg)"),
        ("", "[t](tests/gpu/test_remap.py)", "t (`tests/gpu/test_remap.py`)"),
        ("", "[w](https://example.com/docs/x)", "[w](https://example.com/docs/x)"),
        ("docs/ci.md", "[`examples/ci`](../examples/ci)", "`examples/ci`"),
        ("docs/ci.md", "[s](settings.md), [h](#here)", "[s](settings.md), [h](#here)"),
        ("docs/tasks/first.md", "[i](../install.md), [o](other.md)", "[i](../install.md), [o](other.md)"),
        ("docs/tasks/first.md", "[m](../../LICENSE)", "m (`LICENSE`)"),
    ],
)
def test_links(source: str, text: str, becomes: str) -> None:
    """Links within the site stay such; a path of the repository is shown as one."""
    assert rewritten(text, source) == becomes
