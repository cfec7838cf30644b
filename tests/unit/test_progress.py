"""The line that changes on a terminal, and nowhere else."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gpusnap import progress
from gpusnap.oci.chunks.table import Progress as ChunkProgress
from gpusnap.oci.registry.copy import Moved, Underway
from gpusnap.progress import Progress, grown

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_where_it_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither on stderr nor on stdout."""
    with Progress() as bar:
        bar.stage("records")
        bar.at(1, 2)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage, bytes and time; nothing of it stays, and a stage's name is no markup."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with Progress() as bar:
        assert bar.shown
        bar.stage("checkpoint of [red]w")
        bar.chunks(ChunkProgress(8 * MIB, 2 * MIB))
        assert bar._bars is not None
        bar._bars.refresh()
        bar.stage("restore")
        bar.at(5 * MIB)
        bar._bars.refresh()
        bar.stage("push")
        bar.moved(Underway(Moved(1, MIB, 1, 2 * MIB), 4, 16 * MIB))
        bar._bars.refresh()
    shown = terminal.getvalue()
    assert "checkpoint of [red]w" in shown
    assert "2.0 MiB of 8.0 MiB" in shown
    assert "5.0 MiB" in shown
    assert "5.0 MiB of" not in shown
    assert "3.0 MiB of 16.0 MiB" in shown
    assert "0:00:0" in shown


def test_what_grows(tmp_path: Path) -> None:
    """Files in folders that are new; those that were there do not count, nor does a folder that is gone."""
    (tmp_path / "old").mkdir()
    measure = grown(str(tmp_path))
    (tmp_path / "old/file").write_bytes(b"x" * 100)
    assert measure() == 0
    (tmp_path / "new/blobs").mkdir(parents=True)
    (tmp_path / "new/blobs/one").write_bytes(b"x" * 10)
    (tmp_path / "new/two").write_bytes(b"x" * 5)
    assert measure() == 15
    assert grown(str(tmp_path / "gone"))() == 0


def test_watching() -> None:
    """Looked at now and then, and on a terminal only."""
    looked: list[int] = []

    def measure() -> int:
        looked.append(1)
        return 0

    for shown, expected in ((False, 0), (True, 2)):
        tick = Progress(shown=shown).watching(measure, every=3)
        for _ in range(6):
            tick()
        assert len(looked) == expected
    assert progress.Tick
