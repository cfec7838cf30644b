"""Reads the compressed tar with a container's /dev, strictly and as a stream.

GNU tar creates everything that such an archive names, and the archive may come from anywhere. So it is read
in only one way: an entry that two programs may read differently is refused (tar(5): POSIX ustar, old GNU;
pax(1)). Only a piece of it is in memory at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO, NoReturn

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import ImageError, raise_as

LIMIT = 256 << 20
"""Bytes of the tar, and of its compressed form; Podman's /dev is a tmpfs of 64 MiB."""
ENTRIES = 65536
"""Headers in the tar."""

# Entries that tar makes only from a header or from content of the header's size.
FILE, HARD, SOFT, CHARACTER, BLOCK_DEVICE, FOLDER, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"

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
_OCTAL = compile_later(rb" *([0-7]+)[ \0]*")
_KINDS = {b"\0": FILE, b"7": FILE, b"S": FILE} | {
    kind: kind for kind in (FILE, HARD, SOFT, CHARACTER, BLOCK_DEVICE, FOLDER, FIFO)
}
_LONG_NAME, _LONG_LINK, _PAX, _HOLES = b"L", b"K", b"x", b"S"
# A pax record that only changes a time (pax(1), "pax Extended Header").
_TIMES = compile_later(rb"(\d{1,4}) (?:[amc]time|LIBARCHIVE\.creationtime)=-?\d{1,20}(?:\.\d{1,20})?\n")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry, without its content."""

    before: bytes
    """Extension headers with their content."""
    header: bytes
    name: bytes
    """Without ./ at the start; empty for the directory itself."""
    kind: bytes
    size: int
    """Bytes of its content."""
    link: bytes
    """The target of a link, as in the archive."""

    @property
    def device(self) -> bool:
        """Whether it is a device node."""
        return self.kind in (CHARACTER, BLOCK_DEVICE)

    @property
    def numbers(self) -> tuple[int, int]:
        """Return a device's major and minor number. Raises ImageError if a field contains none."""
        return _read_number(self.header, _MAJOR, self.name), _read_number(self.header, _MINOR, self.name)

    @property
    def target(self) -> bytes:
        """Return the target of a hard link. Raises ImageError if that is outside of /dev."""
        return _normalise(self.link)

    def rename(self, name: bytes, numbers: tuple[int, int]) -> bytes:
        """Return a device's header with another name, other numbers, and the right checksum.

        Raises ImageError if they do not fit into a header.
        """
        name, (major, minor) = b"./" + name, numbers
        fields = f"{major:07o}\0{minor:07o}\0".encode()
        if len(name) > _NAME[1] or len(fields) != _MINOR[1] - _MAJOR[0]:
            refuse(name, "cannot be represented in a tar header")
        old = self.header
        new = name.ljust(_NAME[1], b"\0") + old[_NAME[1] : _MAJOR[0]] + fields + old[_MINOR[1] :]
        return new[: _SUM[0]] + f"{_compute_checksum(new):06o}\0 ".encode() + new[_SUM[1] :]


class Archive:
    """An archive that is read once from start to end: each entry, then its content, and finally the end.

    Everything raises ImageError if the archive is damaged, is larger than `LIMIT`, has more than `ENTRIES`
    headers, or could be read differently by GNU tar.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._plain = _Plain(file)

    def entries(self) -> Iterator[Entry]:
        """Yield the entries; the caller reads each one's `content` before the next."""
        plain, count = self._plain, 0
        before: dict[bytes, bytes] = {}
        extensions = b""
        while (header := plain.read_exactly(_BLOCK)) != _ZEROS:
            count += 1
            if count > ENTRIES:
                raise make_damaged_error(f"has more than {ENTRIES} entries")
            name = _header_name(header)
            kind, size = header[_TYPE : _TYPE + 1], _read_number(header, _SIZE, name)
            if kind in (_LONG_NAME, _LONG_LINK, _PAX):
                if kind in before or size > _EXTENSION:
                    refuse(name, "has a header that tar does not write")
                content = plain.read_exactly(_round_up(size))
                before[kind] = content[:size]
                extensions += header + content
                continue
            if kind == _HOLES:
                header += _read_map(header, plain, name, size)
            yield _make_entry(header, name, size, before, extensions)
            before, extensions = {}, b""
        if before:
            raise make_damaged_error("ends in the middle of an entry")

    def content(self, entry: Entry) -> Iterator[bytes]:
        """Yield the content of the last entry, with the zeros that fill its last block, in pieces."""
        size = _round_up(entry.size)
        while size:
            yield (piece := self._plain.read_exactly(min(size, _PIECE)))
            size -= len(piece)

    def read_end(self) -> Iterator[bytes]:
        """Yield what follows the last entry, in pieces: two blocks of zeros, and nothing but zeros."""
        yield _ZEROS  # the block that ended entries()
        length = 0
        for piece in self._plain.read_rest():
            if piece.strip(b"\0"):
                raise make_damaged_error("continues after its end")
            yield piece
            length += len(piece)
        if length < _BLOCK or length % _BLOCK:
            raise make_damaged_error("is cut short")


def make_damaged_error(what: str, *, code: str = "GPS-601") -> ImageError:
    """The error for a damaged archive."""
    return ImageError(
        f"the image of the container's /dev {what}",
        hint="the checkpoint is damaged, or was not written by CRIU",
        code=code,
    )


def refuse(name: bytes, why: str, *, code: str = "GPS-601") -> NoReturn:
    """Raise the ImageError for an entry."""
    raise make_damaged_error(f"is refused: {make_printable(name)} {why}", code=code)


def make_printable(name: bytes) -> str:
    """Make a name from the archive printable for a message."""
    text = name[:100].decode("utf-8", "backslashreplace") or "."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _make_entry(
    header: bytes, name: bytes, size: int, before: dict[bytes, bytes], extensions: bytes
) -> Entry:
    long_name, long_link = before.get(_LONG_NAME), before.get(_LONG_LINK)
    link = _read_string(header, _LINK)
    if long_name is not None:
        name = _read_long_name(long_name, name)
    if long_link is not None:
        link = _read_long_name(long_link, name)
    kind = _KINDS.get(header[_TYPE : _TYPE + 1])
    if kind is None:
        refuse(name, "is of a type that is not allowed in /dev")
    if kind != FILE and size:
        refuse(name, "has content, but is not a file")
    if kind == FILE and name.endswith(b"/"):
        refuse(name, "is a file with the name of a directory")  # tar would make a directory
    if not _has_only_times(before.get(_PAX, b"")):
        refuse(name, "has a pax header with more than times")
    found = Entry(extensions, header, _normalise(name), kind, size, link)
    if found.device:
        field = header[slice(*_NAME)]
        plain_name = all(0x20 < byte < 0x7F for byte in name) and field.rstrip(b"\0") == name
        if long_name is not None or long_link is not None or not plain_name:
            refuse(name, "is a device without a valid device name")
        found.numbers  # noqa: B018 - refused here where they are none
    return found


def _header_name(header: bytes) -> bytes:
    """Return the name in a header, after checking that it is a header."""
    name = _read_string(header, _NAME)
    if _read_number(header, _SUM, name) != _compute_checksum(header):
        refuse(name, "has a wrong checksum")
    magic, prefix = header[slice(*_MAGIC)], _read_string(header, _PREFIX)
    if magic not in (_USTAR, _GNU):
        refuse(name, "has a header of a type that tar does not write")
    return prefix + b"/" + name if prefix and magic == _USTAR else name


def _read_map(header: bytes, plain: _Plain, name: bytes, size: int) -> bytes:
    """Return the blocks after the header of a sparse file, if its map fits the content (tar(5), "Old GNU").

    Each piece of data fills whole blocks; the last one may end earlier.
    """
    real, found, length = _read_number(header, _REAL_SIZE, name), 0, 0
    slots, goes_on, blocks = header[slice(*_MAP)], header[_MAP_GOES_ON], b""
    while True:
        for at in range(0, len(slots), 24):
            if not slots[at + 12]:  # the map ends here
                if slots[at:].strip(b"\0") or goes_on:
                    refuse(name, "has a map of its holes that tar does not write")
                break
            start = _read_number(slots, (at, at + 12), name)
            piece = _read_number(slots, (at + 12, at + 24), name)
            if (length % _BLOCK and piece) or start < found:
                refuse(name, "has a map of its holes that tar does not write")
            found, length = start + piece, length + piece
        if not goes_on:
            break
        if len(blocks) >= _EXTENSION * _BLOCK:
            refuse(name, "has too many holes")
        block = plain.read_exactly(_BLOCK)
        blocks += block
        slots, goes_on = block[slice(*_MORE_MAP)], block[_MORE_MAP_GOES_ON]
    if length != size or found > real or header[slice(*_MAGIC)] != _GNU:
        refuse(name, "has a map of its holes that does not match its content")
    return blocks


def _has_only_times(records: bytes) -> bool:
    """Whether a pax header contains only times."""
    while records:
        match = _TIMES.match(records)
        if not match or int(match[1]) != len(match[0]):
            return False
        records = records[match.end() :]
    return True


def _read_long_name(content: bytes, name: bytes) -> bytes:
    """Read a name from a header of its own: one string with its terminator."""
    if content[-1:] != b"\0" or b"\0" in content[:-1] or len(content) < 2:
        refuse(name, "has a long name that tar does not write")
    return content[:-1]


def _read_string(header: bytes, field: tuple[int, int]) -> bytes:
    return header[slice(*field)].partition(b"\0")[0]


def _read_number(header: bytes, field: tuple[int, int], name: bytes) -> int:
    match = _OCTAL.fullmatch(header, *field)
    if match is None:
        refuse(name, "has an invalid number")
    return int(match[1], 8)


def _compute_checksum(header: bytes) -> int:
    """Compute it over all bytes, those of the checksum itself counted as blanks (tar(5))."""
    return sum(header) - sum(header[slice(*_SUM)]) + 8 * ord(" ")


def _normalise(name: bytes) -> bytes:
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts:
        refuse(name, "points outside /dev")
    return b"/".join(parts)


def _round_up(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


class _Plain:
    """The decompressed tar, piece by piece. Raises ImageError if it is damaged or too long."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._gzip = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._waiting = b""
        """Compressed."""
        self._buffer = b""
        self._at = 0
        self._read = self._given = 0

    def read_exactly(self, size: int) -> bytes:
        """Return exactly `size` bytes."""
        while len(self._buffer) - self._at < size:
            more = self._read_more()
            if not more:
                raise make_damaged_error("is cut short")
            self._buffer, self._at = self._buffer[self._at :] + more, 0
        self._at += size
        return self._buffer[self._at - size : self._at]

    def read_rest(self) -> Iterator[bytes]:
        """Yield everything that was not read yet, in pieces."""
        piece = self._buffer[self._at :] or self._read_more()
        while piece:
            yield piece
            piece = self._read_more()

    def _read_more(self) -> bytes:
        """Return the next bytes; empty at the end."""
        while True:
            if self._gzip.eof:
                # A gzip file may consist of several members (RFC 1952, 2.2).
                self._waiting = self._gzip.unused_data or self._read_file_bytes()
                if not self._waiting:
                    return b""
                self._gzip = zlib.decompressobj(16 + zlib.MAX_WBITS)
            elif not self._waiting:
                self._waiting = self._read_file_bytes()
                if not self._waiting:
                    raise make_damaged_error("is cut short")
            try:
                piece = self._gzip.decompress(self._waiting, _PIECE)
            except zlib.error as error:
                raise make_damaged_error(f"cannot be unpacked: {error}") from error
            self._waiting = self._gzip.unconsumed_tail
            self._given += len(piece)
            if self._given > LIMIT:
                raise make_damaged_error(f"unpacks to more than {LIMIT >> 20} MiB")
            if piece:
                return piece

    def _read_file_bytes(self) -> bytes:
        with raise_as(ImageError, "the image of the container's /dev cannot be read"):
            piece = self._file.read(_PIECE)
        self._read += len(piece)
        if self._read > LIMIT:
            raise make_damaged_error(f"is larger than {LIMIT >> 20} MiB")
        return piece
