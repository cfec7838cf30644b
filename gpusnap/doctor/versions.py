"""The programs that gpusnap works with on this host, with their versions. None of them need exist or work."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gpusnap.doctor.base.sources import ask, program
from gpusnap.doctor.base.sources import version as numbers_in
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu import find_drivers
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.child_process import Finished
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.runtime_shim.runtime.identify import identify

Find = Callable[[str], str | None]
Run = Callable[[list[str]], Finished | None]

_NAMES = {"nvidia": "NVIDIA driver", "amd": "AMD driver"}


@dataclass(frozen=True, slots=True)
class Part:
    """A program, a package or a driver; texts are empty if unknown."""

    name: str
    version: str = ""
    path: str = ""
    note: str = ""
    fault: str = ""
    """Why its version is unknown; "not found" if it does not exist."""


@dataclass(frozen=True, slots=True)
class Versions:
    """All of them."""

    gpusnap: Part
    python: Part
    kernel: Part
    runtimes: tuple[Part, ...]
    """crun, runc, and that in the settings; the first is Podman's for new containers."""
    criu: Part
    pycriu: Part
    podman: Part
    drivers: tuple[Part, ...]

    def parts(self) -> Iterator[Part]:
        """Yield each, in the order in which they are printed."""
        yield from (self.gpusnap, self.python, self.kernel, self.podman)
        yield from self.runtimes
        yield from (self.criu, self.pycriu)
        yield from self.drivers


def versions() -> Versions:
    """Ask each for its version, with a deadline for each program. Raises nothing."""
    system = os.uname()
    return Versions(
        gpusnap=Part("gpusnap", __version__, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        python=Part("Python", platform.python_version(), sys.executable),
        kernel=Part(system.sysname, system.release, note=system.machine),
        runtimes=tuple(_runtimes()),
        criu=_program("CRIU", "criu"),
        pycriu=_pycriu(),
        podman=_program("Podman", "podman"),
        drivers=tuple(_drivers()),
    )


def _program(name: str, word: str) -> Part:
    path = program(word)
    if path is None:
        return Part(name, fault="not found")
    done = ask([path, "--version"])
    # A development version of CRIU prints its commit on a second line.
    found = numbers_in(done.out) if done is not None and done.code == 0 else ()
    if not found:
        return Part(name, path=path, fault=f"{word} --version does not report it")
    return Part(name, ".".join(map(str, found)), path)


def _runtimes() -> Iterator[Part]:
    """Yield those that gpusnap-runtime would start, each file once, in the order in which it tries them."""
    wanted = ""
    try:
        wanted = locate.setting()
        if wanted:
            locate.find(wanted)
    except GpusnapError as error:
        yield Part(wanted or "settings", path="" if wanted else locate.SETTINGS_FILE, fault=str(error))
    paths: dict[str, str] = {}
    for path, _ in locate.find_all(wanted, "", locate.list_preferred()):
        paths.setdefault(os.path.realpath(path), path)
    if not paths and not wanted:
        yield Part("real runtime", fault="not found")
    for path in paths.values():
        yield _runtime(path)


def _runtime(path: str) -> Part:
    name = os.path.basename(path)
    try:
        real = identify(Path(path))
    except GpusnapError as error:
        return Part(name, path=path, fault=str(error))
    match = re.search(r"version (\S+)", real.line)
    if match is None:
        return Part(name, path=path, fault=f"{name} --version does not report it")
    return Part(name, match[1][:64], path, "" if real.has_criu else "built without CRIU")


def _pycriu() -> Part:
    try:
        found = pycriu_package.load()
        package = sys.modules["pycriu"]
    except (GpusnapError, KeyError) as error:
        return Part("pycriu", fault="not found" if not pycriu_package.is_there() else str(error))
    return Part(
        "pycriu",
        str(getattr(package, "__version__", "")),
        os.path.dirname(package.__file__ or ""),
        "" if found.accelerated else "protobuf uses its Python implementation, which is slow",
    )


def _drivers() -> Iterator[Part]:
    try:
        found = find_drivers()
    except GpusnapError as error:
        yield Part("GPU driver", fault=str(error))
        return
    if not found:
        yield Part("GPU driver", fault="not found")
    for driver in found:
        name = _NAMES.get(driver.vendor, driver.vendor)
        try:
            host = driver.host()
        except GpusnapError as error:
            yield Part(name, fault=str(error))
            continue
        count = f"{len(host.gpus)} GPU{'' if len(host.gpus) == 1 else 's'}"
        cuda = f"CUDA {host.cuda_version}, " if host.cuda_version else ""
        yield Part(name, host.driver_version, note=cuda + count)
