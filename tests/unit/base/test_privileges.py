"""What is said to a user who is not root."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusnap.base import privileges
from gpusnap.base.user_errors import Damaged, failure
from gpusnap.cli import exit_codes
from gpusnap.oci.base.errors import LayoutError
from gpusnap.runtime_shim.base.errors import GpusnapError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def not_root(as_root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is a user."""
    monkeypatch.setattr(privileges, "is_root", lambda: False)


@pytest.mark.parametrize(
    "line", ["checkpoint w", "restore w", "recover", "recover --list", "recover w", "resume 1", "doctor w"]
)
def test_commands_that_need_root(gpusnap: Run, line: str) -> None:
    """They say so before anything else; nothing that follows from it is said."""
    code, out, err = gpusnap(*line.split())
    assert (code, out) == (exit_codes.FAILED, "")
    assert f"gpusnap {line.split()[0]}" in err
    why = "must be run as root"
    if line == "checkpoint w":
        why = "was not run as root, but only containers of root can be checkpointed"
    assert err.endswith(f" {why}; run gpusnap as root [GPS-005]\n")


@pytest.mark.parametrize(
    "line", ["--version", "--help", "restore --help", "explain GPS-005", "completion zsh"]
)
def test_commands_that_do_not(gpusnap: Run, line: str) -> None:
    """They work."""
    assert gpusnap(*line.split())[0] == 0


def refused_by(path: str) -> LayoutError:
    error = LayoutError(f"{path} cannot be read: access is refused")
    error.__cause__ = PermissionError(13, "Permission denied", path)
    return error


def test_explained() -> None:
    """A refused access is no damage; what has another cause, or is root's, stays as it is."""
    error = failure(refused_by("/store"))
    error.__cause__ = refused_by("/store")
    assert isinstance(error, Damaged)
    said = privileges.explain_error(error)
    assert not isinstance(said, Damaged)
    assert said.sentence() == "/store cannot be read: access is refused; run gpusnap as root [GPS-005]"
    other = GpusnapError("another thing", hint="running")
    assert privileges.explain_error(other) is other
    known = GpusnapError("the hooks cannot be written", hint="run it as root", code="GPS-005")
    known.__cause__ = PermissionError(13, "Permission denied")
    assert privileges.explain_error(known) is known  # it is not said twice


def test_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom the kernel refuses an access is not told to be root where he is."""
    monkeypatch.setattr(privileges, "is_root", lambda: True)
    error = GpusnapError("x")
    error.__cause__ = PermissionError(1, "Operation not permitted")
    assert privileges.explain_error(error) is error


def test_what_may_not_be_seen(gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that only root may search is not taken for one that is empty."""
    real = os.stat

    def stat(path: object, *more: object, **named: object) -> object:
        if str(path).startswith(f"{tmp_path}/root/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stat)
    (tmp_path / "root/store").mkdir(parents=True)
    for word in (f"{tmp_path}/root/w.tar", f"oci:{tmp_path}/root/store"):
        code, _, err = gpusnap("inspect", word)
        assert code == exit_codes.FAILED
        assert err.endswith("cannot be read: access is refused; run gpusnap as root [GPS-005]\n")
