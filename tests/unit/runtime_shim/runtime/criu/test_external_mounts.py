"""The driver's undeclared mounts: which are declared to CRIU, and which a manifest may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest import DriverMount
from gpusnap.runtime_shim.runtime.criu import external_mounts
from gpusnap.runtime_shim.runtime.criu.external_mounts import check_mounts, list_undeclared

DRIVER = [
    "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
    "/usr/lib64/libnvidia-ml.so.1",
    "/lib/x86_64-linux-gnu/libnvcuvid.so.1",
    "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ptxjitcompiler.so.580.159.04",
    "/usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.1",
    "/proc/driver/nvidia",
    "/proc/driver/nvidia/gpus/0000:65:00.0",
    "/lib/firmware/nvidia/580.159.04/gsp_ga10x.bin",
    "/usr/bin/nvidia-smi",
    "/run/nvidia-persistenced/socket",
]
OTHER = [
    "/",
    "/etc/passwd",
    "/usr/lib/x86_64-linux-gnu/libc.so.6",
    "/proc/driver/nvidia/../../sys",
    "/proc/driver/nvidiax",
    "/usr/bin/bash",
    "/usr/bin/nvidia-smi/x y",
    "/home/me/libcuda.so.1",
    "/run/docker.sock",
    "/usr/lib/../../etc/libcuda.so.1",
    "/usr/bin/nvidia-smi\n",
]


@pytest.mark.parametrize("path", DRIVER)
def test_the_drivers(path: str) -> None:
    """The places at which NVIDIA's container tools mount the driver's files."""
    assert external_mounts._is_ours(path)


@pytest.mark.parametrize("path", OTHER)
def test_a_manifest_brings_no_other_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest from elsewhere can mount nothing of this host but the driver's files, at either end."""
    monkeypatch.setattr("os.path.exists", lambda _: True)
    good = DRIVER[0]
    for mount in (DriverMount("gpusnap-0", path, good), DriverMount("gpusnap-0", good, path)):
        with pytest.raises(Refused, match="is not a GPU driver file"):
            check_mounts([mount])


def test_a_link_to_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's name on this host that leads elsewhere is refused too."""
    monkeypatch.setattr("os.path.exists", lambda _: True)
    monkeypatch.setattr("os.path.realpath", lambda _: "/etc/shadow")
    with pytest.raises(Refused, match="asks to mount /etc/shadow"):
        check_mounts([DriverMount("gpusnap-0", DRIVER[0], DRIVER[0])])


def test_a_source_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this host does not have is refused by name, with what to do."""
    monkeypatch.setattr("os.path.exists", lambda _: False)
    with pytest.raises(Refused, match=r"libcuda\.so\.580\.159\.04 mounted, but this host does not") as caught:
        check_mounts([DriverMount("gpusnap-0", DRIVER[0], DRIVER[0])])
    assert "same driver" in caught.value.hint
    check_mounts([])


def lay(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, tuple[str, ...]], reachable: bool = True) -> None:
    """A container with these mounts, as (destination, tags)."""
    theirs = tuple(proc.Mount("8:1", "/x", where, ("ro",), tags, "ext4") for where, tags in found)
    monkeypatch.setattr(proc, "mounts", lambda _: theirs)
    monkeypatch.setattr(proc, "host_path", lambda mount: f"/host{mount.destination}" if reachable else None)
    monkeypatch.setattr(external_mounts, "_is_same_file", lambda one, other: True)
    # Here and not by a child, which would look at the files themselves.
    monkeypatch.setattr(question_process, "ask", lambda pid, what, function, *words: function(*words))


def test_undeclared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's mounts that config.json does not list, in order, each with a key of its own."""
    lay(monkeypatch, (DRIVER[0], ()), ("/data", ()), (DRIVER[1], ()), ("/usr/bin/nvidia-smi", ()))
    config = {"mounts": [{"destination": "/usr/lib64//libnvidia-ml.so.1"}, {"type": "proc"}]}
    assert list_undeclared(7, config) == (
        (
            DriverMount("gpusnap-0", DRIVER[0], "/host" + DRIVER[0]),
            DriverMount("gpusnap-1", "/usr/bin/nvidia-smi", "/host/usr/bin/nvidia-smi"),
        ),
        False,
    )


def test_peer_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that is a slave of the host's is told, because CRIU wants to be told."""
    lay(monkeypatch, (DRIVER[0], ("master:1",)))
    assert list_undeclared(7, {})[1]
    lay(monkeypatch, ("/data", ("master:1",)), (DRIVER[0], ()))
    assert not list_undeclared(7, {})[1]


def test_mounted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mounts on one place are one to CRIU, and the manifest refuses duplicates."""
    lay(monkeypatch, (DRIVER[0], ()), (DRIVER[0], ()))
    assert [mount.key for mount in list_undeclared(7, {})[0]] == ["gpusnap-0"]


def test_not_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs of the container, or a file that is another one there, CRIU dumps by itself."""
    lay(monkeypatch, (DRIVER[0], ()), reachable=False)
    assert list_undeclared(7, {}) == ((), False)
    lay(monkeypatch, (DRIVER[0], ()))
    monkeypatch.setattr(external_mounts, "_is_same_file", lambda one, other: False)
    assert list_undeclared(7, {}) == ((), False)


def test_same_file(tmp_path: Path) -> None:
    """Files are compared as such; one that is gone is no match."""
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to("a")
    assert external_mounts._is_same_file(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not external_mounts._is_same_file(str(tmp_path / "a"), str(tmp_path / "none"))
