"""All checks of a host, in the order in which they are told."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress

from gpusnap.doctor.base import free_space
from gpusnap.doctor.base.check import Ask, Check, asked
from gpusnap.doctor.base.sources import program
from gpusnap.doctor.host_checks import cdi, criu, engines, gpus, kernel, site
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.gpu import find_drivers
from gpusnap.runtime_shim.gpu.api.criu_plugin import AMDGPU, CUDA
from gpusnap.runtime_shim.gpu.api.driver import Gpu
from gpusnap.runtime_shim.runtime.criu.version import criu_version
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE
from gpusnap.runtime_shim.settings import Settings


def checks(*, runtime: str = "", root: str = "/", settings: str = SETTINGS_FILE) -> tuple[Check, ...]:
    """Everything that decides whether checkpointing works here; `runtime` instead of the settings' one."""
    chosen, said = site.settings(settings)
    wanted, version = runtime or chosen.runtime, criu_version()
    asked_drivers = [gpus.driver(each) for each in find_drivers()] or [gpus.driver(None)]
    hosts = {host.vendor: host for host, _ in asked_drivers if host is not None}
    drivers = tuple(check for _, checks in asked_drivers for check in checks)
    every = tuple(gpu for host in hosts.values() for gpu in host.gpus)
    nvidia = hosts.get("nvidia")
    elsewhere = tuple(kernel.pid_namespace(root))
    kind = ""
    with suppress(GpusnapError):  # its own check says so
        kind = engines.real_runtime(wanted).kind
    return asked(
        (
            ("PID namespace", lambda: elsewhere),
            ("kernel", lambda: kernel.kernel(root)),
            ("privileges", lambda: kernel.capabilities(root)),
            ("ptrace", lambda: kernel.ptrace_scope(root)),
            ("userfaultfd", kernel.userfaultfd),
            ("cgroups", lambda: kernel.cgroups(root)),
            ("criu", lambda: criu.criu(version)),
            ("criu check", lambda: () if elsewhere else criu.own_check()),
            ("network lock", lambda: criu.network_lock(chosen.criu.options, kind, root=root)),
            ("pycriu", criu.pycriu),
            ("runtime", lambda: engines.runtimes(wanted, version)),
            ("runtime under CRI", lambda: engines.under_cri(wanted, root)),
            ("gpusnap-runtime", lambda: engines.launcher(root)),
            ("gpusnap's parts", lambda: engines.complete(root)),
            ("engines", engines.engines),
            ("registered", lambda: engines.registered(root)),
            ("GPU driver", lambda: drivers),
            *_of_plugins(hosts, chosen),
            *(_of_gpus(nvidia.gpus, root) if nvidia is not None and nvidia.gpus else ()),
            ("CDI", lambda: cdi.check(nvidia.driver_version if nvidia is not None else "", root)),
            ("huge pages", lambda: kernel.huge_pages(root)),
            *_of_room(every, chosen, root),
            ("settings", lambda: (said,)),
            ("registries", lambda: site.registries(chosen.store.pull_from, site.auth_files(), root)),
        )
    )


def _of_plugins(hosts: Collection[str], chosen: Settings) -> Iterator[Ask]:
    if "amd" in hosts:
        yield "CRIU plugin", lambda: gpus.plugin(AMDGPU, chosen)
    if "nvidia" in hosts and chosen.nvidia.driver == "criu-plugin":
        yield "CRIU plugin", lambda: gpus.plugin(CUDA, chosen)


def _of_gpus(own: tuple[Gpu, ...], root: str) -> Iterator[Ask]:
    yield "persistence", lambda: gpus.persistence(own)
    yield "MIG", lambda: gpus.mig(own)
    yield "MPS", lambda: gpus.mps(root)
    yield "compute mode", lambda: gpus.compute_modes(own)
    yield "ModifyDeviceFiles", lambda: gpus.nodes_made(root)


def _of_room(own: tuple[Gpu, ...], chosen: Settings, root: str) -> Iterator[Ask]:
    yield "disk", lambda: free_space.disks(own, chosen.store.path, free_space.graph_root(root), root)
    if program("containerd") is not None:
        folder = os.environ.get("TMPDIR") or "/tmp"
        yield "disk, containerd", lambda: free_space.unpacking(own, root, folder)
    yield "RAM", lambda: free_space.memory(own, root)
    if own:
        yield "Podman's limit", lambda: _limit(own, free_space.graph_root(root))


def _limit(own: tuple[Gpu, ...], folder: str) -> Iterator[Check]:
    return free_space.podmans_limit(own, free_space.speed(folder), folder)
