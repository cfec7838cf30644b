"""bench/checkpoint.py on softgpu: every row runs, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpuhost
import pytest
import shimhost
import waiting
from support import GPUS_CONF, STATE, STORAGE, Done, good, podman, run, until

STAGE = "/run/gpusnap/stage"
SRC = Path(__file__).resolve().parents[2]
BENCH = SRC / "bench" / "checkpoint.py"
JOURNAL = Path("/run/gpusnap/journal")
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": "/root",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GPUSNAP_TESTHOST": "1",
}


@pytest.fixture
def tidied(crun: None, tmp_path: Path) -> Iterator[Path]:
    """A folder for archives; after the test it is empty, and the host as it was."""
    folder = tmp_path / "archives"
    folder.mkdir()
    yield folder
    assert (STATE / "gpus.conf").read_text() == GPUS_CONF
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)
    assert shimhost.SETTINGS.read_text() == 'runtime = "crun"\n'
    assert list(folder.iterdir()) == []
    assert not list(STORAGE.parent.glob("gpusnap-bench*"))
    assert not os.path.exists(STAGE) or os.listdir(STAGE) == []
    assert not list(JOURNAL.glob("gpusnap-bench*"))
    assert "gpusnap-bench" not in good(podman("ps", "--all", "--format", "{{.Names}}"))


def bench(*words: str | os.PathLike[str]) -> Done:
    return run(sys.executable, BENCH, *words, env=ENVIRONMENT)


def by_row(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(line["row"], line["what"]): line for line in found["lines"]}


def test_every_row(tidied: Path, tmp_path: Path) -> None:
    """Each is in the JSON with what it has to tell, and in the table."""
    figures = tmp_path / "figures.json"
    done = bench("--quick", "--folder", tidied, "--json", figures)
    assert done.code == 0, done.out + done.err
    report = json.loads(figures.read_text())
    assert report["software"] is True
    assert len(report["steady"]["pairs"]) == 3
    low, high = report["steady"]["spread"]
    assert 0 < low <= report["steady"]["ratio"] <= high
    (found,) = report["runs"]
    assert found["case"] == {"gib": 0.05, "data": "random", "procs": 1}
    assert found["failed"] == {}
    assert list(found["left_out"]) == ["stock"]
    for rate in ("to_host", "to_device", "write", "read", "sha256"):
        assert found["floor"][rate] > 0, rate
    lines = by_row(found)
    assert list(lines) == [
        ("driver-plain", "checkpoint"),
        ("driver-plain", "restore"),
        ("driver-populated", "checkpoint"),
        ("driver-populated", "restore"),
        ("driver-staged", "checkpoint"),
        ("driver-staged", "restore"),
        ("export-criu", "checkpoint"),
        ("export-criu", "restore"),
        ("export-chunks", "checkpoint"),
        ("export-chunks", "restore"),
        ("pause", "checkpoint"),
        ("again", "first"),
        ("again", "unchanged"),
        ("again", "5 % changed"),
    ]
    for name, line in lines.items():
        assert line["seconds"] >= (line["runtime"] or 0) > -1, name
        assert line["rate"] > 0, name
        assert line["to_floor"] > 0, name
        assert line["stages"], name
        assert line["gpu_bytes"] >= 51 << 20, name
        assert f"| {name[0]} | {name[1]} |" in done.out
        if line["side"] == "checkpoint" and line["runtime"]:
            assert line["peak"] > 10 << 20, name
    for row in ("export-criu", "export-chunks"):
        assert 51 << 20 <= lines[row, "checkpoint"]["written"] <= lines[row, "checkpoint"]["image"], row
        restore = lines[row, "restore"]["stages"]
        assert {"plan", "restore", "driver restore", "CRIU"} <= restore.keys(), row
        assert restore["restore"] < lines[row, "restore"]["runtime"], row
    assert "dump" in lines["export-chunks", "checkpoint"]["stages"]
    for side in ("checkpoint", "restore"):
        for row in ("driver-plain", "driver-populated", "driver-staged"):
            assert len(lines[row, side]["rounds"]) == 3, row
            assert lines[row, side]["to_stock"] is None, row
            assert (lines[row, side]["to_plain"] or 0) > 0 or row == "driver-plain", row
    assert "let go" in lines["driver-staged", "checkpoint"]["stages"]
    assert lines["driver-staged", "checkpoint"]["note"] == ""
    assert "map back" in lines["driver-staged", "restore"]["stages"]
    pause = lines["pause", "checkpoint"]
    plain = [lines["driver-plain", side]["seconds"] for side in ("checkpoint", "restore")]
    assert pause["pause"] > 0
    assert pause["pause_to_driver"] == pytest.approx(pause["pause"] / sum(plain))
    again = lines["again", "unchanged"]
    assert 0 < again["above_driver"] < again["runtime"]


def test_what_later_checkpoints_write(tidied: Path, tmp_path: Path) -> None:
    """The first one everything, the second little, the third what changed; two processes, weights."""
    figures = tmp_path / "figures.json"
    words = ["--sizes", "0.1", "--procs", "2", "--data", "bf16", "--settings", 'memory.chunk-size = "1M"']
    done = bench("--only", "again", "--folder", tidied, "--json", figures, *words)
    assert done.code == 0, done.out + done.err
    (found,) = json.loads(figures.read_text())["runs"]
    written = [line["written"] for line in by_row(found).values()]
    assert written[0] > 50 << 20
    assert written[1] < written[0] / 10
    assert written[1] < written[2] < written[0] / 5


def test_the_driver_alone(tidied: Path, tmp_path: Path) -> None:
    """Two processes; each way puts its bytes where it says, and with no file for them they go to chunks."""
    figures = tmp_path / "figures.json"
    words = ["--sizes", "0.2", "--procs", "2", "--settings", 'memory.ceiling = "64M"']
    done = bench("--only", "driver", "--folder", tidied, "--json", figures, *words)
    assert done.code == 0, done.out + done.err
    (found,) = json.loads(figures.read_text())["runs"]
    lines = by_row(found)
    assert lines["driver-populated", "checkpoint"]["note"] == ""
    assert "exceeds memory.ceiling" in lines["driver-staged", "checkpoint"]["note"]
    assert [line["to_plain"] for line in found["lines"][:2]] == [None, None]
    assert "| this ÷ plain |" in done.out
    assert "median of " in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "bare"), r"argument --only: bare: there are floor, driver, stock, .*, steady"),
        (("--sizes", "1,x"), r"argument --sizes: '1,x': numbers from 0.01 to 1024, with commas between"),
        (("--procs", "0"), r"argument --procs: '0': numbers from 1 to 64"),
        (("--settings", "memory.sizes = 1"), r"--settings: unknown setting memory.sizes in the settings"),
        (("--settings", "memory"), r"--settings: the settings is not TOML"),
        (("--folder", "/nowhere"), r"--folder: /nowhere is no folder; make it, or name another"),
    ],
)
def test_a_wrong_option(words: tuple[str, str], said: str) -> None:
    """One clear sentence, and nothing is done."""
    done = bench(*words)
    assert (done.code, done.out) == (2, "")
    assert re.search(said, done.err.splitlines()[-1]), done.err


def test_a_row_that_fails(tidied: Path, tmp_path: Path) -> None:
    """It says so, with gpusnap's own sentence; the next row is measured."""
    figures = tmp_path / "figures.json"
    words = ["--settings", 'criu.options = ["no-such-option"]']
    done = bench("--quick", "--only", "driver,pause", "--folder", tidied, "--json", figures, *words)
    assert done.code == 1
    (found,) = json.loads(figures.read_text())["runs"]
    assert list(found["failed"]) == ["pause"]
    assert "could not dump container" in found["failed"]["pause"]
    assert "- pause: FAILED: " in done.out
    assert ("driver-plain", "checkpoint") in by_row(found)


@pytest.mark.parametrize("row", ["driver", "pause"])
def test_interrupted(tidied: Path, row: str) -> None:
    """While the workload starts, and in a checkpoint: it ends with a word, and nothing is left."""
    line = [sys.executable, str(BENCH), "--sizes", "0.3", "--only", row, "--folder", str(tidied)]
    with waiting.Process(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            until(lambda: run("pgrep", "-x", "gpuwork").out, "the workload")
            if row == "pause":
                until(lambda: list(JOURNAL.glob("*")), "a checkpoint")
        finally:
            process.send_signal(signal.SIGINT)
            _, err = waiting.communicate(process, 180)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "checkpoint: interrupted; what it had made is removed"
    assert not run("pgrep", "-x", "gpuwork").out
    until(lambda: not list(JOURNAL.glob("*")), "an empty journal")
