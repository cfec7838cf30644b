"""recover, of a container that is paused: real processes in a frozen cgroup, put right as they were found."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cells import ID, Cell, cell, pause
from criu_images import frozen_groups
from fakes import FakeDriver, a_manifest
from holders import blocked, hold_and_be_killed

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime.criu.images.directory import note_earlier
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.gpu_processes import paused_container
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry, JournalProcess, Pause
from gpusnap.runtime_shim.snapshot.recovery import checkpoint as recover_checkpoint
from gpusnap.runtime_shim.snapshot.recovery.checkpoint import recover
from gpusnap.runtime_shim.stopping.stop import stop

__all__ = ["cell"]


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((journal, "journal"), (stage, "stage")):
        monkeypatch.setattr(module, "FOLDER", str(tmp_path / "gpusnap" / name))
    (tmp_path / "gpusnap").mkdir()
    # What is written here is a killed gpusnap's: no process has its PID and that start time.
    owner = state_files.owner
    monkeypatch.setattr(state_files, "owner", lambda pid=None: owner(pid) if pid else (1, 1))


class Driver(FakeDriver):
    """Its thread in a process is the one that sleeps."""

    def restore_thread(self, pid: int) -> int:
        """As the protocol says."""
        return max(map(int, os.listdir(f"/proc/{pid}/task")))


def killed(cell: Cell, image: str = "") -> tuple[paused_container.PausedContainer, Entry]:
    """Held and thawed, as a gpusnap leaves it; with an image, when the first process' GPU state was away."""
    paused = pause(cell)
    paused.hold(cell.pids, timeout=60)
    if image:
        paused.keep(cell.pids[:1])
        journal.write(ID, image, {cell.pids[0]: ()})
    return paused, read()


def read() -> Entry:
    entry = journal.read(ID)
    assert entry is not None
    return entry


def as_it_was(cell: Cell, before: list[bytes]) -> None:
    """Frozen, none stopped, nothing has run; and all runs once it is thawed."""
    assert cell.frozen()
    assert not any(proc.is_halted(pid) for pid in cell.pids)
    assert cell.counts() == before
    cell.freeze(0)
    cell.run(before)


def test_only_the_pause(cell: Cell) -> None:
    """Killed before any GPU was asked: it is frozen again, and nothing is noted of it."""
    before = cell.counts()
    _, entry = killed(cell)
    assert "its pause" in recover(entry, Driver(), Memory())
    assert journal.read(ID) is None
    as_it_was(cell, before)


def test_a_thread_was_held(cell: Cell) -> None:
    """Killed while it held a thread, whose signals it had blocked: the thread has its own mask again."""
    before = cell.counts()
    pid = cell.pids[0]
    mask = blocked(pid, pid)
    _, entry = killed(cell)
    cell.freeze(0)
    hold_and_be_killed(pid, [pid], Path(journal.masks(ID)))
    assert blocked(pid, pid) != mask
    recover(entry, Driver(), Memory())
    assert blocked(pid, pid) == mask
    assert journal.list_noted(journal.MASKS) == ()
    as_it_was(cell, before)


def test_paused_for_its_dump(cell: Cell, tmp_path: Path) -> None:
    """It was gpusnap that paused it: it runs again, GPU process and all."""
    cell.freeze(0)
    stop(cell.pids[:1], timeout=60)
    cell.freeze(1)
    image = tmp_path / "image"
    image.mkdir()
    Draft(str(image)).prepare(None)
    journal.write(ID, str(image), {cell.pids[0]: ()})
    init = proc.process(cell.pids[0])
    assert init is not None
    journal.note_pause(
        ID, Pause((1, 1), "", False, (), init=(init.pid, init.start), groups=(str(cell.group),))
    )
    driver = Driver()
    driver.use(cell.pids[0], state=ProcessState.CHECKPOINTED)
    before = cell.counts()
    assert recover(read(), driver, Memory()) == f"running: {cell.pids[0]}"
    assert journal.read(ID) is None
    cell.run(before)


@pytest.mark.parametrize("thawed", [True, False])
def test_gpu_state_comes_back(cell: Cell, tmp_path: Path, *, thawed: bool) -> None:
    """The driver is asked while the cgroup is thawed and all stand; then it is frozen as it was."""
    before, driver, image = cell.counts(), Driver(), tmp_path / "image"
    image.mkdir()
    Draft(str(image)).prepare(None)
    paused, entry = killed(cell, str(image))
    if not thawed:
        paused.freeze()
        entry = read()
    driver.use(cell.pids[0], state=ProcessState.CHECKPOINTED)
    seen: list[bool] = []
    driver.when("restore", lambda _: seen.append(not cell.frozen() and all(map(proc.is_halted, cell.pids))))
    said = recover(entry, driver, Memory())
    assert said.startswith(f"paused, as before: {cell.pids[0]}; its engine can resume it")
    assert seen == [True]
    assert driver.states[cell.pids[0]] is ProcessState.RUNNING
    assert journal.read(ID) is None
    as_it_was(cell, before)


def test_the_driver_fails(cell: Cell, tmp_path: Path) -> None:
    """It is frozen again, and the process that lacks its GPU state stands even if it is resumed."""
    before, driver, image = cell.counts(), Driver(), tmp_path / "image"
    image.mkdir()
    Draft(str(image)).prepare(None)
    _, entry = killed(cell, str(image))
    driver.use(cell.pids[0], state=ProcessState.CHECKPOINTED)
    driver.fail("open", None, GpuError("the GPU driver is gone"))
    with pytest.raises(GpusnapError, match="the GPU driver is gone"):
        recover(entry, driver, Memory())
    assert cell.frozen()
    assert [proc.is_halted(pid) for pid in cell.pids] == [True, False]
    assert cell.counts() == before
    driver._faults.clear()
    recover(replace(read(), owner=(1, 1)), driver, Memory())
    as_it_was(cell, before)


def test_dumped(tmp_path: Path) -> None:
    """Killed after the dump that ended a paused container: its image is whole, and thawed when restored."""
    image = tmp_path / "image"
    image.mkdir()
    Draft(str(image)).prepare(replace(a_manifest(pids=()), container=ID, pages="criu"))
    (image / "cgroup.img").write_bytes(frozen_groups("FROZEN"))
    (image / "inventory.img").touch()
    gone = proc.process(os.getpid())
    assert gone is not None
    entry = Entry(ID, str(image), (1, 1), (JournalProcess(gone.pid, gone.start + 1, ()),))
    journal.write(ID, str(image), {gone.pid: ()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "read", lambda _: entry)
        assert "is complete" in recover(entry, Driver(), Memory())
    assert (image / "cgroup.img").read_bytes() == frozen_groups("THAWED")


def test_processes_that_are_still_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU has killed them, and one with much memory takes its time: its checkpoint is not taken away."""
    image = tmp_path / "image"
    image.mkdir()
    Draft(str(image)).prepare(replace(a_manifest(pids=()), container=ID, pages="criu"))
    (image / "inventory.img").touch()
    with subprocess.Popen(["sleep", "100"]) as child:
        found, asked = proc.process(child.pid), []
        assert found is not None
        entry = Entry(ID, str(image), (1, 1), (JournalProcess(found.pid, found.start, ()),))
        journal.write(ID, str(image), {found.pid: ()})

        def is_dying(pid: int) -> bool:
            asked.append(pid)
            if len(asked) == 3:
                child.kill()
                child.wait()
            return pid == child.pid

        monkeypatch.setattr(proc, "is_dying", is_dying)
        monkeypatch.setattr(journal, "read", lambda _: entry)
        assert "is complete" in recover(entry, Driver(), Memory())
    assert asked[:3] == [found.pid] * 3
    assert (image / "gpusnap/manifest.json").exists()


def test_one_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the deadline: nothing is touched, and that is said."""
    me = proc.process(os.getpid())
    assert me is not None
    entry = Entry(ID, str(tmp_path), (1, 1), (JournalProcess(me.pid, me.start, ()),))
    journal.write(ID, str(tmp_path), {me.pid: ()})
    monkeypatch.setattr(proc, "is_dying", lambda pid: True)
    monkeypatch.setattr(recover_checkpoint, "_DYING", 0.1)
    with pytest.raises(GpusnapError, match=f"process {me.pid} was killed but does not exit"):
        recover_checkpoint._put_right(entry, Driver(), Memory(), None)
    assert journal.read(ID) is not None


def test_the_disk_failed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports that once: images whose fsync failed are never called whole by us afterwards."""
    image = tmp_path / "image"
    image.mkdir()
    draft = Draft(str(image))
    draft.begin()
    draft.prepare(replace(a_manifest(pids=()), container=ID, pages="criu"))
    (image / "inventory.img").touch()
    (image / "pages-1.img").write_bytes(b"memory")
    gone = proc.process(os.getpid())
    assert gone is not None
    entry = Entry(ID, str(image), (1, 1), (JournalProcess(gone.pid, gone.start + 1, ()),))
    journal.write(ID, str(image), {gone.pid: ()})
    real, failed = os.fsync, list[str]()

    def fsync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        if name == "pages-1.img" and not failed:
            failed.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(journal, "read", lambda _: entry)
    with pytest.raises(GpusnapError, match="cannot be flushed to disk"):
        recover(entry, Driver(), Memory())
    for _ in range(2):
        with pytest.raises(GpusnapError, match=r"were not flushed to disk \(Input/output error\)"):
            recover(entry, Driver(), Memory())
    assert not (image / "gpusnap/manifest.json").exists()
    # Whoever has seen to it says so by hand, or gives it up.
    os.rename(image / "gpusnap/manifest.pending", image / "gpusnap/manifest.json")
    assert "is complete" in recover(entry, Driver(), Memory())
    assert os.listdir(journal.FOLDER) == []


def dumped_into_a_store(tmp_path: Path, *, mount: str) -> tuple[Path, StoreDestination]:
    """Images on a file system that is mounted there, memory in a store, and processes that have ended."""
    image = tmp_path / "storage" / "image"
    image.mkdir(parents=True)
    Draft(str(image)).prepare(replace(a_manifest(pids=()), container=ID, pages="store"))
    (image / "inventory.img").touch()
    destination = StoreDestination(str(tmp_path / "store"), str(image), ID, Memory())
    destination.begin()
    destination.mark_needed()
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(["sleep", "100"]) as child:
        mount_at(mount, patch)
        journal.write(ID, str(image), {child.pid: ()}, layout=destination.layout.path)
        child.kill()
    assert destination._staging is not None
    destination._staging.close(leave=True)
    return image, destination


def mount_at(path: str, patch: pytest.MonkeyPatch, source: str = "server:/images") -> None:
    """Have /proc show that as the mount of every path."""
    patch.setattr(proc, "find_mount", lambda _: proc.Mount("0:1", "/", path, (), (), "nfs4", "", source))


def test_images_that_are_not_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory in the store is kept until they are there again, and then the checkpoint is completed."""
    image, destination = dumped_into_a_store(tmp_path, mount="/storage")
    mount_at("/", monkeypatch)
    image.rename(tmp_path / "elsewhere")
    for _ in ("missing", "an empty mount point"):
        with pytest.raises(GpusnapError, match="was mounted at /storage may not be mounted") as caught:
            recover(read(), Driver(), Memory())
        assert caught.value.code == "GPS-031"
        assert os.path.exists(destination.layout.path)
        image.mkdir(exist_ok=True)
    image.rmdir()
    (tmp_path / "elsewhere").rename(image)
    mount_at("/storage", monkeypatch)
    assert "is complete" in recover(read(), Driver(), Memory())
    assert (image / "gpusnap/manifest.json").exists()


def test_another_file_system_in_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no images, which says nothing of those that were dumped: the memory is kept."""
    image, destination = dumped_into_a_store(tmp_path, mount="/storage")
    image.rename(tmp_path / "elsewhere")
    mount_at("/storage", monkeypatch, "other:/images")
    with pytest.raises(GpusnapError, match="was mounted at /storage may not be mounted"):
        recover(read(), Driver(), Memory())
    assert os.path.exists(destination.layout.path)
    path = Path(journal.FOLDER, f"{ID}.json")  # an earlier version noted the place alone
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "file-system"}))
    assert recover(read(), Driver(), Memory()) == "no process is left"


def test_images_that_were_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their file system is mounted where it was: nobody needs the memory."""
    image, destination = dumped_into_a_store(tmp_path, mount="/storage")
    mount_at("/storage", monkeypatch)
    shutil.rmtree(image)
    assert recover(read(), Driver(), Memory()) == "no process is left"
    assert not os.path.exists(destination.layout.path)
    assert journal.read(ID) is None


def test_images_that_somebody_says_were_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file in their directory is the way out for a file system that is gone for good."""
    image, destination = dumped_into_a_store(tmp_path, mount="/storage")
    mount_at("/", monkeypatch)
    shutil.rmtree(image)
    image.mkdir()
    (image / "gone").touch()
    assert recover(read(), Driver(), Memory()) == "no process is left"
    assert not os.path.exists(destination.layout.path)


def test_an_earlier_version_says_nothing_of_mounts(tmp_path: Path) -> None:
    """What cannot be known is kept, until an empty directory says that the images were removed."""
    image, destination = dumped_into_a_store(tmp_path, mount="/")
    path = Path(journal.FOLDER, f"{ID}.json")
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "mount"}))
    shutil.rmtree(image)
    with pytest.raises(GpusnapError, match="its file system may not be mounted"):
        recover(read(), Driver(), Memory())
    assert os.path.exists(destination.layout.path)
    image.mkdir()
    assert recover(read(), Driver(), Memory()) == "no process is left"
    assert not os.path.exists(destination.layout.path)


def test_images_that_a_failed_disk_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fsync had failed, and some are gone now: the memory stays until somebody has seen to it."""
    image, destination = dumped_into_a_store(tmp_path, mount="/")
    mount_at("/", monkeypatch)
    journal.note_unsynced(ID, "Input/output error")
    (image / "inventory.img").unlink()
    with pytest.raises(GpusnapError, match="were not flushed to disk"):
        recover(read(), Driver(), Memory())
    assert os.path.exists(destination.layout.path)
    shutil.rmtree(image)
    assert recover(read(), Driver(), Memory()) == "no process is left"
    assert not os.path.exists(destination.layout.path)
    assert os.listdir(journal.FOLDER) == []


def test_resumed_meanwhile(cell: Cell, tmp_path: Path) -> None:
    """Where somebody has resumed it since, it runs afterwards, and is not frozen again."""
    driver, image = Driver(), tmp_path / "image"
    image.mkdir()
    Draft(str(image)).prepare(None)
    paused, _ = killed(cell, str(image))
    paused.freeze()
    before = cell.counts()
    cell.freeze(0)
    driver.use(cell.pids[0], state=ProcessState.CHECKPOINTED)
    recover(read(), driver, Memory())
    assert not cell.frozen()
    assert journal.read(ID) is None
    cell.run(before)


@pytest.mark.parametrize("own", [True, False])
def test_images_of_a_killed_dump(own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a container that runs on: removed, unless another one may have been dumped there since."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap" / "journal"))
    monkeypatch.setattr(stage, "FOLDER", str(tmp_path / "gpusnap" / "stage"))
    image = tmp_path / ("c0ffee" if own else "shared")
    image.mkdir()
    Draft(str(image)).prepare(None)
    journal.write("c0ffee", str(image), {1: ()})
    journal.write_document("c0ffee", journal.IMAGES, asdict(note_earlier(str(image))))
    for name in ("inventory.img", "pages-1.img"):
        (image / name).write_bytes(b"dumped")
    (entry,) = journal.entries()
    entry = replace(entry, owner=(entry.owner[0], 1))  # it was killed
    alive = proc.process(1)
    monkeypatch.setattr(journal, "read", lambda _: entry)
    monkeypatch.setattr(recover_checkpoint, "list_alive", lambda _: [alive])
    monkeypatch.setattr(recover_checkpoint, "bring_back", lambda *_: [alive])
    assert recover(entry, FakeDriver(), Memory(pages="chunks")).startswith("running: ")
    assert (image / "pages-1.img").exists() is not own
