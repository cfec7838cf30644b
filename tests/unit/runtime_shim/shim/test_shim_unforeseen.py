"""What nobody foresaw is a sentence for whoever called, and not a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpusnap.runtime_shim.errors import unforeseen
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.shim import entry


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("x"), "KeyError: 'x' (test_shim_unforeseen.py:18)"),
        (FileNotFoundError(2, "No such file or directory", "/a"), "/a: it does not exist (test_shim"),
        (NameError("_driver"), "NameError: _driver (test_shim"),
    ],
)
def test_the_sentence(error: Exception, said: str) -> None:
    """Which it was, and the line that it came from: enough to tell us."""
    found = unforeseen(raised(error)).sentence()
    assert found.startswith(said)
    assert found.endswith("; this should have been said better: tell us [GPS-001]")


def test_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """containerd and Podman read --log, and nothing else."""

    def answer(args: list[str]) -> int:
        raise ImportError("No module named 'zstandard'")

    log = tmp_path / "log.json"
    monkeypatch.setattr(entry, "_answer", answer)
    monkeypatch.setattr(locate, "take_launcher", lambda: None)
    line = ["gpusnap-runtime", "--log", str(log), "--log-format", "json", "checkpoint", "c"]
    monkeypatch.setattr(sys, "argv", line)
    assert entry.main() == 1
    (said,) = [json.loads(each) for each in log.read_text().splitlines()]
    assert said["level"] == "error"
    assert said["msg"].startswith(
        "gpusnap: a part of gpusnap is missing, so nothing is checkpointed or restored: "
        "No module named 'zstandard'; install gpusnap anew"
    )
    assert "Traceback" not in capfd.readouterr().err
