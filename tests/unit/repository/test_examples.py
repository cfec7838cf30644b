"""The units in examples/, by systemd's own check; what the scripts in them do is tested in the test host."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
UNITS = sorted(EXAMPLES.glob("*/*.service"))
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))


def test_there_are_some() -> None:
    assert {unit.parent.name for unit in UNITS} == {"quadlet", "preemption"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    """With the scripts where they are here."""
    text = unit.read_text().replace("/usr/local/lib/gpusnap", str(unit.parent))
    assert str(unit.parent) in text
    copy = tmp_path / unit.name
    copy.write_text(text)
    (tmp_path / "server.service").write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_of_sh(script: Path) -> None:
    """Each can be parsed, says how it is called, and ends with 2 where it is called otherwise."""
    subprocess.run(["sh", "-n", str(script)], check=True)
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.search(rf"^ *{re.escape(script.name)} ", done.stderr, re.M)


@pytest.mark.skipif(
    shutil.which("gpusnap", path="/usr/local/bin:/root/.local/bin") is not None, reason="gpusnap is installed"
)
@pytest.mark.parametrize(
    ("script", "words"),
    [("quadlet/keep.sh", ("stop", "w")), ("preemption/preempt.sh", ("-t", "1", "-f", "/", "w"))],
)
def test_without_gpusnap(script: str, words: tuple[str, ...]) -> None:
    """It is said when the script starts, not when it has to act."""
    done = subprocess.run(
        ["sh", str(EXAMPLES / script), *words],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "gpusnap is not found in /usr/bin:/bin:/usr/local/bin:/root/.local/bin" in done.stderr
