"""A thread that never stops reading host memory which the driver mapped, on libcuda alone.

The driver takes that memory away while a process is suspended, so whoever reads it then is killed: a process
that does must not run before it is resumed. JAX's runtime has such threads.
"""

from __future__ import annotations

import ctypes
import threading

import ticking

PINNED = 1 << 20


def check(result: int) -> None:
    if result:
        raise SystemExit(f"CUDA answered {result}")


def watch(words: ctypes.Array[ctypes.c_uint32]) -> None:
    """Read all of it, again and again."""
    while True:
        bytes(words)


def main() -> None:
    options = ticking.parser(__doc__).parse_args()
    size = ctypes.c_size_t(options.mib << 20)
    cuda = ctypes.CDLL("libcuda.so.1")
    context, device, memory = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
    address = ctypes.c_void_p()
    check(cuda.cuInit(0))
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuMemAlloc_v2(ctypes.byref(memory), size))
    check(cuda.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(PINNED), 0))
    words = (ctypes.c_uint32 * (PINNED // 4)).from_address(address.value or 0)
    threading.Thread(target=watch, args=(words,), daemon=True).start()

    def step(tick: int) -> tuple[bool, str]:
        """Fill the device's memory with the tick, and look at it through the pinned memory, all of it."""
        good = True
        check(cuda.cuMemsetD32_v2(memory, ctypes.c_uint32(tick), ctypes.c_size_t(options.mib << 18)))
        expected = tick.to_bytes(4, "little") * (PINNED // 4)
        for at in range(0, options.mib << 20, PINNED):
            check(cuda.cuMemcpyDtoH_v2(address, ctypes.c_uint64(memory.value + at), ctypes.c_size_t(PINNED)))
            good = good and bytes(words) == expected
        return good, f"{tick:08x}"

    ticking.run(step, options)


main()
