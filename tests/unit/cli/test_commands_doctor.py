"""`gpusnap doctor`: what it prints, and its exit codes."""

from __future__ import annotations

import ast
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from gpusnap.base.user_errors import NotFound
from gpusnap.cli import exit_codes
from gpusnap.cli.commands import doctor as commands_doctor
from gpusnap.doctor import host
from gpusnap.doctor.base import subject
from gpusnap.doctor.base.check import Check, failure, make_refused, ok, warning
from gpusnap.doctor.host_checks import criu
from gpusnap.runtime_shim.base.errors import Refused

Run = Callable[..., tuple[int, str, str]]
FINE, WELL, BAD = (
    ok("one", "fine", size=1),
    warning("second", "well", "do it"),
    failure("third", "no", "do that"),
)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """What the host's checks give."""
    found: list[Check] = []
    monkeypatch.setattr(host, "checks", lambda runtime: tuple(found))
    return found


def test_text(gpusnap: Run, checks: list[Check]) -> None:
    """A line for each, what to do below it, a count; 1 for a failure."""
    checks += [FINE, WELL, BAD]
    code, out, err = gpusnap("doctor")
    assert code == exit_codes.FAILED
    assert out.splitlines() == [
        "OK      one     fine",
        "warning second  well",
        "                → do it",
        "failure third   no",
        "                → do that",
        "",
        "1 failure, 1 warning",
        "GPU containers cannot be checkpointed and restored on this host until the failures are fixed",
    ]
    assert err == "gpusnap: 1 of 3 checks failed; follow the hint of each one\n"


def test_a_code(gpusnap: Run, checks: list[Check]) -> None:
    """At the end of what was found, and in JSON as a member of its own."""
    checks.append(make_refused("one", Refused("it is so", hint="do that", code="GPS-208")))
    assert gpusnap("doctor")[1].splitlines()[:2] == [
        "failure one  it is so [GPS-208]",
        "             → do that",
    ]
    assert json.loads(gpusnap("doctor", "--json")[1])["checks"][0]["code"] == "GPS-208"


def test_warnings_are_no_failure(gpusnap: Run, checks: list[Check]) -> None:
    """0, and nothing on stderr."""
    checks += [FINE, WELL]
    code, out, err = gpusnap("doctor")
    assert (code, err) == (exit_codes.DONE, "")
    assert out.splitlines()[-2:] == [
        "0 failures, 1 warning",
        "GPU containers can be checkpointed and restored on this host; read the warnings first",
    ]


def test_the_last_line_without_warnings() -> None:
    """It names the container that was asked for."""
    assert commands_doctor.conclusion([FINE], "w") == "w can be checkpointed"
    (old,) = criu.check_criu("4.1.1", "6.18.0", find=lambda name: "/usr/bin/criu")
    said = commands_doctor.conclusion([FINE, old], None)
    assert ", but not a container with a server that listens on a port; read the warnings first" in said
    assert commands_doctor.conclusion([FINE, old], "w") == "w can be checkpointed; read the warnings first"
    assert commands_doctor.conclusion([BAD], "w").startswith("w cannot be checkpointed until ")


def test_json(gpusnap: Run, checks: list[Check]) -> None:
    """All of it, with the same exit code."""
    checks += [FINE, BAD]
    code, out, _ = gpusnap("doctor", "--json")
    assert code == exit_codes.FAILED
    assert [each["name"] for each in json.loads(out)["checks"]] == ["one", "third"]


def test_colours() -> None:
    """On a terminal the verdict has a colour; what a container says has no say in it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard")
    commands_doctor.print_checks(console, [BAD, ok("one", "\x1b[31mred [bold]x[/bold]")])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b[1;31mfailure" in text
    assert "\x1b[31mred" not in text
    assert "[bold]x[/bold]" in text


@pytest.mark.parametrize("line", [("--containerd", "default"), ("--runtime", "crun", "w")])
def test_usage(gpusnap: Run, line: tuple[str, ...]) -> None:
    """What does not go together."""
    assert gpusnap("doctor", *line)[0] == exit_codes.USAGE


def test_no_such_container(gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own exit code."""

    def nobody(wanted: str, *, namespace: str) -> None:
        raise NotFound(f"there is no container {wanted} {namespace}")

    monkeypatch.setattr(subject, "find", nobody)
    code, out, err = gpusnap("doctor", "--containerd", "default", "w")
    assert (code, out) == (exit_codes.NOT_FOUND, "")
    assert "there is no container w default" in err


def test_a_host_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check of an empty root gives a line, and none ends the others."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "proc").mkdir()
    found = {each.name: each for each in host.checks(root=str(tmp_path), settings=str(tmp_path / "no.toml"))}
    assert {"kernel", "privileges", "criu", "runtime", "RAM", "settings", "registries"} <= {*found}
    assert found["privileges"].verdict.value == "failure"
    assert found["kernel"].verdict.value == "failure"


def test_every_check_is_in_the_docs() -> None:
    """docs/doctor.md explains each name that a check has."""
    root = Path(__file__).parents[3]
    told = (root / "docs/doctor.md").read_text("utf-8")
    names = {f'"{name}"' for path in (root / "gpusnap/doctor").rglob("*.py") for name in names_in(path)}
    assert len(names) > 30
    assert [name for name in sorted(names) if f"| {name[1:-1]} |" not in told] == []


def names_in(path: Path) -> set[str]:
    """First arguments of ok, warning, failure and refused that are plain strings."""
    calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    makers = ("ok", "warning", "failure", "refused")
    ours = (
        call for call in calls if isinstance(call.func, ast.Name) and call.func.id in makers and call.args
    )
    firsts = (call.args[0] for call in ours)
    return {each.value for each in firsts if isinstance(each, ast.Constant) and isinstance(each.value, str)}
