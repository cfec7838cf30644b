"""Checks of disks and RAM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from doctor_trees import only, tree
from fakes import gpu

from gpusnap.doctor.base import free_space
from gpusnap.doctor.base.free_space import Speed
from gpusnap.runtime_shim.process import proc

MEMINFO = "MemTotal:       {total} kB\nMemFree: 1 kB\nMemAvailable:   {left} kB\n"
GIB = 1 << 30
# More than any disk has.
HUGE = (gpu(0, total=1 << 60),)


@pytest.mark.parametrize(
    ("left", "count", "verdict", "said"),
    [
        (200, 2, "ok", "for 160.0 GiB of GPU memory"),
        (100, 2, "ok", "enough for one full GPU (80.0 GiB), but not for all"),
        (40, 1, "warning", "a container that uses all of a GPU with 80.0 GiB cannot be checkpointed"),
        (4, 0, "ok", "4.0 GiB of 256.0 GiB RAM are available"),
    ],
)
def test_memory(tmp_path: Path, left: int, count: int, verdict: str, said: str) -> None:
    """What is available against the GPUs' memory."""
    info = MEMINFO.format(total=256 << 20, left=left << 20)
    root = tree(tmp_path, {"/proc/meminfo": info})
    found = only(free_space.check_memory([gpu(number) for number in range(count)], root))
    assert found[0] == verdict
    assert said in found[1].says


def test_disks(tmp_path: Path) -> None:
    """Store and Podman's storage, there or not yet, each with what to do."""
    (tmp_path / "store").mkdir()
    few = [*free_space.check_disks((), "/store", "/var/lib/none", str(tmp_path))]
    assert [each.verdict.value for each in few] == ["ok", "ok"]
    many = [*free_space.check_disks(HUGE, "/store", "/var/lib/none", str(tmp_path))]
    assert [each.verdict.value for each in many] == ["warning", "warning"]
    assert "store.path" in many[0].todo
    assert "graphroot" in many[1].todo


def test_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mount that the folder, or the one above that is there, is on."""
    device = tmp_path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    for kind, wanted in (("tmpfs", True), ("ext4", False)):
        mount = proc.Mount(name, "/", "/", (), (), kind)
        monkeypatch.setattr(proc, "mounts", lambda pid, mount=mount: (mount,))
        assert free_space.in_memory(str(tmp_path / "not there")) is wanted


def test_unpacking(tmp_path: Path) -> None:
    """containerd's temporary folder."""
    assert only(free_space.check_unpacking((), str(tmp_path)))[0] == "ok"
    assert only(free_space.check_unpacking(HUGE, str(tmp_path)))[0] == "warning"


def test_graph_root(tmp_path: Path) -> None:
    """By Podman's own configuration, the later file first."""
    assert free_space.graph_root(str(tmp_path)) == "/var/lib/containers/storage"
    files: dict[str, str | bytes] = {
        "/usr/share/containers/storage.conf": '[storage]\ngraphroot = "/a"\n',
        "/etc/containers/storage.conf": '[storage]\ngraphroot = "/data/containers"\n',
    }
    assert free_space.graph_root(tree(tmp_path, files)) == "/data/containers"


def test_speed(tmp_path: Path) -> None:
    """It is measured on a file that is gone afterwards; not where none can be made, or room is short."""
    found = free_space.speed(str(tmp_path), most=8 << 20)
    assert found is not None
    assert found.write > 0
    assert found.read > 0
    assert os.listdir(tmp_path) == []
    assert free_space.speed(str(tmp_path), most=1 << 60) is None
    assert free_space.speed("/proc/self", most=8 << 20) is None


@pytest.mark.parametrize(("read", "verdict"), [(GIB, "ok"), (GIB / 4, "warning")])
def test_podmans_limit(read: float, verdict: str) -> None:
    """80 GiB fit into 240 s at 1 GiB/s, and not at a quarter of that."""
    found = only(free_space.check_podmans_limit((gpu(0),), Speed(GIB, read), "/d"))
    assert found[0] == verdict
    assert found[1].facts["seconds"] == pytest.approx(80 * GIB / read)


def test_podmans_limit_is_not_known() -> None:
    """Without a GPU, or a measured disk, there is nothing to say."""
    assert [*free_space.check_podmans_limit((), Speed(1, 1), "/d")] == []
    assert [*free_space.check_podmans_limit((gpu(0),), None, "/d")] == []
