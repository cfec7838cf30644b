"""The programs that inject faults (bench/): each runs, finds nothing, and says what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import good, run

BENCH = Path(__file__).resolve().parents[2] / "bench"
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/root", "GPUSNAP_TESTHOST": "1"}

# Options, and a count that a run of a few rounds has.
RUNS: dict[str, tuple[tuple[str, ...], str, int]] = {
    "fuzz": (("--only", "rows swapped"), "refused", 2),
    "kills": (("--rounds", "3", "--runtimes", "crun", "--ways", "checkpoint,push,gc"), "good", 3),
    "injected": (("--rounds", "10", "--ways", "checkpoint"), "checkpoints", 10),
    "injected command": (
        ("--rounds", "6", "--ways", "command", "--pages", "store", "--errors", "ENOSPC,EDQUOT"),
        "commands",
        6,
    ),
    "soak": (("--rounds", "6", "--runtimes", "crun"), "cycles", 6),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_few_rounds(crun: None, tmp_path: Path, name: str) -> None:
    """Exit status 0, and a last line of JSON with the counts."""
    words, count, number = RUNS[name]
    program = name.split()[0]
    line: list[str | Path] = [sys.executable, "-B", BENCH / f"{program}.py", "--keep", tmp_path, *words]
    found = json.loads(good(run(*line, env=ENVIRONMENT, seconds=300)).splitlines()[-1])
    assert (found["program"], found["failures"], found[count]) == (program, 0, number)


def test_a_failure_is_kept(crun: None, tmp_path: Path) -> None:
    """A program that finds something says so by its exit status, and keeps what shows it again."""
    code = (
        f"import sys, argparse, pathlib; sys.path.insert(0, {str(BENCH)!r}); import faulthost\n"
        f"report = faulthost.Report('x', 7, pathlib.Path({str(tmp_path)!r}))\n"
        "report.failed('round 1', faulthost.Hung('it hung'), pathlib.Path('/etc/hostname'))\n"
        "sys.exit(report.end())\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["hung"] == 1
    assert "it hung" in (tmp_path / "x-7-1/what").read_text()
    assert (tmp_path / "x-7-1/hostname").exists()
