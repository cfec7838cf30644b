"""The figures of bench/checkpoint.py: what they stand against, and how they are shown."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from fakes import FakeDriver

from gpusnap.runtime_shim.settings import Memory

BENCH = Path(__file__).parents[3] / "bench"
GIB = 1 << 30


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench/ is a folder of programs, and no package."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return importlib.import_module("figures")


def test_ratios(figures: ModuleType) -> None:
    """By the runtime's part of a command; against the stock tools and the floor of the same run."""
    floor = figures.Floor(
        GIB, to_host=50.0, to_device=25.0, sha256=1.0, write=2.0, read=5.0, direct_write=4.0
    )
    run = figures.Run(figures.Case(12.0, "random", 1), floor)
    plain = figures.Line("driver-plain", "checkpoint", "checkpoint", 3.1, 12 * GIB)
    run.lines += [plain, figures.scaled_stock("checkpoint", plain)]
    run.lines.append(figures.Line("pause", "checkpoint", "checkpoint", 9.0, 12 * GIB, runtime=2.9))
    run.lines.append(figures.Line("driver-plain", "restore", "restore", 1.44, 12 * GIB))
    figures.ratios(run)
    _, stock, ours, back = run.lines
    assert stock.scaled
    assert stock.seconds == pytest.approx(11.6 * 3.1 / 6.2)
    assert (plain.to_stock, plain.to_plain) == (None, None)  # calls alone against a whole runtime
    assert ours.to_stock == pytest.approx(2.0)
    assert ours.to_floor == pytest.approx(2.9 / (12 / 50 + 12 / 4))  # the faster way to the disk
    assert back.to_stock is None
    assert back.to_floor == pytest.approx(1.44 / (12 / 5 + 12 / 25))
    shown = figures.table([run], None)
    assert "| stock | checkpoint (scaled) | 5.80 | 5.80 |" in shown
    assert "scaled: 11.6 s × 3.10 s of the driver's here ÷ 6.2 s there" in shown
    assert json.loads(json.dumps(run.record()))["lines"][2]["rate"] == pytest.approx(12 / 2.9)


def test_against_the_driver(figures: ModuleType) -> None:
    """The driver's other ways by its plain one, a pause by both its calls; a second checkpoint's own part."""
    run = figures.Run(figures.Case(12.0, "random", 1))
    run.lines += [
        figures.Line("driver-plain", "checkpoint", "checkpoint", 6.0, 12 * GIB),
        figures.Line("driver-plain", "restore", "restore", 2.0, 12 * GIB),
        figures.Line("driver-populated", "checkpoint", "checkpoint", 3.0, 12 * GIB),
        figures.Line("driver-staged", "restore", "restore", 2.5, 12 * GIB),
        figures.Line("stock", "checkpoint", "checkpoint", 11.0, 12 * GIB),
        figures.Line("pause", "checkpoint", "checkpoint", 9.0, 12 * GIB, runtime=8.0, pause=5.0),
    ]
    for what in ("first", "unchanged"):
        found = figures.Line("again", what, "checkpoint", 9.0, 12 * GIB, runtime=7.0)
        found.stages = {"lock": 0.25, "driver checkpoint": 3.0, "dump": 0.5, "resume": 2.25, "sync": 1.0}
        run.lines.append(found)
    figures.ratios(run)
    assert [line.to_plain for line in run.lines] == [None, None, 0.5, 1.25, *[None] * 4]
    assert [line.to_stock for line in run.lines[:4]] == [None] * 4
    assert [line.pause_to_driver for line in run.lines] == [*[None] * 5, 0.625, None, None]
    assert [line.above_driver for line in run.lines] == [*[None] * 7, pytest.approx(1.5)]
    shown = figures.table([run], None)
    assert "| stock ÷ this | this ÷ floor | this ÷ plain | pause ÷ driver | above driver |" in shown
    assert "| driver-staged | restore | 2.50 |  | 4.80 |  |  |  |  |  |  | 1.25 |  |  |" in shown
    assert "|  |  | 5.00 | 1.38 |  |  | 0.62 |  |" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("| again | unchanged")]
    assert line.endswith("|  |  |  | 1.57 |  |  |  | 1.50 |")


def test_a_pause_without_the_driver(figures: ModuleType) -> None:
    """Half of the driver's time is nothing to divide by."""
    run = figures.Run(figures.Case(1.0, "zero", 1))
    run.lines.append(figures.Line("driver-plain", "checkpoint", "checkpoint", 6.0, GIB))
    run.lines.append(figures.Line("pause", "checkpoint", "checkpoint", 9.0, GIB, pause=5.0))
    figures.ratios(run)
    assert run.lines[1].pause_to_driver is None


class Bare(NamedTuple):
    """The rows of the driver, with rounds that only say when they were asked for."""

    rows: list[Any]
    asked: list[str]


@pytest.fixture
def bare(figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bare:
    """Each round takes as many seconds as there were before it; the first one, 100."""
    module = importlib.import_module("bare")
    asked: list[str] = []

    def rounds(_: object, row: str) -> tuple[dict[str, float], str]:
        asked.append(row)
        took = float(len(asked) - 1) or 100.0
        steps = {"lock": 0.0, "driver checkpoint": took, "driver restore": took / 2, "unlock": 0.0}
        return steps | ({"let go": 0.5, "map back": 0.25} if row == "driver-staged" else {}), ""

    monkeypatch.setattr(module.Bare, "round", rounds)
    found = module.Bare(
        driver=FakeDriver(), pids=[1], gpu_bytes=GIB, name="bench", folder=tmp_path, memory=Memory()
    )
    return Bare(found.rows(lambda: asked.append("well")), [each for each in asked if each != "well"])


def test_turns(bare: Bare) -> None:
    """One round that does not count; then none is always the first, nor always after the same one."""
    plain, populated, staged = "driver-plain", "driver-populated", "driver-staged"
    assert bare.asked[0] == plain
    turns = [bare.asked[at : at + 3] for at in (1, 4, 7)]
    assert [sorted(turn) for turn in turns] == [[plain, populated, staged]] * 3
    without = [row for row in bare.asked[1:] if row != staged]
    assert without == [plain, populated, populated, plain, plain, populated]


def test_medians(bare: Bare) -> None:
    """Of three, with the seconds of each; the steps are that round's, by side."""
    found = {(line.row, line.what): line for line in bare.rows}
    assert list(found) == [
        (f"driver-{row}", side)
        for row in ("plain", "populated", "staged")
        for side in ("checkpoint", "restore")
    ]
    for line in found.values():
        assert line.seconds == sum(line.stages.values()) == sorted(line.rounds)[1]
        assert len(line.rounds) == 3
        assert max(line.rounds) < 50
    assert list(found["driver-staged", "checkpoint"].stages) == ["lock", "driver checkpoint", "let go"]
    assert list(found["driver-staged", "restore"].stages) == ["map back", "driver restore", "unlock"]


def test_a_floor_that_is_not_known(figures: ModuleType) -> None:
    """Without the link or the disk there is no ratio, and the reason is shown."""
    floor = figures.Floor(GIB, to_host=None, to_device=None, sha256=1.0, write=2.0, notes=("no link: why",))
    run = figures.Run(figures.Case(1.0, "zero", 4), floor)
    run.lines.append(figures.Line("driver-plain", "checkpoint", "checkpoint", 1.0, GIB))
    run.failed["pause"] = "it did not"
    figures.ratios(run)
    assert run.lines[0].to_floor is None
    shown = figures.table([run], figures.Steady(((10.0, 9.9), (10.0, 10.0), (10.0, 10.2))))
    assert "- no link: why" in shown
    assert "- pause: FAILED: it did not" in shown
    assert "steady state, gpusnap-runtime ÷ the plain runtime: 1.000 (0.990 to 1.020" in shown


def test_sizes(figures: ModuleType) -> None:
    """Whole MiB, and enough for each process."""
    assert figures.Case(0.05, "random", 1).size == 51 << 20
    assert figures.Case(0.01, "random", 8).mib == 32
