"""Our own binding to NVML: the same answers as nvidia-ml-py's, and the same errors where there is nothing."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from softgpu_box import LIB, ROOT, Agent, Box, gpu_line
from test_nvidia_on_softgpu import CALLER, Caller, loaded

from gpusnap.runtime_shim.gpu.nvidia import nvml, nvml_ctypes


class Without(Caller):
    """A caller whose Python has no nvidia-ml-py."""

    def __init__(self, box: Box, folder: Path) -> None:
        folder.mkdir()
        (folder / "pynvml.py").write_text("raise ImportError('not here')\n")
        path = f"{folder}:{ROOT}"
        self.agent = Agent(box.popen([sys.executable, str(CALLER)], lib=LIB, PYTHONPATH=path))
        box.agents.append(self.agent)


def test_answers_as_nvidia_ml_py(boxes: Callable[..., Box], tmp_path: Path) -> None:
    extra = "mig=on compute-mode=exclusive-process"
    box = boxes(
        gpus=[gpu_line(0), gpu_line(1, memory="24GiB", model="NVIDIA A30", cc="8.0", extra=extra)],
        nodes=[0, 1],
    )
    agent, *_ = loaded(box, 1)
    theirs, ours = Caller(box), Without(box, tmp_path / "without")
    host = ours.do("host")
    assert len(host["gpus"]) == 2
    assert host == theirs.do("host")
    used = ours.do("memory_used", [agent.pid])
    assert used
    assert used == theirs.do("memory_used", [agent.pid])


def test_has_what_is_called() -> None:
    """Of the real one nothing is called, or caught, that ours lacks."""
    called = set(re.findall(r"\bnvml\.(nvml\w+)", Path(nvml.__file__).read_text()))
    assert called
    assert all(hasattr(nvml_ctypes, name) for name in called | {"NVMLError"})


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_ctypes, "_LIBRARY", "libnvidia-ml-of-no-host.so.1")
    nvml_ctypes._library.cache_clear()
    with pytest.raises(nvml_ctypes.NVMLError) as caught:
        nvml_ctypes.nvmlInit()
    assert caught.value.value == 12
    nvml_ctypes._library.cache_clear()


def test_a_driver_that_lacks_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_ctypes, "_library", SimpleNamespace)
    with pytest.raises(nvml_ctypes.NVMLError) as caught:
        nvml_ctypes.nvmlDeviceGetMigMode(ctypes.c_void_p())
    assert caught.value.value == 13


def test_processes_that_come_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is asked for again while it grows; bytes that are not told are None."""
    sizes: list[int] = []

    def answer(_: object, count: Any, rows: Any) -> int:
        sizes.append(count._obj.value)
        if len(sizes) < 3:
            count._obj.value = 6 * len(sizes)
            return 7
        count._obj.value = 2
        rows[0].pid, rows[0].usedGpuMemory = 11, 5
        rows[1].pid, rows[1].usedGpuMemory = 12, (1 << 64) - 1
        return 0

    library = SimpleNamespace(nvmlDeviceGetComputeRunningProcesses_v3=answer)
    monkeypatch.setattr(nvml_ctypes, "_library", lambda: library)
    found = nvml_ctypes.nvmlDeviceGetComputeRunningProcesses(ctypes.c_void_p())
    assert [(each.pid, each.usedGpuMemory) for each in found] == [(11, 5), (12, None)]
    assert sizes == [0, 17, 29]
