"""The image of the container's /dev: the changed nodes are, all else is as it was, and nothing gets in."""

from __future__ import annotations

import functools
import gzip
import io
import os
import stat
import subprocess
import tarfile
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.gpu.api.device_nodes import Change
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.runtime.criu.images import dev
from gpusnap.runtime_shim.runtime.criu.images import dev_tar as reader
from gpusnap.runtime_shim.runtime.criu.images.dev import image_name, rewrite

CORPUS = Path(__file__).parents[4] / "corpus" / "dev"
BLOCK = 512
CREATE = [
    "--create",
    "--gzip",
    "--no-unquote",
    "--no-wildcards",
    "--one-file-system",
    "--check-links",
    "--preserve-permissions",
    "--sparse",
    "--numeric-owner",
]
EXTRACT = ["--extract", "--gzip", "--no-unquote", "--no-wildcards"]
CHARACTER, BLOCK_DEVICE = tarfile.CHRTYPE, tarfile.BLKTYPE
DEVICES = (CHARACTER, BLOCK_DEVICE)


def node(path: str, minor: int, major: int = 195) -> Node:
    return Node(f"/dev/{path}", major, minor)


def change(old: Node, *new: Node) -> Change:
    return Change(old, new)


MOVE = (change(node("nvidia0", 0), node("nvidia3", 3)),)
SWAP = (
    change(node("nvidia0", 0), node("nvidia0", 1)),
    change(node("nvidia1", 1), node("nvidia1", 0)),
)
TRADE = (
    change(node("nvidia0", 0), node("nvidia1", 1)),
    change(node("nvidia1", 1), node("nvidia0", 0)),
)


@functools.cache
def mknod_works() -> bool:
    """Whether this machine lets us make a device node, and whether GNU tar is here."""
    said = subprocess.run(["tar", "--version"], capture_output=True, check=False).stdout
    if os.geteuid() or b"GNU tar" not in said:
        return False
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.mknod(f"{folder}/nvidia0", stat.S_IFCHR | 0o600, os.makedev(195, 0))
        except OSError:
            return False
    return True


needs_mknod = pytest.mark.skipif(
    not mknod_works(), reason="needs GNU tar, and mknod(2) of a device (CAP_MKNOD)"
)


def entry(
    name: str,
    kind: bytes = tarfile.REGTYPE,
    numbers: tuple[int, int] = (0, 0),
    *,
    link: str = "",
    size: int = 0,
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    info.devmajor, info.devminor = numbers
    info.mode, info.uid, info.gid, info.mtime = 0o640, 7, 44, 1_700_000_000
    return info


def gpu(name: str, minor: int) -> tarfile.TarInfo:
    return entry(f"./{name}", CHARACTER, (195, minor))


def plain(*entries: tarfile.TarInfo, form: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for info in entries:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return file.getvalue()


def image(*entries: tarfile.TarInfo, form: int = tarfile.GNU_FORMAT) -> bytes:
    return gzip.compress(plain(entry("./", tarfile.DIRTYPE), *entries, form=form))


def listed(packed: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return tar.getmembers()


def nodes(packed: bytes) -> dict[str, tuple[int, int]]:
    return {each.name: (each.devmajor, each.devminor) for each in listed(packed) if each.type in DEVICES}


def edited(packed: bytes, edit: Callable[[bytearray], None]) -> bytes:
    """The image with its tar changed."""
    tar = bytearray(gzip.decompress(packed))
    edit(tar)
    return gzip.compress(bytes(tar))


def summed(tar: bytearray, at: int) -> None:
    """Put the checksum of the header at `at` right."""
    tar[at + 148 : at + 156] = b" " * 8
    tar[at + 148 : at + 156] = f"{sum(tar[at : at + BLOCK]):06o}\0 ".encode()


def at(packed: bytes, name: str) -> int:
    """Where the header of an entry is."""
    return next(each.offset for each in listed(packed) if each.name == name)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A /dev such as crun makes, with two GPUs."""
    top = tmp_path / "dev"
    (top / "dri").mkdir(parents=True)
    (top / "nvidia-caps").mkdir()
    for name, major, minor, mode in (
        ("null", 1, 3, 0o666),
        ("nvidia0", 195, 0, 0o660),
        ("nvidia1", 195, 1, 0o666),
        ("nvidiactl", 195, 255, 0o666),
        ("dri/renderD128", 226, 128, 0o640),
        ("nvidia-caps/nvidia-cap1", 511, 1, 0o400),
    ):
        os.mknod(top / name, stat.S_IFCHR | mode, os.makedev(major, minor))
        (top / name).chmod(mode)
    os.chown(top / "nvidia0", 1234, 70000)
    (top / "console").touch()
    (top / "fd").symlink_to("/proc/self/fd")
    (top / "gpu").symlink_to("nvidia0")
    (top / "notes").write_text("kept")
    with (top / "holes").open("wb") as file:
        for piece in range(30):
            file.seek(piece << 16)
            file.write(b"data")
        file.truncate(4 << 20)
    (top / ("n" * 150)).write_text("a long name")
    os.mkfifo(top / "pipe")
    return top


HAS = (node("nvidiactl", 255), node("dri/renderD128", 128, 226), node("nvidia-caps/nvidia-cap1", 1, 511))
BOTH = (*HAS, node("nvidia0", 0), node("nvidia1", 1))


def dump(top: Path) -> bytes:
    return subprocess.run(["tar", *CREATE, "--directory", top, "."], capture_output=True, check=True).stdout


def restore(packed: bytes, to: Path) -> Path:
    to.mkdir()
    subprocess.run(["tar", *EXTRACT, "--directory", to], input=packed, check=True)
    return to


def seen(top: Path) -> dict[str, tuple[object, ...]]:
    """What lies below a folder: kind, mode, owner, time, numbers or content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        link = path.readlink() if path.is_symlink() else ""
        time = 0 if path.is_dir() else int(info.st_mtime)
        found[str(path.relative_to(top))] = (
            info.st_mode, info.st_uid, info.st_gid, time, info.st_rdev, content, link
        )  # fmt: skip
    return found


@needs_mknod
def test_what_criu_writes(tree: Path, tmp_path: Path) -> None:
    """An archive made with CRIU's flags, in folders too, comes out as it was, but for the changed nodes."""
    changes = (
        change(node("nvidia0", 0), node("nvidia3", 3)),
        change(node("dri/renderD128", 128, 226), node("dri/renderD131", 131, 226)),
        change(node("nvidia-caps/nvidia-cap1", 1, 511), node("nvidia-caps/nvidia-cap1", 1, 509)),
    )
    new = rewrite(dump(tree), changes, (*HAS, node("nvidia1", 1)))
    assert new is not None
    before, after = seen(tree), seen(restore(new, tmp_path / "restored"))
    for old, name, numbers in (
        ("nvidia0", "nvidia3", (195, 3)),
        ("dri/renderD128", "dri/renderD131", (226, 131)),
        ("nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap1", (509, 1)),
    ):
        was = before.pop(old)
        assert after.pop(name) == (*was[:4], os.makedev(*numbers), *was[5:])
    assert after == before


@needs_mknod
@pytest.mark.parametrize("form", ["gnu", "ustar", "posix"])
def test_a_check_changes_nothing(tree: Path, form: str) -> None:
    """An image with nothing to change is looked at in each of tar's formats, and left alone."""
    if form != "gnu":  # GNU's own headers are for these
        (tree / "holes").unlink()
        (tree / ("n" * 150)).unlink()
    flags = [flag for flag in CREATE if form != "ustar" or flag != "--sparse"]
    words = ["tar", *flags, f"--format={form}", "--directory", str(tree), "."]
    packed = subprocess.run(words, capture_output=True, check=True).stdout
    assert rewrite(packed, (), BOTH) is None
    assert rewrite(packed, [change(node("nvidia7", 7), node("nvidia8", 8))], BOTH) is None
    with pytest.raises(ImageError, match=r"nvidia1 is a device \(195:1\) that"):
        rewrite(packed, (), (*HAS, node("nvidia0", 0)))
    moved = rewrite(packed, MOVE, BOTH)
    assert moved is not None
    assert nodes(moved)["./nvidia3"] == (195, 3)


@needs_mknod
def test_an_alias_is_one_more_entry(tree: Path, tmp_path: Path) -> None:
    """A second name gets owner and mode of the first; tar takes the archive, a block longer."""
    both = change(node("nvidia0", 0), node("nvidia0", 3), node("nvidia3", 3))
    new = rewrite(dump(tree), (both,), BOTH)
    assert new is not None
    assert len(gzip.decompress(new)) % 10240 == BLOCK
    after = seen(restore(new, tmp_path / "restored"))
    assert after["nvidia0"] == after["nvidia3"]
    assert after["nvidia3"][:5] == (
        stat.S_IFCHR | 0o660, 1234, 70000, int((tree / "nvidia0").lstat().st_mtime), os.makedev(195, 3)
    )  # fmt: skip


@needs_mknod
def test_all_else_byte_for_byte(tree: Path) -> None:
    """Put the old header back in the new one's place, and the tar is the old one."""
    packed = dump(tree)
    new = rewrite(packed, MOVE, BOTH)
    assert new is not None
    one, other = gzip.decompress(packed), gzip.decompress(new)
    where = at(packed, "./nvidia0")
    header = other[where : where + BLOCK]
    assert other[:where] + one[where : where + BLOCK] + other[where + BLOCK :] == one
    different = {i for i in range(BLOCK) if header[i] != one[where + i]}
    assert different <= {*range(100), *range(148, 156), *range(329, 345)}


def test_the_compressed_form() -> None:
    """The same image gives the same bytes at any time; several gzip members are one image."""
    packed = image(gpu("nvidia0", 0))
    new = rewrite(packed, MOVE)
    assert new is not None
    assert new[:2] == b"\x1f\x8b"
    assert new[4:8] == bytes(4)
    tar = gzip.decompress(packed)
    assert rewrite(gzip.compress(tar[:700]) + gzip.compress(b"") + gzip.compress(tar[700:]), MOVE) == new
    assert rewrite(io.BytesIO(packed), MOVE) == new


@pytest.mark.parametrize("changes", [SWAP, TRADE])
def test_swap(changes: Sequence[Change]) -> None:
    """Two nodes that trade numbers, or names with them, do so at once."""
    new = rewrite(image(gpu("nvidia0", 0), gpu("nvidia1", 1)), changes)
    assert new is not None
    numbers = {"./nvidia0": (195, 1), "./nvidia1": (195, 0)}
    assert nodes(new) == (numbers if changes is SWAP else {"./nvidia0": (195, 0), "./nvidia1": (195, 1)})


def test_a_name_that_goes_away() -> None:
    """A change to nothing takes the entry out."""
    new = rewrite(
        image(gpu("nvidia0", 0), gpu("nvidia1", 1)), [change(node("nvidia0", 0))], [node("nvidia1", 1)]
    )
    assert new is not None
    assert [each.name for each in listed(new)] == [".", "./nvidia1"]


def test_where_a_bind_mount_lies() -> None:
    """An empty file with a GPU's name is left for the mount; one that holds something is refused."""
    assert rewrite(image(entry("./nvidia0")), MOVE) is None
    with pytest.raises(ImageError, match="nvidia0 has the name of a GPU device, but is not one"):
        rewrite(image(entry("./nvidia0", size=3)), MOVE)


def test_links() -> None:
    """A symbolic link to a node stays as it is."""
    new = rewrite(image(gpu("nvidia0", 0), entry("./gpu", tarfile.SYMTYPE, link="nvidia0")), MOVE)
    assert new is not None
    assert [(each.name, each.linkname) for each in listed(new)][-1] == ("./gpu", "nvidia0")
    hard = [entry("./a"), entry("./b", tarfile.LNKTYPE, link="./a")]
    assert rewrite(image(*hard)) is None


def test_default_devices() -> None:
    """What every container has needs no leave; this host's console does."""
    names = {path: (major, minor) for _, major, minor, path in dev.DEFAULT}
    assert set(names) == {
        f"/dev/{name}" for name in ["null", "zero", "full", "random", "urandom", "tty", "ptmx"]
    }
    for path, numbers in names.items():
        assert rewrite(image(entry(f".{path[4:]}", CHARACTER, numbers))) is None
        info = os.stat(path) if os.path.exists(path) else None
        assert info is None or not stat.S_ISCHR(info.st_mode) or info.st_rdev == os.makedev(*numbers)
    with pytest.raises(ImageError, match=r"console is a device \(5:1\)"):
        rewrite(image(entry("./console", CHARACTER, (5, 1))))


def test_block_devices() -> None:
    """A disk is no character device of the same numbers."""
    disk = image(entry("./sda", BLOCK_DEVICE, (8, 0)))
    with pytest.raises(ImageError, match=r"sda is a device \(8:0\)"):
        rewrite(disk, (), [node("sda", 0, 8)])
    assert rewrite(disk, (), [("b", 8, 0, "/dev/sda")]) is None


REFUSED: dict[str, tuple[Sequence[tarfile.TarInfo], str]] = {
    "unknown": ([entry("./kmsg", CHARACTER, (1, 11))], r"kmsg is a device \(1:11\)"),
    "known by another name": ([entry("./x", CHARACTER, (1, 3))], r"x is a device \(1:3\)"),
    "other numbers": ([gpu("nvidia0", 1)], "nvidia0 is 195:1, but the GPU's device was 195:0"),
    "a block device": (
        [entry("./nvidia0", BLOCK_DEVICE, (195, 0))],
        "nvidia0 has the name of a GPU device",
    ),
    "a link": ([entry("./nvidia0", tarfile.SYMTYPE, link="null")], "nvidia0 has the name of a GPU device"),
    "a directory:": ([entry("./nvidia0", tarfile.DIRTYPE)], "nvidia0 has the name of a GPU device"),
    "a hard link": (
        [gpu("nvidia0", 0), entry("./x", tarfile.LNKTYPE, link="./nvidia0")],
        "x is a hard link to ./nvidia0",
    ),
    "a hard link out": ([entry("./x", tarfile.LNKTYPE, link="/etc/shadow")], "x|shadow"),
    "a hard link up": ([entry("./x", tarfile.LNKTYPE, link="../x")], "points outside /dev"),
    "a hard link to nothing": ([entry("./x", tarfile.LNKTYPE, link="y")], "x is a hard link to y"),
    "absolute": ([entry("/dev/x")], "/dev/x points outside /dev"),
    "up": ([entry("./dri/../../x")], "points outside /dev"),
    "twice": ([entry("./x"), entry("x")], "x is listed twice"),
    "a directory twice": (
        [entry("./x", tarfile.DIRTYPE), entry("./x/", tarfile.DIRTYPE)],
        "x is listed twice",
    ),
    "taken": ([gpu("nvidia0", 0), entry("./nvidia3")], "nvidia3 would exist twice"),
    "in a folder twice": (
        [entry("./x/y"), entry("./x", tarfile.DIRTYPE), entry("./x", tarfile.DIRTYPE)],
        "x is listed twice",
    ),
    "behind a link": (
        [entry("./x", tarfile.SYMTYPE, link="/etc"), entry("./x/passwd")],
        "x/passwd is in something that is not a directory",
    ),
    "a link in a folder's place": (
        [entry("./x/y"), entry("./x", tarfile.SYMTYPE, link="/etc")],
        "x is listed twice",
    ),
    "a newline": (
        [entry("./nvidia0\n", CHARACTER, (195, 0))],
        r"nvidia0\\n is a device without a valid device name",
    ),
    "not ASCII": ([entry("./nvidiå0", CHARACTER, (195, 0))], "is a device without a valid device name"),
    "a long name": (
        [entry("./" + "n" * 150, CHARACTER, (195, 0))],
        "is a device without a valid device name",
    ),
    "no name": ([entry("./.", CHARACTER, (195, 0))], ". is not a directory"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    """What must not get in is refused by its name."""
    entries, words = REFUSED[what]
    with pytest.raises(ImageError, match=words) as caught:
        rewrite(image(*entries), MOVE)
    assert "damaged" in caught.value.hint
    assert "\n" not in str(caught.value)


def test_pax() -> None:
    """A pax header may tell times, and nothing else: neither a size nor another name."""
    timed = gpu("nvidia0", 0)
    timed.pax_headers = {"mtime": "1700000000.25", "atime": "-1.5"}
    gone = rewrite(image(timed, form=tarfile.PAX_FORMAT), [change(node("nvidia0", 0))])
    assert gone is not None
    assert b"mtime=" not in gzip.decompress(gone)
    new = rewrite(image(timed, form=tarfile.PAX_FORMAT), MOVE)
    assert new is not None
    assert nodes(new) == {"./nvidia3": (195, 3)}
    for key in ("path", "size", "GNU.sparse.name", "SCHILY.devmajor", "comment"):
        hostile = gpu("nvidia0", 0)
        hostile.pax_headers = {key: "7"}
        with pytest.raises(ImageError, match="has a pax header with more than times"):
            rewrite(image(hostile, form=tarfile.PAX_FORMAT), MOVE)
    with pytest.raises(ImageError, match="is of a type that is not allowed"):
        rewrite(image(entry("./x", tarfile.XGLTYPE)), MOVE)


HEADERS: dict[str, tuple[int, int, str]] = {
    "a NUL in the name": (50, ord("A"), "is a device without a valid device name"),
    "content": (134, ord("1"), "has content, but is not a file"),
    "no octal number": (330, ord("8"), "has an invalid number"),
    "base 256": (329, 0x80, "has an invalid number"),
    "no magic": (257, 0, "of a type that tar does not write"),
    "another kind": (156, ord("M"), "is of a type that is not allowed"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_headers(what: str) -> None:
    """A header that two programs could read differently is refused."""
    where, byte, words = HEADERS[what]

    def edit(tar: bytearray) -> None:
        tar[BLOCK + where] = byte
        summed(tar, BLOCK)

    with pytest.raises(ImageError, match=words):
        rewrite(edited(image(gpu("nvidia0", 0)), edit), MOVE)


def test_a_name_in_two_parts() -> None:
    """A device whose name goes over into the header's second field is refused: it could not be renamed."""

    def split(tar: bytearray) -> None:
        tar[BLOCK : BLOCK + 100] = b"nvidia0".ljust(100, b"\0")
        tar[BLOCK + 345] = ord(".")
        summed(tar, BLOCK)

    packed = edited(image(gpu("nvidia0", 0), form=tarfile.USTAR_FORMAT), split)
    assert nodes(packed) == {"./nvidia0": (195, 0)}
    with pytest.raises(ImageError, match=r"nvidia0 is a device without a valid device name"):
        rewrite(packed, MOVE)


def test_a_file_named_like_a_folder() -> None:
    """To tar a file whose name ends in a slash is a folder."""

    def slash(tar: bytearray) -> None:
        tar[BLOCK + 3] = ord("/")
        summed(tar, BLOCK)

    with pytest.raises(ImageError, match="is a file with the name of a directory"):
        rewrite(edited(image(entry("./x")), slash))


def test_long_names() -> None:
    """A long name belongs to the entry behind it: there is one, of one kind, and no longer than a path."""
    long = plain(entry("./" + "n" * 150))
    header, rest = long[: 2 * BLOCK], long[2 * BLOCK :]
    assert rewrite(gzip.compress(header + rest)) is None
    for tar, words in (
        (header + header + rest, "has a header that tar does not write"),
        (header + bytes(1024), "ends in the middle of an entry"),
        (plain(entry("./" + "n" * 4096)), "has a header that tar does not write"),
        (header.replace(b"nnn\0", b"n\0n\0") + rest, "has a long name that tar does not write"),
    ):
        with pytest.raises(ImageError, match=words):
            rewrite(gzip.compress(tar))


@needs_mknod
def test_many_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of holes that goes on in blocks of its own is read, up to a length that no real one has."""
    with (tmp_path / "holes").open("wb") as file:
        for piece in range(60):
            file.seek(piece << 16)
            file.write(b"data")
    packed = dump(tmp_path)
    assert rewrite(packed) is None
    monkeypatch.setattr(reader, "_EXTENSION", 1)
    with pytest.raises(ImageError, match="holes has too many holes"):
        rewrite(packed)


def sparse(slots: Sequence[tuple[int, int]], size: int, real: int, *, more: int = 0) -> bytes:
    """A file with holes whose map says these (offset, length)."""

    def change_type(tar: bytearray) -> None:
        tar[BLOCK + 156] = ord("S")
        words = b"".join(f"{number:011o}\0".encode() for slot in slots for number in slot)
        tar[BLOCK + 386 : BLOCK + 386 + len(words)] = words
        tar[BLOCK + 482] = more
        tar[BLOCK + 483 : BLOCK + 495] = f"{real:011o}\0".encode()
        summed(tar, BLOCK)

    return edited(image(entry("./holes", size=size)), change_type)


def test_holes() -> None:
    """A file with holes is fine where its map fits what follows; tar would lose its place otherwise."""
    assert rewrite(sparse([(0, 512), (4096, 100), (9000, 0)], 612, 9000)) is None
    for packed in (
        sparse([(0, 512), (4096, 1024)], 612, 9000),
        sparse([(0, 512), (4096, 100)], 612, 4100),
        sparse([(0, 100), (4096, 512)], 612, 9000),
        sparse([(4096, 512), (0, 100)], 612, 9000),
        sparse([(0, 512), (4096, 100)], 612, 9000, more=1),
    ):
        with pytest.raises(ImageError, match="has a map of its holes that"):
            rewrite(packed)


def test_ends() -> None:
    """An archive that is cut short, or goes on behind its end, is refused wherever that is."""
    packed = image(gpu("nvidia0", 0))
    tar = gzip.decompress(packed)
    for length in (0, 1, 511, 512, 1024, 1535, 1536):
        with pytest.raises(ImageError, match="is cut short"):
            rewrite(gzip.compress(tar[:length]), MOVE)
    assert rewrite(gzip.compress(tar[:2048]), MOVE) is not None
    for length in (0, 5, len(packed) // 2, len(packed) - 1):
        with pytest.raises(ImageError, match="is cut short"):
            rewrite(packed[:length], MOVE)
    for more in (b"x" * 512, tar):
        with pytest.raises(ImageError, match="continues after its end"):
            rewrite(gzip.compress(tar + more), MOVE)
    for packed_more in (packed + b"garbage", packed + bytes(20), b"garbage", tar):
        with pytest.raises(ImageError, match="cannot be unpacked"):
            rewrite(packed_more, MOVE)
    broken = edited(packed, lambda tar: tar.__setitem__(BLOCK + 2, 0x41))
    with pytest.raises(ImageError, match="has a wrong checksum"):
        rewrite(broken, MOVE)


class Endless(io.RawIOBase):
    """A file that gives the same bytes for ever, and counts them."""

    def __init__(self, piece: bytes) -> None:
        self.piece, self.given = piece, 0

    def read(self, size: int = -1) -> bytes:
        self.given += len(self.piece)
        return self.piece


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large, packed or not, and too many: found out as it is read."""
    monkeypatch.setattr(reader, "LIMIT", 1 << 20)
    with pytest.raises(ImageError, match="unpacks to more than 1 MiB"):
        rewrite(image(entry("./x", size=2 << 20)))
    endless = Endless(gzip.compress(b""))
    with pytest.raises(ImageError, match="is larger than 1 MiB"):
        rewrite(endless)  # type: ignore[arg-type]
    assert endless.given <= (1 << 20) + len(endless.piece)
    monkeypatch.setattr(reader, "ENTRIES", 20)
    assert rewrite(image(*(entry(f"./{number}") for number in range(19)))) is None
    with pytest.raises(ImageError, match="has more than 20 entries"):
        rewrite(image(*(entry(f"./{number}") for number in range(20))))
    with pytest.raises(ImageError, match="has more than 20 entries"):
        rewrite(image(entry("./" + "a/" * 30 + "b")))


def test_a_bomb_is_never_held() -> None:
    """A gibibyte of zeros in a mebibyte is given up at the limit, with little of it in memory."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = plain(entry("./", tarfile.DIRTYPE), entry("./x", size=0))[:BLOCK]
    info = entry("./x", size=1 << 30).tobuf(tarfile.GNU_FORMAT)
    packed = packer.compress(head + info)
    packed += b"".join(packer.compress(bytes(1 << 20)) for _ in range(300)) + packer.flush()
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match="unpacks to more than 256 MiB"):
            rewrite(packed)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_changes_that_cannot_be() -> None:
    """A change of what lies outside /dev, or one that does not fit into a header, is refused."""
    packed = image(gpu("nvidia0", 0))
    for path in ("/etc/x", "/dev/../x", "/dev/", "/dev/a//b"):
        with pytest.raises(ImageError, match="is not a valid location for a device"):
            rewrite(packed, [change(Node(path, 1, 1), node("nvidia3", 3))])
        with pytest.raises(ImageError, match="is not a valid location for a device"):
            rewrite(packed, [change(node("nvidia0", 0), Node(path, 1, 1))])
    for new in (node("n" * 99, 3), node("nvidia3", 1 << 21)):
        with pytest.raises(ImageError, match="cannot be represented in a tar header"):
            rewrite(packed, [change(node("nvidia0", 0), new)])
    with pytest.raises(ImageError, match="nvidia0 would be changed twice"):
        rewrite(packed, [*MOVE, *MOVE])


def test_a_file_that_cannot_be_read() -> None:
    """An error of the disk is one of ours."""
    with (
        open("/proc/self/mem", "rb", buffering=0) as file,  # nothing is mapped at 0
        pytest.raises(ImageError, match="the image of the container's /dev cannot be read"),
    ):
        rewrite(file)


def test_image_name() -> None:
    """A tmpfs has no driver, so its number is its minor; CRIU takes the kernel's form of it."""
    assert image_name(os.makedev(0, 57)) == "tmpfs-dev-57.tar.gz.img"
    assert image_name(os.makedev(0, 0x12345)) == "tmpfs-dev-74565.tar.gz.img"
    assert image_name(os.makedev(8, 1)) == f"tmpfs-dev-{8 << 20 | 1}.tar.gz.img"


MIXED = image(
    entry("./null", CHARACTER, (1, 3)),
    gpu("nvidia0", 0),
    gpu("nvidia1", 1),
    entry("./dri", tarfile.DIRTYPE),
    entry("./" + "long" * 40, size=700),
    entry("./fd", tarfile.SYMTYPE, link="/proc/self/fd"),
    entry("./file"),
    entry("./hard", tarfile.LNKTYPE, link="./file"),
)


def only_our_errors(packed: bytes) -> None:
    for changes in ((), MOVE, TRADE):
        try:
            new = rewrite(packed, changes, (node("nvidia0", 0), node("nvidia1", 1)))
        except ImageError:
            continue
        else:
            allowed = (*(n for each in changes for n in each.new), node("nvidia0", 0), node("nvidia1", 1))
            # What came through is as good as what was given: it holds nothing but what may be there.
            assert rewrite(new or packed, (), allowed) is None


def test_mixed_is_whole() -> None:
    """The archive that the next tests break is a good one."""
    for changes in (MOVE, TRADE):
        assert rewrite(MIXED, changes, (node("nvidia1", 1),)) is not None


@settings(deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes(data: bytes) -> None:
    """Whatever comes, compressed or not, ends in an answer or in an error of ours."""
    only_our_errors(data)
    only_our_errors(gzip.compress(data))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8 * 8192 - 1), st.booleans()), min_size=1, max_size=6))
def test_flipped_bits(flips: list[tuple[int, bool]]) -> None:
    """A good tar with bits flipped, its checksums made right again or not."""

    def flip(tar: bytearray) -> None:
        for bit, mend in flips:
            tar[bit // 8 % len(tar)] ^= 1 << bit % 8
            if mend:
                summed(tar, bit // 8 % len(tar) // BLOCK * BLOCK)

    only_our_errors(edited(MIXED, flip))


@settings(deadline=None)
@given(st.integers(0, len(MIXED) - 1), st.integers(0, 255))
def test_flipped_bytes_of_the_image(where: int, byte: int) -> None:
    """The compressed form damaged anywhere."""
    only_our_errors(MIXED[:where] + bytes([byte]) + MIXED[where + 1 :])


NAMES = st.sampled_from(["nvidia0", "nvidia1", "nvidia3", "null", "a", "dri", "dri/renderD128", "dri/a"])
KINDS = st.sampled_from([b"0", b"1", b"2", b"3", b"4", b"5", b"6"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, KINDS, st.integers(0, 3), NAMES, st.integers(0, 600)), max_size=8))
def test_no_device_gets_in(drawn: list[tuple[str, bytes, int, str, int]]) -> None:
    """Whatever is in the archive, what comes out holds no device but the plan's and the allowed ones."""
    packed = image(
        *(
            entry(f"./{name}", kind, (195, minor), link=f"./{link}", size=size if kind == b"0" else 0)
            for name, kind, minor, link, size in drawn
        )
    )
    try:
        new = rewrite(packed, TRADE, [node("nvidia3", 3)])
    except ImageError:
        return
    names = {"./nvidia0": (195, 0), "./nvidia1": (195, 1), "./nvidia3": (195, 3)}
    assert nodes(new or packed).items() <= names.items()
    one, other = (
        [each.get_info() for each in listed(archive) if each.type not in DEVICES]
        for archive in (packed, new or packed)
    )
    assert one == other


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_corpus(path: Path) -> None:
    """The kept archives: good ones are answered, bad ones are refused, as their names say."""
    data, allowed = path.read_bytes(), [node("nvidia0", 0), node("nvidia1", 1)]
    if path.name.startswith("good"):
        assert rewrite(data, TRADE, allowed) is not None
        assert rewrite(data, (), allowed) is None
    else:
        with pytest.raises(ImageError):
            rewrite(data, TRADE, allowed)
