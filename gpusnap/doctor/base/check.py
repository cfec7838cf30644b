"""The result of a check: OK, a warning or a failure, in one line, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.errors import OciError
from gpusnap.runtime_shim.base.errors import GpusnapError, reason


class Verdict(enum.StrEnum):
    """OK; it will work, but not always or not well; it will not work."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    """The name of the check, under which docs/doctor.md explains it."""
    verdict: Verdict
    says: str
    """The result: one line, no full stop."""
    todo: str = ""
    """The next thing to do; empty if there is none."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The result for programs; sizes in bytes, times in seconds."""
    code: str = ""
    """The code of the error, such as GPS-312, for `gpusnap explain`; empty if there is none."""


Ask = tuple[str, Callable[[], Iterable[Check]]]
"""The name of a check, in case it fails itself, and a function that runs it, or several."""


def ok(name: str, says: str, **facts: Any) -> Check:
    """Return a result with nothing to do."""
    return Check(name, Verdict.OK, says, facts=facts)


def warning(name: str, says: str, todo: str, **facts: Any) -> Check:
    """Return a warning: it will not always work, or not as well as it could."""
    return Check(name, Verdict.WARNING, says, todo, facts)


def failure(name: str, says: str, todo: str, **facts: Any) -> Check:
    """Return a failure: it will not work."""
    return Check(name, Verdict.FAILURE, says, todo, facts)


def make_refused(name: str, error: GpusnapError, otherwise: str = "", **facts: Any) -> Check:
    """Return a failure that gpusnap itself would raise; `otherwise`: what to do, if its hint is missing."""
    said = " ".join(str(error).split())
    return Check(name, Verdict.FAILURE, said, error.hint or otherwise, facts, error.code)


def run_checks(asks: Iterable[Ask]) -> tuple[Check, ...]:
    """Run all checks, in order. One that raises an error is a warning, and does not stop the others."""
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
            # A file in /proc, or an answer of another program, has an unexpected form.
            found.append(warning(name, f"cannot determine: {' '.join(str(error).split())[:200]}", ""))
    return tuple(found)


def _make_untold(name: str, error: GpusnapError | OciError, todo: str = "") -> Check:
    return Check(name, Verdict.WARNING, f"cannot determine: {error}", todo, code=error.code)


def document(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the report for JSON."""
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
    """Return for example "1 file", "2 files"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ss') else 's'}"
