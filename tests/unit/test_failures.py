"""Errors of the packages below, as their users see them."""

from __future__ import annotations

import pytest

from gpusnap.failures import Damaged, NotFound, failure, told
from oci import errors
from runtime_shim.errors import GpusnapError, Interrupted

KINDS = [
    getattr(errors, name)
    for name in errors.__all__
    if isinstance(getattr(errors, name), type) and issubclass(getattr(errors, name), errors.OciError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_one(kind: type[errors.OciError]) -> None:
    """Each becomes a sentence of its own words, by `told` too."""
    with pytest.raises(GpusnapError) as raised, told():
        raise kind("this went wrong")
    assert str(raised.value) == "this went wrong"
    assert isinstance(raised.value.__cause__, kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (errors.NotThere, NotFound),
        (errors.NotInRegistry, NotFound),
        (errors.BlobError, Damaged),
        (errors.LayoutError, Damaged),
        (errors.ArchiveError, Damaged),
        (errors.ChunkError, Damaged),
        (errors.Cancelled, Interrupted),
        (errors.DiskFull, GpusnapError),
        (errors.Unreachable, GpusnapError),
        (errors.StoreBusy, GpusnapError),
    ],
)
def test_kinds(kind: type[errors.OciError], expected: type[GpusnapError]) -> None:
    """What is not there, and what is damaged, are told from the rest."""
    assert type(failure(kind("x"))) is expected


def test_others_pass() -> None:
    """`told` is for errors of oci alone."""
    with pytest.raises(ValueError, match="x"), told():
        raise ValueError("x")
