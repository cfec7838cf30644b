"""Collects what the manifest says about a container that is about to be dumped."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from gpusnap.oci.base.files import open_regular
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.gpu import sum_by_gpu
from gpusnap.runtime_shim.gpu.api.device_files import mapped_files
from gpusnap.runtime_shim.gpu.api.driver import Host, Node
from gpusnap.runtime_shim.gpu.nvidia.driver_files import MappedFile, describe_mapped, is_driver_file
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest
from gpusnap.runtime_shim.runtime.container import Container
from gpusnap.runtime_shim.runtime.container_files import directory
from gpusnap.runtime_shim.runtime.criu.images import dev
from gpusnap.runtime_shim.runtime.criu.version import criu_version
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import Record

# The limit of the manifest's schema; a longer list is no reason to refuse.
_ARGUMENTS = 4096


def describe(
    container: Container,
    real: RealRuntime,
    host: Host,
    records: Iterable[Record],
    *,
    nodes: Sequence[Node],
    mounts: tuple[manifest.DriverMount, ...],
    regions: Mapping[int, tuple[manifest.RegionRecord, ...]],
    pages: str,
    neutralised: tuple[manifest.NeutralisedProcess, ...],
    timing: Sequence[Step],
    plugin: str = "",
) -> manifest.Manifest:
    """Make the manifest of a container that is still stopped. `regions`: by PID, in the processes' order."""
    records = sorted(records, key=lambda record: record.process.pid)
    used = sum_by_gpu(record.gpus for record in records)
    for node in nodes:
        if node.gpu:
            used.setdefault(node.gpu, 0)
    return manifest.Manifest(
        created=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        container=container.id,
        host=_host(host, real),
        gpus=tuple(
            manifest.GpuRecord(
                g.uuid, g.minor, g.index, g.model, g.compute_capability, g.memory_total, used[g.uuid], g.pci
            )
            for g in host.gpus
            if g.uuid in used
        ),
        processes=tuple(
            manifest.GpuProcess(
                record.inner_pid,
                record.process.comm,
                record.process.command[:_ARGUMENTS],
                record.gpus,
                regions.get(record.process.pid, ()),
            )
            for record in records
        ),
        mounts=mounts,
        nodes=tuple(nodes),
        libraries=_libraries(record.process.pid for record in records),
        dev=_dev_image(container.pid),
        timing=tuple(timing),
        pages=pages,
        neutralised=neutralised,
        plugin=plugin,
    )


def _host(host: Host, real: RealRuntime) -> manifest.HostRecord:
    return manifest.HostRecord(
        architecture=platform.machine(),
        kernel=platform.release(),
        vendor=host.vendor,
        driver_version=host.driver_version,
        cuda_version=host.cuda_version,
        criu_version=criu_version(),
        runtime_name=real.path.name,
        runtime_version=".".join(map(str, real.version)) or "unknown",
    )


def _libraries(pids: Iterable[int]) -> tuple[MappedFile, ...]:
    """Return the driver's files that GPU processes have mapped; CRIU needs the same build of some again.

    The path may now be a symbolic link to a file of this host, or a FIFO.
    """
    found: dict[str, MappedFile] = {}
    for pid in pids:
        for path in mapped_files(pid):
            if path in found or not is_driver_file(path):
                continue
            folder, name = os.path.split(path)
            with (
                contextlib.suppress(OSError, ValueError),
                directory(pid, folder) as above,
                open_regular(name, above)[0] as file,
            ):
                found[path] = describe_mapped(path, f"/proc/self/fd/{file.fileno()}")
    return tuple(found[path] for path in sorted(found))


def _dev_image(init: int) -> str:
    """Return the name of CRIU's image of the container's /dev; empty if it makes none."""
    for mount in reversed(proc.mounts(init)):
        if mount.destination == "/dev":
            major, _, minor = mount.device.partition(":")
            own = mount.kind == "tmpfs" and mount.root == "/"
            return dev.image_name(os.makedev(int(major), int(minor))) if own else ""
    return ""
