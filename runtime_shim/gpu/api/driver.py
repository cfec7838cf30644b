"""The interface to a vendor's GPU driver: one protocol, one implementation per vendor.

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
    """CUprocessState of cuda.h: the state of a process in the driver's checkpoint API."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host. Sizes are bytes."""

    uuid: str
    """In NVML's format, GPU-8-4-4-4-12 hex digits, or in ROCm's, GPU- and 16 of them."""
    minor: int
    """The minor of its device node: /dev/nvidia<minor>, /dev/dri/renderD<minor>."""
    index: int
    model: str
    compute_capability: str
    """Major and minor with a dot, 9.0, or AMD's name of the target: gfx942."""
    memory_total: int
    memory_used: int
    mig: bool
    compute_mode: str
    """default, exclusive-process, prohibited (NVML's compute modes)."""
    pci: str = ""
    """Address in sysfs's format: 0000:41:00.0; empty if the driver does not report it."""


@dataclass(frozen=True, slots=True)
class Host:
    """The driver and the GPUs of this host."""

    vendor: str
    driver_version: str
    cuda_version: str
    """The newest CUDA that the driver supports: 13.0; empty for another vendor."""
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A character device of a GPU's driver."""

    path: str
    """In the container or on the host: /dev/nvidia0, /dev/dri/renderD128."""
    major: int
    minor: int
    gpu: str = ""
    """UUID; empty if all GPUs share it."""


@dataclass(frozen=True, slots=True)
class HeldFiles:
    """The device files of GPUs that a process holds, with each descriptor and each mapping."""

    descriptors: tuple[tuple[int, str], ...]
    """Number, and the path of the file."""
    mappings: tuple[tuple[int, int, str], ...]
    """Start, end, and the path of the file."""


class Driver(Protocol):
    """A vendor's method to suspend and resume the GPU state of other processes.

    Every method raises a `gpusnap.runtime_shim.gpu.api.errors.GpuError` if the driver or the kernel refuses,
    and another GpusnapError if gpusnap cannot ask: /proc cannot be read, or the process that asks does not
    start, or ends. If a plugin of CRIU suspends the processes, `lock`, `checkpoint`, `restore` and `unlock`
    must not be called.
    """

    vendor: str
    plugin: Plugin | None
    """The plugin that suspends processes within CRIU's dump; None if the methods below do so before it."""

    def open(self) -> None:
        """Load and initialise the driver's library (NVIDIA: up to 0.5 s). Calling it again does nothing.

        Raises DriverMissing, DriverTooOld (no checkpoint API), NoDevice.
        """

    def host(self) -> Host:
        """Return the inventory, read anew at each call."""

    def state(self, pid: int) -> ProcessState | None:
        """Return the state of a process; None if it has no GPU state or has ended."""

    def restore_thread(self, pid: int) -> int:
        """Return the TID of the thread that does the driver's work inside the process."""

    def memory_used(self, pids: Iterable[int]) -> Mapping[int, Mapping[str, int | None]]:
        """Return bytes of GPU memory by PID and GPU UUID, for processes that the driver lists.

        None if the driver does not report the bytes; see `estimate_used`.
        """

    def list_handles(self, pid: int) -> tuple[str, ...]:
        """Return this vendor's files (/dev/nvidia0) that the process has open or mapped, from /proc."""

    def holds(self, pid: int) -> bool:
        """Whether the process has any of them. If one is open, its mappings are not checked."""

    def list_held(self, pid: int) -> HeldFiles:
        """Return the same files, with the descriptors and the addresses of the process."""

    def list_visible(self, pid: int) -> tuple[str, ...]:
        """Return UUIDs of the GPUs that the process could see: it holds their files, or has them in its /dev.

        By minor of the node, not by its name; a suspended process holds none, but still has its /dev.
        """

    def nodes(self, pid: int | None = None) -> tuple[Node, ...]:
        """Return the GPU nodes in the /dev of a process; without PID those of this host, made or not."""

    def lock(self, pid: int, *, timeout: float) -> None:
        """Stop new GPU work and wait for work in progress; LockTimeout after `timeout` seconds."""

    def checkpoint(self, pid: int) -> None:
        """Move the locked process's GPU memory into its own address space and release the GPU."""

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """Restore it; `pairs` of (old UUID, new UUID) name every GPU that the process could see."""

    def unlock(self, pid: int) -> None:
        """Let a locked process continue."""
