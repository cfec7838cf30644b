"""NVIDIA's driver: suspend and resume through libcuda's checkpoint API, inventory through NVML.

libcuda is loaded by `open()` or by the first call that needs it. Nothing here touches a GPU itself: cuInit
makes no context, and all of the work is done by the driver's thread inside the other process.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from gpusnap.oci.base.files import exists
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import reason
from gpusnap.runtime_shim.base.question_process import Companion
from gpusnap.runtime_shim.gpu.api import device_files as handles
from gpusnap.runtime_shim.gpu.api.criu_plugin import Plugin
from gpusnap.runtime_shim.gpu.api.device_nodes import in_container, on_host
from gpusnap.runtime_shim.gpu.api.driver import HeldFiles, Host, Node, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    DriverFailed,
    DriverMissing,
    DriverNotReady,
    DriverTooOld,
    GpuError,
    GpuOutOfMemory,
    InvalidRequest,
    LockTimeout,
    NoDevice,
    NotInitialized,
    NotSupported,
    PermissionRefused,
    ProcessGone,
)
from gpusnap.runtime_shim.gpu.nvidia import nvml
from gpusnap.runtime_shim.gpu.nvidia.result_codes import CUDA_SUCCESS, cuda_error
from gpusnap.runtime_shim.process import proc

if TYPE_CHECKING:
    from gpusnap.runtime_shim.gpu.nvidia.cuda import Library

T = TypeVar("T")

FIRST_DRIVER = 570
"""The first driver that exports cuCheckpointProcess*; only for messages: the symbols are checked."""

# Uses of the GPU that the driver refuses to suspend (measured, and NVIDIA's notes on cuda-checkpoint).
_UNSUSPENDABLE = (
    "likely causes are managed memory (cudaMallocManaged) and MPS: start the program without them"
)
_UNRESTORABLE = (
    "likely causes are a GPU of another model, and memory that was shared between GPUs at the checkpoint "
    "(NCCL peer access, CUDA IPC)"
)
_HOST_MEMORY = "free memory on this host, or raise the container's memory limit"
_NO_ROOM = (
    "free memory on the GPU (nvidia-smi shows who uses it) or choose another GPU, and restore a checkpoint: "
    "the driver cannot restore this process any more"
)
_NOT_AGAIN = (
    "look for Xid lines in the kernel log (dmesg); if an earlier attempt lacked GPU memory, the driver "
    "cannot restore this process any more: remove its container, and restore a checkpoint"
)
_PAIRS = "give a pair for every GPU that the process could see, including unused ones"

# The driver's answers for a process that is being killed, and how long that may take, in seconds.
# Driver 580 answers NOT_INITIALIZED for a zombie and OPERATING_SYSTEM for a PID that is not there.
_VAGUE = (DriverFailed, InvalidRequest, NotInitialized, PermissionRefused)
_DYING = 0.2

# Seconds for NVML's answer, and for cuInit. If nobody keeps the driver open, it first starts every GPU of the
# host. Less than Podman gives a restore (240 s), so that gpusnap says why it failed, and undoes what it did.
_PATIENCE = 180.0
_SILENT = "check whether nvidia-smi responds, and look for Xid lines in the kernel log (dmesg)"
_COMPANION = Companion(starts=True)

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED, cuda.h

_Words = Mapping[type[GpuError], str]
_NO_WORDS: _Words = MappingProxyType({})


def is_present() -> bool:
    """Whether this host has NVIDIA's kernel driver or its device nodes; loads nothing. Raises GpuError."""
    try:
        if exists("/proc/driver/nvidia/version"):
            return True
        nodes = [name[6:] for name in os.listdir("/dev") if name.startswith("nvidia")]
    except OSError as error:
        raise GpuError(
            f"cannot determine whether this host has NVIDIA's driver: {error.filename}: {reason(error)}",
            hint="try again",
        ) from error
    return any(name == "ctl" or name.isdigit() for name in nodes)


def ask_nvml(question: Callable[..., T], *arguments: object) -> T:
    """Return the answer of a function of nvml.py, asked in a separate process if the kernel permits one.

    That process imports nvidia-ml-py and starts NVML at the same time as other work, and a GPU that has
    fallen off the bus cannot make gpusnap wait forever. Raises GpuError.
    """
    if nvml.is_open():
        return question(*arguments)
    try:
        return _COMPANION.ask(question, *arguments, within=_PATIENCE)
    except TimeoutError as error:
        raise DriverNotReady(f"NVML did not respond within {_PATIENCE:g} s", hint=_SILENT) from error


class Nvidia:
    """`gpusnap.runtime_shim.gpu.api.driver.Driver` for NVIDIA. May be used from several threads at once."""

    vendor = "nvidia"
    plugin: Plugin | None = None

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._library: Library | None = None
        self._is_silent = False

    def open(self) -> None:
        """Load libcuda, check that it has the checkpoint API, and initialise it (0.2 to 0.5 s), once.

        Raises DriverMissing, DriverTooOld, NoDevice and other errors of cuInit; DriverNotReady if it does not
        answer, and then at once. cuInit runs in a thread that is left behind then: if the kernel waits for
        the GPU in there, this process ends only when the driver answers.
        """
        self._cuda()

    def host(self) -> Host:
        """Return the inventory, read anew at each call; needs NVML, not libcuda."""
        return ask_nvml(nvml.inventory)

    def state(self, pid: int) -> ProcessState | None:
        """Return the state of a process; None if it has no GPU state (NOT_INITIALIZED) or has ended."""
        if not proc.is_alive(pid):
            return None
        result, state = self._cuda().state(pid)
        if result == _NOT_INITIALIZED:
            return None
        try:
            self._check(result, pid, "read the GPU state of")
            return ProcessState(state)
        except ProcessGone:
            return None
        except ValueError:
            raise DriverFailed(
                f"the GPU driver reports that {_name_pid(pid)} is in state {state}, which gpusnap "
                "does not know",
                hint="use a version of gpusnap that supports this driver",
                pid=pid,
            ) from None

    def restore_thread(self, pid: int) -> int:
        """Return the TID of the driver's thread in the process; raises NotInitialized, ProcessGone.

        NotInitialized is raised without a wait for the process's end, because most processes have no GPU
        state.
        """
        library = self._prepare_library(pid)
        result, tid = library.restore_thread(pid)
        self._check(result, pid, "find the restore thread of", at_once=result == _NOT_INITIALIZED)
        return tid

    def memory_used(self, pids: Iterable[int]) -> Mapping[int, Mapping[str, int | None]]:
        """Return bytes by PID and GPU UUID; `nvml.memory_used` says what it cannot know."""
        return ask_nvml(nvml.memory_used, tuple(pids))

    def list_handles(self, pid: int) -> tuple[str, ...]:
        """Return paths of NVIDIA's device files that the process has open or mapped, sorted by path."""
        return tuple(dict.fromkeys(node.path for node in handles.nodes(pid)))

    def holds(self, pid: int) -> bool:
        """Whether the process has any such file open or mapped."""
        return handles.holds(pid)

    def list_held(self, pid: int) -> HeldFiles:
        """Return NVIDIA's device files by number of the descriptor, and by address."""
        return handles.list_held(pid)

    def list_visible(self, pid: int) -> tuple[str, ...]:
        """Return UUIDs of the GPUs that the process could see: it holds their nodes or has them in its /dev.

        For the driver, a GPU is visible if its node can be opened. So a suspended process, which holds none,
        still sees those of its /dev. Raises NoDevice if it holds the node of a GPU that NVML does not list.
        """
        held = handles.gpu_minors(pid)
        in_dev = handles.dev_minors(pid)
        if not held and not in_dev:
            return ()
        gpus = {gpu.minor: gpu for gpu in self.host().gpus}
        for minor in held:
            if minor not in gpus:
                raise NoDevice(
                    f"{_name_pid(pid)} has the device of GPU minor {minor} open, which the driver "
                    "does not list",
                    hint=NoDevice.advice,
                    pid=pid,
                )
        # A program sees the instances of a GPU that MIG has split, never the GPU itself.
        seen = {minor for minor in in_dev if minor in gpus and not gpus[minor].mig}
        return tuple(gpus[minor].uuid for minor in sorted({*held, *seen}))

    def nodes(self, pid: int | None = None) -> tuple[Node, ...]:
        """Return NVIDIA's device nodes in the /dev of a process, or this host's own; see `device_nodes`."""
        gpus = self.host().gpus
        return on_host(gpus) if pid is None else in_container(pid, gpus)

    def lock(self, pid: int, *, timeout: float) -> None:
        """Stop new GPU work and wait for work in progress, at most `timeout` seconds (1 ms at least).

        After LockTimeout the process continues.
        """
        library = self._prepare_library(pid)
        result = library.lock(pid, _milliseconds(timeout))
        late = f"its GPU work did not stop within {timeout:g} s"
        self._check(result, pid, "lock", because={LockTimeout: late})

    def checkpoint(self, pid: int) -> None:
        """Suspend the locked process. After NotSupported and IllegalState its state is unchanged."""
        library = self._prepare_library(pid)
        # The driver allocates the GPU's memory inside the process, so here it is the host that lacks memory.
        short: dict[type[GpuError], str] = {
            GpuOutOfMemory: "there is not enough host memory for its GPU memory"
        }
        hints: dict[type[GpuError], str] = {NotSupported: _UNSUSPENDABLE, GpuOutOfMemory: _HOST_MEMORY}
        self._check(library.checkpoint(pid), pid, "checkpoint", because=short, hints=hints)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """Resume a suspended process, which is then locked; `pairs` name every GPU it could see, or none.

        After a refusal it stays suspended, and can be tried again with other pairs. But after GpuOutOfMemory,
        driver 580.159 cannot restore the process any more (DriverFailed), even if there is enough memory.
        """
        from gpusnap.runtime_shim.gpu.nvidia.cuda import uuid_bytes

        raw = [(uuid_bytes(old), uuid_bytes(new)) for old, new in pairs]
        library = self._prepare_library(pid)
        hints: dict[type[GpuError], str] = {
            NotSupported: _UNRESTORABLE,
            GpuOutOfMemory: _NO_ROOM,
            DriverFailed: _NOT_AGAIN,
        }
        if pairs:
            hints[InvalidRequest] = _PAIRS
        self._check(library.restore(pid, raw), pid, "restore", hints=hints)

    def unlock(self, pid: int) -> None:
        """Let the locked process continue."""
        library = self._prepare_library(pid)
        self._check(library.unlock(pid), pid, "unlock")

    def _prepare_library(self, pid: int) -> Library:
        """Return the library, after checking that the process exists."""
        library = self._cuda()
        if not proc.is_alive(pid):
            raise ProcessGone(f"process {pid} has exited", hint=ProcessGone.advice, pid=pid)
        return library

    def _check(
        self,
        result: int,
        pid: int,
        verb: str,
        *,
        because: _Words = _NO_WORDS,
        hints: _Words = _NO_WORDS,
        at_once: bool = False,
    ) -> None:
        """Raise for any result except success; ProcessGone, from the driver's error, if the process ended.

        `at_once`: only if it has ended already; do not wait to see whether it does.
        """
        if result == CUDA_SUCCESS:
            return
        name = self._cuda().error_name(result)
        error = cuda_error(
            result, f"{verb} {_name_pid(pid)}", pid=pid, name=name, because=because, hints=hints
        )
        # The driver may notice the end before the kernel shows it. Its other answers are about living
        # processes.
        patience = _DYING if isinstance(error, _VAGUE) and not at_once else 0
        if handles.has_ended(pid, within=patience):
            raise ProcessGone(
                f"process {pid} exited while the GPU driver was about to {verb} it",
                hint=ProcessGone.advice,
                code_name=error.code_name,
                pid=pid,
            ) from error
        raise error

    def _cuda(self) -> Library:
        with self._opening:
            if self._library is None and not self._is_silent:
                try:
                    self._library = _open_library()
                except TimeoutError:
                    self._is_silent = True
            if self._library is None:
                raise DriverNotReady(
                    f"NVIDIA's driver did not start (cuInit) within {_PATIENCE:g} s", hint=_SILENT
                )
            return self._library


def _open_library() -> Library:
    """Raises GpuError; TimeoutError if cuInit does not return; GpusnapError if no thread can be started."""
    from gpusnap.runtime_shim.gpu.nvidia.cuda import Library

    library = Library()
    missing = library.list_missing()
    if missing:
        raise DriverTooOld(
            f"the GPU driver ({_version(library)}) has no checkpoint API: {missing[0]} is missing; driver "
            f"{FIRST_DRIVER} introduced it",
            hint=DriverTooOld.advice,
        )
    with _without_visible_devices():
        result = deadlines.ask(library.init, "cuInit", within=_PATIENCE)
    if result != CUDA_SUCCESS:
        error = cuda_error(result, "start (cuInit)", name=library.error_name(result))
        if isinstance(error, NoDevice) and not is_present():
            # libcuda also says "no device" if there is no kernel driver at all.
            raise DriverMissing(
                "libcuda is installed, but NVIDIA's kernel driver is not loaded",
                hint="load it (modprobe nvidia) and check that nvidia-smi lists the GPUs",
                code_name=error.code_name,
            ) from error
        raise error
    return library


def _version(library: Library) -> str:
    """Return the driver's version for a message, or else the CUDA version that it supports."""
    try:
        return ask_nvml(nvml.driver_version)
    except GpuError:
        result, cuda = library.version()
        return f"CUDA {cuda // 1000}.{cuda % 1000 // 10}" if result == CUDA_SUCCESS else "of unknown version"


@contextmanager
def _without_visible_devices() -> Iterator[None]:
    """Hide CUDA_VISIBLE_DEVICES: it is meant for programs, and an empty one makes cuInit return NO_DEVICE.

    Otherwise it stays in the environment, because the real runtime inherits that.
    """
    narrowed = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        if narrowed is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = narrowed


def _name_pid(pid: int) -> str:
    return f"process {pid} ({handles.comm(pid)})"


def _milliseconds(seconds: float) -> int:
    """Convert for the driver, which takes 32 bits and treats 0 as "no timeout": from 1 to about 49 days."""
    return int(min(max(math.ceil(seconds * 1000), 1), 2**32 - 1)) if math.isfinite(seconds) else 2**32 - 1
