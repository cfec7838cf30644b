"""CRIU's log: the one line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusnap.runtime_shim.runtime.criu import run
from gpusnap.runtime_shim.runtime.criu.run import _find_first_error

WHY = "Can't dump file 5 of that type [20000] (chr 195:0)"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"(00.01) Dumping\n(00.012345) Error (criu/files-ext.c:98): {WHY}\n(00.02) Error (a.c:1): b\n", WHY),
        (f"(00.012345)    123: Error (criu/files-ext.c:98): {WHY}\n", WHY),
        (
            "(00.01) Error (kerndat.c:1): Can't setup RLIMIT_NOFILE for self\n(00.02) Error (a.c:1): b\n",
            "b",
        ),
        ("(00.01) Warn  (criu/a.c:1): careful\n(00.02) Dumping finished successfully\n", ""),
        ("Error (a.c:1): without a time\n", ""),
        ("", ""),
        ("(00.01) Error (a.c:1): " + "x" * 1000, "x" * 300),
        ("(00.01) Error (a.c:1): \udcff", "\\xff"),
    ],
)
def test_first_error(tmp_path: Path, text: str, error: str) -> None:
    """The first error, with or without a task's PID; what does no harm is passed over."""
    path = tmp_path / "dump.log"
    path.write_text(text, "utf-8", errors="surrogateescape")
    assert _find_first_error(str(path)) == error


def test_no_log(tmp_path: Path) -> None:
    """Where there is no log there is no error to tell."""
    assert _find_first_error(str(tmp_path / "dump.log")) == ""
    assert _find_first_error(str(tmp_path)) == ""


def test_only_the_end_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long log the end is read."""
    monkeypatch.setattr(run, "_TAIL", 100)
    path = tmp_path / "dump.log"
    path.write_text(
        "(00.01) Error (a.c:1): early\n" + "(00.02) x\n" * 100 + "(00.03) Error (a.c:1): late\n", "ascii"
    )
    assert _find_first_error(str(path)) == "late"
