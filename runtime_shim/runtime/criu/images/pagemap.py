"""How many pages a pagemap lists: the one image whose messages are not decoded by pycriu.

CRIU 4.2 has put the number of pages into another field: with pycriu of 4.1, as a host has it whose CRIU was
built anew, each such message would be read as one of no pages. And a process may have hundreds of thousands
of runs of pages, each with a message of its own, which are counted before every restore: where protobuf has
no part in C, pycriu takes five times as long for that (bench/image_reading.py; docs/how-it-works.md has the
figures). So the four numbers that such a message consists of are read here, of old images and new.

    pagemap_entry  =  vaddr (1)  nr_pages (2; 0 in those that have 5)  in_parent (3)  flags (4)  nr_pages (5)

From images/pagemap.proto, of 4.1 and of 4.2, and criu/pagemap.c, init_compat_pagemap_entry; the encoding is
protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, Source

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
