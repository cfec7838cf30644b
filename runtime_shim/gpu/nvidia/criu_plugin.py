"""NVIDIA's driver where CRIU's own CUDA plugin suspends the processes, by NVIDIA's cuda-checkpoint.

That program speaks to drivers from 555 on, also to those before 570 whose libcuda has no checkpoint API; then
the state of a process cannot be read, and one that holds the device files counts as running.
"""

from __future__ import annotations

from gpusnap.runtime_shim.gpu.api import device_files
from gpusnap.runtime_shim.gpu.api.criu_plugin import CUDA, Plugin
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import DriverTooOld
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia
from gpusnap.runtime_shim.process import proc


class NvidiaByPlugin(Nvidia):
    """As `Nvidia`, but nothing here may suspend or resume a process."""

    plugin: Plugin | None = CUDA

    def open(self) -> None:
        """As ever, but a driver without the checkpoint API will do."""
        try:
            super().open()
        except DriverTooOld:
            self.host()  # raises where NVML does not answer either

    def state(self, pid: int) -> ProcessState | None:
        """As ever; by the device files where the driver does not tell."""
        try:
            return super().state(pid)
        except DriverTooOld:
            return ProcessState.RUNNING if proc.is_alive(pid) and device_files.gpu_minors(pid) else None
