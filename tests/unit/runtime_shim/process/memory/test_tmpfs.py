"""Regions in files of a tmpfs, and files in the place of a process' memory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from memory_target import MIB, Target, smaps

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.process.memory.maps import mappings
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.process.ptrace.populate import Backing, populate_mappings
from gpusnap.runtime_shim.process.ptrace.remote_syscall import enter_thread

SIZE = 64 * MIB
LARGE = "PRIVATE | mmap.MAP_POPULATE"

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="of x86-64 alone")


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as found:
        found.stop()
        yield found


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where the tmpfs goes in this test; what the test leaves in it is removed."""
    place: Path = request.getfixturevalue("stage")
    yield place
    if place.is_dir():
        for left in os.listdir(place):
            stage.remove(left)


def names(folder: Path) -> list[str]:
    """The files in it."""
    return sorted(name for _, _, found in os.walk(folder) for name in found)


def mapped(target: Target, address: int) -> str:
    """The name of what lies at an address."""
    return next(m.name for m in mappings(target.pid) if m.start <= address < m.end)


def test_another_has_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for it has an end, and nothing is lost: the same is done later."""
    one = Stage("one")
    one.area("a", 0, MIB).close()
    monkeypatch.setattr(stage, "_PATIENCE", 0.05)
    with open(f"{folder}.lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"stage\.lock"):
            one.remove()
    assert names(folder) == ["a"]
    one.remove()
    assert not os.path.ismount(folder)


def test_no_room_for_another_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there need not be made: removing needs no room."""
    one = Stage("one")
    one.area("a", 0, MIB).close()

    def mkdir(path: str, mode: int = 0o777) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    one.remove()
    monkeypatch.undo()
    assert not os.path.ismount(folder)


def test_the_directory_cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tmpfs that was mounted for it goes again; the next try makes both."""
    one = Stage("one")

    def makedirs(path: str, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as full:
        full.setattr(os, "makedirs", makedirs)
        with pytest.raises(OSError, match="No space left"):
            one.area("a", 0, MIB)
    assert os.path.ismount(folder)
    one.remove()
    assert not os.path.ismount(folder)
    one.area("a", 0, MIB).close()
    assert names(folder) == ["a"]
    one.remove()


def test_closing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no reason to stop at: what is staged goes as ever."""
    one = Stage("one")
    area = one.area("a", 0, MIB)
    closing = os.close

    def close(descriptor: int) -> None:
        closing(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "close", close)
        area.close()
    area.close()
    one.remove()
    assert not os.path.ismount(folder)


def test_mounted_when_needed_and_gone_when_not(folder: Path) -> None:
    """The tmpfs comes with the first area and goes with the last container."""
    one, other = Stage("one"), Stage("other")
    assert not folder.exists()
    areas = [one.area("a", 0, MIB), one.area("b", 0, MIB), other.area("a", 0, MIB)]
    assert os.path.ismount(folder)
    assert names(folder) == ["a", "a", "b"]
    assert folder.stat().st_mode & 0o777 == 0o700
    for area in areas:
        area.close()
    one.remove()
    assert os.listdir(folder) == ["other"]
    other.remove()
    other.remove()
    assert not os.path.ismount(folder)


def test_what_a_killed_one_left_is_replaced(folder: Path) -> None:
    """A name that is there already stands for nothing."""
    old = Stage("one").area("a", 0, MIB)
    old.write(0, memoryview(b"old"))
    new = Stage("one").area("a", 0, MIB)
    assert bytes(new.view(0, 3)) == bytes(3)
    assert bytes(old.view(0, 3)) == b"old"
    old.close()
    new.close()


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden"])
def test_names_that_lead_elsewhere(folder: Path, name: str) -> None:
    """A container's ID becomes a folder's name only where it is one."""
    with pytest.raises(OSError, match="it is not a valid directory name"):
        Stage(name).area("a", 0, MIB)


def test_an_area_is_its_file(folder: Path) -> None:
    """What is written is there for who opens it again, at the address' place within a huge page."""
    address = 0x7F0000345000
    area = Stage("one").area("a", address, 3 * MIB)
    area.write(MIB, memoryview(b"word"))
    into = bytearray(4)
    area.read(MIB, memoryview(into))
    assert bytes(into) == b"word"
    area.close()
    again = Area(area.path, address, 3 * MIB)
    back = bytearray(4)
    again.read(MIB, memoryview(back))
    assert bytes(back) == b"word"
    assert (address - again.lead) % copies.HUGE == 0
    assert os.stat(area.path).st_size == again.lead + 3 * MIB
    again.discard()
    assert not os.path.exists(area.path)


def test_what_lies_beyond_a_region(folder: Path) -> None:
    """Nothing is copied from behind its end."""
    area = Stage("one").area("a", 0x7F0000345000, MIB)
    with pytest.raises(ValueError, match="uffer size too small"):
        area.read(MIB - 3, memoryview(bytearray(4)))
    area.close()


def test_a_file_that_is_too_short(folder: Path) -> None:
    """It cannot be the region, and no access to it may kill us."""
    area = Stage("one").area("a", 0, 2 * MIB)
    area.close()
    os.truncate(area.path, MIB)
    with pytest.raises(OSError, match=r"a"):
        Area(area.path, 0, 2 * MIB)


def test_populated(folder: Path) -> None:
    """All of it is there before anybody touches it."""
    area = Stage("one").area("a", 3 * 4096, 5 * MIB)
    area.populate()
    assert os.stat(area.path).st_blocks * 512 >= 5 * MIB
    area.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_a_file_in_the_place_of_memory(folder: Path, target: Target, shared: bool) -> None:
    """The process has the file's bytes where it had its own; what it writes gets into it if it is shared."""
    target.go_on()
    address = target.number(f"new({SIZE})")
    fds = sorted(os.listdir(f"/proc/{target.pid}/fd"))
    area = Stage("one").area("a", address, SIZE)
    area.write(5, memoryview(b"hello"))
    with enter_thread(target.pid) as remote:
        remote.map_file(area.descriptor, address, SIZE, area.lead, shared=shared)
    assert target.ask(f"ctypes.string_at({address} + 5, 5)") == "b'hello'"
    target.ask(f"ctypes.memset({address} + 7, 65, 2)")
    assert bytes(area.view(5, 5)) == (b"heAAo" if shared else b"hello")
    assert sorted(os.listdir(f"/proc/{target.pid}/fd")) == fds
    target.stop()
    assert target.well()
    area.close()


def test_a_mapping_that_is_made_large(folder: Path, target: Target) -> None:
    """What the thread maps is the file, populated; its bytes outlive the mapping and the process."""
    staged, lent = Stage("one"), []

    def saved(thread: object) -> nullcontext[None]:
        lent.append(thread)
        return nullcontext()

    backing = Backing(lambda address, size: staged.area("a", address, size), saved)
    with populate_mappings(target.pid, target.tid, backing=backing) as done:
        address = target.number(f"new({SIZE}, {LARGE})")
        target.ask(f"ctypes.memset({address}, 66, 3)")
    assert (done.mappings, done.size, done.why_not) == (1, SIZE, "")
    (area,) = done.areas
    assert (area.address, area.size) == (address, SIZE)
    assert mapped(target, address).startswith(area.path)
    assert int(smaps(target.pid, address)["Size"][0]) << 10 == SIZE
    assert len(lent) == 1
    assert proc.is_still(target.pid)
    assert target.well()
    target.number(f"libc.munmap(ctypes.c_void_p({address}), {SIZE})")
    assert bytes(area.view(0, 4)) == b"BBB\0"
    area.close()


def test_no_file_to_be_had(target: Target) -> None:
    """The plain way is taken, and it says why."""

    def refuse(address: int, size: int) -> Area:
        raise OSError(28, "No space left on device", "stage")

    with populate_mappings(target.pid, target.tid, backing=Backing(refuse, lambda _: nullcontext())) as done:
        address = target.number(f"new({SIZE}, {LARGE})")
    assert mapped(target, address) == ""
    assert int(smaps(target.pid, address)["Rss"][0]) << 10 >= SIZE
    assert done.mappings == 1
    assert "No space left" in done.why_not


def test_no_descriptor_left_in_the_process(folder: Path, target: Target) -> None:
    """A process at its limit of open files keeps its own memory, and is well."""
    target.go_on()
    target.ask("__import__('resource').setrlimit(7, (4, 4096))")
    target.stop()
    staged = Stage("one")
    backing = Backing(lambda address, size: staged.area("a", address, size), lambda _: nullcontext())
    with populate_mappings(target.pid, target.tid, backing=backing) as done:
        address = target.number(f"new({SIZE}, {LARGE})")
    assert mapped(target, address) == ""
    assert done.areas == []
    assert "socketpair" in done.why_not
    assert names(folder) == []
    assert target.well()
