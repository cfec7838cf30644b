"""The link between host and GPU: copies of pinned memory, in both directions, with only the driver's API.

    python3 bench/link.py [BYTES]

Prints JSON: GiB/s to the device and to the host, the best of three. It is a program of its own, so that the
caller does not hold the GPU.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

ROUNDS = 3


def measure(size: int) -> dict[str, float]:
    """GiB/s of copies of `size` bytes. Raises OSError without libcuda, SystemExit for what CUDA refuses."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        result = getattr(cuda, name)(*arguments)
        if result:
            raise SystemExit(f"link: {name} answers {result} (CUresult, cuda.h)")

    context, pinned = ctypes.c_void_p(), ctypes.c_void_p()
    device, memory = ctypes.c_int(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAllocHost_v2", ctypes.byref(pinned), ctypes.c_size_t(size))
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
    ways = {
        "to_device": ("cuMemcpyHtoD_v2", memory, pinned),
        "to_host": ("cuMemcpyDtoH_v2", pinned, memory),
    }
    found = {}
    for name, (function, target, source) in ways.items():
        times = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            call(function, target, source, ctypes.c_size_t(size))
            call("cuCtxSynchronize")
            times.append(time.perf_counter() - begun)
        found[name] = size / 2**30 / min(times)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 30)))
