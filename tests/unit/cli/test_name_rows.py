"""How the tables of `gpusnap history` and `gpusnap prune` fit a terminal."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpusnap.cli.commands import history, prune
from gpusnap.retention.history import Moment
from gpusnap.retention.prune import Verdict

NOW = datetime(2026, 11, 22, 17, 30, tzinfo=UTC)
LONG = "registry.example:5000/" + "a" * 80 + ":1"


def shown_history(capsys: pytest.CaptureFixture[str], name: str, *labels: str) -> list[str]:
    moment = Moment(
        "sha256:" + "5" * 64,
        (name,),
        "2026-11-22T17:18:35Z",
        "c1",
        12 << 20,
        9 << 20,
        0.25,
        "8 H100",
        "nvidia 580.65.06",
        dict.fromkeys(labels, "1200"),
    )
    history._say((moment,), NOW)
    return capsys.readouterr().out.splitlines()


def shown_prune(capsys: pytest.CaptureFixture[str], name: str) -> list[str]:
    verdict = Verdict(
        "sha256:" + "5" * 64, (name,), "2026-11-22T17:18:35Z", "server", 9 << 20, ("last", "daily")
    )
    prune._say((verdict,), "/store", (), dry_run=False)
    return capsys.readouterr().out.splitlines()


def test_history(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A usual name and the labels are whole in 80 columns; without labels, there is no column of them."""
    monkeypatch.setenv("COLUMNS", "80")
    title, row, _ = shown_history(capsys, "server:20261122-171834", "step")
    assert {"name", "pause", "labels"} < {*title.split()}
    assert "server:20261122-171834" in row
    assert row.endswith("step=1200")
    assert len(row) <= 80
    assert "labels" not in shown_history(capsys, "server:20261122-171834")[0]
    title, _, name, row, _ = shown_history(capsys, LONG, "step")
    assert (title, name) == ("name", LONG)
    assert "0.25 s" in row


def test_prune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are never broken."""
    monkeypatch.setenv("COLUMNS", "80")
    title, row, _ = shown_prune(capsys, "server:20261122-171834")
    assert title.split()[-1] == "because"
    assert "server:20261122-171834" in row
    assert row.endswith("last, daily")
    assert len(row) <= 80
    assert shown_prune(capsys, LONG)[2] == LONG
