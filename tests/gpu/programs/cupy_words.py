"""Kernels of one's own in CuPy: add one to every word of device memory, and look at each of them."""

from __future__ import annotations

import cupy  # type: ignore[import-not-found]
import ticking

KERNELS = r"""
typedef unsigned long long u64;

__device__ unsigned first(u64 at)
{
    u64 z = at + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (unsigned)(z ^ (z >> 31));
}

#define START (blockIdx.x * (u64)blockDim.x + threadIdx.x)
#define EACH(i) for (u64 i = START; i < count; i += gridDim.x * (u64)blockDim.x)

extern "C" __global__ void fill(unsigned *words, u64 count) { EACH(i) words[i] = first(i); }

extern "C" __global__ void add_one(unsigned *words, u64 count) { EACH(i) words[i] += 1; }

/* found[0]: how many are wrong; found[1]: the sum of all */
extern "C" __global__ void look(const unsigned *words, u64 count, unsigned tick, u64 *found)
{
    u64 wrong = 0, sum = 0;
    EACH(i) {
        wrong += words[i] != first(i) + tick;
        sum += words[i];
    }
    atomicAdd(found, wrong);
    atomicAdd(found + 1, sum);
}
"""
BLOCKS, THREADS = 1024, 256


def main() -> None:
    options = ticking.parser(__doc__)
    options.add_argument("--managed", action="store_true", help="take managed memory")
    given = options.parse_args()
    if given.managed:
        cupy.cuda.set_allocator(cupy.cuda.malloc_managed)
    module = cupy.RawModule(code=KERNELS)
    shape = (BLOCKS,), (THREADS,)
    count = cupy.uint64(given.mib << 18)
    words = cupy.empty(given.mib << 18, dtype=cupy.uint32)
    found = cupy.zeros(2, dtype=cupy.uint64)
    module.get_function("fill")(*shape, (words, count))
    add_one, look = module.get_function("add_one"), module.get_function("look")

    def step(tick: int) -> tuple[bool, str]:
        found.fill(0)
        add_one(*shape, (words, count))
        look(*shape, (words, count, cupy.uint32(tick), found))
        wrong, total = (int(number) for number in found.get())
        return wrong == 0, f"{total:016x}"

    ticking.run(step, given)


main()
