"""Which mappings of a process may be written by another than CRIU."""

from __future__ import annotations

import io
from typing import Any

import pytest
from criu_images import mm

from gpusnap.runtime_shim.runtime.criu.images import messages, vmas

MIB = 1 << 20
START = 0x7F0000000000
REGULAR, HEAP, PRIVATE, GUARD = 1 << 0, 1 << 5, 1 << 9, 1 << 16
PLAIN = {1: START, 2: START + 4 * MIB, 3: 0, 4: 0, 5: 3, 6: 0x22, 7: REGULAR | PRIVATE, 8: 1}


def vma(**changed: int) -> list[tuple[int, int]]:
    """A plain mapping with some fields changed: start, end, prot, flags, status, madv."""
    fields = {"start": 1, "end": 2, "prot": 5, "flags": 6, "status": 7, "madv": 9}
    return sorted((PLAIN | {fields[name]: number for name, number in changed.items()}).items())


def decoded(*found: list[tuple[int, int]]) -> Any:
    data = mm(*found)
    (message,) = messages.decode_messages(io.BytesIO(data), len(data), "mm")
    return message


def plain(*found: list[tuple[int, int]], relatives: tuple[Any, ...] = ()) -> list[tuple[int, int]]:
    return list(vmas.plain(decoded(*found), relatives, smallest=MIB))


def test_a_plain_one() -> None:
    assert plain(vma()) == [(START, START + 4 * MIB)]


@pytest.mark.parametrize(
    "changed",
    [
        {"status": REGULAR | PRIVATE | HEAP},
        {"flags": 0x4022},
        {"madv": 1 << 10},
        {"madv": 1 << 15 | 1 << 16},
    ],
    ids=str,
)
def test_plain_all_the_same(changed: dict[str, int]) -> None:
    """The heap, MAP_NORESERVE, and advice that does not change what is in it."""
    assert plain(vma(**changed)) == plain(vma())


UNFIT = {
    "small": {"end": START + MIB - 4096},
    "read-only": {"prot": 1},
    "no access": {"prot": 0},
    "write-only": {"prot": 2},
    "executable": {"prot": 7},
    "locked": {"flags": 0x2022},
    "growing": {"flags": 0x122},
    "hugetlb": {"flags": 0x40022},
    "shared": {"flags": 0x21, "status": REGULAR | 1 << 8},
    "of a file": {"flags": 0x2, "status": REGULAR | 1 << 6},
    "a stack": {"status": REGULAR | PRIVATE | 1 << 1},
    "vDSO": {"status": REGULAR | PRIVATE | 1 << 3},
    "vvar": {"status": REGULAR | PRIVATE | 1 << 12},
    "System V": {"status": REGULAR | PRIVATE | 1 << 10},
    "an AIO ring": {"status": REGULAR | PRIVATE | 1 << 13},
    "a shadow stack": {"status": REGULAR | PRIVATE | 1 << 15},
    "uprobes": {"status": REGULAR | PRIVATE | 1 << 17},
    "a plugin's": {"status": REGULAR | PRIVATE | 1 << 27},
    "not regular": {"status": PRIVATE},
    "MADV_HUGEPAGE": {"madv": 1 << 14},
    "MADV_MERGEABLE": {"madv": 1 << 12},
    "MADV_WIPEONFORK": {"madv": 1 << 18},
    "no whole page": {"start": START + 1},
    "the kernel's": {"start": 1 << 47, "end": (1 << 47) + 4 * MIB},
}


@pytest.mark.parametrize("what", UNFIT)
def test_left_to_criu(what: str) -> None:
    assert plain(vma(**UNFIT[what])) == []


def test_guard_regions() -> None:
    """They are listed behind all others, within the mapping that they are in."""
    guard = vma(start=START + MIB, end=START + MIB + 4096, status=GUARD, prot=0)
    other = vma(start=START + 8 * MIB, end=START + 16 * MIB)
    assert plain(vma(), other, guard) == [(START + 8 * MIB, START + 16 * MIB)]


def test_what_overlaps() -> None:
    """CRIU writes no such image."""
    assert plain(vma(), vma(start=START + MIB, end=START + 16 * MIB)) == []


def test_inherited_by_a_child() -> None:
    """A mapping of the same start in a parent or a child may have pages in common with it."""
    other = vma(start=START + 8 * MIB, end=START + 16 * MIB)
    relative = decoded(vma(end=START + 2 * MIB))
    assert plain(vma(), other, relatives=(relative,)) == [(START + 8 * MIB, START + 16 * MIB)]
