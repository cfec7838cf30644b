"""The figures of bench/checkpoint.py: what they stand against, and how they are shown."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
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
    stock, ours, back = run.lines[1:]
    assert stock.scaled
    assert stock.seconds == pytest.approx(11.6 * 3.1 / 6.2)
    assert ours.to_stock == pytest.approx(2.0)
    assert ours.to_floor == pytest.approx(2.9 / (12 / 50 + 12 / 4))  # the faster way to the disk
    assert back.to_stock is None
    assert back.to_floor == pytest.approx(1.44 / (12 / 5 + 12 / 25))
    shown = figures.table([run], None)
    assert "| stock | checkpoint (scaled) | 5.80 | 5.80 |" in shown
    assert "scaled: 11.6 s × 3.10 s of the driver's here ÷ 6.2 s there" in shown
    assert json.loads(json.dumps(run.record()))["lines"][2]["rate"] == pytest.approx(12 / 2.9)


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
