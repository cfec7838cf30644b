"""The messages that CRIU's images consist of: which image has which, and the numbers in one.

They are decoded by pycriu where this Python has it; their fields of numbers, which are all that is needed to
find one's way through an image, are read without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

# Of the images that consist of messages, by their names without a number.
MAGIC: Mapping[str, int] = {
    "apparmor": 0x59423047,
    "autofs": 0x49353943,
    "binfmt-misc": 0x67343323,
    "bpfmap-data": 0x64324033,
    "bpfmap-file": 0x57506142,
    "cgroup": 0x59383330,
    "core": 0x55053847,
    "cpuinfo": 0x61404013,
    "creds": 0x54023547,
    "eventfd": 0x44523722,
    "eventpoll": 0x45023858,
    "eventpoll-tfd": 0x44433746,
    "ext-files": 0x59255641,
    "fanotify": 0x55096122,
    "fanotify-mark": 0x56506035,
    "fdinfo": 0x56213732,
    "fifo": 0x58364939,
    "fifo-data": 0x59333054,
    "filelocks": 0x54323616,
    "files": 0x56303138,
    "fs": 0x51403912,
    "ghost-file": 0x52583605,
    "ids": 0x54432030,
    "inetsk": 0x56443851,
    "inotify": 0x48424431,
    "inotify-wd": 0x54562009,
    "inventory": 0x58313116,
    "ipcns-msg": 0x55453737,
    "ipcns-sem": 0x59573019,
    "ipcns-shm": 0x46283044,
    "ipcns-var": 0x53115007,
    "itimers": 0x57464056,
    "memfd": 0x48453499,
    "mm": 0x57492820,
    "mountpoints": 0x55563928,
    "netdev": 0x57373951,
    "netlinksk": 0x58005614,
    "netns": 0x55933752,
    "ns-files": 0x61394011,
    "packetsk": 0x60454618,
    "pagemap": 0x56084025,
    "pagemap-shmem": 0x56084025,
    "pidfd": 0x54435556,
    "pidns": 0x61157326,
    "pipes": 0x56513555,
    "pipes-data": 0x56453709,
    "posix-timers": 0x52603957,
    "pstree": 0x50273030,
    "reg-files": 0x50363636,
    "remap-fpath": 0x59133954,
    "rlimit": 0x57113925,
    "seccomp": 0x64413049,
    "sigacts": 0x55344201,
    "signal-p": 0x59255647,
    "signal-s": 0x59255647,
    "signalfd": 0x57323820,
    "sk-queues": 0x56264026,
    "tcp-stream": 0x51465506,
    "timens": 0x43114433,
    "timerfd": 0x50493712,
    "tty": 0x59433025,
    "tty-data": 0x59413026,
    "tty-info": 0x59453036,
    "tunfile": 0x57143751,
    "unixsk": 0x54373943,
    "userns": 0x55474906,
    "utsns": 0x54473203,
    "vmas": 0x54123737,
}
Fields = dict[int, int]
"""The numbers of a message by field."""


_HIGHEST = 32


class Damage(Exception):
    """What is wrong with an image."""


def kind_of(name: str) -> str:
    """What an image is by its name: "core" for core-12.img; empty for what is no image of messages."""
    if not name.endswith(".img"):
        return ""
    stem = name.removesuffix(".img")
    return stem if stem in MAGIC else next((k for k in [stem.rpartition("-")[0]] if k in MAGIC), "")


def fields(message: bytes, kind: str) -> tuple[Fields, list[int]]:
    """The numbers in a protobuf message by field, the last of each, and all of field 5; no high fields.

    From protobuf.dev/programming-guides/encoding: varints, fixed numbers, and what has a length.
    """
    decode = _decoders().get(kind)
    if decode is not None:
        try:
            decode(message)
        except Exception as error:  # of protobuf's, which is not ours to import
            raise Damage(f"does not decode: {error}") from error
    found: Fields = {}
    fifth: list[int] = []
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            number, at = _varint(message, at)
            if field <= _HIGHEST:  # there may be millions of others
                found[field] = number
            if field == 5 and kind == "pstree":
                fifth.append(number)
        elif wire == 2:
            size, at = _varint(message, at)
            if field == 5:
                fifth += _packed(message[at : at + size], kind)
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise Damage("does not decode: a field has no known type")
        if at > len(message):
            raise Damage("does not decode: a field goes on beyond its message")
    return found, fifth


def _packed(data: bytes, kind: str) -> list[int]:
    """The numbers of a repeated field in its short form."""
    found: list[int] = []
    at = 0
    while kind == "pstree" and at < len(data):
        number, at = _varint(data, at)
        found.append(number)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Damage("does not decode: a number goes on beyond its message")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7


@functools.cache
def _decoders() -> Mapping[str, Callable[[bytes], object]]:
    """pycriu's decoder of each kind of message; none where this Python has no pycriu that can be imported."""
    try:
        from pycriu.images import images, magic, pb  # type: ignore[import-not-found, unused-ignore]
    except Exception:  # missing, or protobuf refuses what was generated for another version of it
        return {}
    found: dict[str, Callable[[bytes], object]] = {}
    for kind, number in MAGIC.items():
        payload: Any = getattr(images.handlers.get(magic.by_val.get(number)), "payload", None)
        if payload is not None:
            found[kind] = payload.FromString
    for name in ("pagemap_head", "pagemap_entry", "ghost_file_entry", "ghost_chunk_entry", "ipc_msg"):
        if hasattr(pb, name):
            found[name] = getattr(pb, name).FromString
    return found
