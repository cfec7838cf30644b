"""Names and command lines of units, held against systemd's own programs where this machine has them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusnap.schedule.unit_files import command_line, escape, unescape, value

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@given(TEXTS)
def test_there_and_back(text: str) -> None:
    assert unescape(escape(text)) == text


@pytest.mark.skipif(shutil.which("systemd-escape") is None, reason="needs systemd-escape")
@settings(max_examples=25)
@given(TEXTS)
def test_as_systemd_escapes(text: str) -> None:
    done = subprocess.run(["systemd-escape", "--", text], capture_output=True, check=True)
    assert done.stdout.decode().removesuffix("\n") == escape(text)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("/bin/a", "--x=1", "oci:/srv/b", "a.b_c-d"), "/bin/a --x=1 oci:/srv/b a.b_c-d"),
        (("a b",), '"a b"'),
        (("",), '""'),
        (('say "$HOME" 100%',), '"say \\"$$HOME\\" 100%%"'),
        (("a\\b", "'c'", ";"), '"a\\\\b" "\'c\'" ";"'),
    ],
)
def test_command_lines(words: tuple[str, ...], line: str) -> None:
    assert command_line(words) == line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nExecStart=/bin/evil", "control characters"),
        ("a\rb", "control characters"),
        ("a\0b", "control characters"),
        ("\x7f", "control characters"),
        ("a\udcffb", "not UTF-8"),
    ],
)
def test_what_no_file_takes(text: str, said: str) -> None:
    """A line break would be another setting."""
    for function in (value, lambda each: command_line([each])):
        with pytest.raises(ValueError, match=said):
            function(text)


def test_values() -> None:
    assert value("100% $x") == "100%% $x"
