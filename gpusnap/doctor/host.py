"""All checks of a host, in the order of the report."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress

from gpusnap.doctor.base import free_space
from gpusnap.doctor.base.check import Ask, Check, run_checks
from gpusnap.doctor.base.sources import program
from gpusnap.doctor.host_checks import cdi, criu, engines, gpus, kernel, site
from gpusnap.oci.registry.credentials import list_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu import find_drivers
from gpusnap.runtime_shim.gpu.api.criu_plugin import AMDGPU, CUDA
from gpusnap.runtime_shim.gpu.api.driver import Gpu
from gpusnap.runtime_shim.runtime.criu.version import criu_version
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE
from gpusnap.runtime_shim.settings import Settings


def checks(*, runtime: str = "", root: str = "/", settings: str = SETTINGS_FILE) -> tuple[Check, ...]:
    """Check whether checkpointing works here; `runtime` replaces that in the settings."""
    chosen, said = site.check_settings(settings)
    auths = [path for path, _ in list_files()]
    wanted, version = runtime or chosen.runtime, criu_version()
    asked_drivers = [gpus.check_driver(each) for each in find_drivers()] or [gpus.check_driver(None)]
    hosts = {host.vendor: host for host, _ in asked_drivers if host is not None}
    drivers = tuple(check for _, checks in asked_drivers for check in checks)
    every = tuple(gpu for host in hosts.values() for gpu in host.gpus)
    nvidia = hosts.get("nvidia")
    elsewhere = tuple(kernel.check_pid_namespace(root))
    kind = ""
    with suppress(GpusnapError):  # its own check reports it
        kind = engines.find_real_runtime(wanted).kind
    return run_checks(
        (
            ("PID namespace", lambda: elsewhere),
            ("kernel", lambda: kernel.check_kernel(root)),
            ("privileges", lambda: kernel.check_capabilities(root)),
            ("ptrace", lambda: kernel.check_ptrace_scope(root)),
            ("userfaultfd", kernel.check_userfaultfd),
            ("cgroups", lambda: kernel.check_cgroups(root)),
            ("criu", lambda: criu.check_criu(version)),
            ("criu check", lambda: () if elsewhere else criu.run_own_check()),
            ("network lock", lambda: criu.check_network_lock(chosen.criu.options, kind, root=root)),
            ("pycriu", criu.check_pycriu),
            ("runtime", lambda: engines.check_runtimes(wanted, version)),
            ("runtime under CRI", lambda: engines.check_cri(wanted, root)),
            ("gpusnap-runtime", lambda: engines.check_launcher(root)),
            ("gpusnap's parts", lambda: engines.check_complete(root)),
            ("engines", engines.check_engines),
            ("registered", lambda: engines.check_registered(root)),
            ("GPU driver", lambda: drivers),
            *_list_plugin_checks(hosts, chosen),
            *(_list_gpu_checks(nvidia.gpus, root) if nvidia is not None and nvidia.gpus else ()),
            ("CDI", lambda: cdi.check(nvidia.driver_version if nvidia is not None else "", root)),
            ("huge pages", lambda: kernel.check_huge_pages(root)),
            *_list_space_checks(every, chosen, root),
            ("settings", lambda: (said,)),
            ("registries", lambda: site.check_registries(chosen.store.pull_from, auths, root)),
        )
    )


def _list_plugin_checks(hosts: Collection[str], chosen: Settings) -> Iterator[Ask]:
    if "amd" in hosts:
        yield "CRIU plugin", lambda: gpus.check_plugin(AMDGPU, chosen)
    if "nvidia" in hosts and chosen.nvidia.driver == "criu-plugin":
        yield "CRIU plugin", lambda: gpus.check_plugin(CUDA, chosen)


def _list_gpu_checks(own: tuple[Gpu, ...], root: str) -> Iterator[Ask]:
    yield "persistence", lambda: gpus.check_persistence(own)
    yield "MIG", lambda: gpus.check_mig(own)
    yield "MPS", lambda: gpus.check_mps(root)
    yield "compute mode", lambda: gpus.check_compute_modes(own)
    yield "ModifyDeviceFiles", lambda: gpus.check_device_file_creation(root)


def _list_space_checks(own: tuple[Gpu, ...], chosen: Settings, root: str) -> Iterator[Ask]:
    yield "disk", lambda: free_space.check_disks(own, chosen.store.path, free_space.graph_root(root), root)
    if program("containerd") is not None:
        folder = os.environ.get("TMPDIR") or "/tmp"
        yield "disk, containerd", lambda: free_space.check_unpacking(own, root, folder)
    yield "RAM", lambda: free_space.check_memory(own, root)
    if own:
        layers = free_space.graph_root(root)
        yield "Podman's limit", lambda: free_space.check_podmans_limit(own, free_space.speed(layers), layers)
