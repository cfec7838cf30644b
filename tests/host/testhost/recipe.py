"""What goes into a tree."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CHECKOUT = HERE.parent.parent
FILES = HERE / "files"
REQUIREMENTS = HERE / "requirements.txt"

DEFAULT_MIRROR = "http://deb.debian.org/debian"
ARCHITECTURE = "x86_64"  # of the kernel; the only one that the product knows
WHEEL_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
PACKAGES = (
    # what the product talks to
    "podman", "crun", "runc", "criu", "libcriu2", "conmon", "containerd", "python3-pycriu",
    # what those need at run time: networks, CRIU's network lock, process tools
    "netavark", "iptables", "nftables", "iproute2", "procps", "util-linux", "catatonit",
    # what its artifacts have to be understood by
    "docker-registry", "skopeo", "oras", "checkpointctl",
    # what leads to another host, and what the units are for that gpusnap writes
    "openssh-server", "openssh-client", "systemd", "dbus",
    # the images are made of it
    "busybox-static",
    "python3", "python3-venv",
)  # fmt: skip
# What a client of CRI needs beside grpcio: messages are compiled for the suite's own python3-protobuf, which
# pycriu uses too.
CRI_PACKAGES = ("protobuf-compiler",)
# The next releases of some of them, beside these: what works with one must work with both.
NEWER_SUITE = "sid"
NEWER_PACKAGES = (
    "criu", "libcompel1", "libcriu2", "libnet9", "libnl-3-200", "crun", "libblake3-0", "libjson-c5", "runc",
)  # fmt: skip
NEWER_COMMANDS = ("criu", "crun", "runc")

# Paths in the tree
NEWER = "/opt/newer"
VENV = "/opt/gpusnap"
IMAGE_STORE = "/usr/share/gpusnap/containers.tar"
IMAGE_ARCHIVE = "/usr/share/gpusnap/base.oci.tar"

# The modules whose change changes the trees
_CODE = ("recipe.py", "build.py")


@dataclass(frozen=True, slots=True)
class Suite:
    """A release of Debian, and what its tree has."""

    name: str
    packages: tuple[str, ...] = PACKAGES
    requirements: tuple[Path, ...] = (REQUIREMENTS,)
    newer: bool = False
    """Whether the packages of NEWER_SUITE are unpacked beside its own."""


TRIXIE = Suite("trixie", newer=True)
# Debian's next release as it grows. The tree stays as it was built until the recipe changes.
SID = Suite(
    "sid",
    packages=PACKAGES + CRI_PACKAGES,
    requirements=(REQUIREMENTS, HERE / "requirements-cri.txt"),
)
SUITES = {suite.name: suite for suite in (TRIXIE, SID)}


def digest(suite: Suite) -> str:
    """The name of the tree that this recipe makes of `suite`."""
    total = hashlib.sha256(f"{suite.name}\0".encode())
    code = [HERE / "testhost" / name for name in _CODE]
    files = sorted(path for path in FILES.rglob("*") if path.is_file())
    for path in [*code, *suite.requirements, *files]:
        total.update(f"{path.relative_to(HERE)}\0{path.stat().st_mode & 0o111}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]
