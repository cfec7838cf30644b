"""CRIU's images of messages: their layout, which image has which messages, and their decoding.

    image  =  magic (u32, most have a common one before their own)  entry…
    entry  =  size (u32)  protobuf message  what follows it: data whose size the message says

Sources: lib/pycriu/images/images.py, criu/image-desc.c and criu/include/magic.h. pycriu decodes the messages.
Its `load` of a whole image cannot be used: it takes every size from the image, waits for what the image
promises, and makes dictionaries of everything. Images come from anywhere, so this module cuts them into
messages, with limits. Messages of pagemaps are decoded in pagemap.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpusnap.runtime_shim.base.errors import printable
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package

if TYPE_CHECKING:
    from gpusnap.oci.tar.compression import Readable

# The images that consist of messages, by their names without a number.
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

_COMMON, _SERVICE = 0x54564319, 0x55105940
# Bytes of a message; the largest are those of processes with many mappings, some MiB.
_LARGEST_MESSAGE = 64 << 20
# Bytes of a message that is decoded. A message may consist of empty ones, of two bytes each, and an object of
# each takes 140 bytes in C and 430 in Python. A process with 100,000 mappings has one as large.
_LARGEST_DECODED = 4 << 20
# Empty messages: one whose fields are all optional may be empty. Endless zeros are as many of them.
_MOST_EMPTY = 1000
_PIECE = 1 << 20
# Images for which pycriu has no handler of its own.
_PARTS = ("ghost_file_entry", "ghost_chunk_entry", "ipc_msg")


class Damage(Exception):
    """What is wrong with an image."""


def kind_of(name: str) -> str:
    """Return the kind of an image by its name: "core" for core-12.img; empty if it has no messages."""
    if not name.endswith(".img"):
        return ""
    stem = name.removesuffix(".img")
    return stem if stem in MAGIC else next((k for k in [stem.rpartition("-")[0]] if k in MAGIC), "")


def decode(message: bytes, kind: str) -> Any:
    """Decode a message of an image of this kind; return an object of pycriu's class.

    None if this pycriu does not know such a class, and for messages that are too large for objects. Absent
    fields have protobuf's defaults. `kind` may be the class itself, for a message that is a part of an image.
    Raises Damage, and Refused without pycriu.
    """
    pycriu = pycriu_package.load()
    if len(message) > _LARGEST_DECODED:
        return None
    read = getattr(pycriu.pb, kind).FromString if kind in _PARTS else pycriu.payloads.get(MAGIC[kind])
    if read is None:
        return None
    try:
        return read(message)
    except Exception as error:  # of protobuf's classes, which differ with its implementation
        said = printable(" ".join(str(error).split()))[:200]
        raise Damage(f"does not decode: {said}") from error


def decode_messages(content: Readable, size: int, kind: str) -> Iterator[Any]:
    """Yield the messages of an image of only messages. Raises Damage, and Refused without pycriu."""
    source = Source(content, size)
    source.begin(kind)
    while source.count_left:
        found = decode(source.message(), kind)
        if found is None:
            raise Damage("has a message that cannot be decoded")
        yield found


def encoded_head(kind: str) -> bytes:
    """Return the magic numbers at the start of an image (criu/image.c, img_write_magic)."""
    return struct.pack("<II", _COMMON, MAGIC[kind])


class Source:
    """The bytes of an image, in order. Everything raises Damage if it ends too early."""

    def __init__(self, content: Readable, size: int) -> None:
        self._content, self._unread = content, size
        self._buffer, self._at = b"", 0
        self._empty = 0

    @property
    def count_left(self) -> int:
        """The number of bytes that were not read yet."""
        return self._unread + len(self._buffer) - self._at

    def begin(self, kind: str) -> None:
        """Read the magic numbers, which must be those of this kind."""
        magic = self.number()
        if magic in (_COMMON, _SERVICE):
            magic = self.number()
        if magic != MAGIC[kind]:
            raise Damage("does not start like an image of that type")

    def read_exactly(self, size: int) -> bytes:
        """Return exactly `size` bytes."""
        end = self._at + size
        if end > len(self._buffer):
            self._fill(size)
            end = size
        piece = self._buffer[self._at : end]
        self._at = end
        return piece

    def _fill(self, size: int) -> None:
        """Read until the buffer contains `size` bytes; it may contain more."""
        pieces = [self._buffer[self._at :]]
        there = len(pieces[0])
        if size > there + self._unread:
            raise Damage("is cut short")
        while there < size:
            piece = self._content.read(min(max(size - there, _PIECE), self._unread))
            if not piece:
                raise Damage("is cut short")
            there += len(piece)
            self._unread -= len(piece)
            pieces.append(piece)
        self._buffer, self._at = b"".join(pieces), 0

    def number(self) -> int:
        """Read four bytes, least significant first."""
        return int.from_bytes(self.read_exactly(4), "little")

    def message(self) -> bytes:
        """Read the next message, without its size."""
        # A pagemap has some ten thousand, nearly all of them complete in the buffer.
        begin = self._at + 4
        size = int.from_bytes(self._buffer[self._at : begin], "little")
        end = begin + size
        if size and end <= len(self._buffer) and size <= _LARGEST_MESSAGE:
            self._at = end
            return self._buffer[begin:end]
        size = self.number()
        if size > _LARGEST_MESSAGE:
            raise Damage(f"has a message of {size} bytes")
        if not size:
            self._empty += 1
            if self._empty > _MOST_EMPTY:
                raise Damage("consists of zeros")
        return self.read_exactly(size)

    def skip(self, size: int) -> None:
        """Skip `size` bytes."""
        while size:
            size -= len(self.read_exactly(min(size, _PIECE)))
