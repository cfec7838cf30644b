"""How fast a disk gives the blobs of a store: through the page cache, asked for as a whole, and directly.

    python3 bench/disk_reads.py [--folder /var/tmp] [--files 1000] [--mib 5] [--rounds 1]

Files of random bytes, as large as compressed chunks, are written and synced. Then all of them are read by so
many threads, with a dropped page cache each time, into memory that is there already:

    cache          read(2), the kernel's own read-ahead
    willneed       the same, and each file is asked for as a whole when it is opened (posix_fadvise(2))
    sequential     the same with twice the read-ahead
    direct         O_DIRECT

and from a warm page cache. GiB/s, medians. Needs root, for /proc/sys/vm/drop_caches, and room in --folder,
where nothing is left. A restore reads by `willneed`, asked for in pieces of 1 MiB
(gpusnap.oci.base.files.ask_for), as the kernel takes no more at once than a device's read-ahead.
"""

from __future__ import annotations

import argparse
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
sys.path[:0] = [str(CHECKOUT)]

from gpusnap.oci.base.threads import for_each  # noqa: E402

_GIB = 1 << 30
_PIECE = 8 << 20
_ADVICE = {"willneed": os.POSIX_FADV_WILLNEED, "sequential": os.POSIX_FADV_SEQUENTIAL}
# What is measured: the way, and how many threads.
_CASES = [
    *(("cache", count) for count in (2, 4, 16)),
    *(("willneed", count) for count in (4, 16)),
    ("sequential", 8),
    *(("direct", count) for count in (2, 4, 8, 16)),
]


class Room(threading.local):
    """Memory of a thread, aligned as O_DIRECT wants it, whose pages are there."""

    def __init__(self) -> None:
        self._mapping = mmap.mmap(-1, _PIECE)
        self._mapping[:: mmap.PAGESIZE] = bytes([1]) * (_PIECE // mmap.PAGESIZE)
        self.view = memoryview(self._mapping)


def reader(way: str) -> Callable[[Path], None]:
    """What reads a file in that way."""
    room = Room()

    def read(path: Path) -> None:
        file = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
        try:
            if way in _ADVICE:
                os.posix_fadvise(file, 0, 0, _ADVICE[way])
            at = 0
            while count := os.preadv(file, [room.view], at):
                at += count
        finally:
            os.close(file)

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
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        begun = time.monotonic()
        for_each(paths, work, threads=threads)
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
    if os.geteuid():
        print("disk_reads: needs root, to drop the page cache", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="gpusnap-disk-") as folder:
        measure(Path(folder), options.files, options.mib << 20, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
