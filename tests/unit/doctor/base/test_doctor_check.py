"""What a check is, and how all are asked."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator

import pytest
from fakes import POISON

from gpusnap.doctor.base.check import Check, document, failure, make_refused, ok, plural, run_checks, warning
from gpusnap.oci.base.errors import StoreError
from gpusnap.runtime_shim.base.errors import Refused

CHECKS = (ok("a", "fine", size=1), warning("b", "well", "do it"), failure("c", "no", "do that"))


@pytest.mark.parametrize(
    "error",
    [
        Refused("it is so", hint="do that", code="GPS-208"),
        StoreError("it is so", code="GPS-704"),
        PermissionError(errno.EACCES, "Permission denied", "/proc/1/maps"),
        OSError(errno.ENOENT, "No such file or directory"),
        ValueError("not a\nnumber"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_check_that_cannot_be_made(error: Exception) -> None:
    """It is a warning with the reason, and the others are made."""

    def broken() -> Iterator[Check]:
        yield CHECKS[0]
        raise error

    found = run_checks((("first", broken), ("second", lambda: CHECKS[1:])))
    (told,) = [each for each in found if each.name == "first"]
    assert told.verdict.value == "warning"
    assert told.says.startswith("cannot determine: ")
    assert told.code == getattr(error, "code", "")
    assert "\n" not in told.says
    assert not any(words in told.says.lower() for words in POISON)
    assert found[-2:] == CHECKS[1:]


def test_document() -> None:
    """JSON has all of it, and counts."""
    found = json.loads(json.dumps(document(CHECKS)))
    assert (found["failures"], found["warnings"]) == (1, 1)
    assert found["checks"][0] == {
        "name": "a",
        "verdict": "ok",
        "says": "fine",
        "todo": "",
        "facts": {"size": 1},
        "code": "",
    }


def test_refused() -> None:
    """An error's sentence is what it says, its hint what to do."""
    found = make_refused("name", Refused("it is\n so", hint="do that"), pid=7)
    assert (found.says, found.todo, found.facts["pid"]) == ("it is so", "do that", 7)
    found = make_refused("name", Refused("it is so", code="GPS-208"))
    assert (found.code, document([found])["checks"][0]["code"]) == ("GPS-208", "GPS-208")


@pytest.mark.parametrize(
    ("count", "what", "said"), [(1, "file", "1 file"), (2, "file", "2 files"), (0, "process", "0 processes")]
)
def test_plural(count: int, what: str, said: str) -> None:
    """A number with its noun."""
    assert plural(count, what) == said
