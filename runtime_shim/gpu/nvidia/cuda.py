"""libcuda.so.1 through ctypes: the few calls of the driver's checkpoint API, and nothing that touches a GPU.

Structures and signatures follow cuda.h of CUDA 13.0 ("CUDA Checkpointing"), exported since driver 570. CUDA
13.4 gives names to some of their reserved bytes; zero there means what it meant before.

Not through the package cuda-bindings (31 MB for six calls), whose releases belong to one CUDA version each.
It notices a missing symbol only at the call, which may be the unlock that undoes a lock, and loses a result
that it does not know. The tests use it as the authority on result codes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

from gpusnap.runtime_shim.gpu.api.errors import DriverMissing, InvalidRequest

SONAME = "libcuda.so.1"
_UINT_MAX = 2**32 - 1


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs: 64 bytes."""

    _fields_: ClassVar = [
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class CheckpointArgs(ctypes.Structure):
    """CUcheckpointCheckpointArgs: 64 bytes."""

    _fields_: ClassVar = [("reserved", ctypes.c_uint64 * 8)]


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair: two CUuuid of 16 bytes."""

    _fields_: ClassVar = [("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16)]


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs: 64 bytes."""

    _fields_: ClassVar = [
        ("pairs", ctypes.POINTER(GpuPair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * (52 - ctypes.sizeof(ctypes.c_void_p))),
        ("reserved1", ctypes.c_uint64),
    ]


class UnlockArgs(ctypes.Structure):
    """CUcheckpointUnlockArgs: 64 bytes."""

    _fields_: ClassVar = [("reserved", ctypes.c_uint64 * 8)]


# Name of the function, and the types that follow; all return a CUresult.
_BASICS: dict[str, list[type]] = {
    "cuInit": [ctypes.c_uint],
    "cuDriverGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}
_CHECKPOINT: dict[str, list[type]] = {
    "cuCheckpointProcessGetState": [ctypes.c_int, ctypes.POINTER(ctypes.c_int)],
    "cuCheckpointProcessGetRestoreThreadId": [ctypes.c_int, ctypes.POINTER(ctypes.c_int)],
    "cuCheckpointProcessLock": [ctypes.c_int, ctypes.POINTER(LockArgs)],
    "cuCheckpointProcessCheckpoint": [ctypes.c_int, ctypes.POINTER(CheckpointArgs)],
    "cuCheckpointProcessRestore": [ctypes.c_int, ctypes.POINTER(RestoreArgs)],
    "cuCheckpointProcessUnlock": [ctypes.c_int, ctypes.POINTER(UnlockArgs)],
}


class Library:
    """The loaded library. Each method is one call, from any thread; each returns the CUresult first.

    Raises DriverMissing if the library cannot be loaded or is not CUDA's. Symbols of the checkpoint API may
    be absent: `list_missing()` names them, and their methods must not be called then.
    """

    def __init__(self, path: str = SONAME) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            # The loader's text contains "No such file or directory", which Podman would take for its own.
            raise DriverMissing(
                f"the CUDA driver's library {path} could not be loaded", hint=DriverMissing.advice
            ) from error
        if self._declare(_BASICS):
            raise DriverMissing(f"{path} is not the library of a CUDA driver", hint=DriverMissing.advice)
        self._missing = self._declare(_CHECKPOINT)

    def _declare(self, functions: dict[str, list[type]]) -> tuple[str, ...]:
        """Set the types of the functions; return the names of those that the library does not export."""
        missing = []
        for name, types in functions.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                missing.append(name)
                continue
            function.argtypes = types
            function.restype = ctypes.c_int
        return tuple(missing)

    def list_missing(self) -> tuple[str, ...]:
        """Return the functions of the checkpoint API that this library lacks: none since driver 570."""
        return self._missing

    def init(self) -> int:
        """cuInit: finds the GPUs, 0.2 to 0.5 s on a real driver."""
        return int(self._library.cuInit(0))

    def version(self) -> tuple[int, int]:
        """cuDriverGetVersion: the newest CUDA it speaks, 13000 for 13.0. Works before `init`."""
        version = ctypes.c_int(0)
        return int(self._library.cuDriverGetVersion(ctypes.byref(version))), version.value

    def error_name(self, result: int) -> str:
        """cuGetErrorName: the library's name for a CUresult, empty if it has none. Works before `init`."""
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(result, ctypes.byref(name))
        return name.value.decode("ascii", "replace") if name.value else ""

    def state(self, pid: int) -> tuple[int, int]:
        """cuCheckpointProcessGetState: a CUprocessState."""
        state = ctypes.c_int(-1)
        return int(self._library.cuCheckpointProcessGetState(pid, ctypes.byref(state))), state.value

    def restore_thread(self, pid: int) -> tuple[int, int]:
        """cuCheckpointProcessGetRestoreThreadId: a TID, in the caller's PID namespace."""
        tid = ctypes.c_int(-1)
        return int(self._library.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(tid))), tid.value

    def lock(self, pid: int, timeout_ms: int) -> int:
        """cuCheckpointProcessLock; for the driver 0 means to wait forever, so it becomes 1 ms here."""
        args = LockArgs(timeout_ms=min(max(timeout_ms, 1), _UINT_MAX))
        return int(self._library.cuCheckpointProcessLock(pid, ctypes.byref(args)))

    def checkpoint(self, pid: int) -> int:
        """cuCheckpointProcessCheckpoint."""
        return int(self._library.cuCheckpointProcessCheckpoint(pid, ctypes.byref(CheckpointArgs())))

    def restore(self, pid: int, pairs: Sequence[tuple[bytes, bytes]] = ()) -> int:
        """cuCheckpointProcessRestore; `pairs` are (old, new) UUIDs of 16 bytes each."""
        array = (GpuPair * len(pairs))()
        for item, (old, new) in zip(array, pairs, strict=True):
            item.old[:] = old
            item.new[:] = new
        # ctypes keeps `array` alive through the pointer that is made from it.
        args = RestoreArgs(pairs=array if pairs else None, count=len(pairs))
        return int(self._library.cuCheckpointProcessRestore(pid, ctypes.byref(args)))

    def unlock(self, pid: int) -> int:
        """cuCheckpointProcessUnlock."""
        return int(self._library.cuCheckpointProcessUnlock(pid, ctypes.byref(UnlockArgs())))


_GROUPS = (8, 4, 4, 4, 12)


def uuid_bytes(text: str) -> bytes:
    """Return the 16 bytes of a UUID in NVML's format: GPU-8-4-4-4-12 hex digits, in upper or lower case.

    Raises InvalidRequest for any other text, including a MIG instance's UUID (MIG-…): the driver only remaps
    GPUs.
    """
    groups = text.removeprefix("GPU-").split("-")
    digits = "".join(groups)
    shaped = text.startswith("GPU-") and tuple(map(len, groups)) == _GROUPS
    if not shaped or not digits.isascii() or not digits.isalnum():
        raise _bad_uuid(text)
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise _bad_uuid(text) from None


def _bad_uuid(text: str) -> InvalidRequest:
    return InvalidRequest(
        f"{text!r} is not the UUID of a GPU",
        hint="write it as nvidia-smi -L does: GPU- and 8-4-4-4-12 hex digits",
    )
