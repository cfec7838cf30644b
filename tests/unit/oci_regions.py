"""Regions of memory for the tests of oci: contents of all kinds, and a look at what a layout holds."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import strategies as st

from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.reader import read
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.layout import Layout

__all__ = ["CEILING", "PAGE", "blobs", "fill", "load", "region", "save", "text"]

PAGE = 4096
CEILING = 64 << 20


def text(size: int, seed: int = 0) -> bytes:
    """Bytes that zstd makes smaller."""
    line = b"%d: what a model has to say, " % seed
    return (line * (size // len(line) + 1))[:size]


def fill(size: int, kind: str, seed: int = 0) -> bytes:
    """A piece of a region: "zero", "text", or bytes that zstd makes no smaller."""
    if kind == "zero":
        return bytes(size)
    return text(size, seed) if kind == "text" else random.Random(seed).randbytes(size)


@st.composite
def region(draw: st.DrawFn) -> bytearray:
    """A region of some pieces, that begin and end anywhere."""
    kinds, sizes = st.sampled_from(["zero", "text", "random"]), st.integers(0, 5 * PAGE)
    pieces = draw(st.lists(st.tuples(sizes, kinds, st.integers(0, 3)), max_size=8))
    return bytearray(b"".join(fill(size, kind, seed) for size, kind, seed in pieces))


def blobs(path: Path) -> dict[str, tuple[int, int]]:
    """Name, inode and time of change of every file among the blobs, unfinished ones too."""
    found = ((each.name, each.stat()) for each in (path / "blobs/sha256").iterdir())
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found}


class Far(Buffer):
    """A region that is no memory of ours: it has to be read and written."""

    def view(self, offset: int, size: int) -> None:  # type: ignore[override]
        """None."""


def save(layout: Layout, *regions: bytearray, chunk_size: int = PAGE, level: int = 1) -> tuple[Table, ...]:
    """Write regions, with two threads; every second one of memory that is not ours."""
    sources = [(Buffer if at % 2 else Far)(each) for at, each in enumerate(regions)]
    return write(sources, layout, threads=2, ceiling=CEILING, chunk_size=chunk_size, level=level)


def load(layout: Layout, tables: tuple[Table, ...], *, dirt: int = 0) -> list[bytearray]:
    """Read regions into memory that was full of some byte, with two threads, ours and not ours."""
    found = []
    for kind in (Buffer, Far):
        regions = [bytearray([dirt]) * table.size for table in tables]
        read(tables, layout, [kind(each) for each in regions], threads=2, ceiling=CEILING)
        found.append(regions)
    near, far = found
    assert near == far
    return far
