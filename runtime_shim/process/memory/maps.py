"""The mappings of a process (proc_pid_maps(5)), and the regions among them: large ones that are new.

A GPU's driver puts device memory into new private anonymous memory of the process. The kernel shows adjacent
mappings of one kind as a single one, so gpusnap subtracts what was writable before from what is mapped now. A
heap or a stack that grew is not a region, nor are the small mappings that every program makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base import deadlines

SMALLEST = 2 << 20
"""Bytes; GPU memory is allocated in units of 2 MiB."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A line of /proc/PID/maps."""

    start: int
    end: int
    permissions: str
    """For example "rw-p"."""
    offset: int
    device: str
    """major:minor in hexadecimal, "00:00" if there is no file."""
    inode: int
    name: str
    """A path, a name such as "[heap]", or empty."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start

    @property
    def is_plain(self) -> bool:
        """Whether it is private, anonymous, readable and writable, and not special to the kernel.

        A name that the process gave it (prctl(2), PR_SET_VMA_ANON_NAME) does not matter.
        """
        anonymous = self.inode == 0 and (not self.name or self.name.startswith("[anon:"))
        return anonymous and self.permissions == "rw-p"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of a process that a driver filled."""

    start: int
    size: int
    """Bytes."""

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.start + self.size


def mappings(pid: int) -> tuple[Mapping, ...]:
    """Return the process's mappings, by address; none for a zombie.

    Raises OSError if it has ended, TimeoutError if the kernel does not answer.
    """
    return tuple(map(_parse_mapping, deadlines.read_lines(f"/proc/{pid}/maps")))


def _parse_mapping(line: str) -> Mapping:
    span, permissions, offset, device, inode, *name = line.split(maxsplit=5)
    start, _, end = span.partition("-")
    return Mapping(
        int(start, 16), int(end, 16), permissions, int(offset, 16), device, int(inode), "".join(name)
    )


def regions(
    before: Iterable[Mapping], after: Iterable[Mapping], *, smallest: int = SMALLEST
) -> tuple[Region, ...]:
    """Return private, anonymous, writable memory of `after` that was not writable in `before`, by address.

    Parts below `smallest` bytes are omitted. Both as `mappings` returns them.
    """
    old = sorted((each.start, each.end) for each in before if "w" in each.permissions)
    found = (part for each in after if each.is_plain for part in _subtract(each.start, each.end, old))
    return tuple(Region(start, end - start) for start, end in sorted(found) if end - start >= smallest)


def _subtract(start: int, end: int, taken: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of a span that the others do not cover; those are sorted and do not overlap."""
    for low, high in taken:
        if high <= start or low >= end:
            continue
        if low > start:
            yield start, low
        start = high
    if start < end:
        yield start, end
