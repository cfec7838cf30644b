"""GPU memory beside CRIU's images: out of real processes into chunks, and back."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from select import select
from typing import Any

import pytest
from fakes import DEADLINE, FakeDriver, a_manifest, wait_for

from gpusnap.oci.chunks import writer as writing
from gpusnap.oci.chunks.buffers import is_zero
from gpusnap.oci.chunks.encoding import ReadSpeed
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.process import mount_namespace
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import maps as regions
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.process.memory import userfault
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.process.ptrace.populate import PopulateResult
from gpusnap.runtime_shim.process.ptrace.remote_syscall import enter_thread
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime.criu.images.directory import note_earlier
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.loading.prefetch import Prefetch
from gpusnap.runtime_shim.snapshot.memory import capture as pages
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.memory.destination import ImageDestination
from gpusnap.runtime_shim.snapshot.memory.write_ahead import EarlyWriter
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.recovery import bring_back
from gpusnap.runtime_shim.snapshot.recovery import checkpoint as recover_checkpoint
from gpusnap.runtime_shim.stopping.stop import go_on, stop

MIB = 1 << 20
SMALL = Memory(pages="chunks", chunk_size=MIB, threads=2, ceiling=64 * MIB)
# Maps memory when it is told to, and says what its digest is, whenever it is asked.
PROGRAM = """
import hashlib, mmap, os, sys
held = None
for line in sys.stdin:
    if line == "map\\n":
        held = mmap.mmap(-1, 9 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held.write(os.urandom(5 << 20))
    if line == "change\\n":
        held[1 << 20 : 2 << 20] = os.urandom(1 << 20)
    print(hashlib.sha256(held).hexdigest() if held else "none", flush=True)
"""


class Holder:
    """A process that holds memory as a suspended GPU process does."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", PROGRAM]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self.say("digest")

    def say(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(word, file=self.process.stdin, flush=True)
        assert select([self.process.stdout], [], [], DEADLINE)[0], "it does not go on"
        return self.process.stdout.readline().strip()


@pytest.fixture
def holders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Holder]]:
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap" / "journal"))
    monkeypatch.setattr(stage, "FOLDER", str(tmp_path / "gpusnap" / "stage"))
    found = [Holder(), Holder()]
    yield found
    for holder in found:
        holder.process.kill()
        holder.process.communicate()
    stage.remove("c0ffee")
    assert not os.path.ismount(stage.FOLDER)


@pytest.fixture(params=["staged", "streamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Regions copied to files of the stage, and where there is none, to chunks."""
    name: str = request.param
    if name == "streamed":

        def refuse(self: Stage, name: str, address: int, size: int) -> Area:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Stage, "area", refuse)
    return name


def suspended(chunks: Chunks, holders: list[Holder]) -> list[str]:
    """Each maps memory as the driver's checkpoint would, and stands; their digests."""
    digests = []
    for holder in holders:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pages, "run_populating", lambda *_, **__: nullcontext(PopulateResult()))
            with chunks.run_driver_thread(holder.pid, holder.pid):
                digests.append(holder.say("map"))
    stop([holder.pid for holder in holders], timeout=60)
    return digests


def resident(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Anonymous:"))


def image(folder: Path) -> Path:
    path = folder / "image"
    (path / "gpusnap").mkdir(parents=True)
    return path


def test_taken_and_given_back(way: str, holders: list[Holder], tmp_path: Path) -> None:
    """The regions are found, written and freed; given back, every byte is right. Twice does no harm."""
    chunks = Chunks(str(image(tmp_path)), "c0ffee", SMALL)
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    before = [resident(pid) for pid in pids]
    chunks.take_out(pids)
    chunks.take_out(pids)
    assert (chunks.records() is None) == (way == "staged"), "what is staged is not in the layout yet"
    chunks.write_durably()
    records = chunks.records()
    assert records is not None
    for pid, size in zip(pids, before, strict=True):
        assert resident(pid) <= size - 5 * MIB
        assert sum(region.table.size for region in records[pid]) >= 9 * MIB
        assert 5 * MIB <= sum(region.table.stored for region in records[pid]) <= 6 * MIB, "zeros were stored"
    chunks.give_back(pids)
    chunks.give_back(pids)
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == digests
    chunks.close()
    assert chunks.written.stored == sum(r.table.stored for found in records.values() for r in found)


def test_what_runs_again_does_not_change_what_is_written(holders: list[Holder], tmp_path: Path) -> None:
    """The container goes on before its memory is written: the chunks are of the moment of the checkpoint."""
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    chunks.take_out(pids)
    chunks.give_back(pids)
    go_on(pids)
    changed = [holder.say("change") for holder in holders]
    assert changed != digests
    chunks.record_places(())
    assert journal.entries()[0].processes == ()
    chunks.commit(kept=False)
    stop(pids, timeout=60)
    with Prefetch(str(path), made(chunks, holders[0]), SMALL, "other") as prefetch:
        prefetch.deliver({7: pids[0]})
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == [digests[0], changed[1]]
    chunks.close()


def test_for_the_disk_that_it_is_read_from(
    holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of the chunks says how fast that is; both who writes ahead and who writes the rest ask."""
    home = ImageDestination(str(image(tmp_path)), "c0ffee", SMALL)
    home.speed = ReadSpeed(5 << 30, 2)
    asked: list[object] = []
    write: Callable[..., tuple[Table, ...]] = writing.write

    def asked_to_write(*given: Any, **options: Any) -> tuple[Table, ...]:
        asked.append(options["speed"])
        return write(*given, **options)

    monkeypatch.setattr(writing, "write", asked_to_write)
    moves: list[int] = []
    chunks = Chunks(home.place, "c0ffee", SMALL, destination=home)
    suspended(chunks, holders)
    early = chunks._start_early_writer()
    chunks.take_out([holder.pid for holder in holders])
    chunks.write(lambda: moves.append(1))
    assert len(moves) >= len(holders)
    assert early is not None
    assert [early._speed, *set(asked)] == [home.speed] * 2
    chunks.give_back([holder.pid for holder in holders])
    chunks.close()


def test_a_killed_gpusnap(way: str, holders: list[Holder], tmp_path: Path) -> None:
    """The journal says where the bytes of freed regions are, and they are filled from there."""
    chunks = Chunks(str(image(tmp_path)), "c0ffee", SMALL)
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    chunks.take_out(pids)
    (entry,) = journal.entries()
    assert entry.at_work
    assert [process.pid for process in bring_back.list_alive(entry)] == pids
    assert all(bool(process.staged) == (way == "staged") for process in entry.processes)
    assert all(map(bring_back._is_mapped, entry.processes))
    bring_back._give_back(entry, entry.processes, SMALL, {})  # the driver is not at hand here
    assert all(map(bring_back._is_mapped, entry.processes))
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == digests
    journal.remove("c0ffee")
    assert journal.entries() == ()


def made(chunks: Chunks, holder: Holder) -> Manifest:
    records = chunks.records()
    assert records is not None
    process = replace(a_manifest().processes[0], pid=7, regions=records[holder.pid])
    return replace(a_manifest(), processes=(process,), pages="chunks")


def test_filling(way: str, holders: list[Holder], tmp_path: Path) -> None:
    """A restore reads ahead, and fills the process that has come back, by its PID in the container."""
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    digests = suspended(chunks, holders)
    pid = holders[0].pid
    chunks.take_out([pid])
    chunks.commit(kept=False)
    with Prefetch(str(path), made(chunks, holders[0]), SMALL, "other") as prefetch:
        prefetch.deliver({7: pid})
        prefetch.wait_checked()
    chunks.close()
    go_on([holder.pid for holder in holders])
    assert [holder.say("digest") for holder in holders] == digests


def test_a_region_that_a_process_does_not_take(way: str, holders: list[Holder], tmp_path: Path) -> None:
    """A manifest that was changed: nobody is sent to a file that goes with the failed restore."""
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    suspended(chunks, holders)
    pid = holders[0].pid
    chunks.take_out([pid])
    chunks.commit(kept=False)
    record = made(chunks, holders[0])
    wrong = tuple(replace(each, start=1 << 50) for each in record.processes[0].regions)
    record = replace(record, processes=(replace(record.processes[0], regions=wrong),))
    with (
        Prefetch(str(path), record, SMALL, "other") as prefetch,
        pytest.raises(GpusnapError) as caught,
    ):
        prefetch.deliver({7: pid})
    assert stage.FOLDER not in caught.value.sentence()
    assert ("gpusnap verify" in caught.value.hint) == (way == "staged")
    chunks.close()


def test_one_that_has_ended_is_left_out(way: str, holders: list[Holder], tmp_path: Path) -> None:
    """What was its memory goes nowhere."""
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    suspended(chunks, holders)
    chunks.take_out([holders[0].pid])
    chunks.commit(kept=False)
    with Prefetch(str(path), made(chunks, holders[0]), SMALL, "other") as prefetch:
        prefetch.deliver({})
        prefetch.wait_checked()
    chunks.close()


def test_a_blob_that_is_damaged(
    way: str, holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, whoever reads it, before a process may go on."""
    monkeypatch.setattr(Chunks, "_copy", lambda *_: None)
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    suspended(chunks, holders)
    chunks.take_out([holders[0].pid])
    records = made(chunks, holders[0]).processes[0].regions
    region = max(records, key=lambda region: region.table.stored)
    name = region.table.chunks[0].blob.partition(":")[2]
    blob = path / "gpusnap/blobs/sha256" / name
    blob.write_bytes(bytes(blob.stat().st_size))
    monkeypatch.setattr(userfault, "explain_missing", lambda: "it is not there")  # else test_demand_paging.py
    with Prefetch(str(path), made(chunks, holders[0]), SMALL, "other") as prefetch:
        if way == "staged":
            prefetch.deliver({7: holders[0].pid})
        with pytest.raises(ImageError, match=name[:12]):
            prefetch.wait_checked() if way == "staged" else prefetch.deliver({7: holders[0].pid})
    (failure,) = chunks.give_back([holders[0].pid]).values()
    assert isinstance(failure, ImageError)
    assert name[:12] in str(failure)


def test_discard(way: str, holders: list[Holder], tmp_path: Path) -> None:
    """Bytes that a process waits for stay; once it has them, or is gone, nothing is left."""
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    chunks.take_out(pids)
    chunks.discard(layout=True)
    left = path / "gpusnap/blobs/sha256" if way == "streamed" else Path(stage.FOLDER, "c0ffee")
    assert os.listdir(left)
    chunks.give_back(pids)
    chunks.discard(layout=True)
    assert os.listdir(path / "gpusnap") == []
    assert not os.path.ismount(stage.FOLDER)


def test_what_recover_will_give_back_stays(way: str, holders: list[Holder], tmp_path: Path) -> None:
    """Processes have their bytes again, but the driver could not resume one: the journal still names them."""
    chunks = Chunks(str(image(tmp_path)), "c0ffee", SMALL)
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    chunks.take_out(pids)
    chunks.give_back(pids)
    chunks.discard(layout=True, suspended=True)
    (entry,) = journal.entries()
    assert bring_back._give_back(entry, entry.processes, SMALL, {}) == {}
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == digests
    chunks.discard(layout=True)
    assert not os.path.ismount(stage.FOLDER)


def test_what_is_populated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is in RAM before the driver has written it, and before its thread has ended."""
    chunks, found = Chunks(str(image(tmp_path)), "c0ffee", SMALL), PopulateResult()
    monkeypatch.setattr(pages, "run_populating", lambda *_, **__: nullcontext(found))
    assert chunks.measure_populated(os.getpid()) == 0
    with chunks.run_driver_thread(os.getpid(), os.getpid()):
        for at, name in enumerate(("one", "two")):
            found.areas.append(Area(str(tmp_path / name), at * 4 * MIB, 4 * MIB, new=True))
        assert chunks.measure_populated(os.getpid()) == 8 * MIB


def test_a_process_that_ends(way: str, holders: list[Holder], tmp_path: Path) -> None:
    """The others are taken and given back."""
    chunks = Chunks(str(image(tmp_path)), "c0ffee", SMALL)
    digests = suspended(chunks, holders)
    gone, left = holders
    gone.process.kill()
    gone.process.wait()
    chunks.take_out([gone.pid, left.pid])
    chunks.give_back([gone.pid, left.pid])
    go_on([left.pid])
    assert left.say("digest") == digests[1]


def test_parts(holders: list[Holder]) -> None:
    """A part is read and written at its own offsets."""
    holders[0].say("map")
    found = pages._mappings(holders[0].pid)
    region = max((m for m in found if m.is_plain), key=lambda m: m.size)
    part = transfer.ProcessRegion(holders[0].pid, region.start, region.size)
    view = memoryview(bytearray(b"gpusnap!"))
    part.write(4096, view)
    into = memoryview(bytearray(8))
    part.read(4096, into)
    assert bytes(into) == b"gpusnap!"
    assert not is_zero(into)


def staged(pid: int) -> tuple[regions.Mapping, Area]:
    """The largest region of a process, which stands from now on, and a copy of it in the stage."""
    journal.write("c0ffee", "/image", {pid: ()})
    region = max((m for m in pages._mappings(pid) if m.is_plain), key=lambda m: m.size)
    stop([pid], timeout=60)
    area = Stage("c0ffee").area("a", region.start, region.size)
    copies.read(pid, region.start, area.view(0, region.size))
    return region, area


def test_no_descriptor_is_to_be_had(holders: list[Holder], tmp_path: Path) -> None:
    """A process at its limit of open files cannot be given a file: the bytes are copied."""
    pid, digest = holders[0].pid, holders[0].say("map")
    region, area = staged(pid)
    with enter_thread(pid) as remote:
        remote.mmap(region.start, region.size, 3, transfer.OWN)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    assert transfer.map_areas("c0ffee", {pid: [area]}) == {}
    assert next(m for m in pages._mappings(pid) if m.start <= region.start < m.end).is_plain
    area.close()
    go_on([pid])
    assert holders[0].say("digest") == digest


def test_a_file_of_that_name_on_another_disk(
    holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's own file that is named like a staged one stays what it is, whatever its size."""
    pid, _ = holders[0].pid, holders[0].say("map")
    _, area = staged(pid)
    assert transfer.map_areas("c0ffee", {pid: [area]}) == {}
    monkeypatch.setattr(stage, "device", lambda: "00:00")
    before = pages._mappings(pid)
    transfer.replace_staged_memory("c0ffee", pid)
    assert pages._mappings(pid) == before
    area.close()


def test_what_the_driver_leaves_becomes_the_process_own(
    holders: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A staged file that is mapped after the driver's restore is memory again, of which pages can go."""
    pid, digest = holders[0].pid, holders[0].say("map")
    region, area = staged(pid)
    assert transfer.map_areas("c0ffee", {pid: [area]}) == {}
    assert [m.name for m in pages._mappings(pid) if m.start == region.start] == [area.path]
    monkeypatch.setattr(transfer, "_PIECE", 3 * mmap.PAGESIZE)  # the bytes of it that are held at once
    transfer.replace_staged_memory("c0ffee", pid)
    transfer.replace_staged_memory("c0ffee", pid)
    area.close()
    assert [m.name for m in pages._mappings(pid) if m.name == area.path] == []
    go_on([pid])
    assert holders[0].say("digest") == digest
    stop([pid], timeout=60)
    with enter_thread(pid) as remote:
        remote.madvise(region.start, region.size, 4)  # MADV_DONTNEED
    zeros = bytearray(4096)
    copies.read(pid, region.start, zeros)
    assert bytes(zeros) == bytes(4096)


def test_what_recover_calls_whole_is_on_disk(
    way: str, holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the dump it reads every blob and syncs all of them, and CRIU's images too."""
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", replace(SMALL, sync=False))
    suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    chunks.take_out(pids)
    chunks.write_durably()
    (path / "inventory.img").write_bytes(b"inventory")
    record = replace(made(chunks, holders[0]), container="c0ffee")
    Draft(str(path)).prepare(record)
    for holder in holders:
        holder.process.kill()
        holder.process.wait()
    blobs = {chunk.blob for p in record.processes for r in p.regions for chunk in r.table.chunks}
    files = {path / "gpusnap/blobs/sha256" / blob.partition(":")[2] for blob in blobs}
    synced, real = set[int](), os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    damaged = min(files)
    good = damaged.read_bytes()
    damaged.write_bytes(bytes(len(good)))
    entry = journal.read("c0ffee")
    assert entry is not None
    with pytest.raises(ImageError, match=damaged.name[:12]):
        recover_checkpoint._finish(entry, SMALL)
    assert not (path / "gpusnap/manifest.json").exists()
    damaged.write_bytes(good)
    assert "is complete" in recover_checkpoint._finish(entry, SMALL)
    # Written anew: of the dead one's files nobody could tell any more.
    assert {file.stat().st_ino for file in (*files, path / "inventory.img")} <= synced
    assert manifest_file.read(str(path)).processes == record.processes
    chunks.close()


def test_what_is_freed_is_on_disk(
    holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that is nowhere else but in chunks stays in its process where the disk fails."""
    monkeypatch.setattr(mount_namespace, "is_lasting", lambda: False)
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", replace(SMALL, sync=False))
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fsync)
        with pytest.raises(ImageError, match="Input/output error"):
            chunks.take_out(pids)
    chunks.discard(layout=True)
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == digests


def rotten(folder: Path, area: Area) -> Known:
    """The chunks of an earlier checkpoint with these bytes; the disk has damaged its blobs since."""
    earlier = Layout(folder / "earlier").create()
    tables = writing.write([area], earlier, threads=1, ceiling=SMALL.ceiling, chunk_size=MIB)
    known = Known(folder / "known.json")
    known.learn(tables, earlier)
    for blob in (folder / "earlier/blobs/sha256").iterdir():
        was = blob.stat()
        with blob.open("r+b") as file:
            file.write(b"rotten")
        os.utime(blob, ns=(was.st_atime_ns, was.st_mtime_ns))
    return known


def same_bytes(folder: Path, chunks: Chunks, pid: int) -> Area:
    """A region of its own with the first bytes of that process' region."""
    (region,) = regions.regions(chunks._processes[pid].before, regions.mappings(pid))
    area = Area(str(folder / "area"), region.start, 2 * MIB, new=True)
    copies.read(pid, region.start, area.view(0, 2 * MIB))
    return area


def test_what_was_linked_ahead_is_not_all_that_is_left(
    holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another region has the same bytes, and an earlier checkpoint's chunk of them, which has rotted."""
    monkeypatch.setattr(mount_namespace, "is_lasting", lambda: False)
    chunks = Chunks(str(image(tmp_path)), "c0ffee", SMALL)
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    area = same_bytes(tmp_path, chunks, pids[0])
    chunks._early = EarlyWriter(chunks._layout.create(), SMALL, rotten(tmp_path, area))
    chunks._early.begin(area)
    wait_for(lambda: os.listdir(tmp_path / "image/gpusnap/blobs/sha256"), "the first chunk, linked")
    chunks.take_out(pids)
    assert chunks._early.end(), "nothing was linked"
    chunks.give_back(pids)
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == digests
    chunks.close()
    area.close()


def test_no_link_takes_the_place_of_all_that_is_left(
    holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One region is nowhere but in chunks; another one has the same bytes, known and rotten elsewhere."""
    monkeypatch.setattr(mount_namespace, "is_lasting", lambda: False)
    home = ImageDestination(str(image(tmp_path)), "c0ffee", SMALL)
    chunks = Chunks(home.place, "c0ffee", SMALL, destination=home)
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    area = same_bytes(tmp_path, chunks, pids[0])
    known = rotten(tmp_path, area)
    chunks.take_out(pids)
    monkeypatch.setattr(home, "open_known", lambda: nullcontext(known))
    chunks._processes[0] = pages._Process(
        held=(pages._CapturedRegion(regions.Region(area.address, area.size), area),)
    )
    chunks.write()
    del chunks._processes[0]
    chunks.give_back(pids)
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == digests
    chunks.close()
    area.close()


@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        pytest.param("", ["disk.img"], id="nothing else happened"),
        pytest.param("another", ["disk.img", "gpusnap", "pages-1.img"], id="another's checkpoint is there"),
        pytest.param("moved", ["disk.img", "gpusnap", "pages-1.img"], id="it is a copy"),
    ],
)
def test_killed_while_it_wrote_behind(
    holders: list[Holder], tmp_path: Path, meanwhile: str, left: list[str]
) -> None:
    """The container ran on: it is left alone, and nothing of the checkpoint stays; another's does."""
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    chunks.take_out(pids)
    Draft(str(path)).prepare(None)
    (path / "disk.img").write_bytes(b"not of this dump")
    journal.write_document("c0ffee", journal.IMAGES, asdict(note_earlier(str(path))))
    (path / "pages-1.img").write_bytes(b"pages")
    os.utime(path / "pages-1.img", (1, 1))  # the clock was put back
    chunks.give_back(pids)
    go_on(pids)
    chunks.record_places(())
    chunks.write_durably()
    (entry,) = journal.entries()
    entry = replace(entry, owner=(entry.owner[0], 1))  # it was killed
    journal_read = journal.read
    if meanwhile == "another":
        other = Draft(str(path))
        record = replace(a_manifest(), container="beef")
        other.prepare(record)
        other.finish(record)
    elif meanwhile == "moved":
        path.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "read", lambda _: entry)
        said = recover_checkpoint.recover(entry, FakeDriver(), SMALL)
    assert said == "it continues to run, and its checkpoint failed"
    assert sorted(each.name for each in path.iterdir()) == left
    assert journal_read("c0ffee") is None
    assert journal.list_noted(journal.IMAGES) == ()
    assert stage.containers() == []
    chunks.close()


def test_a_second_tmpfs_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel cannot say for a moment whether the tmpfs is mounted, none is mounted over it."""
    Stage("one").area("a", 0, MIB).close()
    real: Callable[..., object] = os.lstat

    def failing(path: object, **more: object) -> object:
        if path == stage.FOLDER:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path)
        return real(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", failing)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            Stage("other").area("a", 0, MIB)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            stage.containers()
        recover_checkpoint.sweep()  # nothing is freed then
    assert stage.containers() == ["one"]
    stage.remove("one")
    assert not os.path.ismount(stage.FOLDER)


def test_what_is_staged_for_nobody(holders: list[Holder]) -> None:
    """Without an entry nobody needs it, unless somebody is at work on that container just now."""
    for name in ("one", "other", "busy"):
        Stage(name).area("a", 0, MIB).close()
    journal.write("other", "/image", {})
    with journal.hold("busy"):
        recover_checkpoint.sweep()
        assert stage.containers() == ["busy", "other"]
    journal.remove("other")
    recover_checkpoint.sweep()
    assert not os.path.ismount(stage.FOLDER)


def test_a_container_of_that_id_elsewhere(holders: list[Holder], tmp_path: Path) -> None:
    """A restore of another engine's container of the same ID leaves alone what is staged for this one."""
    path, other = image(tmp_path), tmp_path / "other"
    other.mkdir()
    here, there = (container_key.key(f"/run/containerd/runc/{name}", "w") for name in ("default", "k8s.io"))
    chunks = Chunks(str(path), here, SMALL)
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    chunks.take_out(pids)
    chunks.write_durably()
    chunks.commit(kept=False)
    with journal.hold(here), journal.hold(there):
        assert [entry.container for entry in journal.entries()] == ["w"]
        assert journal.read(there) is None
        with Prefetch(str(path), made(chunks, holders[0]), SMALL, there):
            assert stage.containers() == sorted((here, there))
    assert stage.containers() == [here]
    assert chunks.give_back(pids) == {}
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == digests
    chunks.close()
    journal.remove(here)


def test_no_process_has_gpu_state(holders: list[Holder], tmp_path: Path) -> None:
    """An idle container: nothing is written but a layout without chunks."""
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    chunks.write_durably()
    assert chunks.records() == {}
    chunks.commit(kept=True)
    chunks.close()
    assert (path / "gpusnap/index.json").exists()
    assert stage.containers() == []


def test_nothing_is_staged_where_it_would_not_last(
    holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mount namespace of our own the bytes go to the disk before they are freed, and come from there."""
    monkeypatch.setattr(mount_namespace, "is_lasting", lambda: False)
    path = image(tmp_path)
    chunks = Chunks(str(path), "c0ffee", SMALL)
    digests = suspended(chunks, holders)
    pids = [holder.pid for holder in holders]
    chunks.take_out(pids)
    assert chunks.records() is not None
    assert stage.containers() == []
    chunks.commit(kept=False)
    with Prefetch(str(path), made(chunks, holders[0]), SMALL, "other") as prefetch:
        prefetch.deliver({7: pids[0]})
        assert stage.containers() == []
    assert chunks.give_back(pids) == {}
    go_on(pids)
    assert [holder.say("digest") for holder in holders] == digests
    chunks.close()


# The journal.


@pytest.mark.parametrize("text", ["", "{", "[]", '{"container": 1}', '{"version": 1, "owner": []}'])
def test_a_broken_entry(holders: list[Holder], text: str) -> None:
    """It is an error that names the file, never a guess."""
    os.makedirs(journal.FOLDER)
    (Path(journal.FOLDER) / "c0ffee.json").write_text(text)
    with pytest.raises(GpusnapError, match=r"c0ffee\.json"):
        journal.read("c0ffee")


def test_an_id_that_begins_another(holders: list[Holder]) -> None:
    """Removing one container's entry leaves those alone whose ID goes on with a dot."""
    os.makedirs(journal.FOLDER)
    for name in ("a.1.thread", "a.b.1.thread", "a.b.2.idle"):
        Path(journal.FOLDER, name).write_text("{}")
    journal.remove("a")
    assert sorted(os.listdir(journal.FOLDER)) == ["a.b.1.thread", "a.b.2.idle"]


def test_names_and_nothing() -> None:
    """An ID is no path; where nothing waits there is no entry."""
    assert journal.read("../../etc/passwd") is None
    with pytest.raises(GpusnapError, match="not a container ID"):
        journal.write("../../etc/passwd", "/image", {})
    journal.remove("never-there")


def test_the_thread_is_noted(holders: list[Holder]) -> None:
    """While a thread makes calls for us its own registers are on file, and afterwards not."""
    pid = holders[0].pid
    stop([pid], timeout=60)
    journal.write("c0ffee", "/image", {pid: ()})
    with enter_thread(pid) as remote, journal.keep_thread("c0ffee", pid, remote.saved):
        entry = journal.read("c0ffee")
        assert entry is not None
        assert entry.processes[0].thread == remote.saved
    entry = journal.read("c0ffee")
    assert entry is not None
    assert entry.processes[0].thread is None
    go_on([pid])
    assert holders[0].say("digest") == "none"


def test_one_at_a_time(holders: list[Holder]) -> None:
    """Two checkpoints of one container never run at once; the lock goes with its holder."""
    with (
        journal.hold("c0ffee"),
        pytest.raises(GpusnapError, match="another gpusnap is still working on container c0ffee"),
        journal.hold("c0ffee"),
    ):
        pass
    with journal.hold("c0ffee"):
        pass
    assert os.listdir(journal.FOLDER) == []


def test_a_lent_thread_is_forgotten(holders: list[Holder]) -> None:
    """Registers of an earlier kill are never put into a thread that has gone on since."""
    pid = holders[0].pid
    path = Path(journal.FOLDER) / f"c0ffee.{pid}.thread"
    journal.write("c0ffee", "/image", {pid: ()})
    forgets: list[Callable[[], None]] = [
        lambda: journal.drop_thread("c0ffee", pid),
        lambda: journal.remove("c0ffee"),
    ]
    for forget in forgets:
        path.write_text('{"tid": 1, "registers": "", "mask": 0}')
        forget()
        assert not path.exists()
