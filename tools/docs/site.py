"""mkdocs' hooks for the site (mkdocs.yml): README.md is its first page, and what is no document a path.

https://www.mkdocs.org/user-guide/plugins/#events has what mkdocs calls, by these names. Its types are
Any here: mkdocs is installed for the site alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# A link or a picture: its text, and its address.
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Any, /, *, config: Any) -> Any:
    """Make README.md the page index.md."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    text = rewritten((ROOT / "README.md").read_text("utf-8"), "")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, /, *, page: Any, **_: Any) -> str:
    """The text of a page whose links stay in the site."""
    source = page.file.src_uri
    return markdown if source == "index.md" else rewritten(markdown, posixpath.join("docs", source))


def rewritten(text: str, source: str) -> str:
    """A document without links to files of the repository that are no documents; `source`: its own path.

    An empty one is README.md, whose links to docs/ become links within that.
    """
    folder = posixpath.dirname(source)

    def put(found: re.Match[str]) -> str:
        picture, words, address = found.groups()
        path, mark, anchor = address.partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", address) or not path:
            return found.group()
        target = posixpath.normpath(posixpath.join(folder, path))
        if target.startswith("docs/"):
            here = folder.removeprefix("docs").lstrip("/") or "."
            inside = posixpath.relpath(target.removeprefix("docs/"), here)
            return f"{picture}[{words}]({inside}{mark}{anchor})"
        return words if f"`{target}`" in words or target in words else f"{words} (`{target}`)"

    return _LINK.sub(put, text)
