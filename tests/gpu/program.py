"""A small CUDA program, on libcuda alone: fills device memory, and tells on demand whether it still holds.

    python3 program.py BYTES [managed]

Prints "ready" once the memory is filled. Then answers each line on stdin with the number of launches so far
and whether every byte is right; "spin N" instead queues N fills of the memory and answers before they are
done.
"""

from __future__ import annotations

import ctypes
import sys

PATTERN = 0x5A
MANAGED_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL, cuda.h


def check(result: int) -> None:
    if result:
        raise SystemExit(f"CUDA answered {result}")


def main() -> None:
    size = int(sys.argv[1])
    cuda = ctypes.CDLL("libcuda.so.1")
    context, device, memory = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
    check(cuda.cuInit(0))
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))
    if "managed" in sys.argv[2:]:
        check(cuda.cuMemAllocManaged(ctypes.byref(memory), ctypes.c_size_t(size), MANAGED_GLOBAL))
    else:
        check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)))
    check(cuda.cuMemsetD8_v2(memory, PATTERN, ctypes.c_size_t(size)))
    check(cuda.cuCtxSynchronize())
    print("ready", flush=True)
    host = ctypes.create_string_buffer(size)
    for count, line in enumerate(sys.stdin):
        words = line.split()
        if words[0] == "spin":
            for _ in range(int(words[1])):
                check(cuda.cuMemsetD8Async(memory, PATTERN, ctypes.c_size_t(size), None))
            print(count, "spinning", flush=True)
            continue
        check(cuda.cuMemcpyDtoH_v2(host, memory, ctypes.c_size_t(size)))
        right = host.raw == bytes([PATTERN]) * size
        check(cuda.cuMemsetD8_v2(memory, PATTERN, ctypes.c_size_t(size)))
        check(cuda.cuCtxSynchronize())
        print(count, "right" if right else "wrong", flush=True)


main()
