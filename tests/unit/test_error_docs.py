"""docs/errors.md: every message of the packages, with what to do about it."""

from __future__ import annotations

import re

import pytest

from tools.docs import error_docs, error_messages
from tools.docs.error_messages import Message, Messages


@pytest.fixture(scope="module")
def found() -> Messages:
    """All messages of this checkout."""
    return error_messages.read(error_docs.ROOT)


def test_every_message_has_a_cure(found: Messages) -> None:
    """Each says what to do, by its hint, its kind or CURES."""
    assert not error_docs.uncured(found), "\n".join(error_docs.uncured(found))


def test_every_cure_has_a_message(found: Messages) -> None:
    """No entry of CURES is left of a message that has gone or was worded anew."""
    assert not error_docs.unused(found), "take these from CURES of tools/docs/error_cures.py"


def test_the_file_is_up_to_date(found: Messages) -> None:
    """What lies in docs/ is what the code makes: `python -m tools.docs.error_docs` writes it."""
    made = error_docs.markdown(found)
    there = (error_docs.ROOT / "docs" / "errors.md").read_text("utf-8")
    assert there == made, "run: python -m tools.docs.error_docs"


def test_all_is_on_the_page(found: Messages) -> None:
    """Each template stands there in its own words, in rows of two or three cells."""
    page = error_docs.markdown(found)
    for each in found.messages:
        assert f"`{each.template}`".replace("|", r"\|") in page
    for row in (line for line in page.splitlines() if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", row)) in (3, 4), row


def test_what_is_said_in_c(found: Messages) -> None:
    """The launcher's sentence is among them, as long as its source has it."""
    assert any(each.template.startswith("gpusnap-runtime: its Python program") for each in found.messages)


def test_a_message_without_a_cure() -> None:
    """The complaint names the module, the template, and where to write the cure."""
    strange = Message("runtime_shim.new", "GpusnapError", "the <thing> has broken", ())
    (said,) = error_docs.uncured(Messages((strange,), {}))
    assert "runtime_shim.new" in said
    assert "the <thing> has broken" in said
    assert "tools/docs/error_cures.py" in said
