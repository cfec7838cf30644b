"""What a check finds: OK, a warning or a failure, in one line, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import OciError
from gpusnap.runtime_shim.errors import GpusnapError, reason


class Verdict(enum.StrEnum):
    """OK; it will work, but not always or not well; it will not work."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    """Of what was looked at; docs/doctor.md explains it under this name."""
    verdict: Verdict
    says: str
    """What was found: one line, no full stop."""
    todo: str = ""
    """The next thing to do; empty where there is nothing to do."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs; sizes in bytes, times in seconds."""
    code: str = ""
    """Of the error that was found, such as GPS-312, for `gpusnap explain`; empty where it has none."""


Ask = tuple[str, Callable[[], Iterable[Check]]]
"""The name of a check, for when it cannot be made, and what makes it, or several."""


def ok(name: str, says: str, **facts: Any) -> Check:
    """Nothing to do."""
    return Check(name, Verdict.OK, says, facts=facts)


def warning(name: str, says: str, todo: str, **facts: Any) -> Check:
    """It will not always work, or not as well as it might."""
    return Check(name, Verdict.WARNING, says, todo, facts)


def failure(name: str, says: str, todo: str, **facts: Any) -> Check:
    """It will not work."""
    return Check(name, Verdict.FAILURE, says, todo, facts)


def make_refused(name: str, error: GpusnapError, otherwise: str = "", **facts: Any) -> Check:
    """What gpusnap itself would refuse, in its own words; `otherwise`: what to do, where these do not say."""
    said = " ".join(str(error).split())
    return Check(name, Verdict.FAILURE, said, error.hint or otherwise, facts, error.code)


def run_checks(asks: Iterable[Ask]) -> tuple[Check, ...]:
    """All checks, in order. One that cannot be made is a warning, and does not stop the others."""
    found: list[Check] = []
    for name, ask in asks:
        try:
            found += ask()
        except GpusnapError as error:
            found.append(_make_untold(name, error, error.hint))
        except OciError as error:
            found.append(_make_untold(name, error))
        except OSError as error:
            what = error.filename or "the file or program"
            found.append(warning(name, f"cannot determine: {what} cannot be used: {reason(error)}", ""))
        except ValueError as error:
            # A file in /proc, or an answer of another program, of a form that nobody has seen.
            found.append(warning(name, f"cannot determine: {' '.join(str(error).split())[:200]}", ""))
    return tuple(found)


def _make_untold(name: str, error: GpusnapError | OciError, todo: str = "") -> Check:
    return Check(name, Verdict.WARNING, f"cannot determine: {error}", todo, code=error.code)


def document(checks: Sequence[Check]) -> dict[str, Any]:
    """The report for JSON."""
    return {
        "failures": sum(each.verdict is Verdict.FAILURE for each in checks),
        "warnings": sum(each.verdict is Verdict.WARNING for each in checks),
        "checks": [
            {
                "name": each.name,
                "verdict": each.verdict.value,
                "says": each.says,
                "todo": each.todo,
                "facts": dict(each.facts),
                "code": each.code,
            }
            for each in checks
        ],
    }


def plural(count: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ss') else 's'}"
