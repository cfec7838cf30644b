"""Tar archives with wrong or malicious headers, and truncated or damaged compressed archives."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections.abc import Iterator
from functools import partial

import zstandard
from mutations import CANARY, MANIFEST, Base, Case, written

__all__ = ["compressed_cases", "tar_cases"]

_BLOCK = 512

Member = tuple[tarfile.TarInfo, bytes]


def _members(base: Base) -> list[Member]:
    with tarfile.open(base.tar) as tar:
        found = []
        for info in tar:
            file = tar.extractfile(info) if info.isreg() else None
            found.append((info, file.read() if file is not None else b""))
        return found


def _join_members(members: list[Member], form: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out.getvalue()


def _info(name: str, kind: bytes = tarfile.REGTYPE, *, data: bytes = b"", link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), link
    info.devmajor, info.devminor = 1, 5
    return info, data


_X = b"written by an archive"
ADDED: dict[str, list[Member]] = {
    "an absolute name": [_info(f"{CANARY}/x", data=_X)],
    "a name with ..": [_info(f"checkpoint/../../../../../../../..{CANARY}/x", data=_X)],
    "a link out, and a file in it": [
        _info("checkpoint/out", tarfile.SYMTYPE, link=str(CANARY)),
        _info("checkpoint/out/x", data=_X),
    ],
    "a link to a file outside": [_info("config.dump", tarfile.SYMTYPE, link=f"{CANARY}/x")],
    "a hard link outside": [_info("checkpoint/h", tarfile.LNKTYPE, link="/etc/passwd")],
    "a hard link with ..": [_info("checkpoint/h", tarfile.LNKTYPE, link="../../../etc/passwd")],
    "a hard link to nothing": [_info("checkpoint/h", tarfile.LNKTYPE, link="checkpoint/nothing")],
    "a device": [_info("checkpoint/device", tarfile.CHRTYPE)],
    "a block device": [_info("checkpoint/device", tarfile.BLKTYPE)],
    "a FIFO": [_info("checkpoint/fifo", tarfile.FIFOTYPE)],
    "the manifest again": [_info(MANIFEST, data=b"{}")],
    "an image again": [_info("checkpoint/core-1.img", data=b"")],
    "config.dump again": [_info("config.dump", data=b"{}")],
    "gpusnap/ a link": [_info("checkpoint/gpusnap", tarfile.SYMTYPE, link="/etc")],
    "checkpoint/ a link": [_info("checkpoint", tarfile.SYMTYPE, link=str(CANARY))],
    "gpusnap/ a file": [_info("checkpoint/gpusnap", data=b"")],
    "a long name": [_info("checkpoint/" + "x/" * 5000, tarfile.DIRTYPE)],
    "a name of 300 bytes": [_info("checkpoint/" + "x" * 300, data=b"")],
    "a newline in a name": [_info("checkpoint/a\nb.img", data=_X)],
    "an empty name": [_info("", data=b"")],
    "an unknown type": [_info("checkpoint/odd", b"Z", data=_X)],
    "a contiguous file": [_info("checkpoint/odd", tarfile.CONTTYPE, data=_X)],
    "40000 empty files": [_info(f"checkpoint/many/{at}") for at in range(40_000)],
}


def _header_at(data: bytes, name: str) -> int:
    """Return the offset of a member's header."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return next(info.offset for info in tar if info.name.removeprefix("./") == name)


def _patch_header(data: bytes, at: int, fields: dict[int, bytes], *, checksum: bool = True) -> bytes:
    """Replace bytes at offsets in a header; update its checksum unless `checksum` is false."""
    header = bytearray(data[at : at + _BLOCK])
    for offset, value in fields.items():
        header[offset : offset + len(value)] = value
    if checksum:
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + _BLOCK :]


def _size(value: int) -> dict[int, bytes]:
    return {124: b"%011o\0" % value}


# Offsets of fields in a header: tar(5), POSIX.1-1988 and GNU
HEADERS: dict[str, dict[int, bytes]] = {
    "a size of 8 GiB": _size((8 << 30) - 1),
    "a size of 2^70": {124: b"\x80\0\0\x40" + bytes(8)},
    "a negative size": {124: b"\xff" * 12},
    "a size that is no number": {124: b"zzzzzzzzzzz\0"},
    "a size without digits": {124: b" " * 12},
    "an odd mode": {100: b"77777777"},
    "huge owners": {108: b"\x80\xff\xff\xff\xff\xff\xff\xff", 116: b"\x80\xff\xff\xff\xff\xff\xff\xff"},
    "a time of 2^80": {136: b"\x80\x7f" + b"\xff" * 10},
    "of type sparse": {156: b"S"},
    "of type PAX": {156: b"x"},
    "of type PAX, global": {156: b"g"},
    "of type long name": {156: b"L"},
    "of type long link": {156: b"K"},
    "of type volume": {156: b"V"},
    "of type continued": {156: b"M"},
    "a directory with a size": {156: b"5"},
    "no magic": {257: bytes(8)},
    "a prefix": {345: b"/var/canary/" + bytes(20)},
}
PAX: dict[str, dict[str, str]] = {
    "size": {"size": str(1 << 60)},
    "size no number": {"size": "many"},
    "size negative": {"size": "-5"},
    "path": {"path": f"{CANARY}/x"},
    "a sparse file": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)},
    "a sparse map": {"GNU.sparse.map": "0,1,5", "GNU.sparse.size": str(1 << 40)},
    "a long value": {"comment": "x" * (1 << 21)},
}


def _insert_piece(data: bytes, at: int, piece: bytes) -> bytes:
    return data[:at] + piece + data[at:]


def _pax_header(values: dict[str, str]) -> bytes:
    """Return an extended header, which goes before the header of a member."""
    body = b""
    for key, value in values.items():
        text = f" {key}={value}\n".encode()
        length = len(text) + len(str(len(text)))
        length = len(text) + len(str(length))
        body += str(length).encode() + text
    info = tarfile.TarInfo("PaxHeaders/x")
    info.type, info.size = tarfile.XHDTYPE, len(body)
    return info.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % _BLOCK)


TARGETS = (MANIFEST, "checkpoint/core-1.img", "config.dump")


def tar_cases(base: Base) -> Iterator[Case]:
    """Yield cases: unexpected entries, wrong headers of three files, archives with a wrong end."""
    members, data = _members(base), base.tar.read_bytes()
    for name, added in ADDED.items():
        for where in ("first", "last"):
            made = [*added, *members] if where == "first" else [*members, *added]
            unseen = "again" in name or "config.dump" in name
            yield Case(f"tar: {name}, {where}", written(partial(_join_members, made)), unseen)
    for target in TARGETS:
        at = _header_at(data, target)
        for name, fields in HEADERS.items():
            patched = partial(_patch_header, data, at, fields)
            yield Case(f"tar: {target}: {name}", written(patched), target != MANIFEST)
        wrong = partial(_patch_header, data, at, {148: b"0000000\0"}, checksum=False)
        yield Case(f"tar: {target}: a wrong checksum", written(wrong))
        for name, values in PAX.items():
            longer = partial(_insert_piece, data, at, _pax_header(values))
            unseen = target != MANIFEST or name == "a long value"
            yield Case(f"tar: {target}: PAX {name}", written(longer), unseen)
    ends: dict[str, bytes] = {
        "empty": b"",
        "zeros": bytes(1 << 20),
        "noise": random.Random(1).randbytes(1 << 16),
        "without its end": data.rstrip(b"\0"),
        "cut in a header": data[: _header_at(data, "checkpoint/core-1.img") + 100],
        "cut in data": data[: len(data) // 2],
        "twice": data + data,
        "noise behind its end": data + random.Random(2).randbytes(1 << 16),
        "zeros before it": bytes(1024) + data,
    }
    for name, changed in ends.items():
        yield Case(f"tar: {name}", written(partial(bytes, changed)))


# Compressed


def compressed_cases(base: Base) -> Iterator[Case]:
    """Yield cases of the archive compressed with zstd and gzip, and damaged afterwards."""
    data = base.tar.read_bytes()
    for kind, made in (
        ("tar.zst", zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)),
        ("tar.gz", gzip.compress(data, 1)),
    ):
        chance = random.Random(kind)
        edits: dict[str, bytes] = {
            "as it was": made,
            "halved": made[: len(made) // 2],
            "a byte short": made[:-1],
            "its header alone": made[:10],
            "an empty one behind it": made
            + (zstandard.ZstdCompressor().compress(b"") if "zst" in kind else gzip.compress(b"")),
            "itself behind it": made + made,
            "noise behind it": made + chance.randbytes(5000),
            "noise before it": chance.randbytes(100) + made,
        }
        for at in range(6):
            place = chance.randrange(len(made))
            edits[f"bit {at} flipped"] = (
                made[:place] + bytes([made[place] ^ 1 << chance.randrange(8)]) + made[place + 1 :]
            )
        for name, changed in edits.items():
            # Podman reads to the end of the tar, but not the checksum behind it; verify does.
            unseen = name.startswith("bit ")
            yield Case(f"{kind}: {name}", written(partial(bytes, changed), f"archive.{kind}"), unseen)
    # RFC 8878: a frame with the largest window, and a skippable frame of 4 GiB
    window = b"\x28\xb5\x2f\xfd\x00\xff" + b"\x01\x00\x00"
    yield Case("tar.zst: a huge window", written(lambda: window, "archive.tar.zst"))
    skipped = b"\x50\x2a\x4d\x18\xff\xff\xff\xff"
    yield Case("tar.zst: a huge frame to skip", written(lambda: skipped, "archive.tar.zst"))
