"""AMD's GPUs from sysfs trees of several kinds of host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from amd_tree import APU, MI210, MI300X, tree

from gpusnap.runtime_shim.gpu.amd import topology
from gpusnap.runtime_shim.gpu.amd.topology import driver_version, gpus, vram_used


def test_one_gpu_and_two_processors(tmp_path: Path) -> None:
    """Every field of a GPU; processors are none."""
    (found,) = gpus(tree(tmp_path, [(MI300X, 0xD2FF74A100001234)], cpus=2))
    assert (found.gpu_id, found.node) == (30000, 2)
    gpu = found.gpu
    assert gpu.uuid == "GPU-d2ff74a100001234"
    assert (gpu.minor, gpu.index, gpu.pci) == (128, 0, "0000:41:00.0")
    assert gpu.model == "AMD Instinct MI300X OAM (74a1, 1216 SIMDs)"
    assert gpu.compute_capability == "gfx942"
    assert (gpu.memory_total, gpu.memory_used) == (191 << 30, 1 << 20)


def test_several_gpus(tmp_path: Path) -> None:
    """In the order of the topology, by number and not by letter, each with its own render node."""
    found = gpus(tree(tmp_path, [(MI210, 0xA0 + at) for at in range(12)], cpus=2))
    assert [each.node for each in found] == list(range(2, 14))
    assert [each.gpu.index for each in found] == list(range(12))
    assert [each.gpu.minor for each in found] == list(range(128, 140))
    assert found[11].gpu.uuid == "GPU-00000000000000ab"
    assert {each.gpu.compute_capability for each in found} == {"gfx90a"}


def test_an_apu(tmp_path: Path) -> None:
    """It has processors' cores, no memory of its own and no number: its UUID is its place on this host."""
    (found,) = gpus(tree(tmp_path, [(APU, 0)]))
    assert found.gpu.model == "raven (15d8, 20 SIMDs)"
    assert found.gpu.memory_total == 1 << 30
    assert found.gpu.uuid.startswith("GPU-")
    assert found.gpu.uuid == gpus(str(tmp_path))[0].gpu.uuid


def test_no_number_is_no_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts with such a GPU in the same slot do not take it for the same GPU."""
    root = tree(tmp_path / "sys", [(APU, 0)])
    uuids = set()
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
        monkeypatch.setattr(topology, "_MACHINE", str(tmp_path / name))
        uuids.add(gpus(root)[0].gpu.uuid)
    assert len(uuids) == 2


def test_partitions(tmp_path: Path) -> None:
    """The parts of one chip have its number, and still a UUID of their own each, always the same."""
    found = gpus(tree(tmp_path, [(MI300X, 7), (MI300X, 7), (MI300X, 7), (MI300X, 8)]))
    uuids = [each.gpu.uuid for each in found]
    assert len(set(uuids)) == 4
    assert (uuids[0], uuids[3]) == ("GPU-0000000000000007", "GPU-0000000000000008")
    assert uuids == [each.gpu.uuid for each in gpus(str(tmp_path))]


def test_a_gpu_that_is_not_ours_to_see(tmp_path: Path) -> None:
    """KFD shows the nodes of GPUs that the device cgroup keeps away, with nothing in them."""
    root = tree(tmp_path, [(MI210, 1), (MI210, 2)])
    node = tmp_path / "class/kfd/kfd/topology/nodes/1"
    (node / "gpu_id").write_text("")
    (node / "properties").write_text("")
    (found,) = gpus(root)
    assert (found.gpu.uuid, found.gpu.index) == ("GPU-0000000000000002", 0)


def test_a_host_without(tmp_path: Path) -> None:
    assert gpus(str(tmp_path)) == ()


def test_without_drm(tmp_path: Path) -> None:
    """Where the DRM part is not in sysfs, KFD's own words have to do."""
    root = tree(tmp_path, [(MI210, 1)])
    (tmp_path / "class/drm/renderD128/device").unlink()
    (found,) = gpus(root)
    assert found.gpu.pci == "0000:41:00.0"
    assert found.gpu.model.startswith("aldebaran (")
    assert (found.gpu.memory_total, found.gpu.memory_used) == (64 << 30, 0)


@pytest.mark.parametrize(
    "text", ["simd_count", "simd_count -3", "simd_count 1 2", "\x00\xff", "simd_count " + "9" * 99]
)
def test_odd_properties(tmp_path: Path, text: str) -> None:
    """Lines of another shape count for nothing."""
    root = tree(tmp_path, [(MI210, 1)])
    path = tmp_path / "class/kfd/kfd/topology/nodes/1/properties"
    path.write_text(text + "\n")
    assert gpus(root) == ()


def test_memory_of_processes(tmp_path: Path) -> None:
    """By PID and GPU; a process that KFD does not know is not there."""
    root = tree(tmp_path, [(MI210, 1), (MI210, 2)])
    place = tmp_path / "class/kfd/kfd/proc/17"
    place.mkdir(parents=True)
    (place / "vram_30001").write_text("4096\n")
    (place / "vram_30000").write_text("0\n")
    assert vram_used([17, 18], gpus(root), root) == {
        17: {"GPU-0000000000000001": 0, "GPU-0000000000000002": 4096}
    }


def test_version(tmp_path: Path) -> None:
    """amdgpu's own, where it has one, else the kernel's; numbers alone."""
    release = os.uname().release
    assert release.startswith(driver_version(str(tmp_path)))
    module = tmp_path / "module" / "amdgpu"
    module.mkdir(parents=True)
    (module / "version").write_text("6.10.5\n")
    assert driver_version(str(tmp_path)) == "6.10.5"
