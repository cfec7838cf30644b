"""Writing regions: nothing twice, nothing left over, in the memory allowed; the first error ends it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import pytest
from oci_regions import CEILING, PAGE, Far, blobs, fill, load, save

from gpusnap.oci.base.errors import CeilingError, ChunkError, DiskFull, LayoutError
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.planes import make_compressor
from gpusnap.oci.chunks.table import MEDIA_TYPES, Progress
from gpusnap.oci.chunks.writer import worker_memory, write
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout

MIXED = bytearray(b"".join(fill(PAGE, kind, at) for at in range(8) for kind in ("text", "random", "zero")))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


class Failing(Far):
    """A region of which one chunk cannot be read."""

    def read(self, offset: int, into: memoryview) -> None:
        if offset == 9 * PAGE:
            raise OSError(errno.EIO, "the process has gone")
        super().read(offset, into)


def test_a_second_time(layout: Layout) -> None:
    """The same region writes no blob again; one byte that changed writes one."""
    first = save(layout, MIXED)
    before = blobs(Path(layout.path))
    said: list[Progress] = []
    sources = [Buffer(MIXED)]
    again = write(sources, layout, threads=2, ceiling=CEILING, chunk_size=PAGE, progress=said.append)
    assert (again, blobs(Path(layout.path)), said[-1].written) == (first, before, 0)
    changed = bytearray(MIXED)
    changed[5 * PAGE + 17] ^= 1
    (table,) = save(layout, changed)
    new = set(blobs(Path(layout.path))) - set(before)
    assert len(new) == 1
    assert load(layout, (table,)) == [changed]


def test_the_same_content_twice(layout: Layout) -> None:
    """Content that several regions share is one blob."""
    one, two, three = save(layout, bytearray(fill(PAGE, "text") * 9), bytearray(fill(PAGE, "text")), MIXED)
    assert len({chunk.blob for table in (one, two) for chunk in table.chunks}) == 1
    assert len(blobs(Path(layout.path))) == len({c.blob for table in (one, two, three) for c in table.chunks})


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("content", ["random", "text"])
def test_a_region_that_somebody_changes_meanwhile(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, level: int, content: str
) -> None:
    """Each blob is what its digest says, though its region changes whenever something was hashed."""
    with mmap.mmap(-1, 8 * PAGE) as region:  # shared, as a file is that a container's process has mapped
        region[:] = b"".join(fill(PAGE, content, at) for at in range(8))
        hashed: list[str] = []

        def change(data: memoryview) -> str:
            hashed.append(digest_of(data))
            region[:] = fill(8 * PAGE, "random", len(hashed))
            return hashed[-1]

        monkeypatch.setattr("gpusnap.oci.chunks.writer.digest_of", change)
        (table,) = write([Buffer(region)], layout, threads=1, ceiling=CEILING, chunk_size=PAGE, level=level)
    assert len(table.chunks) == 8
    for chunk in table.chunks:
        layout.check_blob(Descriptor(MEDIA_TYPES[chunk.encoding], chunk.blob, chunk.stored))
    # What is in a compressed blob is what the digest of the plain bytes says.
    (back,) = load(layout, (table,))
    parts = [bytes(back[at * PAGE : (at + 1) * PAGE]) for at in range(8)]
    assert [digest_of(part) for part in parts] == [chunk.plain for chunk in table.chunks]


def test_progress(layout: Layout) -> None:
    """The caller hears of each chunk, in turn, and at the end all bytes are accounted for."""
    said: list[Progress] = []
    (table,) = write(
        [Buffer(MIXED)], layout, threads=2, ceiling=CEILING, chunk_size=PAGE, progress=said.append
    )
    assert [each.done for each in said] == list(range(PAGE, len(MIXED) + 1, PAGE))
    assert said[-1] == Progress(len(MIXED), len(MIXED), zero=8 * PAGE, known=0, written=table.stored)


def test_known(layout: Layout, tmp_path: Path) -> None:
    """Chunks of an earlier checkpoint are linked, not written; those whose blob has gone are written."""
    tables = save(layout, MIXED)
    known = Known(tmp_path / "known.json")
    known.learn(tables, layout)
    known.save()
    gone, broken = tables[0].chunks[3], tables[0].chunks[4]
    for chunk, do in ((gone, os.unlink), (broken, lambda path: os.truncate(path, 5))):
        do(Path(layout.path, "blobs/sha256", chunk.blob.removeprefix("sha256:")))
    later = Layout(tmp_path / "later").create()
    said: list[Progress] = []
    again = write(
        [Buffer(MIXED)],
        later,
        threads=2,
        ceiling=CEILING,
        chunk_size=PAGE,
        known=Known(tmp_path / "known.json"),
        progress=said.append,
    )
    assert again == tables
    assert said[-1].written == gone.stored + broken.stored
    assert said[-1].known == 14 * PAGE
    linked = [
        os.path.samefile(Path(later.path, "blobs/sha256", name), Path(layout.path, "blobs/sha256", name))
        for chunk in tables[0].chunks
        if (name := chunk.blob.removeprefix("sha256:")) not in (gone.blob[7:], broken.blob[7:])
    ]
    assert all(linked)
    assert len(linked) == 14
    assert load(later, again) == [MIXED]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_source_that_fails(layout: Layout, threads: int) -> None:
    """What a source raises comes out as it is, ends all workers, and leaves nothing unfinished."""
    before = threading.active_count()
    with pytest.raises(OSError, match="the process has gone"):
        write([Failing(MIXED)], layout, threads=threads, ceiling=CEILING, chunk_size=PAGE)
    assert threading.active_count() == before
    assert not [name for name in blobs(Path(layout.path)) if len(name) != 64]


def test_progress_that_fails(layout: Layout) -> None:
    """So does what the caller's progress raises."""

    def progress(_now: Progress) -> None:
        raise ValueError("no terminal")

    with pytest.raises(ValueError, match="no terminal"):
        write([Buffer(MIXED)], layout, threads=2, ceiling=CEILING, chunk_size=PAGE, progress=progress)


def test_full_disk(small_disk: Path) -> None:
    """A disk that fills up on the way is named; what was whole by then is, the rest has gone."""
    layout = Layout(small_disk / "layout").create()
    data = bytearray(fill(4 << 20, "random"))
    with pytest.raises(DiskFull, match=r"layout is full: a blob of 256\.0 KiB did not fit"):
        save(layout, data, chunk_size=256 << 10)
    left = list((small_disk / "layout/blobs/sha256").iterdir())
    layout.close()
    assert left
    assert all(len(path.name) == 64 and path.stat().st_size == 256 << 10 for path in left)


def test_no_layout(tmp_path: Path) -> None:
    """A layout that was not made is an error, not a hang."""
    with pytest.raises(LayoutError):
        save(Layout(tmp_path / "none"), MIXED)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_ceiling(layout: Layout, monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    """Workers are as many as fit under the ceiling; where none fits, that is an error."""
    size = 1 << 20
    made: list[int] = []
    real = mmap.mmap

    def mapped(descriptor: int, length: int, **options: int) -> mmap.mmap:
        # One byte, never touched, stands for no memory at all.
        made.append(length if length > 1 else 0)
        return real(descriptor, length, **options)

    monkeypatch.setattr(mmap, "mmap", mapped)
    need = worker_memory(size, level)
    data = bytearray(fill(8 * size, "random"))
    with pytest.raises(CeilingError, match=r"is not enough for one chunk of 1\.0 MiB"):
        write([Buffer(data)], layout, threads=4, ceiling=need - 1, chunk_size=size, level=level)
    assert made == []
    write([Buffer(data)], layout, threads=4, ceiling=2 * need + 5, chunk_size=size, level=level)
    assert 2 * size <= sum(made) <= 2 * need
    assert sum(length == size for length in made) == (4 if level else 2)


def test_worker_memory_is_what_zstd_takes() -> None:
    """What is reserved for a worker covers what zstd says that it holds."""
    import zstandard

    size = 1 << 20
    for level in (1, 3, 9):
        compressor = zstandard.ZstdCompressor(level=level)
        data = fill(size, "text")
        compressor.stream_reader(data, size=size, closefd=False).readinto(bytearray(size))
        planes = make_compressor()
        planes.stream_reader(data, size=size // 2, closefd=False).readinto(bytearray(size))
        held = compressor.memory_size() + planes.memory_size()
        assert held + 2 * size + size // 2 <= worker_memory(size, level)


@pytest.mark.parametrize(
    ("chunk_size", "level"), [(0, 1), (-PAGE, 1), (5000, 1), (1 << 31, 1), (PAGE, 20), (PAGE, -1)]
)
def test_bad_parameters(layout: Layout, chunk_size: int, level: int) -> None:
    """Sizes and levels that nobody can mean are refused."""
    with pytest.raises(ChunkError, match=r"chunk size|zstd level"):
        write([], layout, threads=1, ceiling=CEILING, chunk_size=chunk_size, level=level)


def test_nothing(layout: Layout) -> None:
    """No region, and an empty one, are written as such."""
    assert write([], layout, threads=2, ceiling=CEILING) == ()
    (table,) = write([Buffer(bytearray())], layout, threads=2, ceiling=CEILING)
    assert (table.size, table.chunks) == (0, ())


def test_no_descriptor_is_left(layout: Layout) -> None:
    """Whether it went well or not, no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    save(layout, MIXED)
    with pytest.raises(OSError, match="gone"):
        write([Failing(MIXED)], layout, threads=2, ceiling=CEILING, chunk_size=PAGE)
    layout.close()
    assert len(os.listdir("/proc/self/fd")) == before
