"""CRI-O's drop-in: a handler that has what CRI-O needs to start with it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpusnap.engines.install.crio import DROP_IN, items
from gpusnap.runtime_shim.base.errors import GpusnapError

PROGRAM = "/usr/local/bin/gpusnap-runtime"
# As CRI-O's packages have it.
PACKAGED = """\
[crio.runtime]
default_runtime = "crun"
[crio.runtime.runtimes.runc]
runtime_path = "/usr/libexec/crio/runc"
monitor_path = "/usr/libexec/crio/other"
[crio.runtime.runtimes.crun]
runtime_path = "/usr/libexec/crio/crun"
monitor_path = "/usr/libexec/crio/conmon"
"""


def runtime(root: Path, **more: Any) -> dict[str, Any]:
    (item,) = items(PROGRAM, root=str(root), **more)
    assert item.path == DROP_IN
    found: dict[str, Any] = tomllib.loads(item.data.decode())["crio"]["runtime"]
    return found


def test_plain(tmp_path: Path) -> None:
    expected = {"runtime_path": PROGRAM, "runtime_type": "oci", "runtime_root": "/run/crio-gpusnap"}
    assert runtime(tmp_path) == {"runtimes": {"gpusnap": expected}}
    assert runtime(tmp_path, default=True)["default_runtime"] == "gpusnap"


@pytest.mark.parametrize("path", ["etc/crio/crio.conf", "etc/crio/crio.conf.d/10-crio.conf"])
def test_the_monitor_of_the_default(tmp_path: Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(PACKAGED)
    assert runtime(tmp_path)["runtimes"]["gpusnap"]["monitor_path"] == "/usr/libexec/crio/conmon"


def test_ours_is_not_read_back(tmp_path: Path) -> None:
    path = tmp_path / DROP_IN[1:]
    path.parent.mkdir(parents=True)
    path.write_text('[crio.runtime.runtimes.gpusnap]\nmonitor_path = "/gone"\n')
    assert "monitor_path" not in runtime(tmp_path)["runtimes"]["gpusnap"]


def test_odd_files(tmp_path: Path) -> None:
    path = tmp_path / "etc/crio/crio.conf"
    path.parent.mkdir(parents=True)
    for text in (
        "crio = 1",
        "[crio]\nruntime = []",
        "[crio.runtime]\nruntimes = {a = 1, b = {monitor_path = 2}}",
    ):
        path.write_text(text)
        assert "monitor_path" not in runtime(tmp_path)["runtimes"]["gpusnap"]
    path.write_text("[crio")
    with pytest.raises(GpusnapError, match=r"crio\.conf is not TOML"):
        runtime(tmp_path)
