"""CRIU's image of the container's /dev, with other GPU nodes in it.

A tmpfs is dumped by `tar --create --gzip --no-unquote --no-wildcards --one-file-system --check-links
--preserve-permissions --sparse --numeric-owner --directory … .` into tmpfs-dev-NUMBER.tar.gz.img; NUMBER is
the kernel's own number of the file system's device. A restore gives the file to `tar --extract --gzip
--no-unquote --no-wildcards` (criu/filesystems.c, tmpfs_dump and tmpfs_restore; criu/image-desc.c). So a node
is an entry such as ./nvidia0, of type 3 (tar(5)), with its major and minor number.

The archive may come from anywhere, and GNU tar would make as root whatever it names. So it is read in one
way only, the strict one: an entry that two programs may read differently is refused, and so is a device that
nobody gave the container. It is read as a stream; no more than a piece of it is held in memory.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, NoReturn

from runtime_shim.errors import ImageError, reason
from runtime_shim.gpu.nodes import Change, Node

__all__ = ["DEFAULT", "ENTRIES", "LIMIT", "Device", "image_name", "rewritten"]

Device = tuple[str, int, int, str]
"""A device that /dev may hold: "c" or "b", major, minor, path."""

DEFAULT: tuple[Device, ...] = (
    ("c", 1, 3, "/dev/null"),
    ("c", 1, 5, "/dev/zero"),
    ("c", 1, 7, "/dev/full"),
    ("c", 1, 8, "/dev/random"),
    ("c", 1, 9, "/dev/urandom"),
    ("c", 5, 0, "/dev/tty"),
    ("c", 5, 2, "/dev/ptmx"),
)
"""What every container has (runtime-spec, config-linux.md, Default Devices); the numbers are those of
Documentation/admin-guide/devices.txt. /dev/console is not among them: in a container it is a terminal of its
own, mounted on an empty file, and a node 5:1 would be this host's console."""

LIMIT = 256 << 20
"""Bytes of the tar, and of its compressed form; Podman's /dev is a tmpfs of 64 MiB."""
ENTRIES = 65536
"""Headers in the tar."""

_BLOCK = 512
_PIECE = 64 << 10
_ZEROS = bytes(_BLOCK)
_EXTENSION = 4096  # bytes of a long name (PATH_MAX of linux/limits.h) or of a pax header

# Fields of a header (tar(5), POSIX ustar and GNU): offset and end.
_NAME, _SIZE, _SUM, _TYPE, _LINK, _MAGIC = (0, 100), (124, 136), (148, 156), 156, (157, 257), (257, 265)
_MAJOR, _MINOR, _PREFIX = (329, 337), (337, 345), (345, 500)
_USTAR, _GNU = b"ustar\x0000", b"ustar  \x00"
_MAP, _MAP_GOES_ON, _REAL_SIZE = (386, 482), 482, (483, 495)  # of a file with holes, as GNU tar writes it
_MORE_MAP, _MORE_MAP_GOES_ON = (0, 504), 504
_OCTAL = re.compile(rb" *([0-7]+)[ \0]*")
# Entries that tar makes from a header alone or from content of the header's size.
_FILE, _HARD, _SOFT, _CHARACTER, _BLOCK_DEVICE, _FOLDER, _FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
_KINDS = {b"\0": _FILE, b"7": _FILE, b"S": _FILE} | {
    kind: kind for kind in (_FILE, _HARD, _SOFT, _CHARACTER, _BLOCK_DEVICE, _FOLDER, _FIFO)
}
_LONG_NAME, _LONG_LINK, _PAX, _HOLES = b"L", b"K", b"x", b"S"
# A pax record that changes no more than a time (pax(1), "pax Extended Header").
_TIMES = re.compile(rb"(\d{1,4}) (?:[amc]time|LIBARCHIVE\.creationtime)=-?\d{1,20}(?:\.\d{1,20})?\n")


@dataclass(frozen=True, slots=True)
class _Entry:
    before: bytes
    """Extension headers with their content."""
    header: bytes
    name: bytes
    """Without ./ in front; empty for the folder itself."""
    kind: bytes
    size: int
    link: bytes

    @property
    def device(self) -> bool:
        return self.kind in (_CHARACTER, _BLOCK_DEVICE)

    @property
    def numbers(self) -> tuple[int, int]:
        return _number(self.header, _MAJOR, self.name), _number(self.header, _MINOR, self.name)


def image_name(device: int) -> str:
    """The image's name of a tmpfs with this st_dev.

    CRIU names it by the kernel's number of a device, 20 bits of which are the minor (linux/kdev_t.h, MKDEV).
    """
    # The C library keeps the bits in another order (sys/sysmacros.h).
    major = device >> 8 & 0xFFF | device >> 32 & ~0xFFF
    minor = device & 0xFF | device >> 12 & ~0xFF
    return f"tmpfs-dev-{major << 20 | minor}.tar.gz.img"


def rewritten(
    image: bytes | IO[bytes], changes: Sequence[Change] = (), allowed: Iterable[Node | Device] = ()
) -> bytes | None:
    """The image with each change's old node replaced by its new ones; None where that changes nothing.

    All changes are made at once, so two nodes may trade places. Of a changed node's header only name, numbers
    and checksum are new; its second name is a copy of that, right behind. All else of the tar stays byte for
    byte. An empty file in a changed node's place is what a bind mount lies on, and stays.

    `allowed`: the devices that /dev may hold beside `DEFAULT` and the changed ones. Raises ImageError, by the
    entry's name, for anything else, and for an archive that is damaged, that is larger than `LIMIT`, or that
    GNU tar could read otherwise than this.
    """
    plain = _Plain(io.BytesIO(image) if isinstance(image, bytes) else image)
    rules = _Rules(changes, allowed)
    packer = zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # gzip, without a time
    packed: list[bytes] = []
    changed = False

    def put(data: bytes) -> None:
        if changes:
            packed.append(packer.compress(data))

    for entry in _entries(plain):
        headers = rules.judged(entry)
        changed = changed or headers != [entry.header]
        if headers:
            put(entry.before)
        for header in headers:
            put(header)
        for piece in plain.pieces(_padded(entry.size)):
            put(piece)
    for piece in plain.zeros():
        put(piece)
    return b"".join([*packed, packer.flush()]) if changed else None


class _Rules:
    """What may be in the archive, and what has been."""

    def __init__(self, changes: Sequence[Change], allowed: Iterable[Node | Device]) -> None:
        self._new: dict[bytes, tuple[Node, ...]] = {}
        self._old: dict[bytes, Node] = {}
        self._kinds: dict[bytes, bytes] = {}
        """Kind by name, as the archive came; folders that are named only by what lies in them, too."""
        self._implied: set[bytes] = set()
        self._after: set[bytes] = set()
        for change in changes:
            name = _below_dev(change.old.path)
            if name in self._old:
                _refuse(name, "is to be changed twice")
            self._old[name], self._new[name] = change.old, change.new
        nodes = [("c", n.major, n.minor, n.path) if isinstance(n, Node) else n for n in allowed]
        self._allowed = {
            (
                _CHARACTER if kind == "c" else _BLOCK_DEVICE,
                (major, minor),
                path.removeprefix("/dev/").encode(),
            )
            for kind, major, minor, path in (*DEFAULT, *nodes)
        }

    def judged(self, entry: _Entry) -> list[bytes]:
        """The headers that stand for the entry. Raises ImageError where it must not be there."""
        self._place(entry)
        if entry.kind == _HARD:
            self._hard_link(entry)
        if entry.name in self._old:
            return self._changed(entry)
        if entry.device and (entry.kind, entry.numbers, entry.name) not in self._allowed:
            major, minor = entry.numbers
            _refuse(entry.name, f"is a device ({major}:{minor}) that nothing gives the container")
        self._take(entry.name)
        return [entry.header]

    def _changed(self, entry: _Entry) -> list[bytes]:
        if entry.kind == _FILE and not entry.size:
            self._take(entry.name)
            return [entry.header]
        old, new = self._old[entry.name], self._new[entry.name]
        if entry.kind != _CHARACTER:
            _refuse(entry.name, "has the name of a GPU's device, and is none")
        if entry.numbers != (old.major, old.minor):
            major, minor = entry.numbers
            _refuse(entry.name, f"is {major}:{minor}, and the GPU's device was {old.major}:{old.minor}")
        for node in new:
            self._take(_below_dev(node.path))
        return [_renamed(entry.header, node) for node in new]

    def _place(self, entry: _Entry) -> None:
        """Note where the entry lies: not on another one, and not behind a link."""
        name = entry.name
        if not name and entry.kind != _FOLDER:
            _refuse(name, "is no folder")
        if name in self._kinds and not (name in self._implied and entry.kind == _FOLDER):
            _refuse(name, "is there twice")
        self._implied.discard(name)
        self._kinds[name] = entry.kind
        while b"/" in name:
            name = name.rpartition(b"/")[0]
            if name not in self._kinds:
                self._implied.add(name)
            if self._kinds.setdefault(name, _FOLDER) != _FOLDER:
                _refuse(entry.name, "lies in what is no folder")
            if len(self._kinds) > ENTRIES:
                raise _damaged(f"has more than {ENTRIES} entries")

    def _hard_link(self, entry: _Entry) -> None:
        if self._kinds.get(_normal(entry.link)) not in (_FILE, _SOFT, _FIFO):
            _refuse(entry.name, f"is a hard link to {_shown(entry.link)}, which is no file in it")

    def _take(self, name: bytes) -> None:
        """Give a name to what comes out; none is given twice."""
        if name in self._after:
            _refuse(name, "would be there twice")
        self._after.add(name)


def _renamed(header: bytes, node: Node) -> bytes:
    """The header with the name and numbers of `node`, and the checksum that belongs to it."""
    name = b"./" + _below_dev(node.path)
    fields = f"{node.major:07o}\0{node.minor:07o}\0".encode()
    if len(name) > _NAME[1] or len(fields) != _MINOR[1] - _MAJOR[0]:
        _refuse(name, "cannot be named in a tar header")
    new = name.ljust(_NAME[1], b"\0") + header[_NAME[1] : _MAJOR[0]] + fields + header[_MINOR[1] :]
    return new[: _SUM[0]] + f"{_checksum(new):06o}\0 ".encode() + new[_SUM[1] :]


def _entries(plain: _Plain) -> Iterator[_Entry]:
    """The entries up to the first block of zeros; the caller has read each one's content before the next."""
    count = 0
    before: dict[bytes, bytes] = {}
    extensions = b""
    while (header := plain.take(_BLOCK)) != _ZEROS:
        count += 1
        if count > ENTRIES:
            raise _damaged(f"has more than {ENTRIES} entries")
        name = _header_name(header)
        kind, size = header[_TYPE : _TYPE + 1], _number(header, _SIZE, name)
        if kind in (_LONG_NAME, _LONG_LINK, _PAX):
            if kind in before or size > _EXTENSION:
                _refuse(name, "has a header that tar does not write")
            content = plain.take(_padded(size))
            before[kind] = content[:size]
            extensions += header + content
            continue
        if kind == _HOLES:
            header += _map(header, plain, name, size)
        yield _entry(header, name, size, before, extensions)
        before, extensions = {}, b""
    if before:
        raise _damaged("ends in the middle of an entry")


def _entry(header: bytes, name: bytes, size: int, before: dict[bytes, bytes], extensions: bytes) -> _Entry:
    long_name, long_link = before.get(_LONG_NAME), before.get(_LONG_LINK)
    link = _string(header, _LINK)
    if long_name is not None:
        name = _long(long_name, name)
    if long_link is not None:
        link = _long(long_link, name)
    kind = _KINDS.get(header[_TYPE : _TYPE + 1])
    if kind is None:
        _refuse(name, "is of a kind that has no place in /dev")
    if kind != _FILE and size:
        _refuse(name, "has content, and is no file")
    if kind == _FILE and name.endswith(b"/"):
        _refuse(name, "is a file with the name of a folder")  # to tar it is one
    if not _only_times(before.get(_PAX, b"")):
        _refuse(name, "has a pax header that says more than times")
    found = _Entry(extensions, header, _normal(name), kind, size, link)
    if found.device:
        field = header[slice(*_NAME)]
        plain_name = all(0x20 < byte < 0x7F for byte in name) and field.rstrip(b"\0") == name
        if long_name is not None or long_link is not None or not plain_name:
            _refuse(name, "is a device whose name is none for a device")
        found.numbers  # noqa: B018 - refused here where they are none
    return found


def _header_name(header: bytes) -> bytes:
    """The name in a header, once that is one at all."""
    name = _string(header, _NAME)
    if _number(header, _SUM, name) != _checksum(header):
        _refuse(name, "has a wrong checksum")
    magic, prefix = header[slice(*_MAGIC)], _string(header, _PREFIX)
    if magic not in (_USTAR, _GNU):
        _refuse(name, "has a header of a kind that tar does not write")
    return prefix + b"/" + name if prefix and magic == _USTAR else name


def _map(header: bytes, plain: _Plain, name: bytes, size: int) -> bytes:
    """The blocks behind the header of a file with holes, once its map fits the content (tar(5), "Old GNU").

    Each piece of data fills whole blocks; the last one may end earlier.
    """
    real, found, length = _number(header, _REAL_SIZE, name), 0, 0
    slots, goes_on, blocks = header[slice(*_MAP)], header[_MAP_GOES_ON], b""
    while True:
        for at in range(0, len(slots), 24):
            if not slots[at + 12]:  # the map ends here
                if slots[at:].strip(b"\0") or goes_on:
                    _refuse(name, "has a map of its holes that tar does not write")
                break
            start = _number(slots, (at, at + 12), name)
            piece = _number(slots, (at + 12, at + 24), name)
            if (length % _BLOCK and piece) or start < found:
                _refuse(name, "has a map of its holes that tar does not write")
            found, length = start + piece, length + piece
        if not goes_on:
            break
        if len(blocks) >= _EXTENSION * _BLOCK:
            _refuse(name, "has too many holes")
        block = plain.take(_BLOCK)
        blocks += block
        slots, goes_on = block[slice(*_MORE_MAP)], block[_MORE_MAP_GOES_ON]
    if length != size or found > real or header[slice(*_MAGIC)] != _GNU:
        _refuse(name, "has a map of its holes that does not fit its content")
    return blocks


def _only_times(records: bytes) -> bool:
    """Whether a pax header says only when something was changed."""
    while records:
        match = _TIMES.match(records)
        if not match or int(match[1]) != len(match[0]):
            return False
        records = records[match.end() :]
    return True


def _long(content: bytes, name: bytes) -> bytes:
    """A name from a header of its own: one string with its end."""
    if content[-1:] != b"\0" or b"\0" in content[:-1] or len(content) < 2:
        _refuse(name, "has a long name that tar does not write")
    return content[:-1]


def _string(header: bytes, field: tuple[int, int]) -> bytes:
    return header[slice(*field)].partition(b"\0")[0]


def _number(header: bytes, field: tuple[int, int], name: bytes) -> int:
    match = _OCTAL.fullmatch(header, *field)
    if match is None:
        _refuse(name, "has a number that is none")
    return int(match[1], 8)


def _checksum(header: bytes) -> int:
    """Of all bytes, those of the checksum itself counted as blanks (tar(5))."""
    return sum(header) - sum(header[slice(*_SUM)]) + 8 * ord(" ")


def _normal(name: bytes) -> bytes:
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts:
        _refuse(name, "leads out of /dev")
    return b"/".join(parts)


def _below_dev(path: str) -> bytes:
    name = path.encode("utf-8", "surrogateescape")
    parts = name.removeprefix(b"/dev/").split(b"/")
    if not name.startswith(b"/dev/") or any(part in (b"", b".", b"..") for part in parts):
        _refuse(name, "is no place for a device")
    return b"/".join(parts)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _shown(name: bytes) -> str:
    """A name that came with the archive, fit for a message."""
    text = name[:100].decode("utf-8", "backslashreplace") or "."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _damaged(what: str) -> ImageError:
    return ImageError(
        f"the image of the container's /dev {what}", hint="the checkpoint is damaged, or not what CRIU wrote"
    )


def _refuse(name: bytes, why: str) -> NoReturn:
    raise _damaged(f"is refused: {_shown(name)} {why}")


class _Plain:
    """The tar inside the image, piece by piece. Raises ImageError where it is damaged or too long."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._gzip = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._waiting = b""
        """Compressed."""
        self._buffer = b""
        self._at = 0
        self._read = self._given = 0

    def take(self, size: int) -> bytes:
        """Exactly so many bytes."""
        while len(self._buffer) - self._at < size:
            more = self._more()
            if not more:
                raise _damaged("is cut short")
            self._buffer, self._at = self._buffer[self._at :] + more, 0
        self._at += size
        return self._buffer[self._at - size : self._at]

    def pieces(self, size: int) -> Iterator[bytes]:
        """Exactly so many bytes, in pieces."""
        while size:
            yield (piece := self.take(min(size, _PIECE)))
            size -= len(piece)

    def zeros(self) -> Iterator[bytes]:
        """The end of a tar: a block of zeros that has been taken, a second one, and nothing but zeros."""
        yield _ZEROS
        length, piece = 0, self._buffer[self._at :] or self._more()
        while piece:
            if piece.strip(b"\0"):
                raise _damaged("goes on behind its end")
            yield piece
            length += len(piece)
            piece = self._more()
        if length < _BLOCK or length % _BLOCK:
            raise _damaged("is cut short")

    def _more(self) -> bytes:
        """The next bytes; empty at the end."""
        while True:
            if self._gzip.eof:
                # A gzip file may be several ones behind one another (RFC 1952, 2.2).
                self._waiting = self._gzip.unused_data or self._file_bytes()
                if not self._waiting:
                    return b""
                self._gzip = zlib.decompressobj(16 + zlib.MAX_WBITS)
            elif not self._waiting:
                self._waiting = self._file_bytes()
                if not self._waiting:
                    raise _damaged("is cut short")
            try:
                piece = self._gzip.decompress(self._waiting, _PIECE)
            except zlib.error as error:
                raise _damaged(f"cannot be unpacked: {error}") from error
            self._waiting = self._gzip.unconsumed_tail
            self._given += len(piece)
            if self._given > LIMIT:
                raise _damaged(f"unpacks to more than {LIMIT >> 20} MiB")
            if piece:
                return piece

    def _file_bytes(self) -> bytes:
        try:
            piece = self._file.read(_PIECE)
        except OSError as error:
            raise ImageError(f"the image of the container's /dev cannot be read: {reason(error)}") from error
        self._read += len(piece)
        if self._read > LIMIT:
            raise _damaged(f"is larger than {LIMIT >> 20} MiB")
        return piece
