"""How fast a disk reads the blobs of a store: through the page cache, asked for ahead, and with O_DIRECT.

    python3 bench/disk_reads.py [--folder /var/tmp] [--files 1000] [--mib 5] [--rounds 1]

Files of random bytes, of the size of compressed chunks, are written and synced. Then the given number of
threads reads all of them, from the disk each time, into memory that is already allocated, in huge pages (with
pages of 4 KiB, the kernel splits a large request of O_DIRECT):

    cache          read(2), the kernel's own read-ahead
    asked for      the same, and each file is asked for as a whole when it is opened, like in a restore
                   (gpusnap.oci.base.files.ask_for)
    sequential     with twice the read-ahead (posix_fadvise(2))
    direct         O_DIRECT

and from a warm page cache. GiB/s, medians. Needs space in --folder, and leaves nothing there.
"""

from __future__ import annotations

import argparse
import io
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench")]

from chunks import forget  # noqa: E402

from gpusnap.oci.base.files import ask_for  # noqa: E402
from gpusnap.oci.base.threads import run_for_each  # noqa: E402
from gpusnap.oci.chunks.buffers import Memory  # noqa: E402

_GIB = 1 << 30
_PIECE = 8 << 20
# What is measured: the way, and how many threads.
_CASES = [
    *(("cache", count) for count in (2, 4, 16)),
    *(("asked for", count) for count in (4, 16)),
    ("sequential", 8),
    *(("direct", count) for count in (2, 4, 8, 16)),
]


class _Room(threading.local):
    """A thread's memory, kept: to get some takes longer than to fill it."""

    def __init__(self) -> None:
        self.view = Memory(_PIECE).view


def reader(way: str) -> Callable[[Path], None]:
    """What reads a file in that way."""
    room = _Room()

    def read(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
        with io.FileIO(descriptor) as file:
            if way == "asked for":
                ask_for(file, 0, os.fstat(descriptor).st_size)
            elif way == "sequential":
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(room.view):
                continue

    return read


def write(path: Path, content: memoryview) -> None:
    """Write a file, on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def contents(size: int) -> Iterator[memoryview]:
    """Random bytes, other ones for each file."""
    spare = 4 << 20
    drawn = memoryview(os.urandom(size + spare))
    at = 0
    while True:
        yield drawn[at : at + size]
        at = (at + mmap.PAGESIZE + 1) % spare


def measure(folder: Path, count: int, size: int, rounds: int) -> None:
    """Print a line for each case."""
    paths = [folder / f"{number:05}" for number in range(count)]
    whole = count * size / _GIB

    def rate(work: Callable[[Path], None], threads: int, *, cold: bool) -> float:
        if cold:
            forget(folder)
        begun = time.monotonic()
        run_for_each(paths, work, threads=threads)
        return whole / (time.monotonic() - begun)

    by_path = dict(zip(paths, contents(size), strict=False))
    print(
        f"{count} files, {whole:.1f} GiB; written {rate(lambda p: write(p, by_path[p]), 8, cold=False):.2f}"
    )
    found: dict[tuple[str, int], list[float]] = {case: [] for case in _CASES}
    for _ in range(rounds):
        for way, threads in _CASES:
            found[way, threads].append(rate(reader(way), threads, cold=True))
    for (way, threads), rates in found.items():
        print(f"{way:>10} {threads:3} threads {statistics.median(rates):6.2f} GiB/s", flush=True)
    rate(reader("cache"), 16, cold=False)
    print(f"      warm  16 threads {rate(reader('cache'), 16, cold=False):6.2f} GiB/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", default="/var/tmp", help="on the disk in question (/var/tmp)")
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--mib", type=int, default=5, help="of each file (5)")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="gpusnap-disk-") as folder:
        measure(Path(folder), options.files, options.mib << 20, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
