"""Where the story plays: gpusnap and a GPU in place, and how Podman gives that GPU to a container.

`software` is for the test host, which is gone after the demo; `here` writes nothing outside its folder.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from report import DemoError

CHECKOUT = Path(__file__).resolve().parent.parent
GPUS_CONF = """\
driver 580.95.05
cuda 13.0
gpu uuid=GPU-5067b0de-0000-4000-8000-000000000000 minor=0 cc=9.0 memory=16GiB name=softgpu
"""
# What CUDA needs of the driver to run a program that brings its kernels as PTX: the last compiles them, and
# since driver 590 needs the one before.
LIBRARIES = ("libcuda.so.1", "libnvidia-gpucomp.so", "libnvidia-ptxjitcompiler.so.1")
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
CDI_DEVICE = "nvidia.com/gpu"

# Isolated from the caller's environment, which is not the runtime's at a checkpoint either.
_ENTRY = """#!{python} -I
import sys
sys.path[:0] = {path!r}
from gpusnap.runtime_shim.shim.entry import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A machine with gpusnap and a GPU."""

    runtime: str
    """The path of gpusnap-runtime, as `podman --runtime` takes it."""
    options: tuple[str, ...]
    """Of `podman run`: the GPU, and what this machine needs."""
    libraries: tuple[str, ...]
    """The driver's; what they need must be in the image."""
    gpusnap: str = "gpusnap"
    """How the command is typed."""


def software() -> Place:
    """The test host with gpusnap installed, and softgpu as its GPU and driver."""
    if str(CHECKOUT) != "/src" or not os.path.isdir("/opt/gpusnap"):
        raise DemoError("softgpu is installed inside the test host only; run `make demo`")
    import gpuhost
    import shimhost

    gpuhost.install(CHECKOUT / "softgpu" / "build", GPUS_CONF)
    runtime = shimhost.install(CHECKOUT)
    return Place(str(runtime), ("--device", f"{CDI_DEVICE}=0"), _driver_libraries())


def here(folder: Path) -> Place:
    """This machine and its driver; gpusnap goes into `folder`, as the Python entry alone."""
    runtime = folder / "gpusnap-runtime"
    path = [str(CHECKOUT), *(entry for entry in sys.path if entry and entry != str(Path(__file__).parent))]
    runtime.write_text(_ENTRY.format(python=sys.executable, path=path))
    runtime.chmod(0o755)
    libraries = _driver_libraries()
    # Where CDI and the mounts below put them; the image's own cache of libraries knows of neither.
    search = ":".join(dict.fromkeys(os.path.dirname(path) for path in libraries))
    options = [*_cdi_device(), "--env", f"LD_LIBRARY_PATH={search}"]
    if not _cdi_device():
        options = [*_nodes(), *_mounts(libraries), *options]
    gpusnap = f"{sys.executable} -m gpusnap.cli.main"
    return Place(str(runtime), (*options, *_without_pids_limit()), libraries, gpusnap)


def _cdi_device() -> list[str]:
    """The first GPU, if Podman can be asked for it by its CDI name."""
    for folder in CDI_FOLDERS:
        for path in (p for kind in ("yaml", "json") for p in glob.glob(f"{folder}/*.{kind}")):
            text = Path(path).read_text(errors="replace")
            if CDI_DEVICE in text and re.search(r"""name["']?:\s*["']?0["']?\s*(,|$)""", text, re.MULTILINE):
                return ["--device", f"{CDI_DEVICE}=0"]
    return []


def _nodes() -> list[str]:
    gpus = sorted(path for path in glob.glob("/dev/nvidia*") if path[11:].isdigit())
    paths = [gpus[0], "/dev/nvidiactl", "/dev/nvidia-uvm"] if gpus else []
    return [word for path in paths if os.path.exists(path) for word in ("--device", path)]


def _mounts(libraries: tuple[str, ...]) -> list[str]:
    # crun hands CRIU the source of each mount as it is, and CRIU cannot restore one that is a symbolic link.
    return [word for path in libraries for word in ("--volume", f"{os.path.realpath(path)}:{path}:ro")]


def _driver_libraries() -> tuple[str, ...]:
    """Paths of the driver's libraries: beside the libcuda that is loaded here, which no cache may list."""
    import ctypes

    try:
        ctypes.CDLL(LIBRARIES[0])
    except OSError as error:
        raise DemoError(f"the GPU driver's {error}; see that nvidia-smi works, or use --software") from error
    maps = Path("/proc/self/maps").read_text().split()
    folder = next(os.path.dirname(word) for word in maps if "/libcuda.so" in word)
    found = (sorted(glob.glob(f"{folder}/{name}*")) for name in LIBRARIES)
    # The first of several names is the one that programs ask for: libcuda.so.1 before libcuda.so.1.1.
    return tuple(paths[0] for paths in found if paths)


def _without_pids_limit() -> tuple[str, ...]:
    """Podman limits the number of processes by default, which fails where cgroup v2 lacks that controller."""
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    if not controllers.exists() or "pids" in controllers.read_text().split():
        return ()
    return ("--pids-limit", "0")
