"""docs/errors.md: every message of the packages, with what to do about it."""

from __future__ import annotations

import re

import pytest

from gpusnap.error_codes import CODES
from tools.docs import error_docs, error_messages
from tools.docs.error_messages import Message, Messages


@pytest.fixture(scope="module")
def found() -> Messages:
    """All messages of this checkout."""
    return error_messages.read(error_docs.ROOT)


def test_every_message_has_a_cure(found: Messages) -> None:
    """Each has a code, says what to do, or ends with the underlying error."""
    assert not error_docs.uncured(found), "\n".join(error_docs.uncured(found))


def test_every_code_is_known(found: Messages) -> None:
    """No message has a code that `gpusnap explain` does not find."""
    assert not error_docs.unknown(found), "describe these in gpusnap/error_codes"


def test_every_code_has_a_message(found: Messages) -> None:
    """Each is raised somewhere, and each text that needs no cure is said somewhere."""
    assert not error_docs.unused(found), "no message has these any more"


def test_the_file_is_up_to_date(found: Messages) -> None:
    """What lies in docs/ is what the code makes: `make docs` writes it."""
    made = error_docs.markdown(found)
    there = (error_docs.ROOT / "docs" / "errors.md").read_text("utf-8")
    assert there == made, "run: make docs"


def test_all_is_on_the_page(found: Messages) -> None:
    """Each template stands there in its own words, below its code if it has one."""
    page = error_docs.markdown(found)
    sections = {part.split(" ", 1)[0]: part for part in re.split(r"^##+ ", page, flags=re.MULTILINE)}
    assert set(CODES) < set(sections)
    for each in found.messages:
        there = sections.get(error_docs.code_of(each)) or page.partition("## Messages without a code")[2]
        assert f"`{each.template}`" in there or f"`` {each.template} ``" in there
    for code, known in CODES.items():
        assert f"**What to do**: {known.cure.split()[0]}" in sections[code]


def test_the_drivers_words(found: Messages) -> None:
    """What NVIDIA's driver calls an error leads to its code, also where no sentence of ours has it."""
    section = error_docs.markdown(found).partition("### GPS-313 ")[2].partition("###")[0]
    assert "`CUDA_ERROR_NOT_SUPPORTED`" in section


def test_what_is_said_in_c(found: Messages) -> None:
    """The launcher's sentence is among them, as long as its source has it."""
    assert any(each.template.startswith("gpusnap-runtime: its Python program") for each in found.messages)


def test_a_message_without_a_cure() -> None:
    """The complaint names the module, the template, and where to write the cure."""
    strange = Message("runtime_shim.new", "GpusnapError", "the <thing> has broken", ())
    (said,) = error_docs.uncured(Messages((strange,), {}))
    assert "runtime_shim.new" in said
    assert "the <thing> has broken" in said
    assert "gpusnap/error_codes" in said


@pytest.mark.parametrize(
    "message",
    [
        Message("m", "GpusnapError", "the thing has broken", ("mend it",)),
        Message("m", "GpusnapError", "the thing has broken", (), "GPS-001"),
        Message("m", "GpusnapError", "the thing has broken: <reason>", ()),
        Message("m", "UsageError", "--this goes with --that", ()),
        Message("m", "Broken", "the thing answered <status>", ()),
        Message("m", "CeilingError", "the thing needs <size>", ()),
    ],
)
def test_messages_with_a_cure(message: Message) -> None:
    """A hint, also of gpusnap.base.user_errors, a code, a reason, a command line, a part of a message."""
    assert not error_docs.uncured(Messages((message,), {}))


def test_a_code_that_nobody_knows() -> None:
    """It is named."""
    strange = Message("m", "GpusnapError", "the thing has broken", (), "GPS-999")
    assert error_docs.unknown(Messages((strange,), {})) == ("GPS-999",)
    assert "GPS-001" in error_docs.unused(Messages((strange,), {}))
