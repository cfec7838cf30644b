"""CRIU's images as small as they can be, for tests that need an image directory or an archive of one."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpusnap.runtime_shim.runtime.criu.images.messages import encoded_head

__all__ = [
    "CORE",
    "INVENTORY",
    "PAGE",
    "encode_messages",
    "entry",
    "frozen_groups",
    "image",
    "images",
    "mm",
    "numbers",
    "pagemap",
    "varint",
]

PAGE = 4096
_COMMON = 0x54564319
MAGIC = {
    "inventory": 0x58313116,
    "core": 0x55053847,
    "mm": 0x57492820,
    "pagemap": 0x56084025,
    "pstree": 0x50273030,
    "pipes-data": 0x56453709,
    "tcp-stream": 0x51465506,
    "ipcns-shm": 0x46283044,
    "ipcns-sem": 0x59573019,
    "ipcns-msg": 0x55453737,
    "ghost-file": 0x52583605,
    "mountpoints": 0x55563928,
    "cgroup": 0x59383330,
    "files": 0x56303138,
    "fdinfo": 0x56213732,
}


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def numbers(*fields: tuple[int, int]) -> bytes:
    """A message of numbers, each by its field."""
    return b"".join(varint(field << 3) + varint(value) for field, value in fields)


def entry(message: bytes, follows: bytes = b"") -> bytes:
    """A message with its size, and what follows it."""
    return struct.pack("<I", len(message)) + message + follows


def encode_messages(messages: Iterable[Any], kind: str) -> bytes:
    """An image of these messages of pycriu's."""
    return encoded_head(kind) + b"".join(entry(each.SerializePartialToString()) for each in messages)


def image(kind: str, *entries: bytes) -> bytes:
    """An image of these entries."""
    head = b"" if kind == "inventory" else struct.pack("<I", _COMMON)
    return head + struct.pack("<I", MAGIC[kind]) + b"".join(entries)


INVENTORY = image("inventory", entry(numbers((1, 2))))
CORE = image("core", entry(numbers((1, 1))))


def pagemap(number: int, runs: Sequence[tuple[int, int, int]]) -> bytes:
    """A pagemap of pages-NUMBER.img: address, pages and flags of each run."""
    parts = [entry(numbers((1, at), (2, count), (4, flags))) for at, count, flags in runs]
    return image("pagemap", entry(numbers((1, number))), *parts)


def mm(*vmas: Sequence[tuple[int, int]]) -> bytes:
    """Those of a process' memory; of each mapping its fields and their numbers (criu/images/vma.proto)."""
    message = numbers(*((field, 1) for field in range(1, 13)))
    return image("mm", entry(message + b"".join(_part(14, numbers(*fields)) for fields in vmas)))


def images(pages: int = 3, *, pid: int = 1) -> Mapping[str, bytes]:
    """Those of one process with so many pages, in two runs, and one that is in no file."""
    runs = [(0x1000, 1, 4), (0x5000, 7, 0), (0x9000, pages - 1, 4)]
    return {
        "inventory.img": INVENTORY,
        "pstree.img": image("pstree", entry(numbers((1, pid), (2, 0), (3, pid), (4, pid), (5, pid)))),
        f"core-{pid}.img": CORE,
        f"mm-{pid}.img": image("mm", entry(numbers((1, 1)))),
        f"pagemap-{pid}.img": pagemap(1, runs),
        "pages-1.img": bytes(range(256)) * (PAGE // 256) * pages,
    }


def _group(*props: tuple[str, str], children: bytes = b"") -> bytes:
    """A control group with these properties (criu/images/cgroup.proto, cgroup_dir_entry)."""
    parts = [_part(3, _part(1, name.encode()) + _part(2, value.encode())) for name, value in props]
    return _part(1, b"/c") + children + b"".join(parts)


def _part(number: int, content: bytes) -> bytes:
    """A string or a message within a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def frozen_groups(state: str) -> bytes:
    """A group and one in it, both of this state, with properties of other names, and fields nobody knows."""
    others = [
        ("name", "FROZEN"),
        ("xfreezer.state", "FROZEN"),
        ("cgroup.freeze", "1"),
        ("freezer.state", "no"),
    ]
    inner = _group(("freezer.state", state), *others)
    outer = _group(("freezer.state", state), children=_part(2, inner)) + _part(900, b"FROZEN")
    return image("cgroup", entry(_part(2, _part(1, b"freezer") + _part(2, outer))))
