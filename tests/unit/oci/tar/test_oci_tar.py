"""The headers of a tar: what is written is what is read, and whatever is read, the answer is one of two."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from time import process_time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpusnap.oci.tar import headers as tar

PART = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=150).filter(
    lambda text: text not in (".", "..")
)
NAME = st.lists(PART, min_size=1, max_size=4).map("/".join)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)
NUMBER = st.integers(0, (1 << 63) - 1)
# What tarfile would make of a float is what the fraction says; quarters have no rest.
TIME = st.one_of(
    st.integers(-(1 << 40), 1 << 40), st.integers(-(1 << 20), 1 << 34).map(lambda each: each / 4)
)


def exactly(data: bytes) -> io.BytesIO:
    return io.BytesIO(data)


@given(
    name=NAME,
    kind=st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]),
    link=NAME,
    texts=st.tuples(TEXT, TEXT),
    numbers=st.tuples(NUMBER, NUMBER, NUMBER),
    mode=st.integers(0, 0o7777),
    time=TIME,
    notes=st.dictionaries(
        PART.filter(lambda text: "=" not in text).map("SCHILY.xattr.".__add__), st.text(max_size=9)
    ),
)
def test_round_trip(
    name: str,
    kind: bytes,
    link: str,
    texts: tuple[str, str],
    numbers: tuple[int, int, int],
    mode: int,
    time: float,
    notes: dict[str, str],
) -> None:
    """All that a header says comes back, and written again it is the same bytes."""
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime, info.pax_headers = kind, mode, time, notes
    info.uname, info.gname = texts
    info.uid, info.gid, info.size = numbers
    if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        info.linkname = link
    if kind != tarfile.REGTYPE:
        info.size = 0
    data = tar.header(info)
    assert len(data) % tar.BLOCK == 0
    found = tar.read_header(exactly(data).read)
    assert found is not None
    for field in ("name", "type", "linkname", "mode", "uid", "gid", "uname", "gname", "size", "mtime"):
        assert getattr(found, field) == getattr(info, field), field
    assert {key: value for key, value in found.pax_headers.items() if key != "mtime"} == notes
    assert tar.header(found) == data
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as other:
        read = other.next()
    assert read is not None
    assert (read.name, read.uid, read.uname) == (found.name, found.uid, found.uname)


@given(records=st.binary(max_size=200), name=st.binary(max_size=20))
@example(records=b"12 uid=\xd9\xa0\xd9\xa1\n", name=b"a")
@example(records=b"10 uid=-1\n", name=b"a")
@example(records=b"12 path=a\0b\n", name=b"a")
def test_any_records(records: bytes, name: bytes) -> None:
    """Whatever a pax header holds, the answer is an entry within the archive or a fault."""
    head = tarfile.TarInfo("././@PaxHeader")
    head.type, head.size = b"x", len(records)
    entry = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    data = head.tobuf(tarfile.USTAR_FORMAT) + records + tar.padding(len(records))
    data += entry.tobuf(tarfile.USTAR_FORMAT)
    try:
        found = tar.read_header(exactly(data).read)
    except tar.HeaderFault:
        return
    assert found is not None
    assert not found.name.startswith("/")
    assert ".." not in found.name.split("/")


@given(at=st.integers(0, 511), value=st.binary(min_size=1, max_size=16))
def test_any_header(at: int, value: bytes) -> None:
    """Likewise for a header block with a right checksum and anything in its fields."""
    block = bytearray(tarfile.TarInfo("name").tobuf(tarfile.USTAR_FORMAT))
    block[at : at + len(value)] = value
    del block[512:]
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    try:
        found = tar.read_header(exactly(bytes(block) + bytes(1024)).read)
    except tar.HeaderFault:
        return
    if found is not None:
        assert found.size >= 0
        assert tar.header(found)


def test_pieces() -> None:
    """Header, content and filling make whole blocks; a folder has only a header."""
    info = tarfile.TarInfo("a")
    info.size = 700
    assert sum(map(len, tar.pieces(info, io.BytesIO(bytes(900))))) == 512 + 1024
    folder = tarfile.TarInfo("b")
    folder.type = tarfile.DIRTYPE
    assert sum(map(len, tar.pieces(folder, None))) == 512


def extended(data: bytes, kind: bytes = b"x") -> bytes:
    """A header before an entry, with anything in it."""
    head = tarfile.TarInfo("././@PaxHeader")
    head.type, head.size = kind, len(data)
    return head.tobuf(tarfile.USTAR_FORMAT) + data + tar.padding(len(data))


@pytest.mark.parametrize("kind", [b"x", b"L", b"K"])
@pytest.mark.parametrize("size", [0, 90_000])
def test_many_extended_headers(kind: bytes, size: int) -> None:
    """All that stand before one entry are bounded together, empty ones as well: few bytes become many."""
    sent = 0

    def many() -> Iterator[bytes]:
        for at in range(10_000 if not size else 100):
            rest = b" %08d=" % at + b"A" * size + b"\n"
            data = rest if kind != b"x" else b"%d" % (len(rest) + len(str(len(rest)))) + rest
            yield extended(data if size else b"", kind)

        yield tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT)

    blocks, held = many(), b""

    def read(count: int) -> bytes:
        nonlocal held, sent
        while len(held) < count:
            held += next(blocks)
        found, held = held[:count], held[count:]
        sent += count
        return found

    with pytest.raises(tar.HeaderFault, match="more than 1048576 bytes of extended headers"):
        tar.read_header(read)
    assert sent <= tar.LARGEST_EXTENSION + 4 * tar.BLOCK


def test_many_records() -> None:
    """A header of as many records as fit is read in one go: each byte once, not once for each record."""
    data = b"6 a=b\n" * (tar.LARGEST_EXTENSION // 6)
    head = extended(data) + tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT)
    begun = process_time()
    found = tar.read_header(exactly(head).read)
    # Some 0.2 s; slicing the rest anew each time took more than 5.
    assert process_time() - begun < 2
    assert found is not None
    assert found.pax_headers == {"a": "b"}
