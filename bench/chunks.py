"""The cost of chunks: a region in memory is written as blobs of an image layout, and read back.

    python3 bench/chunks.py --json chunks.json [--mib 1024] [--chunk 4 16 64] [--level 0 1 3] [--threads 1 16]

For each kind of data (random, zero, bf16 weights, text) and each setting: GiB/s to write and to read, and the
ratio of plain bytes to stored bytes. The column sha256 is the reading if the table has no BLAKE3. For
comparison, in the same run and on the same disk: memcpy, sha256 and blake3 in one thread, and plain writes
and reads of files of a chunk's size. Without fsync and with a warm page cache, except the rows named
"durable": there the time of a write includes fsync, or `Layout.commit`, and reads come from the disk.
--durable: only these.

The default run takes less than a minute on two idle cores. It changes one thing at a time, and measures zstd
on a part of the region; the column MiB says how much. --all measures every setting on the whole region.

    python3 bench/chunks.py --encodings

shows the encoding of a chunk for disks of several speeds and restores with several numbers of threads. The
writer chooses it, from times that it measures itself. The other columns are measured on the whole region,
from a warm page cache: the size in the smallest encoding as a part of the plain size, and the GiB per second
of processor time that a thread reads in that encoding and in plain chunks. In brackets: how many times faster
a restore of plain chunks is than one of the smallest encoding, according to these.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import itertools
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from gpusnap.oci.chunks.blake3_digests import compute_blake3  # noqa: E402
from gpusnap.oci.chunks.buffers import Buffer, Memory  # noqa: E402
from gpusnap.oci.chunks.encoding import ReadSpeed  # noqa: E402
from gpusnap.oci.chunks.reader import read  # noqa: E402
from gpusnap.oci.chunks.table import CHUNK_SIZE, Table  # noqa: E402
from gpusnap.oci.chunks.writer import worker_memory, write  # noqa: E402
from gpusnap.oci.layout.digests import digest_of  # noqa: E402
from gpusnap.oci.layout.documents import Index  # noqa: E402
from gpusnap.oci.layout.layout import Layout  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
KINDS = ["random", "zero", "bf16", "text"]
# For --encodings: the data, the read rates of disks in GiB/s, and the numbers of reading threads. A restore
# on 16 cores uses 12 threads, and 4 until CRIU is done.
ENCODED = ["bf16", "fp32", "random", "text"]
DISKS = [1, 2, 5, 20]
READERS = [1, 4, 12]
# One pattern of this size is repeated, with a number in each copy: zstd only looks back a few MiB.
BLOCK = 16 * MIB
# Weights of a layer: mean 0, deviation 0.02.
STEPS = statistics.NormalDist(0, 0.02)


@dataclass(frozen=True)
class Row:
    """The figures of one setting: speeds in GiB/s, and the ratio of plain bytes to stored bytes."""

    what: str
    data: str
    chunk_mib: int
    level: int
    threads: int
    mib: int
    write: float
    read: float
    """With BLAKE3 digests, if that package is installed."""
    ratio: float
    read_sha256: float = 0.0


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def weights(size: int) -> bytes:
    """Return bytes like bf16 weights: sign and exponent from a normal distribution, a mantissa of noise."""
    return numbers(size, 2)


def numbers(size: int, width: int) -> bytes:
    """Return bytes like weights with `width` bytes per number: 4 for fp32."""
    floats = array.array("f", [STEPS.inv_cdf((at + 0.5) / 256) for at in range(256)]).tobytes()
    made = bytearray(os.urandom(size))
    # The upper byte of each number: one of 256 equally likely ones, chosen by a random byte.
    made[width - 1 :: width] = made[width - 1 :: width].translate(floats[3::4])
    return bytes(made)


def prose(size: int) -> bytes:
    """Return words in random order, drawn from a small vocabulary."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random.choices(letters, k=random.randint(2, 9))) for _ in range(9000)]
    text = " ".join(random.choices(words, k=MIB)).encode()
    return (text * (size // len(text) + 1))[:size]


def fill(memory: Memory, kind: str) -> None:
    """Fill a region. Random data is new in each block; other data is a repeated block, numbered every MiB."""
    view = memory.view
    if kind == "zero":
        memory.free()
        # Touch each page, so that it is allocated, like the pages of a process.
        for at in range(0, len(view), mmap.PAGESIZE):
            view[at] = 0
        return
    makers: dict[str, Callable[[int], bytes]] = {
        "random": os.urandom,
        "bf16": weights,
        "fp32": lambda size: numbers(size, 4),
        "text": prose,
    }
    block = b"" if kind == "random" else makers[kind](BLOCK)
    for at in range(0, len(view), BLOCK):
        room = len(view[at : at + BLOCK])
        view[at : at + BLOCK] = (block or os.urandom(room))[:room]
        for place in range(at, at + room, MIB):
            view[place : place + 8] = place.to_bytes(8, "little")


def in_threads(count: int, size: int, chunk: int, action: Callable[[int, int], None]) -> float:
    """Handle all pieces of a region in several threads; return the seconds."""
    places = iter(range(0, size, chunk))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                at = next(places, None)
            if at is None:
                return
            action(at, min(chunk, size - at))

    threads = [threading.Thread(target=work) for _ in range(count)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def forget(folder: Path) -> None:
    """Drop the files below a directory from the page cache. They must be on disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def plain_files(
    folder: Path, memory: Memory, back: Memory, chunk: int, threads: int, *, durable: bool
) -> Row:
    """Measure writes and reads of files of the chunk's size by `threads` threads, without other work."""
    size = len(memory.view)

    def put(at: int, length: int) -> None:
        descriptor = os.open(folder / str(at), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, memory.view[at : at + length])
        if durable:
            os.fsync(descriptor)
        os.close(descriptor)

    def get(at: int, length: int) -> None:
        descriptor = os.open(folder / str(at), os.O_RDONLY)
        os.preadv(descriptor, [back.view[at : at + length]], 0)
        os.close(descriptor)

    wrote = in_threads(threads, size, chunk, put)
    if durable:
        forget(folder)
    got = in_threads(threads, size, chunk, get)
    shutil.rmtree(folder)
    folder.mkdir()
    what = "plain files, durable" if durable else "plain files"
    speeds = size / GIB / wrote, size / GIB / got
    return Row(what, "random", chunk // MIB, 0, threads, size // MIB, *speeds, 1.0)


def chunks(
    folder: Path,
    kind: str,
    memory: memoryview,
    back: memoryview,
    chunk: int,
    level: int,
    threads: int,
    *,
    durable: bool,
) -> Row:
    """Measure writing a region of memory as chunks, and reading it back."""
    size, ceiling = len(memory), threads * worker_memory(chunk, max(level, 1))
    layout = Layout(folder / "layout").create()
    begun = time.perf_counter()
    tables = write([Buffer(memory)], layout, threads=threads, ceiling=ceiling, chunk_size=chunk, level=level)
    if durable:
        layout.commit(Index())
    wrote = time.perf_counter() - begun
    got = []
    for each in (tables, [without_blake3(table) for table in tables]):
        if durable:
            forget(folder)
        begun = time.perf_counter()
        read(each, layout, [Buffer(back)], threads=threads, ceiling=ceiling)
        got.append(time.perf_counter() - begun)
        if kind != "zero" and back != memory:
            raise SystemExit(f"{kind} data came back wrong")
    shutil.rmtree(folder / "layout")
    stored = sum(table.stored for table in tables)
    what = "chunks, durable" if durable else "chunks"
    fast, slow = (size / GIB / each if stored else 0.0 for each in got)
    ratio = size / stored if stored else 0.0
    return Row(what, kind, chunk // MIB, level, threads, size // MIB, size / GIB / wrote, fast, ratio, slow)


def without_blake3(table: Table) -> Table:
    """Return the table without BLAKE3 digests, so that its chunks are checked by SHA-256."""
    return Table(table.size, tuple(replace(chunk, blake3="") for chunk in table.chunks))


@dataclass(frozen=True)
class Encoded:
    """The encoding that is chosen for one kind of data, by number of threads and GiB/s of the disk."""

    data: str
    smallest: str
    left: float
    read: float
    read_plain: float
    chosen: dict[int, dict[int, str]]

    def cell(self, threads: int, disk: int) -> str:
        """Return the encoding; if plain is not the smallest, also how many times faster it is."""
        kind = self.chosen[threads][disk]
        if kind != "plain" or kind == self.smallest:
            return kind
        small = max(self.left / disk, 1 / (self.read * threads))
        return f"{kind} ({small / max(1 / disk, 1 / (self.read_plain * threads)):.2f})"


def measure_encodings(folder: Path, kind: str, memory: memoryview, back: memoryview) -> Encoded:
    """Write the data for each disk; read the smallest encoding and plain chunks in one thread."""
    size = len(memory)

    def stored(speed: ReadSpeed | None, level: int, each: Callable[[Layout, Table], float]) -> float:
        layout = Layout(folder / "layout").create()
        ceiling = 2 * worker_memory(CHUNK_SIZE, 1)
        (table,) = write([Buffer(memory)], layout, threads=1, ceiling=ceiling, level=level, speed=speed)
        found = each(layout, table)
        shutil.rmtree(folder / "layout")
        return found

    def rate(layout: Layout, table: Table) -> float:
        targets, ceiling = [Buffer(back)], 2 * worker_memory(CHUNK_SIZE, 1)
        took = []
        for _ in range(3):
            begun = time.process_time()
            read([table], layout, targets, threads=1, ceiling=ceiling)
            took.append(time.process_time() - begun)
        if back != memory:
            raise SystemExit(f"{kind} data came back wrong")
        return size / GIB / min(took)

    def part(layout: Layout, table: Table) -> float:
        named.append(table.chunks[0].encoding)
        return table.stored / size

    named: list[str] = []
    left = stored(None, 1, part)
    chosen: dict[int, dict[int, str]] = {}
    for threads in READERS:
        for disk in DISKS:
            stored(ReadSpeed(disk * GIB, threads), 1, part)
            chosen.setdefault(threads, {})[disk] = named[-1]
    return Encoded(kind, named[0], left, stored(None, 1, rate), stored(None, 0, rate), chosen)


def printed_encodings(rows: list[Encoded]) -> str:
    """Return the rows as a table for the documentation."""
    head = ["data", "smallest", "left", "read", "plain read", "threads", *(f"{disk} GiB/s" for disk in DISKS)]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * 4 + "---|" * len(DISKS)]
    for row in rows:
        for threads in READERS:
            first = [row.data, row.smallest, f"{row.left:.2f}", f"{row.read:.2f}", f"{row.read_plain:.2f}"]
            cells = [row.cell(threads, disk) for disk in DISKS]
            lines.append("| " + " | ".join([*first, str(threads), *cells]) + " |")
    return "\n".join(lines)


def floor(memory: Memory, back: Memory) -> list[Row]:
    """Measure memcpy, sha256 and blake3 of the region in one thread; blake3 is 0 if it is not installed."""
    size = len(memory.view)
    here, there = (ctypes.addressof(ctypes.c_char.from_buffer(each.view)) for each in (memory, back))
    fill(back, "zero")
    copied = size / GIB / seconds(lambda: ctypes.memmove(there, here, size))
    hashed = size / GIB / seconds(lambda: digest_of(memory.view))
    fast = size / GIB / seconds(lambda: compute_blake3(memory.view)) if compute_blake3(b"") else 0.0
    return [
        Row("memcpy", "random", 0, 0, 1, size // MIB, copied, copied, 1.0),
        Row("sha256", "random", 0, 0, 1, size // MIB, hashed, hashed, 1.0),
        Row("blake3", "random", 0, 0, 1, size // MIB, fast, fast, 1.0),
    ]


def format_rows(rows: list[Row]) -> str:
    """Return the rows as a table."""
    head = ("what", "data", "chunk", "level", "threads", "MiB", "write", "read", "sha256", "ratio")
    lines = ["{:21}{:8}{:>6}{:>6}{:>8}{:>6}{:>8}{:>8}{:>8}{:>8}".format(*head)]
    for row in rows:
        back, slow, ratio = (f"{x:.2f}" if x else "-" for x in (row.read, row.read_sha256, row.ratio))
        lines.append(
            f"{row.what:21}{row.data:8}{row.chunk_mib:6}{row.level:6}{row.threads:8}{row.mib:6}"
            f"{row.write:8.2f}{back:>8}{slow:>8}{ratio:>8}"
        )
    return "\n".join([*lines, "write and read in GiB/s of plain bytes; sha256: read without BLAKE3"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Regions as chunks, written and read back, timed.")
    parser.add_argument("--mib", type=int, default=1024, help="size of the region")
    parser.add_argument("--chunk", type=int, nargs="+", default=[4, 16, 64], help="chunk sizes in MiB")
    parser.add_argument("--level", type=int, nargs="+", default=[0, 1, 3], help="zstd levels, 0 for none")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--data", nargs="+", default=KINDS, choices=[*KINDS, "fp32"])
    parser.add_argument("--all", action="store_true", help="every setting, on the whole region")
    parser.add_argument("--encodings", action="store_true", help="only which encoding chunks get")
    parser.add_argument("--durable", action="store_true", help="only the rows that wait for the disk")
    parser.add_argument("--folder", help="where to write; the default is the system's temporary folder")
    parser.add_argument("--json", help="write the figures there too")
    return parser.parse_args()


def settings(options: argparse.Namespace, kind: str) -> list[tuple[int, int, int, int]]:
    """Return the settings to measure: chunk size in MiB, level, threads, and MiB of data."""
    middle, most = options.chunk[len(options.chunk) // 2], max(options.threads)
    packs = kind in ("bf16", "fp32", "text")
    found = []
    for level, chunk, threads in itertools.product(options.level, options.chunk, options.threads):
        mib = options.mib
        if not options.all:
            # Change one thing at a time. Data that is not compressed gives the same figures at other levels.
            idle = level > 1 if not packs else level == 0
            if idle or (chunk != middle) + (threads != most) + (level != 1) > 1:
                continue
            mib = min(mib, max(mib // 8, 2 * chunk * threads)) if packs else mib
        found.append((chunk, level, threads, mib))
    return found


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure all rows. The durable ones are last, because the disk continues to write after them."""
    size = options.mib * MIB
    memory, back = Memory(size), Memory(size)
    middle, most = options.chunk[len(options.chunk) // 2] * MIB, max(options.threads)
    fill(memory, "random")
    rows = floor(memory, back)
    # Not counted: the first files of a run also allocate space on the disk.
    plain_files(folder, memory, back, middle, most, durable=False)
    kind = "random"
    for threads in () if options.durable else options.threads:
        rows.append(plain_files(folder, memory, back, middle, threads, durable=False))
    for kind in () if options.durable else sorted(options.data, key=[*KINDS, "fp32"].index):
        if kind != "random":
            fill(memory, kind)
        for chunk, level, threads, mib in settings(options, kind):
            part, into = memory.view[: mib * MIB], back.view[: mib * MIB]
            rows.append(chunks(folder, kind, part, into, chunk * MIB, level, threads, durable=False))
    rows.append(plain_files(folder, memory, back, middle, most, durable=True))
    rows.append(chunks(folder, kind, memory.view, back.view, middle, 0, most, durable=True))
    return rows


def encodings(folder: Path) -> list[Encoded]:
    """Measure the encodings of all kinds of data, on 64 MiB of each."""
    memory, back = Memory(64 * MIB), Memory(64 * MIB)
    rows = []
    for kind in ENCODED:
        fill(memory, kind)
        rows.append(measure_encodings(folder, kind, memory.view, back.view))
    return rows


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        begun = time.monotonic()
        if options.encodings:
            print(printed_encodings(encodings(Path(folder))))
            return 0
        rows = measure(options, Path(folder))
        took = time.monotonic() - begun
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, {took:.0f} s")
    print(format_rows(rows))
    if options.json:
        document = {
            "kernel": platform.release(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
