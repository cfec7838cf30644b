"""Mappings of a process, and which parts of them are new."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_target import MIB, Target

from gpusnap.runtime_shim.process.memory.maps import SMALLEST, Mapping, Region, mappings, regions


def mapping(start: int, end: int, permissions: str = "rw-p", name: str = "", inode: int = 0) -> Mapping:
    return Mapping(start * MIB, end * MIB, permissions, 0, "00:00", inode, name)


def spans(before: list[Mapping], after: list[Mapping]) -> list[tuple[int, int]]:
    return [(each.start // MIB, each.end // MIB) for each in regions(before, after)]


def test_what_proc_says() -> None:
    """Every field of a line, ours with their names."""
    ours = mappings(os.getpid())
    assert [each.start for each in ours] == sorted(each.start for each in ours)
    names = {each.name: each for each in ours}
    assert names["[stack]"].permissions.startswith("rw")
    library = next(each for each in ours if "libc" in each.name and "x" in each.permissions)
    assert library.inode == os.stat(library.name).st_ino
    assert library.size > 0
    assert not library.is_plain


@pytest.mark.parametrize("name", ["a\x0cb", "a\u2028b", "a\rb"])
def test_names_that_end_lines(tmp_path: Path, name: str) -> None:
    """A mapped file may be called anything; only a newline, which the kernel escapes, ends a line."""
    path = tmp_path / name
    path.write_bytes(b"x")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert str(path) in [each.name for each in mappings(os.getpid())]


def test_a_process_that_is_gone() -> None:
    """OSError, as open(2) gives it."""
    with Target() as target:
        pass
    with pytest.raises(OSError, match="No such"):
        mappings(target.pid)


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ([], [mapping(10, 20)], [(10, 20)]),
        ([mapping(10, 20)], [mapping(10, 20)], []),
        ([mapping(10, 20)], [mapping(4, 20)], [(4, 10)]),
        ([mapping(10, 20)], [mapping(10, 30)], [(20, 30)]),
        ([mapping(10, 12), mapping(14, 20)], [mapping(4, 30)], [(4, 10), (12, 14), (20, 30)]),
        ([mapping(10, 20, "rw-s")], [mapping(5, 25)], [(5, 10), (20, 25)]),
        ([mapping(10, 20, "---p")], [mapping(10, 20)], [(10, 20)]),
        ([], [mapping(10, 11)], []),
        ([mapping(10, 20)], [mapping(9, 21)], []),
        ([], [mapping(1, 200, name="[heap]"), mapping(300, 400, name="[stack]")], []),
        ([], [mapping(1, 200, name="[anon: pool]"), mapping(300, 400, name="[anon_shmem: x]")], [(1, 200)]),
        ([], [mapping(1, 200, "r--p"), mapping(200, 300, "rw-s"), mapping(300, 400, "rwxp")], []),
        ([], [mapping(1, 200, name="/memfd:x (deleted)", inode=3), mapping(300, 400, name="/dev/zero")], []),
    ],
    ids=[
        *("new", "old", "below", "above", "three gaps", "over a shared one", "was no access", "small"),
        *("grew by little", "heap and stack", "named", "not for both", "files"),
    ],
)
def test_regions(before: list[Mapping], after: list[Mapping], new: list[tuple[int, int]]) -> None:
    """What is new, and nothing that only looks so."""
    assert spans(before, after) == new


SETS = st.lists(st.integers(0, 60), unique=True, max_size=16).map(
    lambda edges: [
        mapping(low, high) for low, high in zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False)
    ]
)


@given(SETS, SETS)
def test_every_part_is_new_or_old(before: list[Mapping], after: list[Mapping]) -> None:
    """A MiB is in a region if and only if it is mapped now and was not before."""

    def covered(some: list[Mapping] | tuple[Region, ...]) -> set[int]:
        return {each for some_ in some for each in range(some_.start // MIB, some_.end // MIB)}

    assert covered(regions(before, after, smallest=1)) == covered(after) - covered(before)


def test_a_region_of_a_real_process() -> None:
    """New memory is found where the kernel merged it with its neighbour."""
    with Target() as target:
        middle = target.number(f"new({16 * MIB})")
        assert target.number(f"libc.munmap(ctypes.c_void_p({middle}), {4 * MIB})") == 0
        before = mappings(target.pid)
        fixed = "PRIVATE | 0x10"
        assert target.number(f"new({4 * MIB}, {fixed}, address={middle})") == middle
        assert any(each.start <= middle and each.end >= middle + 16 * MIB for each in mappings(target.pid))
        found = regions(before, mappings(target.pid))
        assert Region(middle, 4 * MIB) in found
        assert all(each.size >= SMALLEST for each in found)
