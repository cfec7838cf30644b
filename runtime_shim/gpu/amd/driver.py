"""AMD's driver: inventory from sysfs, and the state of processes by CRIU's own plugin for AMD's GPUs.

The kernel permits a process's GPU state to be read and created only within a dump and a restore (kfd_ioctl.h,
AMDKFD_IOC_CRIU_OP: of a traced process, and of the caller itself), so no other program can suspend one. This
module does the rest: which GPUs there are, who uses them, and by which device files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from gpusnap.oci.base.files import exists, is_folder
from gpusnap.runtime_shim.base.errors import reason
from gpusnap.runtime_shim.gpu.amd import device_files, topology
from gpusnap.runtime_shim.gpu.amd.device_files import DRM_MAJOR
from gpusnap.runtime_shim.gpu.api import device_files as handles
from gpusnap.runtime_shim.gpu.api.criu_plugin import AMDGPU, Plugin
from gpusnap.runtime_shim.gpu.api.device_nodes import in_container, on_host
from gpusnap.runtime_shim.gpu.api.driver import HeldFiles, Host, Node, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    DriverMissing,
    GpuError,
    NoDevice,
    NotInitialized,
    NotSupported,
)
from gpusnap.runtime_shim.process import proc

VENDOR = "amd"


def is_present() -> bool:
    """Whether this host has AMD's compute driver: its device node, or its topology. Raises GpuError."""
    try:
        return exists(device_files.KFD) or is_folder(f"{topology.SYS}/class/kfd/kfd/topology")
    except OSError as error:
        raise GpuError(
            f"cannot determine whether this host has AMD's driver: {error.filename}: {reason(error)}",
            hint="try again",
        ) from error


class Amd:
    """`gpusnap.runtime_shim.gpu.api.driver.Driver` for AMD. It has no state: each call reads anew."""

    vendor = VENDOR
    plugin: Plugin | None = AMDGPU

    def open(self) -> None:
        """Check that the driver lists a GPU. Raises DriverMissing, NoDevice."""
        if device_files.kfd_number() is None:
            raise DriverMissing(
                "AMD's compute driver is not loaded: there is no /dev/kfd",
                hint="load it (modprobe amdgpu), on a kernel with CONFIG_HSA_AMD",
            )
        if not topology.gpus():
            raise NoDevice(
                "AMD's compute driver lists no GPU in /sys/class/kfd/kfd/topology",
                hint="run rocminfo to see which GPUs it lists, and check that no device cgroup hides "
                "them from gpusnap",
            )

    def host(self) -> Host:
        """Return the inventory, read anew at each call."""
        found = tuple(each.gpu for each in topology.gpus())
        return Host(VENDOR, topology.driver_version(), "unknown", found)

    def state(self, pid: int) -> ProcessState | None:
        """Return RUNNING for a process that holds /dev/kfd or a render node; no other state can be seen."""
        if not proc.is_alive(pid):
            return None
        return ProcessState.RUNNING if self.list_handles(pid) else None

    def restore_thread(self, pid: int) -> int:
        """There is none; raises NotInitialized."""
        raise NotInitialized(
            f"process {pid} has no AMD driver thread: CRIU's plugin saves its state", pid=pid
        )

    def memory_used(self, pids: Iterable[int]) -> Mapping[int, Mapping[str, int]]:
        """Return bytes by PID and GPU UUID, for processes that have used /dev/kfd."""
        return topology.vram_used(pids, topology.gpus())

    def list_handles(self, pid: int) -> tuple[str, ...]:
        """Return the paths of /dev/kfd and render nodes that the process has open or mapped, sorted."""
        found = self.list_held(pid)
        return tuple(sorted({path for _, path in found.descriptors} | {path for *_, path in found.mappings}))

    def holds(self, pid: int) -> bool:
        """Whether the process has any such file open or mapped."""
        return bool(self.list_handles(pid))

    def list_held(self, pid: int) -> HeldFiles:
        """Return the same files by number of the descriptor, and by address."""
        return device_files.list_held(pid, _numbers())

    def list_visible(self, pid: int) -> tuple[str, ...]:
        """Return UUIDs of the GPUs whose render node the process holds, or has in its own /dev."""
        ours = {(DRM_MAJOR, each.gpu.minor): each.gpu.uuid for each in topology.gpus()}
        there = device_files.list_held_numbers(pid) | device_files.numbers_in_dev(pid)
        return tuple(uuid for number, uuid in ours.items() if number in there)

    def nodes(self, pid: int | None = None) -> tuple[Node, ...]:
        """Return AMD's device nodes in the /dev of a process, or this host's own; see `device_nodes`."""
        gpus = self.host().gpus
        found = on_host(gpus) if pid is None else in_container(pid, gpus)
        # On a host with NVIDIA's GPUs too, the list contains theirs.
        ours = (node for node in found if not node.path.startswith("/dev/nvidia"))
        return tuple(node for node in ours if node.gpu or node.path == device_files.KFD)

    def lock(self, pid: int, *, timeout: float) -> None:
        """Impossible from outside of CRIU; raises NotSupported, like the methods below."""
        _not_from_outside(pid)

    def checkpoint(self, pid: int) -> None:
        """See `lock`."""
        _not_from_outside(pid)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """See `lock`."""
        _not_from_outside(pid)

    def unlock(self, pid: int) -> None:
        """See `lock`."""
        _not_from_outside(pid)


def _numbers() -> frozenset[device_files.Number]:
    """Return the device numbers of AMD's nodes."""
    kfd = device_files.kfd_number()
    renders = {(DRM_MAJOR, each.gpu.minor) for each in topology.gpus()}
    return frozenset(renders | ({kfd} if kfd is not None else set()))


def _not_from_outside(pid: int) -> NoReturn:
    raise NotSupported(
        f"process {pid} ({handles.comm(pid)}) uses an AMD GPU, which only CRIU's plugin can suspend",
        hint="checkpoint its container instead",
        pid=pid,
    )
