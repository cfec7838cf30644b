"""What can go wrong between gpusnap and a GPU's driver, as a tree of exceptions.

    GpusnapError
    └── GpuError
        ├── DriverMissing         no driver library here, or no kernel driver behind it
        ├── DriverTooOld          the driver lacks what we call: no checkpoint API, or an older NVML
        ├── DriverMismatch        the driver's parts are of different versions
        ├── DriverNotReady        the driver or one of its daemons is still starting or slow to answer
        ├── NoDevice              no GPU, or not the one that was meant
        ├── GpuBusy               the GPU is taken: exclusive mode, or its shared resources are used up
        ├── GpuOutOfMemory        the GPU has not enough free memory
        ├── HardwareFault         ECC, NVLink, bus, power; a GPU that is lost or needs a reset
        ├── PermissionRefused     the driver or the kernel does not let us
        ├── NotInitialized        the process has no GPU state, or the driver's library was not initialised
        ├── IllegalState          the step does not follow from the state that the process is in
        ├── LockTimeout           the process' GPU work did not stop within the deadline
        ├── NotSupported          the process uses what the driver cannot suspend, or the GPU cannot do it
        │   └── MpsInTheWay       … because of the Multi-Process Service
        ├── InvalidRequest        an argument was refused: GPU pairs that leave out a visible GPU, …
        ├── ProcessGone           the process ended before or during the step
        ├── WorkloadFault         the program's own GPU work had failed: a bad address, an assertion, …
        └── DriverFailed          everything else, numbers of drivers to come included

`gpusnap.runtime_shim.gpu.nvidia.result_codes` says which CUresult and nvmlReturn_t becomes which of these.
"""

from __future__ import annotations

from typing import ClassVar

from gpusnap.runtime_shim.base.errors import GpusnapError


class GpuError(GpusnapError):
    """The base of all errors of a GPU's driver, or of the access to it.

    `code_name` is the driver's own name for it, such as CUDA_ERROR_NOT_SUPPORTED or NVML_ERROR_TIMEOUT; empty
    if gpusnap determined it without asking the driver. `pid` is the process concerned, if there is one.
    """

    because: ClassVar[str] = "the driver refused"
    """The reason, as the second half of "the GPU driver could not lock process 7 (python3): …"."""

    advice: ClassVar[str] = "look for NVRM and Xid lines in the kernel log (dmesg)"
    """The hint if the caller has no better one."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        code: str = "",
        code_name: str = "",
        pid: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.code_name = code_name
        self.pid = pid


class DriverMissing(GpuError):
    """No driver library can be loaded, it is a build-time stub, or there is no kernel driver for it."""

    code = "GPS-301"
    because = "the NVIDIA driver is not installed or not loaded"
    advice = "install the NVIDIA driver on this host and load its kernel module (modprobe nvidia)"


class DriverTooOld(GpuError):
    """The driver lacks a function that gpusnap calls, usually the checkpoint API."""

    code = "GPS-302"
    because = "the NVIDIA driver is too old for this"
    advice = "install NVIDIA driver 570 or later"


class DriverMismatch(GpuError):
    """Kernel module, libcuda and libnvidia-ml are not of one version."""

    code = "GPS-303"
    because = "the driver's kernel module and its libraries are of different versions"
    advice = "reload the kernel module or restart the host after a driver update"


class DriverNotReady(GpuError):
    """The driver or one of its daemons is starting, or did not answer in time."""

    code = "GPS-304"
    because = "the driver is not ready"
    advice = (
        "check that nvidia-fabricmanager and nvidia-persistenced are running if this host needs them, "
        "then try again"
    )


class NoDevice(GpuError):
    """There is no GPU, or not the requested one."""

    code = "GPS-305"
    because = "the GPU was not found"
    advice = "run nvidia-smi -L to see which GPUs the driver lists"


class GpuBusy(GpuError):
    """The GPU exists, but is taken: compute mode, or its shared resources are used up."""

    code = "GPS-306"
    because = "the GPU is in use by another process or restricted by its compute mode"
    advice = "run nvidia-smi to see which process uses it, and set its compute mode to DEFAULT"


class GpuOutOfMemory(GpuError):
    """The GPU (or the driver, for itself) has not enough free memory."""

    code = "GPS-307"
    because = "there is not enough free GPU memory"
    advice = "free memory on the GPU (nvidia-smi shows who uses it) or choose another GPU"


class HardwareFault(GpuError):
    """The GPU, its link or its power is at fault."""

    code = "GPS-308"
    because = "the GPU has a hardware fault"
    advice = "look for Xid lines in the kernel log (dmesg); the GPU may need a reset (nvidia-smi --gpu-reset)"


class PermissionRefused(GpuError):
    """The driver or the kernel does not let this process do it."""

    code = "GPS-309"
    because = "this user or this cgroup is not permitted to do that"
    advice = "run gpusnap as root, outside any container that limits its devices"


class NotInitialized(GpuError):
    """The process holds no GPU state, or the library was not initialised."""

    code = "GPS-310"
    because = "there is no initialised GPU state"
    advice = "check that the program still uses its GPU (nvidia-smi)"


class IllegalState(GpuError):
    """The process is not in the right state for the step; nothing has been changed."""

    code = "GPS-311"
    because = "the process is not in the state that this step requires"
    advice = "check that no other tool (cuda-checkpoint, CRIU's CUDA plugin) suspends it at the same time"


class LockTimeout(GpuError):
    """The process's GPU work did not stop within the deadline; it continues."""

    code = "GPS-312"
    because = "its GPU work did not stop in time"
    advice = "give the lock more time, or checkpoint when the program does less GPU work"


class NotSupported(GpuError):
    """The process uses something that the driver cannot suspend, or this GPU or driver cannot do it."""

    code = "GPS-313"
    because = "the driver does not support this"
    advice = "see NVIDIA's notes for this driver and GPU"


class MpsInTheWay(NotSupported):
    """The Multi-Process Service is active, and processes under it cannot be suspended."""

    code = "GPS-314"
    because = "the Multi-Process Service (MPS) prevents it"
    advice = "stop MPS (echo quit | nvidia-cuda-mps-control) and start the program without it"


class InvalidRequest(GpuError):
    """The driver refused an argument."""

    code = "GPS-315"
    because = "the driver refused an argument"
    advice = "check that the process uses a GPU of this host"


class ProcessGone(GpuError):
    """The process ended (or is a zombie) before or during the step."""

    code = "GPS-316"
    because = "the process has exited"
    advice = "check the program's own output and the kernel log for the reason"


class WorkloadFault(GpuError):
    """The program's own GPU work had failed, so that its GPU state is lost in any case."""

    code = "GPS-317"
    because = "the program's own GPU work has failed"
    advice = "restart the program; its GPU state was lost before gpusnap was called"


class DriverFailed(GpuError):
    """Any other failure; an error number that this gpusnap does not know is one."""

    code = "GPS-318"
    because = "the driver failed"
