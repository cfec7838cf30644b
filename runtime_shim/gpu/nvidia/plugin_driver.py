"""NVIDIA's driver if CRIU's own CUDA plugin suspends the processes, with NVIDIA's cuda-checkpoint.

That program supports drivers since 555, also those before 570 whose libcuda has no checkpoint API. With
these, the state of a process cannot be read, and one that holds the device files counts as running.
"""

from __future__ import annotations

from gpusnap.runtime_shim.gpu.api import device_files
from gpusnap.runtime_shim.gpu.api.criu_plugin import CUDA, Plugin
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import DriverTooOld
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia
from gpusnap.runtime_shim.process import proc


class NvidiaByPlugin(Nvidia):
    """Like `Nvidia`, but it cannot suspend or resume a process."""

    plugin: Plugin | None = CUDA

    def open(self) -> None:
        """Like `Nvidia.open`, but a driver without the checkpoint API is enough."""
        try:
            super().open()
        except DriverTooOld:
            self.host()  # raises if NVML does not answer either

    def state(self, pid: int) -> ProcessState | None:
        """Like `Nvidia.state`; from the device files if the driver does not report it."""
        try:
            return super().state(pid)
        except DriverTooOld:
            return ProcessState.RUNNING if proc.is_alive(pid) and device_files.gpu_minors(pid) else None
