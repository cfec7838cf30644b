"""The table of the settings in docs/settings.md, which is made from the code."""

from __future__ import annotations

import re

import pytest

from gpusnap.runtime_shim.setting_keys import TABLE
from tools.docs import settings_docs


def test_the_document_is_up_to_date() -> None:
    """What lies in docs/ is what the code makes: `make docs` writes it."""
    document = settings_docs.DOCUMENT.read_text("utf-8")
    assert settings_docs.written(document) == document, "run: make docs"


def test_every_key_has_a_meaning() -> None:
    """Each key of TABLE is there, with what it takes and what it means, as a sentence."""
    found = settings_docs.described()
    assert [each.key for each in found] == list(TABLE)
    for each in found:
        assert each.meaning.endswith("."), f"{each.key}: its attribute needs a docstring in settings.py"
        assert each.takes, each.key


def test_defaults_and_units() -> None:
    """A default stands as the file has it, and a check's words tell the unit."""
    found = {each.key: each for each in settings_docs.described()}
    assert found["nvidia.lock-timeout"].takes == "seconds, from 0.001 to 86400"
    assert found["criu.ghost-limit"].default == '"300M"'
    assert "bytes" in found["criu.ghost-limit"].takes
    assert "a multiple of 4096" in found["memory.chunk-size"].takes
    assert (found["gpu-map"].default, found["criu.external"].default) == ('""', "[]")
    assert not found["runtime"].annotation
    assert found["retries"].annotation


def test_rows_are_well_formed() -> None:
    """Five cells in each row, and nothing in one that ends it."""
    for row in settings_docs.table().splitlines():
        assert len(re.findall(r"(?<!\\)\|", row)) == 6, row


def test_the_text_around_the_table_stays() -> None:
    """Only what is between the two marks is written anew; without them nothing is."""
    document = f"# Mine\n{settings_docs.BEGIN}\nwas here\n{settings_docs.END}\nand this\n"
    made = settings_docs.written(document)
    assert made.startswith("# Mine\n")
    assert made.endswith(f"{settings_docs.END}\nand this\n")
    assert settings_docs.table() in made
    assert "was here" not in made
    with pytest.raises(ValueError, match="two marks"):
        settings_docs.written("# Mine\n")
