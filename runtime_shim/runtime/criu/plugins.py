"""CRIU's plugins for GPUs: CRIU gets the one that a dump or a restore needs, and no other.

CRIU loads every *.so of one directory: libdir of its configuration, else $CRIU_LIBS_DIR, else /usr/lib/criu
(criu/plugin.c). A plugin for GPUs in that directory would work even if it is not wanted, on processes that
the driver has already suspended, and a restore would require it. So if the directory contains such a plugin,
or lacks the wanted one, gpusnap uses a temporary directory instead, with links to the right ones. Other
plugins of the site stay.

Options reach a plugin only by its environment. CRIU is a child of crun or runc, and has theirs: crun's
libcriu starts `criu swrk` by fork and exec (lib/c/criu.c), runc by os/exec without an environment of its own
(libcontainer/criu_linux.go). So variables that gpusnap gives the runtime reach the plugin.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress

from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.runtime_shim.base.errors import ImageError, Refused, raise_as
from gpusnap.runtime_shim.gpu.api.criu_plugin import AMDGPU, CUDA, KNOWN, Plugin
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE
from gpusnap.runtime_shim.settings import Criu, Settings

VARIABLE = "CRIU_LIBS_DIR"

FOLDERS = (
    "/usr/lib/criu",
    "/usr/lib64/criu",
    "/usr/lib/x86_64-linux-gnu/criu",
    "/usr/local/lib/criu",
    "/usr/local/lib64/criu",
    "/usr/local/lib/x86_64-linux-gnu/criu",
)
"""Where packages and `make install` put plugins: CRIU's own default first (PLUGINDIR of Makefile.install)."""

_CHECKS = {
    "firmware": "KFD_FW_VER_CHECK",
    "sdma-firmware": "KFD_SDMA_FW_VER_CHECK",
    "caches": "KFD_CACHES_COUNT_CHECK",
    "gws": "KFD_NUM_GWS_CHECK",
    "vram": "KFD_VRAM_SIZE_CHECK",
    "numa": "KFD_NUMA_CHECK",
    "capability": "KFD_CAPABILITY_CHECK",
}
"""criu-amdgpu-plugin(1), by the names that settings.Amd has for them."""
_BUFFER = "KFD_MAX_BUFFER_SIZE"

# A text in CUDA plugins that call the driver themselves, and need no program (plugins/cuda of CRIU's
# development branch).
_DRIVER_API = b"cuCheckpointProcessLock"
# Seconds for CRIU to stop the tasks, in addition to the locks.
_BESIDE = 10


@dataclass(frozen=True, slots=True)
class Injection:
    """Options for CRIU, and environment for the runtime."""

    criu: Criu
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def inject(plugin: Plugin | None, settings: Settings, *, processes: int = 1) -> Iterator[Injection]:
    """Make CRIU load `plugin`, or none for GPUs; temporary files are removed after the block.

    `processes` use the GPU, and each may take nvidia.lock-timeout to be locked, one after the other. Raises
    Refused if the plugin, or a program that it runs, is not on this host; and ImageError.
    """
    found = find(plugin, settings) if plugin is not None else ""
    environment = _environment(plugin, found, settings) if plugin is not None else {}
    folder = settings.criu.libdir or locate.environment().get(VARIABLE, "") or _default()
    there = _libraries(folder)
    wanted = {name: path for name, path in there.items() if name not in {each.file for each in KNOWN}}
    if plugin is not None:
        wanted[plugin.file] = found
    criu = settings.criu
    if plugin is CUDA:
        locks = math.ceil(settings.nvidia.lock_timeout * max(1, processes)) + _BESIDE
        criu = replace(criu, timeout=max(criu.timeout, locks))
    if plugin is None and wanted == there:
        yield Injection(criu)
        return
    own = os.path.dirname(found)
    with nullcontext(own) if found and wanted == _libraries(own) else _folder(wanted) as libdir:
        yield Injection(replace(criu, libdir=libdir), environment | {VARIABLE: libdir})


def _default() -> str:
    """Return the directory that CRIU uses by default.

    Its builder chose that: a directory with a plugin for GPUs counts as the one.
    """
    names = [each.file for each in KNOWN]
    having = (path for path in FOLDERS if any(os.path.exists(os.path.join(path, name)) for name in names))
    return next(having, FOLDERS[0])


def find(plugin: Plugin, settings: Settings) -> str:
    """Return the path of a plugin's library, from the settings or where packages put it. Raises Refused."""
    own = settings.nvidia.libdir if plugin is CUDA else settings.amd.libdir
    folders = [own] if own else [*filter(None, [settings.criu.libdir]), *FOLDERS]
    for folder in folders:
        path = os.path.join(folder, plugin.file)
        if os.path.isfile(path):
            return path
    section = "nvidia" if plugin is CUDA else "amd"
    raise Refused(
        f"{plugin.what} is not installed on this host: there is no {plugin.file} in {', '.join(folders)}",
        hint=f"install it, or set {section}.libdir in {SETTINGS_FILE} to its directory",
        code="GPS-506",
    )


def _environment(plugin: Plugin, path: str, settings: Settings) -> dict[str, str]:
    if plugin is AMDGPU:
        environment = {_CHECKS[name]: "0" for name in settings.amd.skip_checks}
        return environment | ({_BUFFER: str(settings.amd.buffer)} if settings.amd.buffer else {})
    return _with_program(plugin, path, settings.nvidia.cuda_checkpoint)


def _with_program(plugin: Plugin, path: str, chosen: str) -> dict[str, str]:
    """Return a PATH on which CRIU's plugin finds its program. That of Podman and containerd may be short."""
    searched = locate.environment().get("PATH", "") or os.defpath
    places = [chosen] if chosen else [os.path.join(folder, plugin.program) for folder in _folders(searched)]
    program = next((place for place in places if os.access(place, os.X_OK)), None)
    if program is None:
        if not chosen and _calls_driver(path):
            return {}
        raise Refused(
            f"{plugin.what} runs {plugin.program}, but this host has none "
            + (f"at {chosen}" if chosen else f"in {', '.join(_folders(searched))}"),
            hint=f"install NVIDIA's {plugin.program}, or set nvidia.cuda-checkpoint in {SETTINGS_FILE}",
            code="GPS-506",
        )
    folder = os.path.dirname(program)
    if folder in searched.split(":") and not chosen:
        return {}
    # First only if somebody asked for this one: crun and runc look for criu itself there, too.
    return {"PATH": f"{folder}:{searched}" if chosen else f"{searched}:{folder}"}


def _folders(searched: str) -> list[str]:
    every = (*searched.split(":"), *locate.SYSTEM_DIRECTORIES)
    return list(dict.fromkeys(folder for folder in every if folder.startswith("/")))


def _calls_driver(path: str) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        return _DRIVER_API in file.read()
    return False


def _libraries(folder: str) -> dict[str, str]:
    """Return the libraries that CRIU would load from a directory: paths by name."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".so"))
    except OSError:
        return {}
    return {name: os.path.join(folder, name) for name in names}


@contextmanager
def _folder(libraries: Mapping[str, str]) -> Iterator[str]:
    with ExitStack() as stack:
        with raise_as(ImageError, "the directory for CRIU's plugins cannot be created"):
            made = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=scratch_files.prefix("plugins"), dir=scratch())
            )
            for name, path in libraries.items():
                os.symlink(os.path.realpath(path), os.path.join(made, name))
        yield made
