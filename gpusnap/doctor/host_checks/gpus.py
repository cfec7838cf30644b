"""The GPUs: each vendor's driver, the configuration of NVIDIA's, CRIU's plugins for GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from gpusnap.doctor.base.check import Check, failure, make_refused, ok, warning
from gpusnap.doctor.base.sources import join_root, text
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu.api.criu_plugin import Plugin
from gpusnap.runtime_shim.gpu.api.driver import Driver, Gpu, Host
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.gpu.nvidia import nvml
from gpusnap.runtime_shim.gpu.nvidia.driver import ask_nvml
from gpusnap.runtime_shim.runtime.criu.plugins import find as find_plugin
from gpusnap.runtime_shim.settings import Settings

# cuda.h: the checkpoint functions came with CUDA 12.8 (driver 570), and the pairs of GPUs for a restore
# (CUcheckpointRestoreArgs.gpuPairs) with CUDA 13.0 (driver 580).
_API = 570
_REMAP = 580
# The kernel cuts a process's name to 15 bytes: nvidia-cuda-mps-control, nvidia-cuda-mps-server.
_MPS = "nvidia-cuda-mps"


def check_driver(found: Driver | None) -> tuple[Host | None, tuple[Check, ...]]:
    """Check a vendor's driver: its version, GPUs and ability to suspend; also return its inventory.

    Nothing is locked or checkpointed: the library is only loaded and queried.
    """
    if found is None:
        return None, (_no_driver(),)
    host: Host | None = None
    try:
        host = found.host()
        found.open()
    except GpuError as error:
        return host, (make_refused("GPU driver", error, vendor=found.vendor),)
    return host, (_describe_host(host, found.plugin),)


def _no_driver() -> Check:
    return failure(
        "GPU driver",
        "this host has no GPU driver that gpusnap knows: no /dev/nvidia*, no /dev/kfd",
        "install NVIDIA driver 570 or later, or AMD's; containers without a GPU need none",
    )


def _describe_host(host: Host, plugin: Plugin | None) -> Check:
    facts = {
        "vendor": host.vendor,
        "version": host.driver_version,
        "cuda": host.cuda_version,
        "gpus": len(host.gpus),
    }
    if host.vendor == "nvidia":
        says = f"NVIDIA driver {host.driver_version} (CUDA {host.cuda_version})"
        says += " has the checkpoint API" if plugin is None else ""
    else:
        says = f"{host.vendor.upper()} driver {host.driver_version}"
    if not host.gpus:
        todo = (
            f"check with {'nvidia-smi -L' if host.vendor == 'nvidia' else 'rocminfo'} which GPUs the "
            "driver lists"
        )
        return failure("GPU driver", f"{says}, but no GPU", todo, **facts)
    kinds: dict[str, int] = {}
    for gpu in host.gpus:
        kind = f"{gpu.model} with {human(gpu.memory_total)}"
        kinds[kind] = kinds.get(kind, 0) + 1
    each = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    says = f"{says}; {each}"
    if host.vendor == "nvidia" and plugin is None:
        release = _release(host.driver_version)
        if release < _API:
            what = f"{says}. NVIDIA documents that API since driver {_API}, and it is untested with this one"
            return warning("GPU driver", what, f"install NVIDIA driver {_REMAP} or later", **facts)
        if release < _REMAP:
            what = f"{says}. Before {_REMAP}, it can restore only onto the same GPUs, not on another host"
            return warning("GPU driver", what, f"install NVIDIA driver {_REMAP} or later", **facts)
    return ok("GPU driver", says, **facts)


def _release(version: str) -> int:
    """Return the first number of a driver's version; a sufficiently new one if it has none."""
    first = version.partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() else _REMAP


def check_plugin(
    wanted: Plugin, settings: Settings, find: Callable[[Plugin, Settings], str] = find_plugin
) -> Iterator[Check]:
    """Check CRIU's plugin for a vendor's GPUs: needed for AMD's, for NVIDIA's if nvidia.driver says so."""
    try:
        path = find(wanted, settings)
    except GpusnapError as error:
        yield make_refused("CRIU plugin", error, plugin=wanted.name)
    else:
        yield ok("CRIU plugin", f"{wanted.what}: {path}", plugin=wanted.name, path=path)


def check_mig(gpus: Iterable[Gpu]) -> Iterator[Check]:
    """Check for GPUs with MIG: the driver cannot checkpoint a program on an instance."""
    cut = [gpu.index for gpu in gpus if gpu.mig]
    if cut:
        yield warning(
            "MIG",
            f"{_join(cut)} in MIG mode: the driver cannot checkpoint a program that uses an instance",
            "run nvidia-smi -i GPU --mig 0 when nothing uses it",
            gpus=cut,
        )
    else:
        yield ok("MIG", "off", gpus=cut)


def check_compute_modes(gpus: Iterable[Gpu]) -> Iterator[Check]:
    """Check for GPUs whose compute mode allows one process, or none."""
    modes = {gpu.index: gpu.compute_mode for gpu in gpus if gpu.compute_mode != "default"}
    closed = [index for index, mode in modes.items() if mode == "prohibited"]
    todo = "nvidia-smi -i GPU --compute-mode DEFAULT"
    if closed:
        says = f"{_join(closed)} in compute mode prohibited: nothing can be restored onto it"
        yield warning("compute mode", says, todo, modes=modes)
    elif modes:
        yield warning(
            "compute mode",
            f"{_join(modes)} in compute mode {', '.join(sorted(set(modes.values())))}: only a container "
            "with one GPU process can be restored onto it, and only while no other process uses it",
            todo,
            modes=modes,
        )
    else:
        yield ok("compute mode", "default", modes=modes)


def _join(indexes: Iterable[int]) -> str:
    numbers = sorted(indexes)
    return f"GPU{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _ask_persistence_modes() -> Mapping[int, bool]:
    return ask_nvml(nvml.persistence_modes)


def check_persistence(
    gpus: Iterable[Gpu], ask: Callable[[], Mapping[int, bool]] = _ask_persistence_modes
) -> Iterator[Check]:
    """Check the persistence mode: without it, each operation on an unused GPU starts the driver."""
    there = {each.index for each in gpus}
    modes = {index: on for index, on in ask().items() if index in there}
    off = [index for index, on in modes.items() if not on]
    if off:
        yield warning(
            "persistence",
            f"persistence mode is off for {_join(off)}: for a restore onto an unused GPU the driver has "
            "to initialise, which takes seconds",
            "enable the service nvidia-persistenced, or run nvidia-smi --persistence-mode 1",
            modes=modes,
        )
    elif modes:
        yield ok("persistence", "persistence mode is on", modes=modes)


def check_mps(root: str = "/") -> Iterator[Check]:
    """Check for the Multi-Process Service, whose programs the driver cannot suspend."""
    found = []
    for name in sorted(filter(str.isdigit, os.listdir(join_root(root, "/proc"))), key=int):
        if (text(root, f"/proc/{name}/comm") or "").startswith(_MPS):
            found.append(int(name))
    if found:
        yield warning(
            "MPS",
            f"the Multi-Process Service is running (process {found[0]}): programs that use it cannot be "
            "suspended",
            "run echo quit | nvidia-cuda-mps-control, and start the programs without it",
            pids=found,
        )
    else:
        yield ok("MPS", "off", pids=found)


def check_device_file_creation(root: str = "/") -> Iterator[Check]:
    """Check ModifyDeviceFiles: with 1, a program in a container may make nodes of other GPUs."""
    params = text(root, "/proc/driver/nvidia/params")
    match = re.search(r"^ModifyDeviceFiles:\s*(\d)", params or "", re.M)
    if match is None:
        return
    says = {
        "0": "0: libcuda creates no device nodes in containers",
        "1": "1, NVIDIA's default; nvidia-ctk's hook hides it from containers, and gpusnap knows its mounts",
    }.get(match[1], match[1])
    yield ok("ModifyDeviceFiles", says, value=int(match[1]))
