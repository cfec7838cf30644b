"""Opening a checkpoint, wherever it is."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpusnap.operations import open as opening
from gpusnap.runtime_shim.runtime.criu import scratch_files


def test_a_temporary_directory_of_a_killed_process_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name has the mark of its process; that of a process that runs stays."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:
        path = os.path.dirname(os.path.join(opening._make_temporary(stack).path, ""))
        scratch_files.sweep_all()
        assert os.path.isdir(path)
        with subprocess.Popen(["true"]) as ended:
            pass
        killed = os.path.basename(path).replace(f"-{os.getpid()}.", f"-{ended.pid}.")
        (tmp_path / killed).mkdir()
        scratch_files.sweep_all()
        assert os.listdir(tmp_path) == [os.path.basename(path)]
