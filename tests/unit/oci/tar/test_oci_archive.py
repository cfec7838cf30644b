"""Podman's archive: what is written is what is read; what is broken or cut short is refused."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import resource
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from archives import COMPRESS
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.checkpoints.formats.entries import read_member
from gpusnap.oci.base.errors import ArchiveError, DiskError, DiskFull
from gpusnap.oci.tar import archive as archive_module
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.archive import Compression, Writer, entries, unpack
from gpusnap.oci.tar.compression import as_file, compress

NAME = "checkpoint/gpusnap/manifest.json"
CONTENT = b'{"version": "1.0"}' * 50
BROKEN = r"is not a checkpoint archive, or is cut short"


def make_tar(names: tuple[str, ...] = ("config.dump", NAME, "rootfs-diff.tar")) -> bytes:
    """A tar as Python's tarfile writes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
        folder = tarfile.TarInfo("checkpoint/")
        folder.type = tarfile.DIRTYPE
        made.addfile(folder)
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(CONTENT)
            made.addfile(entry, io.BytesIO(CONTENT))
    return buffer.getvalue()


def entry_tar(entry: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """A tar of one entry, written by tarfile."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
        entry.size = len(content)
        made.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def write(folder: Path, data: bytes) -> str:
    path = folder / "archive"
    path.write_bytes(data)
    return str(path)


def read_all(archive: str) -> dict[str, bytes | None]:
    return {each.name: each.content.read() if each.content else None for each in entries(archive)}


# Reading


@pytest.mark.parametrize("how", COMPRESS)
def test_member(tmp_path: Path, how: str) -> None:
    """The entry is read however Podman compressed the archive, and no more of it than asked for."""
    path = write(tmp_path, COMPRESS[how](make_tar()))
    assert read_member(path, NAME, limit=1 << 20) == CONTENT
    assert read_member(path, NAME, limit=7) == CONTENT[:7]
    assert read_member(path, "checkpoint/none", limit=7) is None


def test_leading_dot(tmp_path: Path) -> None:
    """A leading ./ makes no difference, and the folder of the archive itself is no entry."""
    data = make_tar(("./" + NAME,))
    assert read_member(write(tmp_path, data), NAME, limit=1 << 20) == CONTENT
    assert read_all(write(tmp_path, entry_tar(entry("./", tarfile.DIRTYPE)))) == {}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """An entry that is no file holds nothing."""
    path = write(tmp_path, entry_tar(entry(NAME, tarfile.SYMTYPE, "/etc/shadow")))
    assert read_member(path, NAME, limit=1 << 20) is None


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("how", COMPRESS)
def test_cut_short(tmp_path: Path, how: str, skipped: bool) -> None:
    """Cut off anywhere, in steps of a block or of a byte near the end, it never counts as whole."""
    plain = make_tar((NAME,))
    # Without tarfile's filling: the end of the archive is the end of its second block of zeros.
    whole = COMPRESS[how](
        plain.rstrip(b"\0").ljust(-(-len(plain.rstrip(b"\0")) // 512) * 512, b"\0") + tar.END
    )
    path = write(tmp_path, whole)
    assert read_all(path) == {"checkpoint": None, NAME: CONTENT}
    ends = sorted({*range(0, len(whole), 512), *range(max(0, len(whole) - 40), len(whole))})
    for end in ends:
        write(tmp_path, whole[:end])
        with pytest.raises(ArchiveError, match=BROKEN):
            assert [None if skipped else each.content and each.content.read() for each in entries(path)]


@pytest.mark.parametrize(
    "data", [b"", b"no archive" * 200, b"\x28\xb5\x2f\xfd" + b"x" * 2000, b"\x1f\x8b" * 900]
)
def test_no_archive(tmp_path: Path, data: bytes) -> None:
    """What is no tar is refused by name."""
    path = write(tmp_path, data)
    with pytest.raises(ArchiveError, match="is not a checkpoint archive"):
        read_member(path, NAME, limit=1)


@pytest.mark.parametrize("how", COMPRESS)
def test_goes_on(tmp_path: Path, how: str) -> None:
    """Zeros may follow the end; a second tar, or anything else, may not."""
    data = make_tar()
    assert read_all(write(tmp_path, COMPRESS[how](data + bytes(1 << 20))))
    for more in (data, b"x", bytes((16 << 20) + 1)):
        with pytest.raises(ArchiveError, match="continues after its end"):
            read_all(write(tmp_path, COMPRESS[how](data + more)))
    with pytest.raises(ArchiveError, match=BROKEN):
        read_all(write(tmp_path, COMPRESS["zstd"](data) + b"more"))


def test_broken_compression(tmp_path: Path) -> None:
    """Data that is broken in the middle is an ArchiveError, too."""
    for how in ("gzip", "zstd"):
        data = bytearray(COMPRESS[how](make_tar(tuple(f"a{n}" for n in range(200)))))
        data[len(data) // 2 : len(data) // 2 + 20] = b"\xff" * 20
        with pytest.raises(ArchiveError, match=BROKEN):
            read_all(write(tmp_path, bytes(data)))


def test_cannot_be_opened(tmp_path: Path) -> None:
    """A path that cannot be opened is named, in words that Podman shows."""
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ArchiveError, match="cannot be read") as caught:
            read_member(str(path), NAME, limit=1)
        assert "No such file" not in str(caught.value)


HOSTILE = {
    "absolute": (entry("/etc/passwd"), "points outside"),
    "parent": (entry("checkpoint/../../etc/passwd"), "points outside"),
    "hard link out": (entry("a", tarfile.LNKTYPE, "../b"), "points outside"),
    "hard link to nothing": (entry("a", tarfile.LNKTYPE, "."), "has no target"),
    "long name": (entry("a/" * 3000 + "b"), "characters"),
    "long link": (entry("a", tarfile.SYMTYPE, "x" * 5000), "has no target"),
    "device": (entry("a", tarfile.CHRTYPE), "is a device"),
    "FIFO": (entry("a", tarfile.FIFOTYPE), "is a FIFO"),
    "unknown type": (entry("a", b"Z"), "of the unknown type"),
    "pax sparse": (entry("a", pax_headers={"GNU.sparse.major": "1"}), "is a sparse file"),
    "huge pax": (entry("a", pax_headers={"comment": "x" * (1 << 20) + "y" * 4096}), "an entry has more than"),
    "odd size": (entry("a", pax_headers={"size": "-1"}), "is not a number"),
    "odd time": (entry("a", pax_headers={"mtime": "nan"}), "is not a valid time"),
    "no name": (entry("."), "has no name"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile(tmp_path: Path, what: str) -> None:
    """Each is refused with a sentence that says what it is."""
    info, words = HOSTILE[what]
    with pytest.raises(ArchiveError, match=words):
        read_all(write(tmp_path, entry_tar(info)))


def _tar_of(*entries: tarfile.TarInfo) -> bytes:
    """A tar of empty entries."""
    return b"".join(each.tobuf(tarfile.USTAR_FORMAT) for each in entries) + tar.END


@pytest.mark.parametrize(
    "link", [entry("a/l", tarfile.SYMTYPE, "/var"), entry("a/l", tarfile.LNKTYPE, "a/m")]
)
def test_a_name_below_a_link(tmp_path: Path, link: tarfile.TarInfo) -> None:
    """What lies below a link would be written wherever that leads; beside it is fine."""
    assert read_all(write(tmp_path, _tar_of(link, entry("a/lx"), entry("l/b"))))["a/lx"] == b""
    for name in ("a/l/b", "a/./l//b/c", "a/l/b/c"):
        with pytest.raises(ArchiveError, match="passes through the link 'a/l'"):
            read_all(write(tmp_path, _tar_of(link, entry(name))))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.REGTYPE])
def test_names_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    """However small the archive is, its names take no more memory than is allowed."""
    monkeypatch.setattr(archive_module, "_MOST_NAMES", 1 << 20)
    names = [f"{'a' * 3000}{number}" for number in range(1000)]

    def written(most: int) -> str:
        made = [
            tar.header(entry(name, kind, "x" if kind == tarfile.SYMTYPE else "")) for name in names[:most]
        ]
        return write(tmp_path, COMPRESS["zstd"](b"".join(made) + tar.END))

    assert len(read_all(written(200))) == 200
    path = written(1000)
    assert os.path.getsize(path) < 100 << 10
    seen: list[str] = []
    with pytest.raises(ArchiveError, match="its entries have more names than any checkpoint"):
        seen.extend(each.name for each in entries(path))
    assert 200 < len(seen) < 400


def test_sparse_and_global(tmp_path: Path) -> None:
    """GNU's sparse files, headers for all entries, and folders with content are refused."""
    for kind, words in (
        (b"S", "is a sparse file"),
        (b"g", "header for all"),
        (b"5", "is not a file, but has"),
    ):
        block = bytearray(entry("a", size=512).tobuf(tarfile.USTAR_FORMAT))
        block[156:157] = kind
        block[148:156] = b"        "
        block[148:156] = b"%06o\0 " % sum(block)
        with pytest.raises(ArchiveError, match=words):
            read_all(write(tmp_path, bytes(block) + bytes(512) + tar.END))


@pytest.mark.parametrize("records", [b"5 a=\n", b"9 path=a", b"99 path=a\n", b"x path=a\n", b"7 =a\n\n\n"])
def test_broken_pax(tmp_path: Path, records: bytes) -> None:
    """A pax header whose lengths do not fit is refused, or read as the standard says."""
    head = entry("././@PaxHeader", b"x", size=len(records)).tobuf(tarfile.USTAR_FORMAT)
    data = head + records + tar.padding(len(records)) + entry("b").tobuf(tarfile.USTAR_FORMAT) + tar.END
    if records == b"5 a=\n":
        assert read_all(write(tmp_path, data)) == {"b": b""}
        return
    with pytest.raises(ArchiveError, match="extended headers is invalid"):
        read_all(write(tmp_path, data))


def test_gnu_names(tmp_path: Path) -> None:
    """GNU's long names and links are read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as made:
        made.addfile(entry("long/" * 50 + "name", tarfile.SYMTYPE, "to/" * 60))
    [found] = entries(write(tmp_path, buffer.getvalue()))
    assert (found.name, found.info.linkname) == ("long/" * 50 + "name", "to/" * 60)


@given(
    at=st.integers(0, 511), value=st.binary(min_size=1, max_size=12), how=st.sampled_from(sorted(COMPRESS))
)
def test_any_damage(tmp_path_factory: pytest.TempPathFactory, at: int, value: bytes, how: str) -> None:
    """Whatever is broken in the first header, the answer is bytes, None or an ArchiveError."""
    data = bytearray(COMPRESS[how](make_tar((NAME,))))
    data[at : at + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(bytes(data))
    try:
        found = read_member(str(path), NAME, limit=1 << 20)
    except ArchiveError:
        return
    assert found is None or len(found) <= 1 << 20


def test_seen(tmp_path: Path) -> None:
    """`plain` gets every byte of the tar in order, whoever reads the entries, and its filling as well."""
    data = make_tar()
    for how in COMPRESS:
        seen: list[bytes] = []
        for _ in entries(io.BytesIO(COMPRESS[how](data)), plain=seen.append):
            pass
        assert b"".join(seen) == data


def test_unpacked() -> None:
    """A compressed blob comes out whole, and one that is cut short is named."""
    packed = b"".join(compress([CONTENT] * 1000))
    assert b"".join(unpack(io.BytesIO(packed), "the blob")) == CONTENT * 1000
    with pytest.raises(ArchiveError, match="the blob is not"):
        list(unpack(io.BytesIO(packed[:-1]), "the blob"))


def test_threads_change_nothing() -> None:
    """The same content makes the same frame, however many threads there are."""
    pieces = [os.urandom(1 << 20), bytes(9 << 20), CONTENT * 100_000]
    assert b"".join(compress(pieces, threads=1)) == b"".join(compress(pieces, threads=3))


# Writing

ENTRIES = [
    (entry("checkpoint", tarfile.DIRTYPE, mode=0o700), b""),
    (entry("checkpoint/a", uid=1000, gid=1001, uname="me", gname="us", mode=0o4755, mtime=1), CONTENT),
    (entry("checkpoint/empty"), b""),
    (entry("link", tarfile.SYMTYPE, "../anywhere/" + "x" * 200), b""),
    (entry("hard", tarfile.LNKTYPE, "checkpoint/a"), b""),
    (entry("n" * 100), b"1"),
    (entry("d" * 99, tarfile.DIRTYPE), b""),
    (entry("e" * 100, tarfile.DIRTYPE), b""),
    (entry("long/" * 400 + "name"), b"22"),
    (entry("né"), b"333"),
    (entry(b"\xff\xfe".decode("utf-8", "surrogateescape")), b"4"),
    (entry("large owner", uid=1 << 31, gid=1 << 31, uname="u" * 60), b"5"),
    (entry("time", mtime=1234567890.25), b"6"),
    (entry("old", mtime=-5), b"7"),
    (
        entry(
            "xattr",
            mtime=9.123456789,
            pax_headers={"SCHILY.xattr.user.a": "\udcff=\n\0b", "atime": "1.5", "mtime": "9.123456789"},
        ),
        b"8",
    ),
]


def said(info: tarfile.TarInfo) -> tuple[object, ...]:
    return (
        *(info.name, info.type, info.linkname, info.mode, info.uid, info.gid, info.uname, info.gname),
        *(info.size, info.mtime),
        {key: value for key, value in info.pax_headers.items() if key.startswith(("SCHILY", "atime"))},
    )


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_round_trip(tmp_path: Path, compress: Compression) -> None:
    """Names, owners, modes, times, links and extended attributes come back, twice, as do the bytes."""
    first, second = tmp_path / "first", tmp_path / "second"
    with Writer(first, compress=compress) as writer:
        for info, content in ENTRIES:
            info.size = len(content)
            writer.add(info, io.BytesIO(content))
    with Writer(second, compress=compress) as writer:
        found = []
        for each in entries(str(first)):
            found.append(said(each.info))
            writer.add(each.info, each.content)
    for (info, _), seen in zip(ENTRIES, found, strict=True):
        assert seen == said(info)
    assert first.read_bytes() == second.read_bytes()
    assert list(read_all(str(second)).values()) == [
        content if info.isreg() else None for info, content in ENTRIES
    ]


def test_it_replaces_nothing(tmp_path: Path) -> None:
    """What somebody else made meanwhile stays, and nothing else is left."""
    with pytest.raises(DiskError, match=r"w\.tar was created by another process"), Writer(tmp_path / "w.tar"):
        (tmp_path / "w.tar").write_text("the other one")
    assert os.listdir(tmp_path) == ["w.tar"]
    assert (tmp_path / "w.tar").read_text() == "the other one"


def test_tarfile_reads_it(tmp_path: Path) -> None:
    """Another reader finds the same."""
    path = tmp_path / "archive"
    with Writer(path) as writer:
        for info, content in ENTRIES:
            info.size = len(content)
            writer.add(info, io.BytesIO(content))
    with tarfile.open(path) as read:
        for (info, _), found in zip(ENTRIES, read, strict=True):
            assert said(found)[:10] == said(info)[:10]


def test_gnu_tar_reads_it(tmp_path: Path) -> None:
    """So does GNU tar."""
    path = tmp_path / "archive.tar"
    with Writer(path) as writer:
        for info, content in ENTRIES:
            info.size = len(content)
            writer.add(info, io.BytesIO(content))
    done = subprocess.run(["tar", "-tf", path], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(ENTRIES)


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_large(tmp_path: Path, compress: Compression) -> None:
    """64 MiB of zeros between other bytes pass through in pieces."""
    size, path = (64 << 20) + 3, tmp_path / "archive"

    def content() -> Iterator[bytes]:
        yield b"a"
        yield from [bytes(1 << 20)] * 64
        yield b"zz"

    with Writer(path, compress=compress, threads=2) as writer:
        writer.add(entry("pages-1.img", size=size), as_file(content()))
        writer.add(entry("after"), None)
    read, last = 0, b""
    for each in entries(str(path)):
        while each.content and (piece := each.content.read(1 << 20)):
            assert len(piece) <= 1 << 20
            read, last = read + len(piece), piece[-2:]
    assert (read, last) == (size, b"zz")
    assert (path.stat().st_size > size) == (compress == "none")


def test_size_of_many_digits() -> None:
    """A file of 8 GiB or more has its size in a pax header, and comes back with it."""
    head = tar.header(entry("pages-1.img", size=640 << 30))
    stream = io.BytesIO(head)
    found = tar.read_header(stream.read)
    assert found is not None
    assert (found.size, found.name) == (640 << 30, "pages-1.img")


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_in_place_at_the_end(tmp_path: Path, compress: Compression) -> None:
    """Until the end there is none, and after a failure nothing is left."""
    path = tmp_path / "archive"
    with pytest.raises(ArchiveError, match="ends 4 bytes too early"), Writer(path) as writer:
        writer.add(entry("a", size=5), io.BytesIO(b"1"))
    broken = Writer(path, compress=compress)
    with contextlib.suppress(KeyboardInterrupt), broken as writer:
        writer.add(entry("a", size=1), io.BytesIO(b"1"))
        assert not path.exists()
        raise KeyboardInterrupt
    assert not os.listdir(tmp_path)
    with Writer(path, compress=compress) as writer:
        writer.add(entry("a", size=1), io.BytesIO(b"1"))
    assert os.listdir(tmp_path) == ["archive"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_all(str(path)) == {"a": b"1"}


def test_through_a_link(tmp_path: Path) -> None:
    """The folder may be a link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with Writer(tmp_path / "link" / "archive") as writer:
        writer.add(entry("a"))
    assert read_all(str(tmp_path / "real" / "archive")) == {"a": b""}


@pytest.mark.parametrize("step", ["write", "fsync", "name"])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whichever step finds the disk full, the path is named and nothing is left."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    where, name = {"write": (archive_module, "write_all"), "name": (os, "link")}.get(step, (os, step))
    monkeypatch.setattr(where, name, full)
    with (
        pytest.raises(DiskFull, match=rf"{tmp_path} is full: the archive out\.tar"),
        Writer(tmp_path / "out.tar") as writer,
    ):
        writer.add(entry("a", size=3), io.BytesIO(b"123"))
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_not_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive whose name did not reach the disk is not left: the next try would be refused for it."""
    synced = os.fsync

    def fails(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "Input/output error")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    said = r"the archive out\.tar, .* cannot be written in .*: .*nput/output error"
    with pytest.raises(DiskError, match=said), Writer(tmp_path / "out.tar") as writer:
        writer.add(tarfile.TarInfo("a"), io.BytesIO())
    assert os.listdir(tmp_path) == []


def test_killed(tmp_path: Path) -> None:
    """Nothing is left of an archive whose writer is killed: it has no name before its end."""
    program = """
import io, os, signal, sys, tarfile
from gpusnap.oci.tar.archive import Writer
info = tarfile.TarInfo("a")
info.size = 1 << 20
with Writer(sys.argv[1]) as writer:
    writer.add(info, io.BytesIO(bytes(1 << 20)))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "out.tar"
    done = subprocess.run([sys.executable, "-B", "-c", program, path], check=False)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_file_too_large(tmp_path: Path) -> None:
    """The limit on the size of files is met as a full disk is, by the real system call."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    program = """
import io, resource, signal, sys, tarfile
from gpusnap.oci.tar.archive import Writer
from gpusnap.oci.base.errors import DiskFull
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
info = tarfile.TarInfo("a")
info.size = 2 << 20
try:
    with Writer(sys.argv[1]) as writer:
        writer.add(info, io.BytesIO(bytes(2 << 20)))
except DiskFull as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, tmp_path / "out.tar"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "does not allow files of that size: the archive out.tar" in done.stdout
    assert not os.listdir(tmp_path)
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_an_entry_that_no_disk_has_room_for(tmp_path: Path) -> None:
    """It is refused before its first byte: it may be terabytes of zeros that a table of chunks tells of."""

    class Zeros(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            pytest.fail("it was being read")

    info = tarfile.TarInfo("volumes/v.tar")
    info.size = 1 << 50
    said = r"the archive out.tar with an entry of 1024.0 TiB did not fit"
    with pytest.raises(DiskFull, match=said), Writer(tmp_path / "out.tar") as writer:
        writer.add(info, Zeros())
    assert not os.listdir(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    """A folder that is not there is named."""
    with pytest.raises(DiskError, match="it does not exist"), Writer(tmp_path / "none" / "out.tar"):
        pass


def test_gzip_members(tmp_path: Path) -> None:
    """gzip in several members, as pigz may write it, is read to its end."""
    data = make_tar()
    path = write(tmp_path, gzip.compress(data[:1000]) + gzip.compress(data[1000:]))
    assert read_member(path, NAME, limit=1 << 20) == CONTENT
