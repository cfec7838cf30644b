"""Memory that is taken out of CRIU's images, and written into processes."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from criu_images import PAGE, entry, image, mm, numbers, pagemap
from memory_target import MIB, Target

from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.criu import gate as gates
from gpusnap.runtime_shim.runtime.criu.images import pagemap as reader
from gpusnap.runtime_shim.runtime.criu.images.messages import Source
from gpusnap.runtime_shim.snapshot.memory import bulk_copy
from gpusnap.runtime_shim.snapshot.memory.bulk_copy import BulkCopy, ProcessPages, make_plan, write_all

START = 0x7F0000000000
SIZE = 20 * MIB
# Stands in for the launcher at the probe.
PROGRAM = """#!/usr/bin/env python3
import os, socket
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(os.environ["GPUSNAP_GATE"])
    asking.send(b"probe 0\\n")
    asking.recv(9)
"""


def vma(start: int = START, size: int = SIZE) -> list[tuple[int, int]]:
    numbered = {1: start, 2: start + size, 3: 0, 4: 0, 5: 3, 6: 0x22, 7: 0x201, 8: 1}
    return sorted(numbered.items())


def pages_of(pid: int) -> bytes:
    """A page that stays, memory, and one more that stays; each says its process and number."""
    said = [pid.to_bytes(8, "little") + at.to_bytes(8, "little") for at in range(2 + SIZE // PAGE)]
    return b"".join(each + bytes(PAGE - 16) for each in said)


def tree(*parents: int) -> bytes:
    """pstree.img: of each process, from 1 on, its parent."""
    each = [numbers((1, pid), (2, parent), (3, 1), (4, 1), (5, pid)) for pid, parent in enumerate(parents, 1)]
    return image("pstree", *map(entry, each))


def images_of(pid: int, number: int, *, start: int = START) -> dict[str, bytes]:
    runs = [(0x400000, 1, 4), (start, SIZE // PAGE, 4), (start + (1 << 30), 1, 4)]
    return {
        f"mm-{pid}.img": mm(vma(start)),
        f"pagemap-{pid}.img": pagemap(number, runs),
        f"pages-{number}.img": pages_of(pid),
    }


@pytest.fixture
def view(tmp_path: Path) -> Path:
    """A directory as CRIU is shown it: links to the images."""
    (tmp_path / "images").mkdir()
    (tmp_path / "view").mkdir()
    return tmp_path / "view"


def put(view: Path, images: Mapping[str, bytes]) -> None:
    for name, data in images.items():
        (view.parent / "images" / name).write_bytes(data)
        if not (view / name).is_symlink():
            (view / name).symlink_to(f"../images/{name}")


@pytest.fixture
def one(view: Path) -> Path:
    put(view, {"pstree.img": tree(0), **images_of(1, 1)})
    return view


def test_the_plan(one: Path) -> None:
    """Beside the first pagemap there is a second one, with its own pages file; nothing is changed yet."""
    plan = make_plan(str(one))
    assert plan.names == ["pagemap-1.img"]
    assert plan.taken == [ProcessPages(1, os.path.realpath(one / "pages-1.img"), [(START, PAGE, SIZE)])]
    assert (one / "pagemap-1.img").is_symlink()
    data = (one / "pagemap-1.img.next").read_bytes()
    assert data == pagemap(2, [(0x400000, 1, 4), (START + (1 << 30), 1, 4)])
    first = pages_of(1)
    assert (one / "pages-2.img").read_bytes() == first[:PAGE] + first[-PAGE:]


def test_a_number_of_its_own(one: Path) -> None:
    """No pagemap and no pages file has that number, of whatever kind."""
    put(one, {"pages-7.img": b"", "pagemap-shmem-3.img": pagemap(11, [])})
    make_plan(str(one))
    assert (one / "pages-12.img").exists()


def test_several_processes(view: Path) -> None:
    """Where parent and child have the same mapping, CRIU restores it; between others it is no matter."""
    put(view, {"pstree.img": tree(0, 1, 1, 2)})
    for pid, start in ((1, START), (2, START + (1 << 33)), (3, START), (4, START)):
        put(view, images_of(pid, pid, start=start))
    plan = make_plan(str(view))
    assert [each.pid for each in plan.taken] == [2, 4]
    assert plan.names == ["pagemap-2.img", "pagemap-4.img"]


def _no_large_file(view: Path) -> None:
    put(view, {"pages-1.img": pages_of(1)[: 16 * MIB - PAGE]})


def _another_size(view: Path) -> None:
    put(view, {"pages-1.img": pages_of(1) + bytes(PAGE)})


def _an_earlier_dump(view: Path) -> None:
    (view / "parent").symlink_to("..")


def _read_by_two(view: Path) -> None:
    put(view, {"pagemap-shmem-3.img": pagemap(1, [])})


def _mostly_kept(view: Path) -> None:
    runs = [(0x400000, SIZE // PAGE + 1, 4), (START, 1 * MIB // PAGE, 4)]
    pages = bytes((SIZE // PAGE + 1) * PAGE + MIB)
    put(view, {"pagemap-1.img": pagemap(1, runs), "pages-1.img": pages})


def _cut_short(view: Path) -> None:
    put(view, {"pagemap-1.img": (view / "pagemap-1.img").read_bytes()[:-1]})


def _twice_in_the_tree(view: Path) -> None:
    each = entry(numbers((1, 1), (2, 0), (3, 1), (4, 1), (5, 1)))
    put(view, {"pstree.img": image("pstree", each, each)})


def _fifo(view: Path) -> None:
    (view.parent / "images" / "mm-1.img").unlink()
    os.mkfifo(view.parent / "images" / "mm-1.img")


def _no_number_left(view: Path) -> None:
    put(view, {"pagemap-shmem-3.img": pagemap((1 << 32) - 1, [])})


def _many_runs(view: Path) -> None:
    runs = [(0x400000 + at * 2 * PAGE, 1, 4) for at in range(80_000)]
    put(view, {"pagemap-1.img": pagemap(1, [*runs, (START, SIZE // PAGE, 4)])})
    put(view, {"pages-1.img": bytes(80_000 * PAGE + SIZE)})


LEFT = (
    _no_large_file,
    _another_size,
    _an_earlier_dump,
    _read_by_two,
    _mostly_kept,
    _cut_short,
    _twice_in_the_tree,
    _fifo,
    _no_number_left,
    _many_runs,
)


@pytest.mark.parametrize("change", LEFT, ids=lambda change: change.__name__.strip("_"))
def test_left_to_criu(one: Path, change: Any) -> None:
    """CRIU restores everything, or says what is wrong."""
    change(one)
    assert make_plan(str(one)) == make_plan("/nonexistent")


def test_no_room(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second pages file cannot be written CRIU reads the first ones."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "sendfile", full)
    assert make_plan(str(one)).names == []


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as found:
        yield found


def write(target: Target, path: Path, *pieces: tuple[int, int, int], pid: int | None = None) -> int:
    """Write pieces of a file into the target; how often it was said that this goes on."""
    said: list[None] = []
    taken = ProcessPages(target.pid if pid is None else pid, str(path), pieces)
    write_all(target.pid, [taken], lambda: said.append(None), threads=2)
    return len(said)


def test_bytes_arrive(target: Target, tmp_path: Path) -> None:
    """Each piece at its address, and nothing beside it is touched."""
    data = os.urandom(20 * MIB)
    (tmp_path / "pages").write_bytes(data)
    address = target.number(f"new({40 * MIB})")
    pieces = [(address + MIB, PAGE, 17 * MIB), (address + 30 * MIB, 18 * MIB, 2 * MIB)]
    assert write(target, tmp_path / "pages", *pieces) == 4
    wanted = bytearray(40 * MIB)
    wanted[MIB : 18 * MIB] = data[PAGE : PAGE + 17 * MIB]
    wanted[30 * MIB : 32 * MIB] = data[18 * MIB : 20 * MIB]
    found = bytearray(40 * MIB)
    copies.read(target.pid, address, found)
    assert found == wanted


def test_other_memory(target: Target, tmp_path: Path) -> None:
    """Nothing is written where a process has no private anonymous memory, or cannot write it."""
    (tmp_path / "pages").write_bytes(bytes(4 * MIB))
    private = target.number(f"new({2 * MIB})")
    shared = target.number(f"new({MIB}, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)")
    shut = target.number(f"new({MIB}, PRIVATE, mmap.PROT_READ)")
    for address in (shared, shut):
        with pytest.raises(ImageError, match="has other memory at"):
            write(target, tmp_path / "pages", (address, 0, MIB))
    for address, size in ((0x1000, MIB), (private, 1 << 40)):
        with pytest.raises(ImageError, match="has no memory at"):
            write(target, tmp_path / "pages", (address, 0, size))


def test_a_process_that_has_ended(target: Target, tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(bytes(MIB))
    address = target.number(f"new({MIB})")
    with pytest.raises(ImageError, match="process 4194305 of the container ended before"):
        write(target, tmp_path / "pages", (address, 0, MIB), pid=4194305)
    target.process.kill()
    target.process.wait()
    with pytest.raises(ProcessLookupError):
        write(target, tmp_path / "pages", (address, 0, MIB))


def test_a_file_that_is_shorter(target: Target, tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(bytes(MIB))
    address = target.number(f"new({2 * MIB})")
    with pytest.raises(ImageError, match="changed during the restore"):
        write(target, tmp_path / "pages", (address, PAGE, MIB))


def test_nobody_waits_any_more(target: Target, tmp_path: Path) -> None:
    """Where CRIU has ended the copy does not go on."""
    (tmp_path / "pages").write_bytes(bytes(64 * MIB))
    address = target.number(f"new({64 * MIB})")
    said: list[None] = []

    def busy() -> None:
        said.append(None)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        write_all(
            target.pid,
            [ProcessPages(target.pid, str(tmp_path / "pages"), [(address, 0, 64 * MIB)])],
            busy,
            threads=1,
        )
    assert len(said) == 1


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "launcher"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    monkeypatch.setattr(gates, "criu_version", lambda: "4.2")
    monkeypatch.setattr(locate, "launcher", lambda: str(path))
    return path


def ask(view: Path, line: str) -> bytes:
    answer = b""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(30)
        asking.connect(str(view / "gate"))
        asking.send(line.encode())
        asking.shutdown(socket.SHUT_WR)
        while piece := asking.recv(99):
            answer += piece
    return answer.lstrip(b".")


def begun(view: Path, config: Mapping[str, Any] | None = None, *options: str) -> BulkCopy | None:
    return bulk_copy.begin(str(view), config or {}, options, threads=2)


def test_a_restore(view: Path, launcher: Path, target: Target) -> None:
    """The second pagemap is there when CRIU has asked, and the memory when it may go on."""
    address, pid = target.number(f"new({SIZE})"), target.pid
    each = entry(numbers((1, pid), (2, 0), (3, 1), (4, 1), (5, pid)))
    put(view, {"pstree.img": image("pstree", each), **images_of(pid, 1, start=address)})
    bulk = begun(view)
    assert bulk is not None
    with closing(bulk):
        assert bulk.offer() == (str(launcher), {"GPUSNAP_GATE": str(view / "gate")})
        bulk.check()
        assert (view / f"pagemap-{pid}.img").is_symlink()
        assert ask(view, "pre-restore 0\n") == b"y"
        with open(view / f"pagemap-{pid}.img", "rb") as file:
            source = Source(file, os.fstat(file.fileno()).st_size)
            source.begin("pagemap")
            assert reader.read(source).present == 2
        with pytest.raises(ImageError, match="CRIU went on before"):
            bulk.check()
        assert ask(view, f"post-restore {pid}\n") == b"y"
        bulk.check()
        assert (bulk.totals.bytes, bulk.totals.processes) == (SIZE, 1)
    found = bytearray(SIZE)
    copies.read(pid, address, found)
    assert found == pages_of(pid)[PAGE:-PAGE]


def test_it_cannot_be_written(one: Path, launcher: Path) -> None:
    """CRIU may not go on, and the restore can say why."""
    bulk = begun(one)
    assert bulk is not None
    with closing(bulk):
        assert ask(one, "pre-restore 0\n") == b"y"
        assert ask(one, f"post-restore {os.getpid()}\n") == b"n"
        assert isinstance(bulk.error, GpusnapError)
        assert bulk.error.code == "GPS-523"


def test_nothing_to_take_out(view: Path, launcher: Path) -> None:
    """CRIU asks, and may go on."""
    put(view, {"pstree.img": tree(0)})
    bulk = begun(view)
    assert bulk is not None
    with closing(bulk):
        assert ask(view, "pre-restore 0\n") == b"y"
        assert ask(view, "post-restore 1\n") == b"y"
        bulk.check()
        assert bulk.totals.bytes == 0


def test_a_plan_that_takes_too_long(one: Path, launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU restores everything itself."""
    hanging = threading.Event()
    monkeypatch.setattr(bulk_copy, "make_plan", lambda _: hanging.wait(30))
    monkeypatch.setattr(bulk_copy, "_PATIENCE", 0.01)
    bulk = begun(one)
    assert bulk is not None
    try:
        assert ask(one, "pre-restore 0\n") == b"y"
        assert ask(one, "post-restore 1\n") == b"y"
        bulk.check()
    finally:
        hanging.set()
        bulk.close()


def test_not_offered(one: Path, launcher: Path) -> None:
    """Where CRIU would run a program that does not know what is meant it is not told of any."""
    launcher.write_text("#!/bin/sh\nexit 1\n")
    bulk = begun(one)
    assert bulk is not None
    with closing(bulk):
        assert bulk.offer() == ("", {})


@pytest.mark.parametrize("option", ["lazy-pages", "--lazy-pages  # far", "auto-dedup", "stream"])
def test_other_ways_of_criu(one: Path, launcher: Path, option: str) -> None:
    assert begun(one, {}, "ghost-limit 5", option) is None


def test_bound_to_numa_nodes(one: Path, launcher: Path) -> None:
    """The kernel would look for pages on the nodes that gpusnap may use."""
    assert begun(one, {"linux": {"resources": {"cpu": {"mems": "0"}}}}) is None


def test_without_a_launcher(one: Path, launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "launcher", lambda: "")
    assert begun(one) is None


def test_no_socket(one: Path, launcher: Path) -> None:
    (one / "gate").touch()
    assert begun(one) is None
