"""What a pagemap lists: the one image whose messages are not decoded by pycriu.

CRIU 4.2 has put the number of pages into another field: with pycriu of 4.1, as a host has it whose CRIU was
built anew, each such message would be read as one of no pages. And a process may have hundreds of thousands
of runs of pages, each with a message of its own, which are counted before every restore: where protobuf has
no part in C, pycriu takes five times as long for that (bench/image_reading.py; docs/how-it-works.md has the
figures). So the four numbers that such a message consists of are read here, of old images and new.

    pagemap_entry  =  vaddr (1)  nr_pages (2; 0 in those that have 5)  in_parent (3)  flags (4)  nr_pages (5)

From images/pagemap.proto, of 4.1 and of 4.2, and criu/pagemap.c, init_compat_pagemap_entry; the encoding is
protobuf.dev/programming-guides/encoding.

The pages of a run are in pages-N.img behind those of all runs before it that are present there
(criu/pagemap.c, skip_pagemap_pages). So a pagemap that lacks some of the runs needs another such file, which
lacks their pages: `split`.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, Source, encoded_head

# criu/include/pagemap.h
_IN_PARENT, _PRESENT = 1 << 0, 1 << 2
_FIELDS = 6
_MOST_KNOWN = 10_000
_PAGE = 4096
# The address, where a message begins with it: a key and a number of at most ten bytes.
_ADDRESS = compile_later(rb"\x08[\x80-\xff]{0,9}[\x00-\x7f]")


@dataclass(frozen=True, slots=True)
class Pagemap:
    """What a pagemap says of the file that its pages are in."""

    pages: int
    """The number of its pages-N.img."""
    present: int
    """Pages that are in it."""
    in_parent: int
    """Pages that are in an earlier dump."""


def read(source: Source) -> Pagemap:
    """Read the messages of a pagemap, behind its magic numbers. Raises Damage."""
    number = _numbers(source.message())[1] or 0
    # All but the address is the same in most messages.
    known: dict[bytes, tuple[int, int]] = {}
    present = in_parent = 0
    while source.count_left:
        message = source.message()
        address = _ADDRESS.match(message)
        rest = message[address.end() :] if address is not None else message
        counts = known.get(rest)
        if counts is None:
            counts = _counts(message)
            if len(known) < _MOST_KNOWN:
                known[rest] = counts
        present += counts[0]
        in_parent += counts[1]
    return Pagemap(number, present, in_parent)


def locate(source: Source, address: int) -> tuple[int, int, int] | None:
    """Where the page with an address is: the number of its pages-N.img, the offset there, and what follows.

    That is how many bytes of the same run follow. None where the page is in no file, or in that of an earlier
    dump. Pages are those of x86-64. Raises Damage.
    """
    number, before = _numbers(source.message())[1] or 0, 0
    while source.count_left:
        message = source.message()
        start, (present, in_parent) = _numbers(message)[1] or 0, _counts(message)
        end = start + max(present, in_parent) * _PAGE
        if start <= address < end:
            return (number, before * _PAGE + address - start, end - address) if present else None
        before += present
    return None


@dataclass(frozen=True, slots=True)
class Split:
    """A pagemap in two: what CRIU is to restore, and what is taken out."""

    image: bytes
    """The pagemap of what CRIU is to restore."""
    kept: Sequence[tuple[int, int]]
    """Offset and size of what is in its pages file, in this order, in the pages file of all."""
    taken: Sequence[tuple[int, int, int]]
    """Address, offset in the pages file of all, and size of each piece that is taken out."""
    pages: int
    """Of all, in the pages file."""


def read_number(source: Source) -> int:
    """The number of its pages-N.img. Raises Damage."""
    return _numbers(source.message())[1] or 0


def split(source: Source, spans: Sequence[tuple[int, int]], *, number: int, smallest: int) -> Split | None:
    """Take out of a pagemap, behind its magic numbers, what lies in some spans of addresses.

    `spans`: sorted, of whole pages of x86-64, none overlaps another. Of a run at least `smallest` bytes are
    taken, or none. `number`: of the pages file that CRIU is to read. None where pages are in an earlier dump,
    and where runs are not sorted, overlap one another or are of no whole page: CRIU shall judge those. At
    least one run is kept, or None: CRIU does not restore from a pagemap without any. Raises Damage.
    """
    source.message()
    starts = [start for start, _ in spans]
    parts = [_framed(_encoded((1, number)))]
    kept: list[tuple[int, int]] = []
    taken: list[tuple[int, int, int]] = []
    known: dict[bytes, tuple[int, int]] = {}
    offset = end = 0
    while source.count_left:
        message = source.message()
        address = _ADDRESS.match(message)
        if address is None:
            return None
        start, rest = _varint(message, 1)[0], message[address.end() :]
        counts = known.get(rest)
        if counts is None:
            counts = _counts(message)
            if len(known) < _MOST_KNOWN:
                known[rest] = counts
        present, in_parent = counts
        if in_parent or start % _PAGE or start < end:
            return None
        if not present:
            parts.append(_framed(message))
            end = start + _count(message) * _PAGE
            continue
        end = start + present * _PAGE
        cuts = [
            (max(low, start), min(high, end))
            for low, high in spans[max(0, bisect_right(starts, start) - 1) : bisect_right(starts, end - 1)]
            if min(high, end) - max(low, start) >= smallest
        ]
        if not cuts:
            parts.append(_framed(message))
            kept.append((offset, end - start))
        at = start
        for low, high in cuts:
            if low > at:
                parts.append(_framed(_piece(message, at, low)))
                kept.append((offset + at - start, low - at))
            taken.append((low, offset + low - start, high - low))
            at = high
        if cuts and at < end:
            parts.append(_framed(_piece(message, at, end)))
            kept.append((offset + at - start, end - at))
        offset += end - start
    if not kept or not taken:
        return None
    return Split(encoded_head("pagemap") + b"".join(parts), kept, taken, offset // _PAGE)


def _count(message: bytes) -> int:
    """How many pages a run has, wherever they are."""
    found = _numbers(message)
    return (found[2] or 0) if found[5] is None else found[5]


def _piece(message: bytes, start: int, end: int) -> bytes:
    """The message of a part of a run, as the CRIU that wrote the run writes one."""
    _, _, _, was_in_parent, flags, count = _numbers(message)
    pages = (end - start) // _PAGE
    fields = [(1, start), (2, pages if count is None else 0), (3, was_in_parent), (4, flags)]
    if count is not None:
        fields.append((5, pages))
    return _encoded(*fields)


def _encoded(*fields: tuple[int, int | None]) -> bytes:
    """A message of numbers, each by its field; those that are None are left out."""
    return b"".join(
        _as_varint(field << 3) + _as_varint(number) for field, number in fields if number is not None
    )


def _as_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def _counts(message: bytes) -> tuple[int, int]:
    """How many pages of a run are in the file, and how many are in an earlier dump."""
    _, _, old_count, was_in_parent, flags, count = _numbers(message)
    # criu/pagemap.c, init_compat_pagemap_entry: images of older versions have no flags.
    if flags is None:
        flags = 0 if was_in_parent else _PRESENT
    if count is None:
        count = old_count or 0
    return count if flags & _PRESENT else 0, count if was_in_parent or flags & _IN_PARENT else 0


def _numbers(message: bytes) -> list[int | None]:
    """The first fields of a message, by their numbers; None for those that it does not have."""
    found: list[int | None] = [None] * _FIELDS
    at, end = 0, len(message)
    try:
        while at < end:
            key = message[at]
            at += 1
            if key & 0x80:
                key, at = _varint(message, at - 1)
            wire = key & 7
            if wire == 0:
                value = message[at]
                at += 1
                if value & 0x80:
                    value, at = _varint(message, at - 1)
                if key >> 3 < _FIELDS:
                    found[key >> 3] = value
            elif wire == 2:
                size, at = _varint(message, at)
                at += size
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            else:
                raise Damage("does not decode: a field has an unknown type")
    except IndexError:
        raise Damage("does not decode: a number extends beyond its message") from None
    if at > end:
        raise Damage("does not decode: a field extends beyond its message")
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of at most ten bytes, and where it ends."""
    value = shift = 0
    while shift <= 63:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
    raise Damage("does not decode: a number has more than ten bytes")
