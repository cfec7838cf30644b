"""What was spilled of a suspended container, read into files in RAM ahead of its resume."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import oci_regions
import pytest

from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ImageError, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.process.memory.tmpfs import Area
from gpusnap.runtime_shim.records.manifest import RegionRecord
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal, reservations
from gpusnap.runtime_shim.snapshot.records.journal import Entry, JournalProcess
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import load, spilled
from gpusnap.runtime_shim.snapshot.suspended_containers.load import MemoryLoad

KEY = "aaaa0001@123456789abc"
FOUND = Suspension(KEY, "llama", "podman", "", Stage.SUSPENDED, (1, 1), (os.getpid(), 1), "", "crun")
START = 0x7F0000201000
SIZE = 16 * oci_regions.PAGE


@pytest.fixture
def content() -> list[bytearray]:
    """Two regions, with zeros and without."""
    zeros = bytearray(SIZE)
    zeros[oci_regions.PAGE : 2 * oci_regions.PAGE] = oci_regions.fill(oci_regions.PAGE, "random")
    return [bytearray(oci_regions.fill(SIZE, "random", 1)), zeros]


@pytest.fixture
def entry(tmp_path: Path, content: list[bytearray]) -> Entry:
    """A process of which two regions are in a layout."""
    layout = Layout(tmp_path / "layout").create()
    tables = oci_regions.save(layout, *content)
    regions = tuple(RegionRecord(START + at * 4 * SIZE, table) for at, table in enumerate(tables))
    return Entry(KEY, "", (1, 1), (JournalProcess(7, 1, regions),), layout=str(layout.path))


def names(stage: Path) -> list[str]:
    """The files in it."""
    return sorted(path.name for path in stage.glob("*/*"))


def test_all_of_it(stage: Path, entry: Entry, content: list[bytearray]) -> None:
    """In files for the addresses of the regions, which are gone afterwards."""
    loading = MemoryLoad(entry, Memory())
    found = loading.areas()
    assert [(area.address, area.size) for area in found[7]] == [(START, SIZE), (START + 4 * SIZE, SIZE)]
    assert [bytes(area.view(0, SIZE)) for area in found[7]] == [bytes(each) for each in content]
    assert len(names(stage)) == 2
    spilled.sweep_loaded(KEY)  # they are of a gpusnap that lives
    assert len(names(stage)) == 2
    loading.close()
    assert not stage.exists() or not list(stage.iterdir())


def test_they_are_in_nobodys_way(stage: Path, entry: Entry) -> None:
    """Whoever has the container's lock may stage something, and remove all of it."""
    loading = MemoryLoad(entry, Memory())
    area = tmpfs.Stage(KEY).area(f"7-{START:x}", START, SIZE)
    area.write(0, memoryview(b"another's"))
    found = loading.areas()
    assert bytes(area.view(0, 9)) == b"another's"
    loading.close()
    assert names(stage) == [f"7-{START:x}"]
    area.close()
    loading = MemoryLoad(entry, Memory())
    tmpfs.remove(KEY)
    found = loading.areas()
    assert len(found[7]) == 2
    loading.close()


def test_damage(stage: Path, entry: Entry) -> None:
    """There are no files then; the resume reads the store itself, and says what is wrong with it."""
    blob = next(path for path in Path(entry.layout).glob("blobs/*/*") if path.stat().st_size > 4000)
    blob.chmod(0o600)
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    loading = MemoryLoad(entry, Memory())
    assert loading.areas() == {}
    loading.close()
    assert names(stage) == []


def test_a_full_stage(stage: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise; nobody writes where the kernel has no memory for it."""

    def fail(area: Area, offset: int = 0, size: int | None = None, *, threads: int = 0) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", area.path)

    monkeypatch.setattr(Area, "populate", fail)
    loading = MemoryLoad(entry, Memory())
    assert loading.areas() == {}
    loading.close()
    assert names(stage) == []


def test_a_failure_at_the_beginning(stage: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made is removed."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(load, "Reader", fail)
    with pytest.raises(OSError, match="Too many open files"):
        MemoryLoad(entry, Memory())
    assert names(stage) == []


class Silent(Layout):
    """A layout in a file system that does not answer before `answered`."""

    answered = threading.Event()

    def open_blob(self, digest: str, size: int | None = None) -> Any:
        self.answered.wait(60)
        return super().open_blob(digest, size)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What makes such layouts answer."""
    monkeypatch.setattr(Silent, "answered", threading.Event())
    monkeypatch.setattr(load, "Layout", Silent)
    yield Silent.answered
    Silent.answered.set()


def test_a_store_that_does_not_answer(
    stage: Path, entry: Entry, silent: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for with a deadline, and the files are removed."""
    monkeypatch.setattr(transfer, "STALL", 0.01)
    loading = MemoryLoad(entry, Memory())
    with pytest.raises(ImageError, match=r"cannot be transferred: nothing could be read for") as caught:
        loading.areas()
    assert "NFS server, and try again; the memory stays there" in caught.value.hint
    loading.close()
    assert names(stage) == []


def test_the_ram_is_claimed(
    stage: Path, tmp_path: Path, entry: Entry, silent: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is in use; others that want it see it, and a load that others leave no room for is refused."""
    room = str(tmp_path / "gpusnap/room")
    monkeypatch.setattr(load, "claim", partial(reservations.claim, room))
    monkeypatch.setattr(journal, "read", lambda key: entry)
    monkeypatch.setattr(space, "_measure_available", lambda: (150 << 20) * 2 + 3 * SIZE)
    with reservations.claim(room) as another:
        another.record({reservations.RAM: SIZE + 1})
        with pytest.raises(Refused, match="of GPU memory must move to RAM"):
            load.begin(FOUND, Memory(), beside=0)
    loading = load.begin(FOUND, Memory(), beside=0)
    assert loading is not None
    assert reservations.read_reserved(room) == {reservations.RAM: 2 * SIZE}
    silent.set()
    loading.areas()
    assert reservations.read_reserved(room) == {}
    loading.close()
    for damaged in (False, True):
        if damaged:
            for blob in Path(entry.layout).glob("blobs/*/*"):
                blob.unlink()
        loading = load.begin(FOUND, Memory(), beside=0)
        assert loading is not None
        if damaged:
            assert loading.areas() == {}
        else:
            loading.close()
        assert reservations.read_reserved(room) == {}
    assert names(stage) == []


def test_what_a_killed_one_has_left(stage: Path) -> None:
    """Is removed by the next command, and what is staged is not."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pid, start = state_files.owner(child.pid)
    kept = tmpfs.Stage(KEY).area(f"7-{START:x}", START, SIZE)
    left = tmpfs.Stage(KEY).area(f"7-{START:x}.load.{pid}.{start}", START, SIZE)
    left.close()
    kept.close()
    spilled.sweep_loaded(KEY)
    assert len(names(stage)) == 2
    child.communicate(b"\n")
    assert not proc.is_same(pid, start)
    spilled.sweep_loaded(KEY)
    assert names(stage) == [f"7-{START:x}"]
    tmpfs.remove(KEY)


def test_when(stage: Path, tmp_path: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where nothing was spilled, where there is a ceiling, or no RAM for both containers."""
    there: list[Entry | None] = [entry]
    monkeypatch.setattr(load, "claim", partial(reservations.claim, str(tmp_path / "gpusnap/room")))
    monkeypatch.setattr(journal, "read", lambda key: there[0])
    monkeypatch.setattr(space, "_measure_available", lambda: (150 << 20) * 2 + 5 * SIZE)
    loading = load.begin(FOUND, Memory(), beside=3 * SIZE)
    assert loading is not None
    loading.close()
    with pytest.raises(Refused, match="of GPU memory must move to RAM"):
        load.begin(FOUND, Memory(), beside=3 * SIZE + 1)
    assert load.begin(FOUND, Memory(ceiling=1 << 30), beside=0) is None
    there[0] = Entry(KEY, "", (1, 1), (JournalProcess(7, 1, ()),))
    assert load.begin(FOUND, Memory(), beside=0) is None
    there[0] = None
    assert load.begin(FOUND, Memory(), beside=0) is None
