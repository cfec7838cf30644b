"""Does with the GPU what it is told, line by line: JSON `[name, argument, …]` in, one JSON value out.

Tests start it as the process that is checkpointed, and as the one that checkpoints. It calls libcuda.so.1 by
the real names through ctypes and knows nothing of softgpu. A CUDA result is answered by its name; a call that
has a value to give answers that instead when it succeeds.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

PTX = b"""
.version 6.0
.target sm_52
.address_size 64
.visible .entry add_one(.param .u64 words, .param .u32 count) { ret; }
.visible .entry busy(.param .u32 milliseconds) { ret; }
.visible .entry barrier(.param .u64 group, .param .u32 ranks, .param .u32 rank, .param .u64 word) { ret; }
"""

cuda = ctypes.CDLL("libcuda.so.1")
kernels: dict[str, ctypes.c_void_p] = {}
threads: dict[str, threading.Thread] = {}
results: dict[str, object] = {}


class LockArgs(ctypes.Structure):
    _fields_: ClassVar = [
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class Pair(ctypes.Structure):
    _fields_: ClassVar = [("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16)]


class RestoreArgs(ctypes.Structure):
    _fields_: ClassVar = [
        ("pairs", ctypes.POINTER(Pair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * 44),
        ("reserved1", ctypes.c_uint64),
    ]


def name(result: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(result, ctypes.byref(text))
    return (text.value or b"?").decode().removeprefix("CUDA_ERROR_")


def call(function: str, *arguments: Any) -> str:
    return name(getattr(cuda, function)(*arguments))


def value(function: str, cell: Any, *arguments: Any) -> Any:
    """The out parameter of a call whose first argument it is, or the name of the result."""
    result = call(function, ctypes.byref(cell), *arguments)
    return cell.value if result == "CUDA_SUCCESS" else result


def ok(result: str) -> None:
    if result != "CUDA_SUCCESS":
        raise RuntimeError(result)


def uuid_text(raw: bytes) -> str:
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def uuid_bytes(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))


def init() -> str:
    return call("cuInit", 0)


def uuids() -> list[str]:
    count = value("cuDeviceGetCount", ctypes.c_int())
    out = []
    for ordinal in range(count):
        raw = (ctypes.c_ubyte * 16)()
        ok(call("cuDeviceGetUuid_v2", raw, ordinal))
        out.append(uuid_text(bytes(raw)))
    return out


def context(ordinal: int) -> str:
    handle = ctypes.c_void_p()
    result = call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), ordinal)
    return call("cuCtxSetCurrent", handle) if result == "CUDA_SUCCESS" else result


def alloc(size: int) -> Any:
    return value("cuMemAlloc_v2", ctypes.c_uint64(), ctypes.c_size_t(size))


def managed(size: int) -> Any:
    return value("cuMemAllocManaged", ctypes.c_uint64(), ctypes.c_size_t(size), 1)


def free(address: int) -> str:
    return call("cuMemFree_v2", ctypes.c_uint64(address))


def memory() -> Any:
    available, total = ctypes.c_size_t(), ctypes.c_size_t()
    result = call("cuMemGetInfo_v2", ctypes.byref(available), ctypes.byref(total))
    return [available.value, total.value] if result == "CUDA_SUCCESS" else result


def content(seed: int, size: int) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(size)


def write(address: int, seed: int, size: int) -> str:
    return call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content(seed, size), ctypes.c_size_t(size))


def read(address: int, size: int) -> Any:
    """Digest of device memory, or the name of the result."""
    buffer = ctypes.create_string_buffer(size)
    result = call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(address), ctypes.c_size_t(size))
    return hashlib.sha256(buffer.raw).hexdigest() if result == "CUDA_SUCCESS" else result


def words(address: int, count: int) -> Any:
    buffer = (ctypes.c_uint32 * count)()
    result = call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(address), ctypes.c_size_t(4 * count))
    return list(buffer) if result == "CUDA_SUCCESS" else result


def copy(to: int, source: int, size: int) -> str:
    return call("cuMemcpyDtoD_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))


def fill(address: int, word: int, count: int) -> str:
    return call("cuMemsetD32_v2", ctypes.c_uint64(address), word, ctypes.c_size_t(count))


def kernel(entry: str) -> str:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    ok(call("cuModuleLoadData", ctypes.byref(module), PTX))
    result = call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
    kernels[entry] = function
    return result


def launch(entry: str, threads_wanted: int, *parameters: int) -> str:
    """Parameters of more than 32 bits are taken for such of 64: addresses, and groups that are so large."""
    cells: list[Any] = [ctypes.c_uint64(p) if p > 0xFFFFFFFF else ctypes.c_uint32(p) for p in parameters]
    pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
    grid = (threads_wanted + 255) // 256
    return call("cuLaunchKernel", kernels[entry], grid, 1, 1, 256, 1, 1, 0, None, pointers, None)


def begin(label: str, ordinal: int, function: str, *arguments: Any) -> str:
    """Run one of these functions in a thread of its own, with the GPU's context; `end` answers its value."""

    def run() -> None:
        context(ordinal)
        results[label] = FUNCTIONS[function](*arguments)

    threads[label] = threading.Thread(target=run, daemon=True)
    threads[label].start()
    return "started"


def ended(label: str) -> bool:
    return not threads[label].is_alive()


def end(label: str) -> Any:
    threads[label].join()
    return results[label]


def fork() -> int:
    """A child without exec that never uses CUDA by itself; it ends with this process."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, linux/prctl.h
        while os.getppid() == parent:
            time.sleep(3600)
        os._exit(0)
    return pid


def forked_init() -> int:
    """Whether a child by fork can start CUDA: the value of its cuInit."""
    pid = os.fork()
    if pid == 0:
        os._exit(cuda.cuInit(0) % 256)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def peek(address: int) -> str:
    return ctypes.string_at(address, 1).hex()


def state(pid: int) -> Any:
    return value_last("cuCheckpointProcessGetState", pid)


def restore_thread(pid: int) -> Any:
    return value_last("cuCheckpointProcessGetRestoreThreadId", pid)


def value_last(function: str, pid: int) -> Any:
    cell = ctypes.c_int(-1)
    result = call(function, pid, ctypes.byref(cell))
    return cell.value if result == "CUDA_SUCCESS" else result


def lock(pid: int, timeout_ms: int = 10000) -> str:
    return call("cuCheckpointProcessLock", pid, ctypes.byref(LockArgs(timeout_ms=timeout_ms)))


def checkpoint(pid: int) -> str:
    return call("cuCheckpointProcessCheckpoint", pid, None)


def restore(pid: int, pairs: list[list[str]] | None = None) -> str:
    array = (Pair * len(pairs or [()]))()
    for cell, (old, new) in zip(array, pairs or [], strict=False):
        cell.old[:] = list(uuid_bytes(old))
        cell.new[:] = list(uuid_bytes(new))
    arguments = RestoreArgs(pairs=array if pairs else None, count=len(pairs or []))
    return call("cuCheckpointProcessRestore", pid, ctypes.byref(arguments))


def unlock(pid: int) -> str:
    return call("cuCheckpointProcessUnlock", pid, None)


def symbol(function: str) -> bool:
    return hasattr(cuda, function)


def nvml() -> Any:
    """What nvidia-ml-py says of each GPU, or the error that it raises."""
    import pynvml  # type: ignore[import-untyped,unused-ignore]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return error.value
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    out = [
        {
            "uuid": pynvml.nvmlDeviceGetUUID(h),
            "index": pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(h))),
            "minor": pynvml.nvmlDeviceGetMinorNumber(h),
            "name": pynvml.nvmlDeviceGetName(h),
            "cc": list(pynvml.nvmlDeviceGetCudaComputeCapability(h)),
            "mig": pynvml.nvmlDeviceGetMigMode(h)[0],
            "compute_mode": pynvml.nvmlDeviceGetComputeMode(h),
            "persistence": pynvml.nvmlDeviceGetPersistenceMode(h),
            "bus": pynvml.nvmlDeviceGetPciInfo(h).busId,
            "total": pynvml.nvmlDeviceGetMemoryInfo(h).total,
            "used": pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2).used,
            "processes": [[p.pid, p.usedGpuMemory] for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)],
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "cuda": pynvml.nvmlSystemGetCudaDriverVersion_v2(),
        }
        for h in handles
    ]
    pynvml.nvmlShutdown()
    return out


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for group in (
        (init, uuids, context, alloc, managed, free, memory, write, read, words, copy, fill, kernel, launch),
        (begin, ended, end, fork, forked_init, peek, symbol, nvml),
        (state, restore_thread, lock, checkpoint, restore, unlock),
    )
    for f in group
}


def main() -> None:
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        try:
            answer = FUNCTIONS[function](*arguments)
        except RuntimeError as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
