"""The headers of a tar: ustar and pax (POSIX.1-2018, pax), and GNU's long names; nothing else.

tarfile reads a pax header of any size into memory, considers a tar that ends between two entries complete,
and one with a broken header as ended there. So only its code for a single block is used.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping

from gpusnap.oci.tar.compression import Readable

BLOCK = 512
END = bytes(2 * BLOCK)
# linux/limits.h, PATH_MAX.
LONGEST_NAME = 4096
# As Go's archive/tar, which Podman reads with (maxSpecialFileSize); an inode's xattrs take 64 KiB each.
LARGEST_EXTENSION = 1 << 20
_PIECE = 1 << 20
_LARGEST = (1 << 63) - 1
_PAX, _GLOBAL = b"x", b"g"
_KINDS: Mapping[bytes, bytes] = {
    tarfile.REGTYPE: tarfile.REGTYPE,
    tarfile.AREGTYPE: tarfile.REGTYPE,
    tarfile.CONTTYPE: tarfile.REGTYPE,
    tarfile.DIRTYPE: tarfile.DIRTYPE,
    tarfile.SYMTYPE: tarfile.SYMTYPE,
    tarfile.LNKTYPE: tarfile.LNKTYPE,
}
_ODD: Mapping[bytes, str] = {
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a FIFO",
    _GLOBAL: "a header for all entries",
}


class HeaderFault(Exception):
    """What is wrong with a header, as the end of a sentence."""


def read_header(read: Callable[[int], bytes]) -> tarfile.TarInfo | None:
    """Read the next entry, None at the end of the archive; `read` returns exactly that many bytes.

    Its name has no leading or trailing slash, no empty part and no `.` or `..`, and is empty for the
    directory of the archive itself. Its `pax_headers` are those without a field of their own, such as
    extended attributes, and times that are not whole seconds. Raises HeaderFault, and what `read` raises.
    """
    records: dict[str, str] = {}
    left = LARGEST_EXTENSION + 3 * BLOCK
    while True:
        block = read(BLOCK)
        if not any(block):
            if records or any(read(BLOCK)):
                raise HeaderFault("it has a block of zeros between its entries")
            return None
        info = _parse_header(block)
        if info.type not in (_PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            return _apply_records(info, records)
        # Together, because a few compressed bytes could otherwise make any number of them for one entry. Each
        # counts with its block, so that empty ones are limited, too; an entry needs three at most.
        left -= BLOCK + info.size
        if left < 0:
            raise HeaderFault(f"an entry has more than {LARGEST_EXTENSION} bytes of extended headers")
        data = _read_extension(info, read)
        if info.type == _PAX:
            records |= _records(data)
        else:
            key = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
            records[key] = _text(data.split(b"\0", 1)[0])


def begins_like_a_tar(data: bytes) -> bool:
    """Whether bytes begin with a header in a format that knows its own name: ustar, pax, GNU.

    If there are too few bytes to tell, they may be the beginning of one whose first name is on one line.
    """
    return b"\n" not in data[:100] and b"ustar".startswith(data[257:262])


def header(info: tarfile.TarInfo) -> bytes:
    """Return the blocks before an entry's content: ustar, with a pax header for what ustar cannot express."""
    block, records = tarfile.TarInfo(), dict(info.pax_headers)
    folder = info.isdir()

    def text(key: str, value: str, limit: int) -> str:
        raw = value.encode("utf-8", "surrogateescape")
        if len(raw) <= limit and raw.isascii():
            return value
        records[key] = value
        return "".join(chr(each) if each < 128 else "?" for each in raw[:limit])

    def number(key: str, value: int, limit: int) -> int:
        if 0 <= value < limit:
            return value
        records[key] = str(value)
        return 0

    # tobuf() ends the name of a directory with a slash.
    end = "/" if folder else ""
    block.name = text("path", info.name + end, 100).removesuffix(end)[: 100 - len(end)]
    block.linkname = text("linkpath", info.linkname, 100)
    block.uname, block.gname = text("uname", info.uname, 31), text("gname", info.gname, 31)
    block.uid, block.gid = number("uid", info.uid, 8**7), number("gid", info.gid, 8**7)
    block.size = number("size", info.size, 8**11) if info.isreg() else 0
    seconds = int(info.mtime)
    if seconds != info.mtime:
        records.setdefault("mtime", repr(info.mtime))
    # If the time has a record of its own, the field is for readers that do not read records.
    block.mtime = min(max(seconds, 0), 8**11 - 1) if "mtime" in records else number("mtime", seconds, 8**11)
    block.mode, block.type = info.mode & 0o7777, info.type
    return (_pax(records) if records else b"") + block.tobuf(tarfile.USTAR_FORMAT)


def file_entry(path: str, size: int, mode: int) -> tarfile.TarInfo:
    """Return the entry of a file without a time and an owner."""
    info = tarfile.TarInfo(path)
    info.size, info.mode = size, mode
    return info


def folder_entry(path: str, mode: int) -> tarfile.TarInfo:
    """Return the entry of a directory without a time and an owner."""
    info = tarfile.TarInfo(path)
    info.type, info.mode = tarfile.DIRTYPE, mode
    return info


def padding(size: int) -> bytes:
    """Return the padding after content of that size, up to the next block."""
    return bytes(-size % BLOCK)


def pieces(info: tarfile.TarInfo, content: Readable | None) -> Iterator[bytes]:
    """Yield an entry in the format of a tar. Raises HeaderFault if the content ends too early."""
    yield header(info)
    left = info.size if info.isreg() else 0
    while left:
        piece = content.read(min(left, _PIECE)) if content is not None else b""
        if not piece:
            raise HeaderFault(f"the content of {info.name!r} ends {left} bytes too early")
        left -= len(piece)
        yield piece
    if info.isreg():
        yield padding(info.size)


def _parse_header(block: bytes) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise HeaderFault("one of its headers is invalid") from error
    for key in ("size", "uid", "gid"):
        if not 0 <= getattr(info, key) <= _LARGEST:
            raise HeaderFault(f"the entry {info.name[:200]!r} has a {key} of {getattr(info, key)}")
    return info


def _read_extension(info: tarfile.TarInfo, read: Callable[[int], bytes]) -> bytes:
    data = read(info.size)
    read(-info.size % BLOCK)
    return data


def _records(data: bytes) -> dict[str, str]:
    """Parse the records of a pax header: "length key=value\\n" each."""
    found, at = {}, 0
    while at < len(data):
        # Seven digits and the blank after them: LARGEST_EXTENSION has no more.
        length = data[at : at + 8].partition(b" ")[0]
        size = int(length) if length.isdigit() and len(length) < 8 else 0
        record = data[at + len(length) + 1 : at + size]
        key, equals, value = record[:-1].partition(b"=")
        if not key or not equals or at + size > len(data) or not record.endswith(b"\n"):
            raise HeaderFault("one of its extended headers is invalid")
        found[_text(key)] = _text(value)
        at += size
    return found


def _apply_records(info: tarfile.TarInfo, records: dict[str, str]) -> tarfile.TarInfo:
    """Return the entry of a header with the records before it."""
    name = records.pop("path", info.name)
    if any(key.startswith("GNU.sparse.") for key in records):
        raise HeaderFault(f"the entry {name[:200]!r} is a sparse file")
    if info.type not in _KINDS:
        what = _ODD.get(info.type, f"of the unknown type {info.type!r}")
        raise HeaderFault(f"the entry {name[:200]!r} is {what}, which no checkpoint contains")
    # frombuf() recognizes an old-style directory (a file whose name ends with a slash).
    info.type = _KINDS[info.type]
    # Values of any bytes are written unchanged, so nothing must declare that.
    records.pop("hdrcharset", None)
    info.linkname = records.pop("linkpath", info.linkname)
    info.uname, info.gname = records.pop("uname", info.uname), records.pop("gname", info.gname)
    for key in ("size", "uid", "gid"):
        if key in records:
            setattr(info, key, _number(records.pop(key), key, name))
    if "mtime" in records:
        info.mtime = _time(records["mtime"], name)
        if records["mtime"].isdigit():
            del records["mtime"]
    info.name = _name(name)
    if not info.isreg() and info.size:
        raise HeaderFault(f"the entry {name[:200]!r} is not a file, but has {info.size} bytes")
    if not info.name and not info.isdir():
        raise HeaderFault(f"the entry {name[:200]!r} has no name")
    if info.islnk():
        info.linkname = _name(info.linkname)
    if (info.islnk() or info.issym()) and not 0 < len(info.linkname) <= LONGEST_NAME:
        raise HeaderFault(f"the link {name[:200]!r} has no target")
    info.pax_headers = records
    return info


def _name(text: str) -> str:
    """Return a name within the archive. Raises HeaderFault for one that leads out of it."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if text.startswith("/") or ".." in parts or "\0" in text:
        raise HeaderFault(f"the name {text[:200]!r} points outside the archive")
    if len(text) > LONGEST_NAME:
        raise HeaderFault(f"the name {text[:200]!r}… has {len(text)} characters")
    return "/".join(parts)


def _number(text: str, key: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= _LARGEST):
        raise HeaderFault(f"the {key} of {name[:200]!r} is not a number: {text[:40]!r}")
    return int(text)


def _time(text: str, name: str) -> float:
    whole, _, fraction = text.removeprefix("-").partition(".")
    if not (text.isascii() and len(text) <= 40 and whole.isdigit() and (not fraction or fraction.isdigit())):
        raise HeaderFault(f"the mtime of {name[:200]!r} is not a valid time: {text[:40]!r}")
    return float(text)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pax(records: Mapping[str, str]) -> bytes:
    """Return a pax header of these records, and the block before it."""
    data = b"".join(_record(key, value) for key, value in sorted(records.items()))
    block = tarfile.TarInfo("././@PaxHeader")
    block.type, block.size = _PAX, len(data)
    return block.tobuf(tarfile.USTAR_FORMAT) + data + padding(len(data))


def _record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode("utf-8", "surrogateescape")
    size = len(rest) + 1
    # The length counts its own digits.
    while len(rest) + len(str(size)) != size:
        size = len(rest) + len(str(size))
    return str(size).encode() + rest
