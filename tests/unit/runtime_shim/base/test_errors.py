"""Errors of the kernel that become sentences."""

from __future__ import annotations

import errno

import pytest

from gpusnap.runtime_shim.base.errors import ImageError, raise_as


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOENT, "not this text"), "it does not exist"),
        (OSError(errno.ENOSPC, "not this text"), "No space left on device"),
        (ValueError("it is not a regular file"), "it is not a regular file"),
    ],
)
def test_an_error_gets_a_sentence(error: Exception, reason: str) -> None:
    """It has the reason at its end, and the first error as its cause."""
    both = (OSError, ValueError)
    with pytest.raises(ImageError) as found, raise_as(ImageError, "x broke", hint="mend it", errors=both):
        raise error
    assert str(found.value) == f"x broke: {reason}"
    assert (found.value.hint, found.value.code, found.value.__cause__) == ("mend it", "", error)


def test_other_errors_pass() -> None:
    """Those that are not asked for, and none at all."""
    with raise_as(ImageError, "x broke", code="GPS-601"):
        pass
    with pytest.raises(ValueError, match="as it is"), raise_as(ImageError, "x broke"):
        raise ValueError("as it is")
