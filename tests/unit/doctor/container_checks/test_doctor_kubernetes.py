"""Checks of a pod's container."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from doctor_trees import only

from gpusnap.doctor.container_checks import kubernetes
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.proc import Mount
from gpusnap.runtime_shim.records.cri_layout import OF_CRI

POD = {OF_CRI: "container"}


@pytest.mark.parametrize(
    ("pause", "verdict", "said"),
    [
        (0.4, "ok", "(failureThreshold - 1) * periodSeconds must be more than 1"),
        (19.9, "ok", "allows 20 s, and the pause may take 20 s"),
        (20.0, "warning", "failureThreshold: 4"),
        (29.0, "warning", "failureThreshold: 4"),
        (30.0, "warning", "failureThreshold: 5"),
        (95.2, "warning", "more than 96, such as periodSeconds: 10 with failureThreshold: 11"),
    ],
)
def test_probes(pause: float, verdict: str, said: str) -> None:
    """The pause against the defaults, and what the pod has to say where it is longer."""
    found = only(kubernetes.check_probes(POD, pause))
    assert found[0] == verdict
    assert said in f"{found[1].says} {found[1].todo}"


def test_no_pod() -> None:
    assert list(kubernetes.check_probes({}, 100.0)) == []
    assert list(kubernetes.open_files({}, (), 1)) == []


def test_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpoint takes along, or would refuse."""
    volume = tmp_path / "volumes/kubernetes.io~empty-dir/cache"
    volume.mkdir(parents=True)
    monkeypatch.setattr(proc, "mounts", lambda pid: (Mount("0:1", "/", str(volume), (), (), "ext4"),))
    process = proc.process(os.getpid())
    assert process is not None
    mount = {"destination": str(volume), "source": str(volume), "options": ["bind"]}
    config: dict[str, Any] = {"annotations": POD, "mounts": [mount]}
    assert "no file" in only(kubernetes.open_files(config, [process], 1 << 20))[1].says
    (volume / "log").write_bytes(b"x" * (1 << 20))
    with (volume / "log").open():
        verdict, found = only(kubernetes.open_files(config, [process], 4 << 20))
        assert (verdict, found.facts["files"]) == ("ok", 1)
        verdict, found = only(kubernetes.open_files(config, [process], 4096))
        assert verdict == "failure"
        assert "criu.ghost-limit" in found.todo
