"""Reads pagemaps: the only images whose messages pycriu does not decode.

CRIU 4.2 has put the number of pages into another field. pycriu 4.1, on a host whose CRIU was built anew,
would read each such message as one without pages. And a process may have hundreds of thousands of runs of
pages, each with a message of its own, which are counted before every restore. If protobuf has no C part,
pycriu takes five times as long for that (bench/image_reading.py; docs/how-it-works.md has the figures). So
this module reads the four numbers of such a message, of old images and new.

    pagemap_entry  =  vaddr (1)  nr_pages (2; 0 in those that have 5)  in_parent (3)  flags (4)  nr_pages (5)

From images/pagemap.proto, of 4.1 and of 4.2, and criu/pagemap.c, init_compat_pagemap_entry; the encoding is
protobuf.dev/programming-guides/encoding.

The pages of a run are in pages-N.img after those of all earlier runs that are present there (criu/pagemap.c,
skip_pagemap_pages). So a pagemap that lacks some of the runs needs another such file, which lacks their
pages: `split`.
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
# The address, if a message begins with it: a key and a number of at most ten bytes.
_ADDRESS = compile_later(rb"\x08[\x80-\xff]{0,9}[\x00-\x7f]")


@dataclass(frozen=True, slots=True)
class Pagemap:
    """What a pagemap says about the file with its pages."""

    pages: int
    """The number of its pages-N.img."""
    present: int
    """Pages in that file."""
    in_parent: int
    """Pages in an earlier dump."""


def read(source: Source) -> Pagemap:
    """Read the messages of a pagemap, after its magic numbers. Raises Damage."""
    number = _read_numbers(source.message())[1] or 0
    # Everything except the address is the same in most messages.
    known: dict[bytes, tuple[int, int]] = {}
    present = in_parent = 0
    while source.count_left:
        message = source.message()
        address = _ADDRESS.match(message)
        rest = message[address.end() :] if address is not None else message
        counts = known.get(rest)
        if counts is None:
            counts = _count_pages(message)
            if len(known) < _MOST_KNOWN:
                known[rest] = counts
        present += counts[0]
        in_parent += counts[1]
    return Pagemap(number, present, in_parent)


def locate(source: Source, address: int) -> tuple[int, int, int] | None:
    """Find the page with an address: the number of its pages-N.img, the offset there, and the bytes after it.

    These are the following bytes of the same run. None if the page is in no file, or in that of an earlier
    dump. Pages are those of x86-64. Raises Damage.
    """
    number, before = _read_numbers(source.message())[1] or 0, 0
    while source.count_left:
        message = source.message()
        start, (present, in_parent) = _read_numbers(message)[1] or 0, _count_pages(message)
        end = start + max(present, in_parent) * _PAGE
        if start <= address < end:
            return (number, before * _PAGE + address - start, end - address) if present else None
        before += present
    return None


@dataclass(frozen=True, slots=True)
class Split:
    """A pagemap in two parts: one for CRIU, and one that is taken out."""

    image: bytes
    """The pagemap that CRIU is to restore."""
    kept: Sequence[tuple[int, int]]
    """The content of its pages file, in order: offset and size in the original pages file."""
    taken: Sequence[tuple[int, int, int]]
    """Address, offset in the original pages file, and size of each piece that is taken out."""
    pages: int
    """The number of pages in the original pages file."""


def read_number(source: Source) -> int:
    """Read the number of its pages-N.img. Raises Damage."""
    return _read_numbers(source.message())[1] or 0


def split(source: Source, spans: Sequence[tuple[int, int]], *, number: int, smallest: int) -> Split | None:
    """Take the pages in some spans of addresses out of a pagemap, after its magic numbers.

    `spans`: sorted, of whole pages of x86-64, without overlap. At least `smallest` bytes of a run are taken,
    or none. `number`: of the pages file that CRIU is to read. None if pages are in an earlier dump, and if
    runs are not sorted, overlap or contain no whole page: CRIU must judge those. At least one run is kept, or
    None: CRIU does not restore from an empty pagemap. Raises Damage.
    """
    source.message()
    starts = [start for start, _ in spans]
    parts = [_frame(_encode((1, number)))]
    kept: list[tuple[int, int]] = []
    taken: list[tuple[int, int, int]] = []
    known: dict[bytes, tuple[int, int]] = {}
    offset = end = 0
    while source.count_left:
        message = source.message()
        address = _ADDRESS.match(message)
        if address is None:
            return None
        start, rest = _read_varint(message, 1)[0], message[address.end() :]
        counts = known.get(rest)
        if counts is None:
            counts = _count_pages(message)
            if len(known) < _MOST_KNOWN:
                known[rest] = counts
        present, in_parent = counts
        if in_parent or start % _PAGE or start < end:
            return None
        if not present:
            parts.append(_frame(message))
            end = start + _count(message) * _PAGE
            continue
        end = start + present * _PAGE
        cuts = [
            (max(low, start), min(high, end))
            for low, high in spans[max(0, bisect_right(starts, start) - 1) : bisect_right(starts, end - 1)]
            if min(high, end) - max(low, start) >= smallest
        ]
        if not cuts:
            parts.append(_frame(message))
            kept.append((offset, end - start))
        at = start
        for low, high in cuts:
            if low > at:
                parts.append(_frame(_make_piece(message, at, low)))
                kept.append((offset + at - start, low - at))
            taken.append((low, offset + low - start, high - low))
            at = high
        if cuts and at < end:
            parts.append(_frame(_make_piece(message, at, end)))
            kept.append((offset + at - start, end - at))
        offset += end - start
    if not kept or not taken:
        return None
    return Split(encoded_head("pagemap") + b"".join(parts), kept, taken, offset // _PAGE)


def _count(message: bytes) -> int:
    """Return the number of pages of a run, wherever they are."""
    found = _read_numbers(message)
    return (found[2] or 0) if found[5] is None else found[5]


def _make_piece(message: bytes, start: int, end: int) -> bytes:
    """Return the message of a part of a run, in the format of the CRIU that wrote the run."""
    _, _, _, was_in_parent, flags, count = _read_numbers(message)
    pages = (end - start) // _PAGE
    fields = [(1, start), (2, pages if count is None else 0), (3, was_in_parent), (4, flags)]
    if count is not None:
        fields.append((5, pages))
    return _encode(*fields)


def _encode(*fields: tuple[int, int | None]) -> bytes:
    """Encode a message of numbers, each by its field; None is omitted."""
    return b"".join(
        _as_varint(field << 3) + _as_varint(number) for field, number in fields if number is not None
    )


def _as_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _frame(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def _count_pages(message: bytes) -> tuple[int, int]:
    """Return how many pages of a run are in the file, and how many are in an earlier dump."""
    _, _, old_count, was_in_parent, flags, count = _read_numbers(message)
    # criu/pagemap.c, init_compat_pagemap_entry: images of older versions have no flags.
    if flags is None:
        flags = 0 if was_in_parent else _PRESENT
    if count is None:
        count = old_count or 0
    return count if flags & _PRESENT else 0, count if was_in_parent or flags & _IN_PARENT else 0


def _read_numbers(message: bytes) -> list[int | None]:
    """Return the first fields of a message, by their numbers; None for absent ones."""
    found: list[int | None] = [None] * _FIELDS
    at, end = 0, len(message)
    try:
        while at < end:
            key = message[at]
            at += 1
            if key & 0x80:
                key, at = _read_varint(message, at - 1)
            wire = key & 7
            if wire == 0:
                value = message[at]
                at += 1
                if value & 0x80:
                    value, at = _read_varint(message, at - 1)
                if key >> 3 < _FIELDS:
                    found[key >> 3] = value
            elif wire == 2:
                size, at = _read_varint(message, at)
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


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number of at most ten bytes; return it and where it ends."""
    value = shift = 0
    while shift <= 63:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
    raise Damage("does not decode: a number has more than ten bytes")
