"""What goes into the tree."""

from __future__ import annotations

import hashlib
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CHECKOUT = HERE.parent.parent
FILES = HERE / "files"
REQUIREMENTS = HERE / "requirements.txt"

SUITE = "trixie"
DEFAULT_MIRROR = "http://deb.debian.org/debian"
ARCHITECTURE = "x86_64"  # of the kernel; the only one that the product knows
PYTHON_VERSION = "3.13"  # of the suite
WHEEL_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
PACKAGES = (
    # what the product talks to
    "podman", "crun", "runc", "criu", "libcriu2", "conmon", "containerd", "python3-pycriu",
    # what those need at run time: networks, CRIU's network lock, process tools
    "netavark", "iptables", "nftables", "iproute2", "procps", "util-linux",
    # what its artifacts have to be understood by
    "docker-registry", "skopeo", "oras", "checkpointctl",
    # the images are made of it
    "busybox-static",
    "python3", "python3-venv",
)  # fmt: skip
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

# The modules whose change changes the tree
_CODE = ("recipe.py", "build.py")


def digest() -> str:
    """The name of the tree that this recipe makes."""
    total = hashlib.sha256()
    code = [HERE / "testhost" / name for name in _CODE]
    for path in [*code, REQUIREMENTS, *sorted(p for p in FILES.rglob("*") if p.is_file())]:
        total.update(f"{path.relative_to(HERE)}\0{path.stat().st_mode & 0o111}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]
