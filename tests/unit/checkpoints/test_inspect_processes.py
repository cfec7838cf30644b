"""`gpusnap inspect --processes`: what CRIU's images say, wherever a checkpoint is, and of hostile ones."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from archives import record, written
from checkpoints import keep
from criu_images import CORE, INVENTORY, PAGE, encode_messages, entry, image, pagemap, varint

from gpusnap.checkpoints import processes
from gpusnap.oci.store.store import Store
from gpusnap.operations import processes as reading
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.runtime.criu.images import inet_sockets, pycriu_package

Run = Callable[..., tuple[int, str, str]]
ARGUMENTS = 0x7FFC_0000_1F10
COMMAND = b"python3\0serve.py\0--port=80\x1b[31m\0"


def words(address: str) -> list[int]:
    """An address as CRIU has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    data = socket.inet_pton(family, address)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def open_files() -> bytes:
    """A file, a pipe, TCP connections and a listener, UDP, and Unix sockets."""
    pb = pycriu_package.load().pb

    def inet(number: int, proto: int, state: int, local: tuple[str, int], remote: tuple[str, int]) -> object:
        family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
        return pb.file_entry(
            type=4,
            id=number,
            isk=pb.inet_sk_entry(
                id=number,
                family=family,
                proto=proto,
                state=state,
                src_addr=words(local[0]),
                src_port=local[1],
                dst_addr=words(remote[0]),
                dst_port=remote[1],
            ),
        )

    unix = pb.unix_sk_entry(id=7, type=1, state=10, name=b"/run/x\x1b.sock\0")
    abstract = pb.unix_sk_entry(id=8, type=2, state=7, peer=99, name=b"\0abs\xff")
    return encode_messages(
        [
            pb.file_entry(type=1, id=1, reg=pb.reg_file_entry(id=1, name="/data/a\x1b[2Jb")),
            pb.file_entry(type=2, id=2, pipe=pb.pipe_entry(id=2, pipe_id=77)),
            inet(3, 6, 1, ("10.88.0.5", 4000), ("192.0.2.7", 443)),
            inet(4, 6, 10, ("::", 8080), ("::", 0)),
            inet(5, 6, 8, ("2001:db8::5", 4001), ("2001:db8::7", 22)),
            inet(6, 17, 7, ("127.0.0.1", 53), ("0.0.0.0", 0)),
            pb.file_entry(type=5, id=7, usk=unix),
            pb.file_entry(type=5, id=8, usk=abstract),
            pb.file_entry(type=17, id=9),
        ],
        "files",
    )


def images() -> dict[str, bytes]:
    """Two processes, the second a child with a thread of its own; the first one's memory is there."""
    pb = pycriu_package.load().pb
    core = [
        pb.core_entry(tc=pb.task_core_entry(task_state=1, comm=name)) for name in ("python3", "worker\x07")
    ]
    tree = [pb.pstree_entry(pid=1, ppid=0, threads=[1]), pb.pstree_entry(pid=42, ppid=1, threads=[42, 43])]
    numbers = range(1, 10)
    mm = pb.mm_entry(mm_arg_start=ARGUMENTS, mm_arg_end=ARGUMENTS + len(COMMAND))
    mm.vmas.add(start=0x1000, end=0x9000)
    mm.vmas.add(start=0x7FFC_0000_0000, end=0x7FFC_0000_4000)
    pages = bytearray(3 * PAGE)
    pages[PAGE + 0xF10 : PAGE + 0xF10 + len(COMMAND)] = COMMAND
    runs = [(0x1000, 1, 4), (0x5000, 7, 1), (ARGUMENTS & ~0xFFF, 2, 4)]
    return {
        "inventory.img": INVENTORY,
        "files.img": open_files(),
        "fdinfo-2.img": encode_messages(
            [pb.fdinfo_entry(id=n, fd=n + 2, type=17 if n == 9 else 1) for n in numbers], "fdinfo"
        ),
        "ids-1.img": encode_messages([pb.task_kobj_ids_entry(files_id=2)], "ids"),
        "pstree.img": encode_messages(tree, "pstree"),
        "core-1.img": encode_messages(core[:1], "core"),
        "core-42.img": encode_messages(core[1:], "core"),
        "mm-1.img": encode_messages([mm], "mm"),
        "pagemap-1.img": pagemap(1, runs),
        "pages-1.img": bytes(pages),
    }


def an_archive(folder: Path, found: Mapping[str, bytes]) -> str:
    return written(folder / "in.tar", None, record(()), more={f"checkpoint/{n}": d for n, d in found.items()})


def a_folder(folder: Path, found: Mapping[str, bytes]) -> str:
    for name, data in found.items():
        (folder / name).write_bytes(data)
    return f"{folder}/"


def test_of_an_archive(tmp_path: Path, gpusnap: Run) -> None:
    """All that there is, as JSON; the GPU memory is the manifest's."""
    code, out, err = gpusnap("inspect", "--processes", "--json", an_archive(tmp_path, images()))
    assert (code, err) == (0, "")
    first, second = json.loads(out)
    assert (first["pid"], first["parent"], first["name"], first["threads"]) == (1, 0, "python3", [1])
    assert (second["pid"], second["parent"], second["threads"]) == (42, 1, [42, 43])
    assert first["command"] == ["python3", "serve.py", "--port=80\x1b[31m"]
    assert first["memory"] == {"mapped": 0x8000 + 0x4000, "stored": 3 * PAGE, "earlier": 7 * PAGE}
    assert (first["gpuMemory"], second["gpuMemory"], second["memory"]) == (1 << 20, 0, None)
    assert first["files"] == [
        {"descriptor": 3, "kind": "file", "path": "/data/a\x1b[2Jb"},
        {"descriptor": 4, "kind": "file", "path": "pipe:[77]"},
        {"descriptor": 11, "kind": "timerfd", "path": ""},
    ]
    assert [(s["protocol"], s["local"], s["remote"], s["state"]) for s in first["sockets"]] == [
        ("tcp", "10.88.0.5:4000", "192.0.2.7:443", "established"),
        ("tcp", "[::]:8080", "", "listening"),
        ("tcp", "[2001:db8::5]:4001", "[2001:db8::7]:22", "close wait"),
        ("udp", "127.0.0.1:53", "", "closed"),
        ("unix stream", "/run/x\x1b.sock", "", "listening"),
        ("unix dgram", "@abs\\xff", "unix:[99]", "unconnected"),
    ]


@pytest.mark.parametrize("place", ["archive", "folder", "store", "unpacked"])
def test_for_people(tmp_path: Path, gpusnap: Run, host_store: Store, place: str) -> None:
    """A tree and two tables, wherever the checkpoint is; nothing that a terminal would obey."""
    if place == "archive":
        what = an_archive(tmp_path, images())
    elif place == "folder":
        what = a_folder(tmp_path, images())
    elif place == "unpacked":
        (tmp_path / "checkpoint").mkdir()
        a_folder(tmp_path / "checkpoint", images())
        what = f"{tmp_path}/"
    else:
        files = {f"checkpoint/{name}": data for name, data in sorted(images().items())}
        keep(host_store, records=files, names=["w:1"], gpu=False)
        what = "w:1"
    code, out, err = gpusnap("inspect", "--processes", what)
    assert (code, err) == (0, "")
    assert "python3 serve.py --port=80\ufffd[31m" in out
    assert "  worker\ufffd" in out
    assert "192.0.2.7:443" in out
    assert "/data/a\ufffd[2Jb" in out
    assert "\x1b" not in out
    assert "\x07" not in out


def test_without_a_command(tmp_path: Path, gpusnap: Run) -> None:
    """Where the image of its page is not there, the manifest's is taken, or the name of the program."""
    more = {f"checkpoint/{name}": data for name, data in images().items()}
    path = written(tmp_path / "in.tar", None, record(()), more=more, without="checkpoint/pages-1.img")
    out = gpusnap("inspect", "--processes", "--json", path)[1]
    assert [each["command"] for each in json.loads(out)] == [["serve"], []]


def test_pages_of_a_store(tmp_path: Path, gpusnap: Run, host_store: Store) -> None:
    """What is the memory of a checkpoint alone has no images."""
    keep(host_store, bytearray(PAGE), names=["w:1"])
    code, _, err = gpusnap("inspect", "--processes", "w:1")
    assert code != 0
    assert "is only the memory of a checkpoint" in err


def test_no_images(tmp_path: Path, gpusnap: Run) -> None:
    """A checkpoint without the tree of processes says which image is missing."""
    code, _, err = gpusnap("inspect", "--processes", an_archive(tmp_path, {}))
    assert code != 0
    assert "pstree.img" in err
    assert "is missing" in err


@pytest.mark.parametrize("name", sorted(set(images()) - {"inventory.img", "pages-1.img"}))
@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<I", 1 << 31),
        b"\xff" * 64,
        None,
        "deep",
        "wrong",
    ],
    ids=["empty", "two GiB", "noise", "cut", "deep", "wrong types"],
)
def test_hostile(tmp_path: Path, gpusnap: Run, name: str, data: bytes | str | None) -> None:
    """Each image cut short, of noise, nested without end, or of other types: a sentence, or less is shown."""
    found = images()
    if data is None:
        found[name] = found[name][:-1]
    elif isinstance(data, bytes):
        found[name] = found[name][:8] + data if data else b""
    elif data == "deep":
        nested = b""
        for _ in range(2000):
            nested = b"\x1a" + varint(len(nested)) + nested
        found[name] = found[name][:8] + entry(nested)
    else:
        found[name] = found[name][:8] + entry(b"".join(bytes((at << 3 | 2, 1, 120)) for at in range(1, 16)))
    code, out, err = gpusnap("inspect", "--processes", an_archive(tmp_path, found))
    assert "Traceback" not in err
    assert "code." not in err
    assert code in (0, 1)
    assert code == 0 or name in err or "core-0.img" in err
    assert "\x1b" not in out


def test_a_circle() -> None:
    """Processes that are each other's parents, and one that is there twice."""
    pb = pycriu_package.load().pb
    tree = [pb.pstree_entry(pid=1, ppid=2), pb.pstree_entry(pid=2, ppid=1), pb.pstree_entry(pid=3, ppid=0)]
    found = {"pstree.img": encode_messages(tree, "pstree")} | {f"core-{pid}.img": CORE for pid in (1, 2, 3)}
    assert [each.pid for each in processes.read(found, "x")] == [3, 1, 2]
    twice = encode_messages([tree[0], tree[0]], "pstree")
    with pytest.raises(ImageError, match=r"pstree\.img in x lists process 1 twice"):
        processes.read(found | {"pstree.img": twice}, "x")


def test_too_large(tmp_path: Path, gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are held in memory up to a limit."""
    monkeypatch.setattr(reading, "_LARGEST", 10)
    code, _, err = gpusnap("inspect", "--processes", an_archive(tmp_path, images()))
    assert code != 0
    assert "too much to show here" in err


def test_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open files, threads and entries are counted over all processes, which may name one image."""
    whole = processes.read(images(), "x")
    opened = sum(len(each.files) + len(each.sockets) for each in whole)
    monkeypatch.setattr(processes, "_MOST", opened)
    assert processes.read(images(), "x") == whole
    monkeypatch.setattr(processes, "_MOST", opened - 1)
    with pytest.raises(ImageError, match=f"(beyond the|more than) {opened - 1}"):
        processes.read(images(), "x")


def test_too_many_images(tmp_path: Path, gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs little, and there may be as many as fit into an archive."""
    monkeypatch.setattr(reading, "_MOST_IMAGES", 2)
    code, _, err = gpusnap("inspect", "--processes", an_archive(tmp_path, images()))
    assert code != 0
    assert "too much to show here" in err


def test_connections(tmp_path: Path) -> None:
    """Those that a restore makes again: neither what listens nor what is closed, nor UDP."""
    a_folder(tmp_path, images())
    found = inet_sockets.list_established(str(tmp_path))
    assert [(each.local, each.remote_port) for each in found] == [("10.88.0.5", 443), ("2001:db8::5", 22)]
    (tmp_path / "files.img").write_bytes(image("files", b"\xff"))
    with pytest.raises(ImageError, match=r"files\.img in .* is cut short"):
        inet_sockets.list_established(str(tmp_path))
    (tmp_path / "files.img").unlink()
    assert inet_sockets.list_established(str(tmp_path)) == ()
