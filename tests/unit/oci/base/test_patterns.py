"""Regular expressions that are compiled when they are first used."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gpusnap.oci.base.patterns import compile_later


def test_as_a_pattern() -> None:
    name = compile_later(r"(?P<first>[a-z]+)-(\d+)", re.IGNORECASE)
    found = name.fullmatch("Ab-12")
    assert found is not None
    assert (found["first"], found[2]) == ("Ab", "12")
    assert name.match("1") is None
    assert name.search("..a-1..") is not None
    assert name.sub("x", "a-1 b-2") == "x x"
    assert [each[0] for each in name.finditer("a-1 b-2")] == ["a-1", "b-2"]
    assert (name.findall("a-1"), name.split("_a-1_")) == ([("a", "1")], ["_", "a", "1", "_"])
    assert (name.pattern, name.groups) == (r"(?P<first>[a-z]+)-(\d+)", 2)
    assert compile_later(rb"\d").search(b"a1") is not None


def test_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = re.compile

    def noted(text: str, flags: int = 0) -> re.Pattern[str]:
        made.append(text)
        return real(text, flags)

    monkeypatch.setattr(re, "compile", noted)
    name = compile_later("a")
    assert made == []
    for _ in range(3):
        assert name.match("a")
        assert name.search("ba")
    assert made == ["a"]


def test_what_it_has_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fulmatch'"):
        compile_later("a").fulmatch("a")  # type: ignore[attr-defined]
    with pytest.raises(re.error):
        compile_later("(").match("a")


def test_a_runtime_compiles_few() -> None:
    """That is what it is for: gpusnap-runtime's modules compile none of their own when they are imported."""
    program = """
import re, sys
made = []
real = re._compile
def note(text, flags):
    caller = sys._getframe(2).f_globals["__name__"]
    if caller.startswith("gpusnap"):
        made.append((caller, text))
    return real(text, flags)
re._compile = note
import gpusnap.runtime_shim.shim.dispatch, gpusnap.runtime_shim.snapshot.restore
assert not made, made
"""
    subprocess.run([sys.executable, "-c", program], check=True)
