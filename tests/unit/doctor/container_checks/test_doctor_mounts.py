"""Checks of mounts."""

from __future__ import annotations

import pytest
from doctor_trees import only

from gpusnap.doctor.container_checks import mounts
from gpusnap.runtime_shim.process.proc import Mount

CONFIG = {
    "mounts": [{"destination": "/proc"}, {"destination": "/dev"}, {"destination": "/data"}],
    "linux": {"maskedPaths": ["/sys/firmware"], "readonlyPaths": ["/proc/bus"]},
}


def mount(destination: str, device: str = "8:1", root: str = "/srv", kind: str = "ext4") -> Mount:
    return Mount(device, root, destination, ("rw",), (), kind)


BASE = (
    mount("/", "0:99", "/", "overlay"),
    mount("/proc", "0:5", "/", "proc"),
    mount("/data", "8:2", "/data"),
)


@pytest.mark.parametrize(
    "one",
    [
        mount("/proc/bus", "0:5", "/bus", "proc"),
        mount("/sys/firmware", "0:7", "/", "tmpfs"),
        mount("/run", "0:8", "/", "tmpfs"),
        mount("/dev/nvidia0", "0:6", "/nvidia0", "devtmpfs"),
        mount("/data/below", "8:9", "/x"),
        mount("/again", "8:2", "/data/part"),
        mount("/usr/lib/libcuda.so.1", "8:1", "/usr/lib/libcuda.so.580"),
    ],
    ids=lambda each: each.destination,
)
def test_explained(one: Mount) -> None:
    """Of the configuration, below it, made by CRIU, a device, a bind of what is known, the driver's."""
    assert only(mounts.check([*BASE, one], CONFIG, {"/usr/lib/libcuda.so.1"}))[0] == "ok"


@pytest.mark.parametrize(
    "one", [mount("/etc/motd"), mount("/x", "0:30", "/part", "tmpfs"), mount("/y", "8:2", "/database")]
)
def test_unexplained(one: Mount) -> None:
    """A bind from the host that nothing declares."""
    verdict, found = only(mounts.check([*BASE, one], CONFIG))
    assert verdict == "failure"
    assert one.destination in found.says
