"""Checks of CDI specifications."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_trees import only, tree

from gpusnap.doctor.host_checks import cdi

LIBRARY = "/usr/lib/libcuda.so.580.159.04"


def spec(*libraries: str, kind: str = "nvidia.com/gpu") -> str:
    mounts = [{"hostPath": path, "containerPath": path} for path in libraries]
    document = {
        "cdiVersion": "0.5.0",
        "kind": kind,
        "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
        "containerEdits": {"mounts": mounts},
    }
    return json.dumps(document)


@pytest.mark.parametrize(
    ("content", "driver", "verdict", "said"),
    [
        (spec(LIBRARY), "580.159.04", "ok", "nvidia.com/gpu, 1 device"),
        (spec(LIBRARY), "610.10", "failure", "made for driver 580.159.04, but the running driver is 610.10"),
        (
            spec(LIBRARY, "/usr/bin/nvidia-smi"),
            "580.159.04",
            "failure",
            "/usr/bin/nvidia-smi, which this host",
        ),
        ("{", "580.159.04", "failure", "nvidia.json"),
        (spec(kind="amd.com/gpu"), "580.159.04", "warning", "no specification for NVIDIA's GPUs"),
    ],
)
def test_check(tmp_path: Path, content: str, driver: str, verdict: str, said: str) -> None:
    """Valid, of the driver that runs, and with all of its files."""
    root = tree(tmp_path, {"/etc/cdi/nvidia.json": content, LIBRARY: ""})
    found = only(cdi.check(driver, root))
    assert found[0] == verdict
    assert said in found[1].says


def test_none(tmp_path: Path) -> None:
    """A warning where NVIDIA's driver runs, else nothing to say."""
    assert only(cdi.check("580.159.04", str(tmp_path)))[0] == "warning"
    assert [*cdi.check("", str(tmp_path))] == []


def test_mounted(tmp_path: Path) -> None:
    """What comes into containers with GPUs, of the GPUs' vendors alone; a broken file has none."""
    root = tree(
        tmp_path,
        {
            "/nvidia.json": spec(LIBRARY, "/run/state"),
            "/other.json": spec("/other", kind="vendor.example/net"),
            "/broken.json": "{",
        },
    )
    assert cdi.list_mounted([root]) == {LIBRARY, "/run/state"}
