"""What gpusnap asks of a vendor's GPU driver: one protocol, one implementation a vendor.

A process is named by its PID as this process sees it. Operations on one process block until the driver has
answered; `parallel.run_at_once` runs them on several processes at the same time.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.gpu.api.criu_plugin import Plugin


class ProcessState(enum.IntEnum):
    """CUprocessState of cuda.h: what the driver's checkpoint API says of a process."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host. Sizes are bytes."""

    uuid: str
    """As NVML writes it, GPU-8-4-4-4-12 hex digits, or as ROCm does, GPU- and 16 of them."""
    minor: int
    """Of its device node: /dev/nvidia<minor>, /dev/dri/renderD<minor>."""
    index: int
    model: str
    compute_capability: str
    """Major and minor with a dot, 9.0, or what AMD calls its target: gfx942."""
    memory_total: int
    memory_used: int
    mig: bool
    compute_mode: str
    """default, exclusive-process, prohibited (NVML's compute modes)."""
    pci: str = ""
    """Address as sysfs writes it: 0000:41:00.0; empty where the driver does not tell."""


@dataclass(frozen=True, slots=True)
class Host:
    """The driver and the GPUs of this host."""

    vendor: str
    driver_version: str
    cuda_version: str
    """The newest CUDA that the driver speaks: 13.0; another vendor's speaks none."""
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A character device that belongs to a GPU's driver."""

    path: str
    """In the container or on the host: /dev/nvidia0, /dev/dri/renderD128."""
    major: int
    minor: int
    gpu: str = ""
    """UUID; empty where all GPUs share it."""


@dataclass(frozen=True, slots=True)
class HeldFiles:
    """What a process holds of a GPU's device files, each descriptor and each mapping by itself."""

    descriptors: tuple[tuple[int, str], ...]
    """Number, and the path of the file."""
    mappings: tuple[tuple[int, int, str], ...]
    """Start, end, and the path of the file."""


class Driver(Protocol):
    """A vendor's way to suspend and resume the GPU state of other processes.

    Every method raises a `gpusnap.runtime_shim.gpu.api.errors.GpuError` if the driver or the kernel refuses,
    and another GpusnapError if gpusnap cannot ask: /proc cannot be read, or the process that asks does not
    start, or ends. Where a plugin of CRIU's does the suspending, `lock`, `checkpoint`, `restore` and `unlock`
    are not to be called.
    """

    vendor: str
    plugin: Plugin | None
    """What suspends the processes within CRIU's dump; None where the methods below do so before it."""

    def open(self) -> None:
        """Load and initialise the driver's library (NVIDIA: up to 0.5 s). Calling it again does nothing.

        Raises DriverMissing, DriverTooOld (no checkpoint API), NoDevice.
        """

    def host(self) -> Host:
        """The inventory, read anew at each call."""

    def state(self, pid: int) -> ProcessState | None:
        """The state of a process; None where it has no GPU state or is gone."""

    def restore_thread(self, pid: int) -> int:
        """TID of the thread that does the driver's work inside the process."""

    def memory_used(self, pids: Iterable[int]) -> Mapping[int, Mapping[str, int]]:
        """Bytes of GPU memory by PID and GPU UUID, for processes that the driver lists."""

    def list_handles(self, pid: int) -> tuple[str, ...]:
        """Device files of this vendor the process has open or mapped (/dev/nvidia0); from /proc alone."""

    def holds(self, pid: int) -> bool:
        """Whether the process has any of them: most have one open, and their mappings are not looked at."""

    def list_held(self, pid: int) -> HeldFiles:
        """The same files, with the descriptors and the addresses by which the process has them."""

    def list_visible(self, pid: int) -> tuple[str, ...]:
        """UUIDs of the GPUs that the process could see: whose device files it holds, or has in its own /dev.

        By minor of the node, not by its name; a suspended process holds none, but still has its /dev.
        """

    def nodes(self, pid: int | None = None) -> tuple[Node, ...]:
        """The GPU device nodes in the /dev of a process; without one those of this host, made or not."""

    def lock(self, pid: int, *, timeout: float) -> None:
        """Stop new GPU work and wait for what is under way; LockTimeout after `timeout` seconds."""

    def checkpoint(self, pid: int) -> None:
        """Move the locked process' GPU memory into its own address space and let go of the GPU."""

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """Put it back; `pairs` of (old UUID, new UUID) name every GPU that the process could see."""

    def unlock(self, pid: int) -> None:
        """Let a locked process run on."""
