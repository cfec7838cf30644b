"""Labels: what a command line may give, and what is read of annotations that anybody may have written."""

from __future__ import annotations

import pytest

from gpusnap.checkpoints.labels import as_annotations, labels_in, parse_labels, written_labels
from gpusnap.runtime_shim.base.errors import UsageError


def test_there_and_back() -> None:
    """In the order of their keys; other annotations are no labels."""
    found = parse_labels(["step=100", "best", "a/b.c-d_e=x=y", "step=100"])
    assert found == {"step": "100", "best": "", "a/b.c-d_e": "x=y"}
    notes = {"io.gpusnap.memory": "1", "io.gpusnap.labels": "2", **as_annotations(found)}
    assert [*labels_in(notes).items()] == sorted(found.items())
    assert written_labels(labels_in(notes)) == "a/b.c-d_e=x=y, best, step=100"
    assert parse_labels([]) == labels_in({}) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["=x"], "is not a valid label"),
        (["a b=x"], "is not a valid label"),
        (["-a=x"], "is not a valid label"),
        (["ä=x"], "is not a valid label"),
        ([f"{'k' * 64}=x"], "is not a valid label"),
        (["a=x\ny"], "must be printable text"),
        ([f"a={'x' * 1025}"], "must be printable text"),
        (["a=1", "a=2"], "given twice"),
        ([f"a{n}" for n in range(65)], "65 labels are given"),
    ],
)
def test_what_is_none(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_labels(words)
