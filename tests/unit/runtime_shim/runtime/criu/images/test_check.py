"""CRIU's images are looked at before CRIU does: what would keep it for ever is refused by name."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from criu_images import CORE, INVENTORY, PAGE, encode_messages, entry, image, images, numbers, pagemap, varint

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.runtime.criu.images import messages, pycriu_package
from gpusnap.runtime_shim.runtime.criu.images.check import check
from gpusnap.runtime_shim.runtime.criu.images.messages import kind_of
from gpusnap.runtime_shim.runtime.criu.images.written_file import WrittenFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An image directory that is right, with what CRIU and the runtime leave beside images."""
    top = tmp_path / "checkpoint"
    top.mkdir()
    for name, data in images().items():
        (top / name).write_bytes(data)
    (top / "descriptors.json").write_text("[]")
    (top / "dump.log").write_text("log")
    (top / "gpusnap").mkdir()
    return top


def refused(folder: Path) -> str:
    with pytest.raises(ImageError) as caught:
        check(str(folder), "x86_64")
    assert "use another copy" in caught.value.hint
    return str(caught.value)


def test_right(folder: Path) -> None:
    """A dump as CRIU writes it is accepted, and so is what somebody else has put beside it."""
    (folder / "notes").mkdir()
    (folder / "link").symlink_to("/nowhere")
    check(str(folder), "x86_64")


def test_files_that_were_written_to(folder: Path) -> None:
    """CRIU compares their size; it has recorded none for one that is open for appending only."""
    pb = pycriu_package.load().pb
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_LARGEFILE, os.O_RDWR, os.O_WRONLY | os.O_APPEND)
    files = [
        pb.reg_file_entry(id=at, flags=each, pos=0, name=f"/log {at}", **({} if at == 3 else {"size": at}))
        for at, each in enumerate(flags)
    ]
    entries = [pb.file_entry(type=1, id=at, reg=file) for at, file in enumerate(files)]
    entries.append(pb.file_entry(type=17, id=9))
    (folder / "files.img").write_bytes(encode_messages(entries, "files"))
    assert check(str(folder), "x86_64") == (WrittenFile("/log 1", 1), WrittenFile("/log 2", 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-PAGE],
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"x" * PAGE,
    ],
    ids=["a page short", "empty", "half", "a byte short", "a page long"],
)
def test_pages_are_as_long_as_the_pagemap_says(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Where they are not, CRIU would read at their end for ever."""
    path = folder / "pages-1.img"
    path.write_bytes(change(path.read_bytes()))
    assert f"pages-1.img in {folder} has {path.stat().st_size} bytes" in refused(folder)


def test_no_pages(folder: Path) -> None:
    """They may be missing only where no page is said to be in them."""
    (folder / "pages-1.img").unlink()
    assert "pages-1.img" in refused(folder)
    (folder / "pagemap-1.img").write_bytes(pagemap(1, [(0x1000, 4, 0)]))
    check(str(folder), "x86_64")


def test_pages_from_chunks(folder: Path) -> None:
    """Those that a store has are measured by what the manifest says of them."""
    (folder / "pages-1.img").unlink()
    check(str(folder), "x86_64", {"pages-1.img": 3 * PAGE})
    with pytest.raises(ImageError, match="has 4096 bytes"):
        check(str(folder), "x86_64", {"pages-1.img": PAGE})


@pytest.mark.parametrize("name", ["pages-1.img", "core-1.img", "descriptors.json", "mountpoints-999.img"])
@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "socket"])
def test_every_image_is_a_regular_file(folder: Path, name: str, kind: str) -> None:
    """A FIFO would be waited for, a link would lead anywhere: both are refused, and nothing is opened."""
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(folder):
            made.bind(name)  # a whole path may be longer than unix(7) takes
    text = refused(folder)
    assert name in text
    assert "not a regular file" in text


def test_what_an_earlier_dump_left(folder: Path) -> None:
    """The pagemap of a process that is no more; its pages have been written over by another process' ones."""
    (folder / "pagemap-206.img").write_bytes(pagemap(1, [(0x1000, 8, 4)]))
    (folder / "mm-207.img").write_bytes((folder / "mm-1.img").read_bytes())
    check(str(folder), "x86_64")
    (folder / "pages-1.img").write_bytes(bytes(8 * PAGE))
    assert "pagemap-1.img lists 3 pages" in refused(folder)


def test_shared_memory(folder: Path) -> None:
    """Its pagemap is looked at as a task's; of two for the same pages one may be an earlier dump's."""
    (folder / "pagemap-shmem-5.img").write_bytes(pagemap(9, [(0, 8, 4)]))
    assert "pages-9.img in" in refused(folder)
    (folder / "pages-9.img").write_bytes(bytes(2 * PAGE))
    assert "pagemap-shmem-5.img lists 8 pages" in refused(folder)
    (folder / "pagemap-shmem-6.img").write_bytes(pagemap(9, [(0, 2, 4)]))
    check(str(folder), "x86_64")


@pytest.mark.parametrize("name", ["inventory.img", "core-1.img", "pagemap-1.img"])
def test_missing(folder: Path, name: str) -> None:
    """What CRIU cannot do without, or would take for empty."""
    (folder / name).unlink()
    assert f"{name} in {folder} is missing" in refused(folder)


def test_a_zombie(folder: Path) -> None:
    """CRIU leaves the number of its thread unset, and there is no image of that; one of its own there is."""
    zombie = numbers((1, 7), (2, 1), (3, 1), (4, 1), (5, 48377920))
    path = folder / "pstree.img"
    path.write_bytes(path.read_bytes() + entry(zombie))
    assert f"core-7.img in {folder} is missing" in refused(folder)
    (folder / "core-7.img").write_bytes(CORE)
    check(str(folder), "x86_64")


@pytest.mark.parametrize("name", ["inventory.img", "pstree.img", "core-1.img", "mm-1.img", "pagemap-1.img"])
@pytest.mark.parametrize("size", [0, 3, 9, -1])
def test_cut_short(folder: Path, name: str, size: int) -> None:
    """An image that ends within its magic, a size, or a message."""
    path = folder / name
    path.write_bytes(path.read_bytes()[:size])
    assert f"{name} in {folder} is cut short" in refused(folder)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\0" * 64, "does not start like an image"),
        (image("core", entry(b"\x0f")), "does not decode"),
        (image("core", entry(b"\x0a\x7fshort")), "does not decode"),
        (image("core", entry(b"\x08" + b"\xff" * 12)), "does not decode"),
        (image("core", struct.pack("<I", 1 << 31)), "has a message of"),
        (image("core", entry(numbers((1, 1))) + bytes(1 << 20)), "consists of zeros"),
        (image("mm", entry(numbers((1, 1)))), "does not start like an image"),
    ],
)
def test_decodes(folder: Path, data: bytes, said: str) -> None:
    """What is no message, and what is another image under that name."""
    (folder / "core-1.img").write_bytes(data)
    assert said in refused(folder)


@pytest.mark.parametrize(
    ("kind", "message", "size"),
    [
        ("pipes-data", numbers((1, 9), (2, 5)), 5),
        ("tcp-stream", numbers((1, 7), (3, 6)), 13),
        ("ipcns-shm", numbers((2, 5)), 8),
        ("ipcns-shm", numbers((2, 5), (3, 1)), 0),
        ("ipcns-sem", numbers((2, 3)), 8),
        ("ipcns-msg", numbers((3, 0)), 0),
    ],
)
def test_data_behind_a_message(folder: Path, kind: str, message: bytes, size: int) -> None:
    """It is passed over by the size that the message gives, and has to be there."""
    path = folder / f"{kind}{'-1' if kind != 'pipes-data' else ''}.img"
    whole = image(kind, entry(message, b"\xff" * size), entry(message, b"\xff" * size))
    path.write_bytes(whole)
    check(str(folder), "x86_64")
    path.write_bytes(whole[:-1])
    assert "is cut short" in refused(folder)


def test_messages_of_a_queue(folder: Path) -> None:
    """A queue's messages follow it, each rounded to eight bytes."""
    whole = image("ipcns-msg", entry(numbers((3, 2)), entry(numbers((1, 1), (2, 5)), b"x" * 8) * 2))
    (folder / "ipcns-msg-1.img").write_bytes(whole)
    check(str(folder), "x86_64")


def test_a_deleted_file(folder: Path) -> None:
    """Its content follows as it is, or in chunks."""
    path = folder / "ghost-file-1f.img"
    path.write_bytes(image("ghost-file", entry(numbers((3, 0o100600)), b"anything")))
    check(str(folder), "x86_64")
    path.write_bytes(image("ghost-file", entry(numbers((9, 1))), entry(numbers((1, 4), (2, 0)), b"data")))
    check(str(folder), "x86_64")
    path.write_bytes(image("ghost-file", entry(numbers((9, 1))), entry(numbers((1, 5), (2, 0)), b"data")))
    assert "is cut short" in refused(folder)


def test_an_earlier_dump(folder: Path, tmp_path: Path) -> None:
    """Pages that are in the directory of an earlier dump are looked at there."""
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "pagemap-1.img").write_bytes(pagemap(1, [(0x1000, 2, 4)]))
    (earlier / "pages-1.img").write_bytes(bytes(2 * PAGE))
    (folder / "parent").symlink_to("../earlier")
    check(str(folder), "x86_64")
    (earlier / "pages-1.img").write_bytes(bytes(PAGE))
    assert f"pages-1.img in {earlier}" in refused(folder)
    (earlier / "parent").symlink_to(".")
    (earlier / "pages-1.img").write_bytes(bytes(2 * PAGE))
    with pytest.raises(ImageError, match="parent dumps"):
        check(str(folder), "x86_64")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"\x0f", "an unknown type"),
        (b"\x08", "extends beyond its message"),
        (b"\x08\x80", "extends beyond its message"),
        (b"\x08" + b"\xff" * 12, "more than ten bytes"),
        (b"\x32\x7fshort", "extends beyond its message"),
        (b"\x31short", "extends beyond its message"),
        (struct.pack("<I", 1 << 31), "is cut short"),
    ],
)
def test_a_run_of_pages_decodes(folder: Path, message: bytes, said: str) -> None:
    """What is no message is refused; fields that this release does not know are passed over."""
    path = folder / "pagemap-1.img"
    whole = path.read_bytes()
    path.write_bytes(whole + entry(message))
    if message[:1] == b"\0":
        path.write_bytes(whole + message)
        said = "has a message of 2147483648 bytes"
    assert said in refused(folder)
    keys = range(1 << 14, 1 << 18, 8)  # varints of three bytes, of the wire type for varints
    unknown = b"".join(bytes((at & 0x7F | 0x80, at >> 7 & 0x7F | 0x80, at >> 14, 1)) for at in keys)
    path.write_bytes(whole + entry(numbers((1, 0x20000), (2, 0), (4, 0)) + b"\x32\1x\x39longlong" + unknown))
    check(str(folder), "x86_64")


def test_pages_of_other_releases(folder: Path) -> None:
    """CRIU 4.2 has the number of pages in another field, and zero in the old one; CRIU 2 has no flags."""
    runs = [numbers((1, 0x1000), (2, 0), (4, 4), (5, 2)), numbers((1, 0x9000), (2, 1))]
    runs.append(numbers((1, 0x20000), (2, 5), (3, 1)))
    head = entry(numbers((1, 1)))
    (folder / "pagemap-1.img").write_bytes(image("pagemap", head, *map(entry, runs)))
    check(str(folder), "x86_64")
    (folder / "pages-1.img").write_bytes(bytes(2 * PAGE))
    assert "pagemap-1.img lists 3 pages" in refused(folder)


def nested(depth: int) -> bytes:
    """A control group in a control group, and so on (criu/images/cgroup.proto)."""
    message = b""
    for _ in range(depth):
        message = b"\x12" + varint(len(message)) + message
    return message


@pytest.mark.parametrize(
    "message",
    [nested(10_000), b"\x9b\x06" * 100_000, b"\x12\xff\xff\xff\xff\x07", b"\x12\x05\x0a\x7fabc"],
    ids=["nested", "groups", "two GiB", "a field beyond its message"],
)
def test_hostile_messages(folder: Path, message: bytes) -> None:
    """protobuf's errors are ours, whatever it is that it does not take."""
    (folder / "cgroup.img").write_bytes(image("cgroup", entry(message)))
    assert f"cgroup.img in {folder} does not decode" in refused(folder)


def test_wrong_types(folder: Path) -> None:
    """Fields of another type than CRIU's are as if they were not there, and break nothing."""
    (folder / "pstree.img").write_bytes(image("pstree", entry(b"\x0a\x01x" + b"\x2d\0\0\0\0")))
    assert "core-0.img" in refused(folder)
    (folder / "pipes-data.img").write_bytes(image("pipes-data", entry(b"\x12\x01x", b"data")))
    assert "pipes-data.img" in refused(folder)


def test_a_message_of_millions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No objects are made of a message larger than any; one that has to be known is refused."""
    monkeypatch.setattr(messages, "_LARGEST_DECODED", 1000)
    (folder / "mm-1.img").write_bytes(image("mm", entry(b"\x72\0" * 1000)))
    check(str(folder), "x86_64")
    (folder / "pstree.img").write_bytes(image("pstree", entry(b"\x28\1" * 1000)))
    assert "a message of 2000 bytes that cannot be decoded" in refused(folder)


@pytest.mark.parametrize("link", ["../../other/earlier", "{other}/earlier", "../beside", ".."])
def test_an_earlier_dump_elsewhere(folder: Path, tmp_path: Path, link: str) -> None:
    """A link out, to the memory of another container, is not followed, nor one by way of another link."""
    other = tmp_path.parent / "other"
    (other / "earlier").mkdir(parents=True, exist_ok=True)
    (tmp_path / "beside").symlink_to(other / "earlier")
    (folder / "parent").symlink_to(link.format(other=other))
    with pytest.raises(ImageError, match="does not point to a directory next to it"):
        check(str(folder), "x86_64")


def test_an_earlier_dump_within(folder: Path) -> None:
    """CRIU would read images there that nobody has looked at."""
    (folder / "parent").mkdir()
    assert "parent in" in refused(folder)
    (folder / "parent").rmdir()
    os.mkfifo(folder / "parent")
    assert "is a FIFO, not a link to the images" in refused(folder)


def test_other_page_sizes(folder: Path) -> None:
    """Of a host whose pages are larger."""
    (folder / "pages-1.img").write_bytes(bytes(3 * 65536))
    check(str(folder), "aarch64")
    assert "pages-1.img" in refused(folder)


def test_kinds() -> None:
    """By the names that CRIU gives (criu/image-desc.c)."""
    found = {name: kind_of(name) for name in ("signal-s-1.img", "pagemap-shmem-2.img", "ghost-file-1f.img")}
    assert found == {
        "signal-s-1.img": "signal-s",
        "pagemap-shmem-2.img": "pagemap-shmem",
        "ghost-file-1f.img": "ghost-file",
    }
    assert [kind_of(name) for name in ("tty-info.img", "ifaddr-9.img", "core-1", "x.img")] == [
        "tty-info",
        "",
        "",
        "",
    ]
    assert INVENTORY
