"""This machine's own GPU in Podman containers, whose programs are the machine's own.

The image is nearly empty. Its containers see /usr and what else the programs need read-only, so they run
the PyTorch, JAX and CuPy that are installed here, whatever their versions. Nothing is left behind: the image
goes, and gpusnap's files in /usr/local and /etc are put back as they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "host"), str(CHECKOUT / "tests" / "integration")]

import shimhost  # noqa: E402
from support import Container, good, podman, run, until  # noqa: E402

from gpusnap.runtime_shim.process import proc  # noqa: E402

__all__ = [
    "IMAGE",
    "Machine",
    "Program",
    "Workload",
    "cdi_device",
    "machine",
    "missing",
    "needs_network_lock",
    "reference",
]

IMAGE = "localhost/gpusnap-this-machine"
# What a CDI specification brings, as far as a program with kernels in PTX needs it.
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1")
VIEW = "gpusnap-places-"  # what a temporary mount of a file system of this machine is called
START = 180.0  # seconds for a framework's first ticks, from a disk that has never read it

_STAMP = re.compile(r"tick=(\d+) ok .*?sum=(\S+) at=([\d.]+)")
# What tells programs where CUDA is, and what this machine asks of all that use several GPUs.
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
_PASSED_ON_ALL = ("NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM_")


@dataclass(frozen=True)
class Machine:
    """How `podman run` gives a container this machine's programs and its first GPU."""

    nodes: tuple[str, ...]
    mounts: tuple[str, ...]

    def options(self, *, gpu: bool = True, minors: Sequence[int] = ()) -> list[str]:
        """`gpu`: with the device nodes; `minors`: of these GPUs, by default the first."""
        nodes = [node for node in self.nodes if not minors or not node[-1].isdigit()]
        nodes += [f"/dev/nvidia{minor}" for minor in minors]
        words = ["--pids-limit", "0", "--network", "host", "--log-driver", "k8s-file"]
        words += ["--env", "PYTHONUNBUFFERED=1"]
        for path in self.mounts:
            # `bind`: CRIU is told of the mounts that are in config.json, and of none below them.
            words += ["--volume", f"{path}:{path}:ro,bind"]
        for name, value in os.environ.items():
            if name in _PASSED_ON or name.startswith(_PASSED_ON_ALL):
                words += ["--env", f"{name}={value}"]
        words += [word for node in nodes if gpu for word in ("--device", node)]
        return [*words, "--volume", f"{HERE / 'programs'}:/programs:ro,bind"]


@dataclass(frozen=True)
class Workload:
    """A program that ticks, and what it takes."""

    command: tuple[str, ...]
    mib: int
    needs: str = ""
    """The Python package without which it does not run."""

    @classmethod
    def python(cls, script: str, needs: str, mib: int, *words: str) -> Workload:
        """A program of the folder programs/."""
        return cls((sys.executable, f"/programs/{script}", "--mib", str(mib), *words), mib, needs)

    @classmethod
    def gpuwork(cls, mib: int, *words: str) -> Workload:
        """tests/workload/gpuwork.c."""
        return cls(("/gpuwork", "--mib", str(mib), *words), mib)

    def options(self) -> list[str]:
        build = CHECKOUT / "softgpu/build/bin/gpuwork"
        return ["--volume", f"{build}:/gpuwork:ro,bind"] if self.command[0] == "/gpuwork" else []


@dataclass(frozen=True)
class Program(Container):
    """A container of a workload."""

    @classmethod
    def begin(
        cls, name: str, load: Workload, options: Sequence[str], *, workers: int = 1, ticks: int = 3
    ) -> Program:
        """Start it; returns when each of its workers has ticked a few times."""
        good(podman("run", "-d", "--name", name, *options, *load.options(), IMAGE, *load.command))
        program = cls(name)

        def ticking() -> bool:
            ready = len([numbers for numbers in program.ticks().values() if len(numbers) >= ticks])
            if ready < workers:
                said = podman("logs", name)
                assert program.inspect()["State"]["Running"], f"{name} ended:\n{said.out}{said.err}"
            return ready >= workers

        until(ticking, f"the first ticks of {name}", deadline=START)
        return program

    def stamps(self) -> list[tuple[int, str, float]]:
        """Tick, checksum and time of each tick of one worker."""
        return [(int(m[1]), m[2], float(m[3])) for m in _STAMP.finditer(self.log())]


def reference(load: Workload, ticks: int) -> dict[int, str]:
    """The checksums of the same program when nobody interrupts it, in no container."""
    script = HERE / load.command[1].removeprefix("/")
    words = [load.command[0], str(script), *load.command[2:], "--ticks", str(ticks), "--pause", "0"]
    said = good(run(*words, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}))
    return {int(m[1]): m[2] for m in _STAMP.finditer(said)}


def needs_network_lock() -> None:
    """Skip where CRIU cannot keep connections: its rules for iptables match a mark (criu/netfilter.c).

    With crun it also runs `ip` for the container's network (criu/net.c).
    """
    import pytest  # what bench/ uses of this module needs none

    if run("iptables", "-m", "mark", "--help").code:
        pytest.skip("iptables has no extension `mark` here, which CRIU needs for --tcp-established")
    if not shutil.which("ip"):
        pytest.skip("iproute2 is not installed, which CRIU needs for a container's own network")


def missing() -> str:
    """Why containers cannot be checkpointed on this machine; empty if they can."""
    for program in ("podman", "criu", "make", "gcc"):
        if not shutil.which(program):
            return f"{program} is not installed"
    if run("podman", "ps").code:
        return f"Podman does not work here: {run('podman', 'ps').err.strip()}"
    if run("criu", "check").code:
        return f"CRIU does not work here: {run('criu', 'check').err.strip()[-200:]}"
    return ""


@contextmanager
def machine(minor: int) -> Iterator[Machine]:
    """gpusnap installed and the image made, until the block ends; `minor` is the GPU's."""
    for words in (["softgpu", "build/bin/gpuwork"], ["runtime_shim/launcher"], ["oci/chunks/native"]):
        subprocess.run(["make", "-s", "-C", *words], cwd=CHECKOUT, check=True)
    targets = [shimhost.LAUNCHER, shimhost.ENTRY, shimhost.COMMAND, shimhost.HOOK, shimhost.SETTINGS]
    before = {path: (path.read_bytes(), path.stat().st_mode) for path in targets if path.exists()}
    try:
        others = [path for path in sys.path if path and not Path(path).is_relative_to(CHECKOUT)]
        shimhost.install(CHECKOUT, path=tuple(others))
        _make_image()
        nodes = (f"/dev/nvidia{minor}", "/dev/nvidiactl", "/dev/nvidia-uvm")
        mounts = _mounts()
        with _places(mounts):
            yield Machine(tuple(node for node in nodes if os.path.exists(node)), tuple(mounts))
    finally:
        podman("rmi", "--force", IMAGE)
        for path in targets:
            path.unlink(missing_ok=True)
            if path in before:
                path.write_bytes(before[path][0])
                path.chmod(before[path][1] & 0o7777)


def _make_image() -> None:
    """A root with the places to mount things at, and with this machine's list of libraries."""
    with tempfile.TemporaryDirectory(prefix="gpusnap-image-") as folder:
        root = Path(folder, "root")
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "root", "programs"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        for name in ("ld.so.cache", "passwd", "group", "nsswitch.conf"):
            if os.path.exists(f"/etc/{name}"):
                shutil.copy(f"/etc/{name}", root / "etc")
        if os.path.isdir("/etc/alternatives"):  # Debian's and Ubuntu's /usr/local/cuda points there
            shutil.copytree("/etc/alternatives", root / "etc" / "alternatives", symlinks=True)
        (root / "tmp").chmod(0o1777)
        archive = Path(folder, "root.tar")
        good(run("tar", "-C", root, "-cf", archive, "."))
        good(run("podman", "import", "--quiet", archive, IMAGE))


def _mounts() -> list[str]:
    """Folders that hold the programs, each once; a file system mounted inside one stands by itself."""
    libraries = {os.path.dirname(path) for path in _libraries("libcuda.so.1")}
    wanted = {
        "/usr",
        sys.prefix,
        sys.base_prefix,
        *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
        *libraries,
    }
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in wanted if path and os.path.isdir(path)}):
        if not any(Path(path).is_relative_to(other) and _mounted(path) == _mounted(other) for other in found):
            found.append(path)
    return found


@contextmanager
def _places(paths: Sequence[str]) -> Iterator[None]:
    """Have a folder beneath each that is a file system inside another, for as long as the block runs.

    The other is mounted without it and read-only, so runc could not make it, where the machine has none.
    """
    made: list[Path] = []
    with ExitStack() as stack:
        for path in paths:
            for other in (other for other in paths if path != other and Path(path).is_relative_to(other)):
                view = Path(tempfile.mkdtemp(prefix=VIEW))
                stack.callback(view.rmdir)  # never by a walk: the machine's own files are in it
                good(run("mount", "--bind", _mounted(other), view))
                stack.callback(run, "umount", view)
                inside = view / Path(path).relative_to(_mounted(other))
                made += [each for each in (inside, *inside.parents) if not each.exists()]
                inside.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            for each in sorted(set(made), reverse=True):
                each.rmdir()


def _mounted(path: str) -> str:
    """Where the file system that holds a folder is mounted."""
    places = {mount.destination for mount in proc.mounts("self")}
    return next(str(place) for place in [Path(path), *Path(path).parents] if str(place) in places)


def _libraries(*names: str) -> list[str]:
    """Where the loader finds these libraries."""
    lines = good(run("ldconfig", "-p")).splitlines()
    return [line.split(" => ")[1] for line in lines if line.split()[0] in names and "x86-64" in line]


@contextmanager
def cdi_device(nodes: Sequence[str]) -> Iterator[str]:
    """A CDI specification with the device nodes and the driver's libraries; the name for --device.

    As nvidia-ctk writes it: mounts without a type, which the runtime specification allows.
    """
    libraries = sorted({os.path.realpath(path) for path in _libraries(*DRIVER)})
    edits = {
        "deviceNodes": [{"path": node} for node in nodes],
        "mounts": [
            {"hostPath": path, "containerPath": path, "options": ["ro", "nosuid", "nodev", "bind"]}
            for path in libraries
        ],
    }
    kind, path = "gpusnap.test/gpu", Path("/etc/cdi/gpusnap-test.json")
    made = not path.parent.exists()
    path.parent.mkdir(exist_ok=True)
    spec = {"cdiVersion": "0.5.0", "kind": kind, "devices": [{"name": "0", "containerEdits": edits}]}
    path.write_text(json.dumps(spec))
    try:
        yield f"{kind}=0"
    finally:
        path.unlink()
        if made:
            path.parent.rmdir()
