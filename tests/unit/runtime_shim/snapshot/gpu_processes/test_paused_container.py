"""A paused container is held still, thawed, and frozen again: real processes in a real cgroup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cells import ID, Cell, cell, container, folder, pause
from criu_images import frozen_groups
from fakes import Scene, wait_for
from pairs import Pair, a_pair

from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import cgroup_freezer
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu.images import control_groups
from gpusnap.runtime_shim.shim import suspended
from gpusnap.runtime_shim.snapshot.gpu_processes import paused_container
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry, Pause

__all__ = ["cell", "folder"]


def test_hold_and_freeze(cell: Cell, folder: Path) -> None:
    """Thawed they are stopped, frozen again they are not, and none has run an instruction."""
    before, paused = cell.counts(), pause(cell)
    paused.hold(cell.pids, timeout=60)
    assert (cell.group / "cgroup.freeze").read_text().strip() == "0"
    assert all(proc.is_still(pid) for pid in cell.pids)
    assert sorted(paused.held) == sorted(cell.pids)
    paused.freeze()
    assert cell.frozen()
    assert not any(proc.is_halted(pid) for pid in cell.pids)
    assert cell.counts() == before
    assert list(folder.iterdir()) == []
    cell.freeze(0)
    cell.run(before)


def test_kept_and_let_go(cell: Cell) -> None:
    """A process whose GPU state is away stays stopped when all is frozen, until it is let go."""
    before, paused = cell.counts(), pause(cell)
    paused.hold(timeout=60)
    paused.keep(cell.pids[:1])
    paused.freeze()
    assert [proc.is_halted(pid) for pid in cell.pids] == [True, False]
    paused.hold(timeout=60)
    paused.let_go(cell.pids[0])
    paused.freeze()
    assert [proc.is_halted(pid) for pid in cell.pids] == [False, False]
    assert cell.counts() == before


@pytest.mark.parametrize("when", ["before", "within"])
def test_stopped_by_its_user(cell: Cell, when: str) -> None:
    """A process that was stopped before the pause, or was sent SIGSTOP in it, stays so."""
    if when == "before":
        cell.freeze(0)
    os.kill(cell.pids[0], signal.SIGSTOP)
    if when == "before":
        wait_for(lambda: proc.is_still(cell.pids[0]), "the stop")
        cell.freeze(1)
    paused = pause(cell)
    paused.hold(timeout=60)
    assert list(paused.held) == cell.pids[1:]
    paused.freeze()
    assert proc.is_halted(cell.pids[0])


@pytest.mark.parametrize("path", [f"/default/{ID}", f"system.slice:cri:{ID}", "/default/other", 7])
def test_in_the_cgroup_of_its_configuration(cell: Cell, tmp_path: Path, path: object) -> None:
    """Restored under another name it has the old one's, which its configuration names."""
    (tmp_path / "config.json").write_text(json.dumps({"linux": {"cgroupsPath": path}}))
    restored = containers.Container("renamed", cell.pids[0], "paused", str(tmp_path), {})
    found = paused_container.find(restored)
    assert (found is not None) == (isinstance(path, str) and path.endswith(ID))


@contextmanager
def within_vfork(cell: Cell, tmp_path: Path) -> Iterator[Pair]:
    """Two more in the cell, of which one waits within vfork for the other."""
    pair = a_pair(tmp_path, "/bin/cat")
    try:
        for pid in pair.pids:
            (cell.group / "cgroup.procs").write_text(str(pid))
        wait_for(cell.frozen, "the freeze")
        yield pair
    finally:
        cell.freeze(0)
        for pid in reversed(pair.pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pair.process.communicate()


def test_one_waits_within_vfork(cell: Cell, tmp_path: Path) -> None:
    """Its child begins the program, and no more; both stand, and afterwards none waits."""
    before = cell.counts()
    with within_vfork(cell, tmp_path) as pair:
        writer = pair.open()
        paused = pause(cell)
        paused.hold([*cell.pids, pair.parent], timeout=60)
        assert all(proc.is_still(pid) for pid in (*cell.pids, *pair.pids))
        paused.freeze()
        assert cell.frozen()
        paused.check_nobody_waits()
        assert cell.counts() == before
        os.close(writer)


def test_one_waits_for_good(cell: Cell, tmp_path: Path) -> None:
    """Nothing is done to the container, unless GPU state has to come back, which is worth more."""
    before = cell.counts()
    with within_vfork(cell, tmp_path) as pair:
        paused = pause(cell)
        with pytest.raises(GpusnapError, match=f"waits for its child {pair.child}"):
            paused.hold(timeout=0.2)
        paused.freeze()
        with pytest.raises(GpusnapError, match=f"child {pair.child} .* is stopped"):
            paused.check_nobody_waits()
        paused.keep(cell.pids[:1])
        paused.hold(cell.pids[:1], timeout=0.2)
        paused.let_go(cell.pids[0])
        paused.freeze()
        assert cell.counts() == before


def test_not_frozen(cell: Cell) -> None:
    """A container that runs has no pause; nor has one that has no cgroup of its own."""
    cell.freeze(0)
    assert paused_container.find(container(cell.pids[0])) is None
    assert paused_container.find(container(os.getpid())) is None


def test_a_frozen_cgroup_within(cell: Cell) -> None:
    """A process that stays frozen, since it is so by a group of its own, is told of and not waited for."""
    inner = cell.group / "inner"
    inner.mkdir()
    (inner / "cgroup.freeze").write_text("1")
    (inner / "cgroup.procs").write_text(str(cell.pids[1]))
    paused = pause(cell)
    with pytest.raises(GpusnapError, match=r"did not stop within 0\.2 s"):
        paused.hold(cell.pids, timeout=0.2)
    paused.freeze()
    assert cell.frozen()
    (inner / "cgroup.freeze").write_text("0")
    (cell.group / "cgroup.procs").write_text(str(cell.pids[1]))
    inner.rmdir()


def killed(cell: Cell, *, thawed: bool) -> Entry:
    """What a gpusnap leaves that was killed while it held the container, or had it frozen again."""
    paused = pause(cell)
    paused.hold(cell.pids, timeout=60)
    paused.keep(cell.pids[:1])
    if not thawed:
        paused.freeze()
    entry = journal.read(ID)
    assert entry is not None
    assert isinstance(entry.paused, Pause)
    assert entry.paused.thawed is thawed
    assert journal.entries() == (entry,)
    return entry


@pytest.mark.parametrize("thawed", [True, False])
def test_left_by_a_killed_one(cell: Cell, *, thawed: bool) -> None:
    """It is frozen again, with everything as it was."""
    before, entry = cell.counts(), killed(cell, thawed=thawed)
    paused = paused_container.reopen(entry, cell.pids[:1])
    assert paused is not None
    paused.hold(timeout=60)
    paused.let_go(cell.pids[0])
    paused.freeze()
    assert cell.frozen()
    assert not any(proc.is_halted(pid) for pid in cell.pids)
    assert cell.counts() == before
    assert journal.read(ID) is None


def test_left_and_resumed(cell: Cell) -> None:
    """Where somebody has resumed the container since, it is not paused again."""
    entry = killed(cell, thawed=False)
    cell.freeze(0)
    assert paused_container.reopen(entry, cell.pids[:1]) is None
    assert proc.is_halted(cell.pids[0])  # its GPU state comes first


def test_left_thawed_by_criu(cell: Cell) -> None:
    """CRIU was killed, too, and had thawed it: runc would refuse the resume that its engine still wants."""
    for then in ("runs", "is paused", "is deleted", "ended"):
        entry = killed(cell, thawed=False)
        cell.freeze(0)
        assert paused_container.reopen(entry, cell.pids[:1]) is None
        assert journal.list_noted(journal.THAWED) == (ID,)
        assert suspended.answer("pause", [ID], None, lambda: 1) is None
        if then == "is paused":
            cell.freeze(1)
        if then == "ended":
            journal.write_document(ID, journal.THAWED, {"group": "/sys/fs/cgroup/none"})
            paused_container.sweep()
        elif then == "is deleted":
            assert suspended.answer("delete", ["--force", ID], None, lambda: 1) is None
        else:
            assert suspended.answer("resume", ["other"], None, lambda: 1) is None
            assert suspended.answer("resume", [ID], None, lambda: 1) == (0 if then == "runs" else None)
        assert journal.list_noted(journal.THAWED) == ()
        assert suspended.answer("resume", [ID], None, lambda: 1) is None
        cell.freeze(1)
        again = paused_container.reopen(entry, cell.pids[:1])
        assert again is not None
        again.freeze()
        journal.drop(ID, journal.PAUSED)


def test_left_under_crun(cell: Cell) -> None:
    """crun resumes what is thawed already without a word, so that it may have: it is not frozen again."""
    paused = paused_container.find(container(cell.pids[0]), "crun")
    assert paused is not None
    paused.hold(timeout=60)
    entry = journal.read(ID)
    assert entry is not None
    assert paused_container.reopen(entry, cell.pids[:1]) is None
    assert journal.list_noted(journal.THAWED) == ()
    assert proc.is_halted(cell.pids[0])  # its GPU state comes first
    assert not proc.is_halted(cell.pids[1])
    paused.freeze()
    entry = journal.read(ID)
    assert entry is None or paused_container.reopen(entry, cell.pids[:1]) is not None


@pytest.mark.parametrize("at", ["_send", "settle"])
def test_noted_before_and_after(cell: Cell, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Killed just before the thaw, or just after the freeze: it was not we who thawed what is frozen."""
    paused = pause(cell)
    if at == "settle":
        paused.hold(timeout=60)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cgroup_freezer if at == "settle" else paused_container, at, killed)
        with pytest.raises(KeyboardInterrupt):
            paused.freeze() if at == "settle" else paused.hold(timeout=60)
    entry = journal.read(ID)
    assert entry is not None
    assert entry.paused is not None
    assert not entry.paused.thawed
    paused.freeze()


def test_a_kept_one_that_ended(cell: Cell) -> None:
    """Nothing of it is left in the journal."""
    paused = pause(cell)
    paused.hold(timeout=60)
    paused.keep(cell.pids[:1])
    os.kill(cell.pids[0], signal.SIGKILL)
    wait_for(lambda: not proc.is_running(cell.pids[0]), "its end")
    paused.freeze()
    assert journal.read(ID) is None


def test_left_without_a_note(cell: Cell) -> None:
    """A container that somebody paused after gpusnap was killed is thawed for the driver, too."""
    entry = Entry(ID, "/i", (1, 1), ())
    paused = paused_container.reopen(entry, cell.pids)
    assert paused is not None
    assert sorted(paused.held) == sorted(cell.pids)


def test_not_as_we_write_it(folder: Path) -> None:
    """A note of another shape is told of, and changes nothing."""
    journal.write_document(ID, journal.PAUSED, {"owner": [1, 1], "group": "/g", "stopped": [[1]]})
    with pytest.raises(GpusnapError, match="was not written by this version of gpusnap"):
        journal.read(ID)


def test_an_image_thaws(tmp_path: Path) -> None:
    """Version 1's freezer alone is said to be thawed, and all else stays."""
    path = tmp_path / "cgroup.img"
    path.write_bytes(frozen_groups("FROZEN"))
    for _ in range(2):
        control_groups.thaw(str(tmp_path))
        assert path.read_bytes() == frozen_groups("THAWED")


def test_an_image_thaws_without_being_decoded(tmp_path: Path) -> None:
    """Users wait meanwhile, and pycriu takes time to import; the container may have ended without it."""
    (tmp_path / "cgroup.img").write_bytes(frozen_groups("FROZEN"))
    program = (
        "import sys\n"
        "from gpusnap.runtime_shim.runtime.criu.images import control_groups\n"
        "control_groups.thaw(sys.argv[1])\n"
        "print([each for each in sys.modules if each.partition('.')[0] in ('google', 'pycriu')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, check=True)
    assert done.stdout == b"[]\n"
    assert (tmp_path / "cgroup.img").read_bytes() == frozen_groups("THAWED")


def test_a_checkpoint_thaws_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever has been dumped, before it is called a checkpoint."""
    with Scene(tmp_path, monkeypatch, capfd) as scene:
        scene.gpu_processes(1)
        (tmp_path / "dumped").write_bytes(frozen_groups("FROZEN"))
        scene.runtime.script("checkpoint", f"""cp '{tmp_path}/dumped' "$image/cgroup.img"; """, default=True)
        assert scene.checkpoint("--leave-running").code == 0
        assert (scene.image / "cgroup.img").read_bytes() == frozen_groups("THAWED")


def test_no_image_to_thaw(tmp_path: Path) -> None:
    """There is none where CRIU left control groups alone; one that cannot be changed is named."""
    control_groups.thaw(str(tmp_path))
    (tmp_path / "cgroup.img").mkdir()
    with pytest.raises(ImageError, match=r"cgroup\.img cannot be changed"):
        control_groups.thaw(str(tmp_path))
