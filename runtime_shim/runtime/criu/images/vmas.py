"""Mappings in the images of a process's memory (mm-PID.img) that CRIU first restores as plain, empty memory.

CRIU maps such a mapping where it was, and fills its pages from the process's pagemap (criu/mem.c,
restore_priv_vma_content; criu/pie/restorer.c). If the pagemap lists none of its pages, it stays empty, and
another process may write them later. All other mappings are excluded:

    file mappings, shared memory, System V, hugetlb, stacks and other growing mappings, shadow stacks, AIO
    rings, vDSO, uprobes, a plugin's: their status or flags have a bit that is not in _STATUS or _FLAGS memory
    that the process cannot both read and write: a write from outside would fail locked memory (MAP_LOCKED),
    and memory with any advice (madvise(2)) except that of _ADVICE mappings that overlap another one: guard
    regions (MADV_GUARD_INSTALL) are listed so memory that the process may share with its parent or a child
    since fork(2): CRIU maps it once, and lets the child inherit it, if both have a mapping with the same
    start and end (criu/mem.c, prepare_cow_vmas_for)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

# criu/include/image.h: regular, heap, private anonymous.
_REGULAR, _HEAP, _PRIVATE, _GUARD = 1 << 0, 1 << 5, 1 << 9, 1 << 16
_STATUS, _NEEDED_STATUS = _REGULAR | _HEAP | _PRIVATE, _REGULAR | _PRIVATE
# sys/mman.h: MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE; PROT_READ and PROT_WRITE.
_NEEDED_FLAGS, _FLAGS = 0x2 | 0x20, 0x2 | 0x20 | 0x4000
_READ_WRITE = 0x1 | 0x2
# MADV_DONTFORK, MADV_NOHUGEPAGE, MADV_DONTDUMP (asm-generic/mman-common.h), as bits. Not MADV_HUGEPAGE: CRIU
# gives this advice after the pages, and a later write would fill the gaps between them with huge pages.
_ADVICE = 1 << 10 | 1 << 15 | 1 << 16
_END = 1 << 47
_PAGE = 4096

Span = tuple[int, int]
"""The first address, and the one after the last."""


def plain(mm: Any, relatives: Collection[Any], *, smallest: int) -> Sequence[Span]:
    """Return a process's mappings of this kind with at least `smallest` bytes, by address.

    `mm`: its mm_entry; `relatives`: those of its parent and children. Empty if the mappings are not sorted,
    as CRIU writes them.
    """
    own = [vma for vma in mm.vmas if not vma.status & _GUARD]
    guards = [(vma.start, vma.end) for vma in mm.vmas if vma.status & _GUARD]
    if any(before.end > after.start for before, after in pairwise(own)):
        return ()
    inherited = {vma.start for each in relatives for vma in each.vmas}
    found = [(vma.start, vma.end) for vma in own if _is_plain(vma) and vma.start not in inherited]
    return [
        (start, end)
        for start, end in found
        if end - start >= smallest and not any(low < end and start < high for low, high in guards)
    ]


def _is_plain(vma: Any) -> bool:
    return (
        vma.prot == _READ_WRITE
        and vma.status & _NEEDED_STATUS == _NEEDED_STATUS
        and not vma.status & ~_STATUS
        and vma.flags & _NEEDED_FLAGS == _NEEDED_FLAGS
        and not vma.flags & ~_FLAGS
        and not vma.madv & ~_ADVICE
        and 0 < vma.start < vma.end <= _END
        and vma.start % _PAGE == vma.end % _PAGE == 0
    )
