"""What is shown while a command works: a line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusnap.base.progress import Lines, Progress, board, in_words, watch_growth
from gpusnap.oci.registry.copy import TransferProgress, TransferTotals
from gpusnap.runtime_shim.base.progress import Board, Record, Reporter

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In stderr's place; pytest puts its own there after the fixtures."""
    made = Terminal()
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return made


@pytest.fixture
def quiet() -> Iterator[None]:
    Progress.quiet = True
    yield
    Progress.quiet = False


def shown(bar: Progress) -> None:
    """Have the terminal show how it is now."""
    bar._line._bars.refresh()  # type: ignore[union-attr]


def test_nothing_of_what_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is no terminal: neither on stderr nor on stdout."""
    with Progress() as bar:
        bar.stage("records")
        bar.at(1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is no terminal: the stage, bytes of how many, how fast, and how long it will take."""
    now = [100.0]
    lines = Lines(every=10, clock=lambda: now[0])
    lines.stage("push")
    for second in range(1, 26):
        now[0] = 100.0 + second
        lines.at(second * MIB, 85 * MIB)
    now[0] += 10
    lines.stage("to disk")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "gpusnap: push: 10.0 MiB of 85.0 MiB, 1.0 MiB/s, 1 min 15 s left",
        "gpusnap: push: 20.0 MiB of 85.0 MiB, 1.0 MiB/s, 1 min 5 s left",
        "gpusnap: to disk",
    ]


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage, bytes and time; nothing of it stays, and a stage's name is no markup."""
    terminal = a_terminal(monkeypatch)
    with Progress() as bar:
        assert bar.shown
        bar.stage("checkpoint of [red]w")
        bar.at(2 * MIB, 8 * MIB)
        shown(bar)
        bar.stage("restore")
        bar.at(5 * MIB)
        shown(bar)
        bar.stage("push")
        bar.show_transfer(TransferProgress(TransferTotals(1, MIB, 1, 2 * MIB), 16 * MIB))
        shown(bar)
        bar.say("SIGINT: [it] is being undone")
    text = terminal.getvalue()
    assert "checkpoint of [red]w" in text
    assert "2.0 MiB of 8.0 MiB" in text
    assert "5.0 MiB" in text
    assert "5.0 MiB of" not in text
    assert "3.0 MiB of 16.0 MiB" in text
    assert "0:00:0" in text
    assert "gpusnap: SIGINT: [it] is being undone\n" in text


def test_on_a_terminal_that_takes_no_line_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what is short, not even an empty line."""
    terminal = a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with Progress() as bar:
        assert not bar.shown
        bar.stage("records")
    assert terminal.getvalue() == ""


def test_quiet(monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    """Only what is said of a signal."""
    terminal = a_terminal(monkeypatch)
    with Progress() as bar, board() as there:
        assert not bar.shown
        bar.stage("push")
        bar.at(1, 2)
        tick = bar.follow(there, "restore", lambda: pytest.fail("it was looked at"))
        for _ in range(100):
            tick()
        bar.say("SIGINT")
    assert terminal.getvalue() == "gpusnap: SIGINT\n"


def test_what_grows(tmp_path: Path) -> None:
    """Files in folders that are new; those that were there do not count, nor does a folder that is gone."""
    (tmp_path / "old").mkdir()
    measure = watch_growth(str(tmp_path))
    (tmp_path / "old/file").write_bytes(b"x" * 100)
    assert measure() == 0
    (tmp_path / "new/blobs").mkdir(parents=True)
    (tmp_path / "new/blobs/one").write_bytes(b"x" * 10)
    (tmp_path / "new/two").write_bytes(b"x" * 5)
    assert measure() == 15
    assert watch_growth(str(tmp_path / "gone"))() == 0


def test_following_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps in words, the bytes that it moves, and when the container runs again."""
    terminal = a_terminal(monkeypatch)
    reporter = Reporter()
    with Progress() as bar, Board() as there:
        reporter.report_to(there.path)
        tick = bar.follow(there, "checkpoint of w", lambda: 3 * MIB)
        reporter.step("lock")
        for _ in range(4):
            tick()
        shown(bar)
        assert "checkpoint of w: waiting for its GPU work" in terminal.getvalue()
        assert "3.0 MiB" in terminal.getvalue()  # of files, as the step moves nothing itself
        reporter.step("resume")
        reporter.note_resumed()
        reporter.step("write")
        reporter.move(8 * MIB, 8 * MIB)
        tick()
        shown(bar)
        assert re.search(r"the container runs again after \d\.\d s; writing GPU memory", terminal.getvalue())
        assert "8.0 MiB of 8.0 MiB" in terminal.getvalue()
        reporter.step("undo: unlock")
        tick()
        shown(bar)
    assert "checkpoint of w: being undone" in terminal.getvalue()


def test_steps_that_have_no_words() -> None:
    """The command's own words stay."""
    assert in_words("restore", Record("let go")) == "restore"
    assert in_words("restore", Record("fill")) == "restore: memory to its processes"
    assert in_words("x", Record("prepare", resumed=3.14)) == "the container runs again after 3.1 s"


def test_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has no memory for one: what is there to look at is shown."""

    def fail(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", fail)
    looked: list[int] = []

    def measure() -> int:
        looked.append(1)
        return 0

    with Progress(shown=False) as bar, board() as there:
        assert there is None
        tick = bar.follow(there, "restore", measure)
        for _ in range(80):
            tick()
    assert len(looked) == 2
