"""Errors of the packages below, as their users see them."""

from __future__ import annotations

import errno

import pytest

from gpusnap.base.user_errors import Damaged, NotFound, convert_errors, failure
from gpusnap.oci.base import errors
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type)]
KINDS = [kind for kind in CLASSES if issubclass(kind, errors.OciError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_one(kind: type[errors.OciError]) -> None:
    """Each becomes a sentence of its own words, by `convert_errors` too."""
    with pytest.raises(GpusnapError) as raised, convert_errors():
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
        (errors.NotACheckpoint, GpusnapError),
        (errors.EngineImage, GpusnapError),
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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("r:1 does not speak TLS; plain HTTP has to be requested explicitly", "give --plain-http"),
        ("the certificate of r:1 is not trusted (x): add its CA to the system's certificates", ""),
        ("r:1 speaks TLS, but was asked over plain HTTP; r:1/x cannot be read", "omit --plain-http"),
        ("r: the host name is unknown; r/x cannot be read (2 attempts)", "check the name of the registry"),
        (
            "r:1: nothing listens there (connection refused); r:1/x cannot",
            "check that the registry is running",
        ),
        ("r:1 answered 503; r:1/x cannot be read (6 attempts)", "run the same command again"),
    ],
)
def test_unreachable(words: str, hint: str) -> None:
    """To try again is no help where TLS is the matter."""
    found = failure(errors.Unreachable(words))
    assert found.hint.startswith(hint)
    assert bool(found.hint) == bool(hint)
    assert "transfer" not in found.hint  # it may have been a list that was asked for


def test_others_pass() -> None:
    """`convert_errors` is for errors of oci alone."""
    with pytest.raises(ValueError, match="x"), convert_errors():
        raise ValueError("x")


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_what_could_not_be_read(code: int) -> None:
    """That is of this host, and nothing is said of what was to be read."""
    for cause, expected in ((OSError(code, ""), GpusnapError), (OSError(errno.ENOENT, ""), Damaged)):
        with pytest.raises(GpusnapError) as raised, convert_errors():
            raise errors.LayoutError("the index cannot be read") from cause
        assert type(raised.value) is expected
