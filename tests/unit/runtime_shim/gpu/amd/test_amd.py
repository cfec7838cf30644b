"""AMD's driver: who holds its device files, which GPUs a process can see, and what only CRIU can do."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from amd_tree import MI210, tree

from gpusnap.runtime_shim import gpu
from gpusnap.runtime_shim.gpu.amd import device_files, topology
from gpusnap.runtime_shim.gpu.amd import driver as amd
from gpusnap.runtime_shim.gpu.amd.driver import Amd
from gpusnap.runtime_shim.gpu.api import device_files as handles
from gpusnap.runtime_shim.gpu.api import device_nodes
from gpusnap.runtime_shim.gpu.api.criu_plugin import AMDGPU
from gpusnap.runtime_shim.gpu.api.driver import Driver, Node, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    DriverMissing,
    NoDevice,
    NotInitialized,
    NotSupported,
    PermissionRefused,
)
from gpusnap.runtime_shim.gpu.nvidia import driver as nvidia

ME = os.getpid()
ONE, TWO = "GPU-0000000000000001", "GPU-0000000000000002"
NULL = os.stat("/dev/null").st_rdev
KFD = (os.major(NULL), os.minor(NULL))  # any device will do, which every process can open


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs; /dev/null is its /dev/kfd."""
    root = tree(tmp_path, [(MI210, 1), (MI210, 2)])
    monkeypatch.setattr(topology, "SYS", root)
    monkeypatch.setattr(device_files, "kfd_number", lambda: KFD)


@pytest.fixture
def opened() -> Iterator[int]:
    descriptor = os.open("/dev/null", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def test_it_is_a_driver() -> None:
    driver: Driver = Amd()
    assert driver.plugin is AMDGPU


def test_host(host: None) -> None:
    found = Amd().host()
    assert (found.vendor, [each.uuid for each in found.gpus]) == ("amd", [ONE, TWO])
    Amd().open()


def test_a_host_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No module, or one without a GPU: said which."""
    monkeypatch.setattr(topology, "SYS", str(tmp_path))
    monkeypatch.setattr(device_files, "kfd_number", lambda: None)
    with pytest.raises(DriverMissing, match="no /dev/kfd"):
        Amd().open()
    monkeypatch.setattr(device_files, "kfd_number", lambda: KFD)
    with pytest.raises(NoDevice, match="lists no GPU"):
        Amd().open()


def test_holders(host: None, opened: int) -> None:
    """By the device's number, with the descriptor that has it."""
    assert (opened, "/dev/null") in Amd().list_held(ME).descriptors
    assert Amd().list_handles(ME) == ("/dev/null",)
    assert Amd().state(ME) is ProcessState.RUNNING
    assert gpu.holders(Amd(), [ME]) == (ME,)


def test_no_holder(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_files, "kfd_number", lambda: (240, 0))
    assert Amd().list_handles(ME) == ()
    assert Amd().state(ME) is None
    assert gpu.holders(Amd(), [ME]) == ()


def test_one_that_is_gone(host: None) -> None:
    assert Amd().state(1 << 22) is None
    assert Amd().list_handles(1 << 22) == ()


def test_not_ours_to_see(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says "holds nothing" of what it may not look at."""

    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "no", path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionRefused):
        device_files.list_held(ME, [KFD])


def test_visible(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs whose render node it holds or has in its /dev, and no others."""
    monkeypatch.setattr(device_files, "numbers_in_dev", lambda pid: frozenset({(226, 129), KFD}))
    assert Amd().list_visible(ME) == (TWO,)
    monkeypatch.setattr(device_files, "list_held_numbers", lambda pid: frozenset({(226, 128)}))
    assert Amd().list_visible(ME) == (ONE, TWO)


def test_numbers_in_dev() -> None:
    assert KFD in device_files.numbers_in_dev(ME)


def test_numbers_held(opened: int) -> None:
    assert KFD in device_files.list_held_numbers(ME)


def devices(*paths: tuple[str, int, int]) -> Callable[[str], Iterator[tuple[str, int]]]:
    return lambda dev: iter([(path, os.makedev(major, minor)) for path, major, minor in paths])


def test_nodes(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """kfd and the GPUs' DRM nodes by their minors; what is NVIDIA's on the same host is not among them."""
    monkeypatch.setattr(device_nodes, "_read_listed_majors", lambda: {"kfd": 240, "nvidia": 195})
    monkeypatch.setattr(device_nodes, "_pci", lambda minor: "0000:42:00.0" if minor == 1 else "")
    there = devices(
        ("kfd", 240, 0),
        ("nvidiactl", 195, 255),
        ("nvidia0", 195, 0),
        ("dri/renderD128", 226, 128),
        ("dri/renderD129", 226, 129),
        ("dri/renderD130", 226, 130),
        ("dri/card1", 226, 1),
    )
    monkeypatch.setattr(device_nodes, "_devices", there)
    expected = (
        Node("/dev/dri/card1", 226, 1, TWO),
        Node("/dev/dri/renderD128", 226, 128, ONE),
        Node("/dev/dri/renderD129", 226, 129, TWO),
        Node("/dev/kfd", 240, 0),
    )
    assert Amd().nodes() == expected
    assert Amd().nodes(ME) == expected


def test_only_criu_can(host: None) -> None:
    """Nothing here suspends or resumes a process; each says so."""
    driver = Amd()
    with pytest.raises(NotSupported, match="only CRIU's plugin"):
        driver.lock(ME, timeout=1)
    for call in (driver.checkpoint, driver.restore, driver.unlock):
        with pytest.raises(NotSupported, match="only CRIU's plugin"):
            call(ME)
    with pytest.raises(NotInitialized):
        Amd().restore_thread(ME)


def test_memory(host: None, tmp_path: Path) -> None:
    place = tmp_path / "class/kfd/kfd/proc" / str(ME)
    place.mkdir(parents=True)
    (place / "vram_30000").write_text("8192\n")
    assert Amd().memory_used([ME]) == {ME: {ONE: 8192}}


def test_kfds_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By /proc/devices, or where that is masked by the node."""
    monkeypatch.setattr(handles, "character_drivers", lambda: (("mem", 1), ("kfd", 241)))
    assert device_files.kfd_number() == (241, 0)
    monkeypatch.setattr(handles, "character_drivers", lambda: ())
    assert device_files.kfd_number("/dev/null") == KFD
    assert device_files.kfd_number(str(tmp_path)) is None
    assert device_files.kfd_number(str(tmp_path / "none")) is None
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    ("nvidias", "amds", "vendors"),
    [(True, False, ["nvidia"]), (False, True, ["amd"]), (True, True, ["nvidia", "amd"]), (False, False, [])],
)
def test_the_drivers_of_a_host(
    monkeypatch: pytest.MonkeyPatch, nvidias: bool, amds: bool, vendors: list[str]
) -> None:
    """NVIDIA's first; each vendor's by its name, and NVIDIA's in either way."""
    monkeypatch.setattr(nvidia, "is_present", lambda: nvidias)
    monkeypatch.setattr(amd, "is_present", lambda: amds)
    assert [each.vendor for each in gpu.find_drivers()] == vendors
    first = gpu.find_driver()
    assert (first.vendor if first else None) == next(iter(vendors), None)
    assert (gpu.driver_of("nvidia") is not None) is nvidias
    by_plugin = gpu.driver_of("nvidia", "cuda_plugin")
    assert (by_plugin is not None and by_plugin.plugin is not None) is nvidias
    assert (gpu.driver_of("amd", "amdgpu_plugin") is not None) is amds
    assert gpu.driver_of("amd") is None
    assert gpu.driver_of("intel") is None
