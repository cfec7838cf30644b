"""JSON is read in one way only, and by one function."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from gpusnap.oci.base.json_text import parse_json

ROOT = Path(__file__).parents[4]
# The one parser, and our own schema.
OTHERS = {"oci/base/json_text.py", "hooks/documents.py"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the member 'c' twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": 1e999}', "too large a number"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting"),
    ],
)
def test_refused(text: str, said: str) -> None:
    """What two parsers may read differently, and what is no JSON."""
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_a_name_twice_among_many() -> None:
    """It is found in one pass: to look for each among all takes a minute for 400 KiB, hours for 4 MiB."""
    names = [f"{number:x}" for number in range(50_000)]
    begin = time.process_time()
    with pytest.raises(ValueError, match="has the member 'c34f' twice"):
        parse_json("{" + ",".join(f'"{name}":0' for name in (*names, names[-1])) + "}")
    assert time.process_time() - begin < 5


def test_read() -> None:
    """Anything else is what it says, from text and from bytes."""
    assert parse_json('{"a": [1, 2.5, null], "b": {"a": true}}') == {"a": [1, 2.5, None], "b": {"a": True}}
    assert parse_json(b'"x"') == "x"


def test_duplicate_keys_are_refused_in_every_json() -> None:
    """No module reads JSON by any other function."""
    found = set()
    for package in ("gpusnap", "runtime_shim", "oci", "hooks"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in ("load", "loads", "JSONDecoder")
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "json"
                ):
                    found.add(str(path.relative_to(ROOT)))
    assert found == OTHERS
