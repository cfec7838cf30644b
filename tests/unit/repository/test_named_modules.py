"""Modules that a docstring, a comment or a page of docs/ names exist."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
DIRECTORIES = (
    *("gpusnap", "hooks", "runtime_shim", "oci", "softgpu", "tests", "tools", "bench", "demo", "packaging"),
    *("deploy", "examples"),
)
# Not in a longer path, such as /usr/lib/x.py, and not where a part of it varies, such as test_<name>.py.
_NAME = re.compile(r"(?<![\w./*<>-])(?:\w[\w-]*/)*\w+\.py\b(?!\.\w)")
_OTHERS = ("Lib/", "lib/pycriu/")
"""In the sources of CPython and CRIU."""


def modules() -> frozenset[str]:
    """All modules of the checkout, as paths from its root."""
    walk = (each for name in DIRECTORIES for each in os.walk(ROOT / name))
    found = (Path(folder, name) for folder, _, names in walk for name in names if name.endswith(".py"))
    return frozenset(str(path.relative_to(ROOT)) for path in (*found, *ROOT.glob("*.py")))


MODULES = modules()


def prose(source: str) -> Iterator[str]:
    """The comments and docstrings of a module; a string that stands alone counts as a docstring."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def list_missing(text: str, module: str = "") -> list[str]:
    """The modules that a text names and that do not exist.

    In a module, a name is a path from the root, or from a directory above that module, or a file beside it.
    Pages, and tests, may also begin a path below that.
    """
    strict = module and not module.startswith("tests/")
    places = Path(module).parents if strict else ()
    return [
        name
        for name in _NAME.findall(text)
        if not name.startswith(_OTHERS)
        and not any(str(place / name) in MODULES for place in places)
        and (strict or not any(f"/{each}".endswith(f"/{name}") for each in MODULES))
    ]


def test_named_modules_exist() -> None:
    """In docstrings and comments of all modules, and in the pages of docs/."""
    sources = {each: (ROOT / each).read_text("utf-8") for each in MODULES}
    # Four of five modules name none: what takes the time is to take them apart.
    naming = {each: source for each, source in sources.items() if _NAME.search(source)}
    texts = [(each, text) for each, source in naming.items() for text in prose(source)]
    missing = {f"{module} names {name}" for module, text in texts for name in list_missing(text, module)}
    for page in (ROOT / "docs").rglob("*.md"):
        missing |= {f"docs/{page.name} names {name}" for name in list_missing(page.read_text("utf-8"))}
    assert not missing, "there are no such modules, or not there: " + "; ".join(sorted(missing))


def test_what_is_found() -> None:
    """Each form of a name that is right, and one of a module that has moved."""
    right = "record.py, restoring/record.py, base/errors.py, runtime_shim/base/errors.py. Lib/threading.py"
    assert list_missing(right, "runtime_shim/snapshot/restoring/gpus.py") == []
    moved = "see recover_restore.py."
    assert list_missing(moved, "runtime_shim/snapshot/restore.py") == ["recover_restore.py"]
    assert list_missing(moved) == list_missing(moved, "tests/unit/x.py") == ["recover_restore.py"]
    assert list_missing("`snapshot/restore.py`, /usr/lib/x.py, test_<name>.py") == []
    assert list_missing("errors.py", "runtime_shim/runtime/container.py") == ["errors.py"]
