"""Signal masks of held threads, when who holds them is killed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import DEADLINE, FakeDriver, wait_for
from holders import blocked, hold_and_be_killed

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace import signal_masks, tracee
from gpusnap.runtime_shim.process.ptrace.tracee import hold, put_masks_back
from gpusnap.runtime_shim.process.ptrace.tracer import Tracer
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.recovery import checkpoint as recover_checkpoint

# A thread that blocks SIGUSR1 and waits; one that blocks nothing.
PROGRAM = """
import os, signal, threading
def wait(*blocked):
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    os.write(1, b"%d\\n" % threading.get_native_id())
    os.read(0, 1)
threading.Thread(target=wait, args=(signal.SIGUSR1,)).start()
wait()
"""
USR1 = 1 << signal.SIGUSR1 - 1
KEY = "a" * 64


@pytest.fixture
def process() -> Iterator[tuple[int, dict[int, int]]]:
    """A process, and the masks of its threads."""
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            tids = sorted(int(child.stdout.readline()) for _ in range(2))
            yield child.pid, {tid: blocked(child.pid, tid) for tid in tids}
        finally:
            child.kill()


def test_killed(process: tuple[int, dict[int, int]], tmp_path: Path) -> None:
    """Each thread has the mask that it had, and the file is gone when nobody keeps it."""
    pid, masks = process
    assert sorted(masks.values()) == [0, USR1]
    path = tmp_path / "masks"
    hold_and_be_killed(pid, list(masks), path)
    assert all(blocked(pid, tid) & 1 << signal.SIGTERM - 1 for tid in masks)
    with signal_masks.keep_masks(str(path)):
        assert put_masks_back(str(path)) == 2
    assert {tid: blocked(pid, tid) for tid in masks} == masks
    assert not path.exists()
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG), "the end by SIGTERM")


def test_killed_while_they_are_put_back(process: tuple[int, dict[int, int]], tmp_path: Path) -> None:
    """A second one that is killed loses none of them, and takes no held thread's mask for its own."""
    pid, masks = process
    path = tmp_path / "masks"
    hold_and_be_killed(pid, list(masks), path)
    hold_and_be_killed(pid, list(masks), path)
    with signal_masks.keep_masks(str(path)):
        assert put_masks_back(str(path)) == 2
    assert {tid: blocked(pid, tid) for tid in masks} == masks
    assert not path.exists()


def test_another_thread_by_now(process: tuple[int, dict[int, int]], tmp_path: Path) -> None:
    """One with the number of a thread that has ended is let alone, and so is one with another mask."""
    pid, masks = process
    path = tmp_path / "masks"
    hold_and_be_killed(pid, list(masks), path)
    for mask in signal_masks.read(str(path)):
        with open(path, "r+b") as file:
            file.seek(mask.slot * 32 + 8)
            file.write((mask.start + 1).to_bytes(8, sys.byteorder))
    assert put_masks_back(str(path)) == 0
    assert all(blocked(pid, tid) != mask for tid, mask in masks.items())
    assert signal_masks.read(str(path)) == ()


def test_let_go(process: tuple[int, dict[int, int]], tmp_path: Path) -> None:
    """Nothing is left of who let all go; while one is held, its mask alone is on file."""
    pid, masks = process
    path = tmp_path / "masks"
    first, second = masks
    with signal_masks.keep_masks(str(path)):
        with hold(pid, first):
            pass
        with hold(pid, second):
            assert [(mask.tid, mask.blocked) for mask in signal_masks.read(str(path))] == [
                (second, masks[second])
            ]
            assert path.stat().st_size == 64
    assert not path.exists()


def fail_to_set(monkeypatch: pytest.MonkeyPatch, times: int, tid: int) -> None:
    """Have so many calls that give a thread another mask than that of a held one fail."""
    really, left = ptrace.set_signal_mask, [times]

    def set_mask(whose: int, mask: int) -> None:
        if mask != tracee._EVERY and whose == tid and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(whose, mask)

    monkeypatch.setattr(ptrace, "set_signal_mask", set_mask)


def test_a_mask_that_cannot_be_restored_at_first(
    process: tuple[int, dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is restored all the same."""
    pid, masks = process
    path = tmp_path / "masks"
    fail_to_set(monkeypatch, 1, pid)
    with signal_masks.keep_masks(str(path)), hold(pid, pid):
        pass
    assert {tid: blocked(pid, tid) for tid in masks} == masks
    assert not path.exists()


@pytest.mark.parametrize("times", [1, 1 << 30])
def test_a_thread_that_cannot_be_released(
    process: tuple[int, dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """It has its own mask by then: nothing is left to recover. The kernel releases it with the tracer."""
    pid, masks = process
    path = tmp_path / "masks"
    really, left = ptrace.let_go, [times]

    def let_go(tid: int, deliver: int = 0) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        really(tid, deliver)

    monkeypatch.setattr(ptrace, "let_go", let_go)
    failed: list[OSError] = []

    def trace() -> None:
        try:
            with hold(pid, pid):
                pass
        except OSError as error:
            failed.append(error)

    with signal_masks.keep_masks(str(path)):
        tracer = threading.Thread(target=trace)
        tracer.start()
        tracer.join(DEADLINE)
    assert bool(failed) == (times > 1)
    assert {tid: blocked(pid, tid) for tid in masks} == masks
    assert not path.exists()


def test_a_mask_that_cannot_be_restored(
    process: tuple[int, dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is released, and its mask stays in the file; those of the others are put back."""
    pid, masks = process
    path = tmp_path / "masks"
    fail_to_set(monkeypatch, 1 << 30, pid)
    with signal_masks.keep_masks(str(path)):
        with pytest.raises(OSError, match="Input/output error"), hold(pid, pid):
            pass
        with hold(pid, pid):  # nobody traces it any more
            monkeypatch.undo()
    assert [(mask.tid, mask.blocked) for mask in signal_masks.read(str(path))] == [(pid, masks[pid])]
    with signal_masks.keep_masks(str(path)):
        assert put_masks_back(str(path)) == 1
    hold_and_be_killed(pid, list(masks), path)
    fail_to_set(monkeypatch, 1 << 30, pid)
    with signal_masks.keep_masks(str(path)), pytest.raises(OSError, match="Input/output error"):
        put_masks_back(str(path))
    assert {tid for tid in masks if blocked(pid, tid) == masks[tid]} == {*masks} - {pid}
    assert [mask.tid for mask in signal_masks.read(str(path))] == [pid]
    monkeypatch.undo()
    with signal_masks.keep_masks(str(path)):
        assert put_masks_back(str(path)) == 1
    assert {tid: blocked(pid, tid) for tid in masks} == masks
    assert not path.exists()


def test_it_cannot_be_read_at_the_end(
    process: tuple[int, dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has nobody's mask is removed without a look at it."""
    pid, _ = process
    path = tmp_path / "masks"

    def read(path: str) -> tuple[signal_masks.Mask, ...]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as broken:
        broken.setattr(signal_masks, "read", read)
        with signal_masks.keep_masks(str(path)), hold(pid, pid):
            assert path.exists()
    assert not path.exists()


def test_room_comes_later(
    process: tuple[int, dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slot could not be written: no mask takes its place, and the next one brings it."""
    pid, masks = process
    path = tmp_path / "masks"

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with signal_masks.keep_masks(str(path)):
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", pwrite)
            assert signal_masks.note_mask(pid, pid, masks[pid]) is None
        with hold(pid, pid):
            assert [(mask.tid, mask.slot) for mask in signal_masks.read(str(path))] == [(pid, 1)]
    assert not path.exists()


def test_no_room(process: tuple[int, dict[int, int]], tmp_path: Path) -> None:
    """A mask that cannot be noted is put back all the same."""
    pid, masks = process
    with signal_masks.keep_masks(str(tmp_path / "missing" / "masks")):
        for tid in masks:
            with hold(pid, tid):
                assert blocked(pid, tid) != masks[tid]
    assert {tid: blocked(pid, tid) for tid in masks} == masks


def test_it_cannot_be_told(process: tuple[int, dict[int, int]], tmp_path: Path) -> None:
    """A thread that cannot be looked at is not taken for one that has ended: its mask stays on file."""
    pid, masks = process
    path = tmp_path / "masks"
    hold_and_be_killed(pid, list(masks), path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    noted = signal_masks.read(str(path))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            assert noted[0].is_there
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(signal_masks.read(str(path))) == 2
    assert put_masks_back(str(path)) == 2
    assert {tid: blocked(pid, tid) for tid in masks} == masks


def test_another_pid_namespace(
    process: tuple[int, dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its PIDs say nothing here: the file stays as it is."""
    pid, masks = process
    path = tmp_path / "masks"
    hold_and_be_killed(pid, list(masks), path)
    before = path.read_bytes()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(signal_masks, "_read_namespace", lambda: 1)
        with signal_masks.keep_masks(str(path)), pytest.raises(GpusnapError, match="another PID namespace"):
            put_masks_back(str(path))
    assert path.read_bytes() == before
    assert put_masks_back(str(path)) == 2


def test_a_thread_ends_while_it_is_held(tmp_path: Path) -> None:
    """Nothing is noted of it any more."""
    path = tmp_path / "masks"
    with (
        subprocess.Popen(["sleep", "60"]) as child,
        signal_masks.keep_masks(str(path)),
        Tracer(child.pid, [child.pid], guard=False) as tracer,
    ):
        child.kill()
        wait_for(lambda: not tracer.traced, "the end of the thread")
        assert signal_masks.read(str(path)) == ()
    assert not path.exists()


def test_let_go_after_the_file_was_closed(process: tuple[int, dict[int, int]], tmp_path: Path) -> None:
    """Whoever has the descriptor's number then loses nothing."""
    pid, masks = process
    with signal_masks.keep_masks(str(tmp_path / "masks")):
        note = signal_masks.note_mask(pid, pid, masks[pid])
    assert note is not None
    other = tmp_path / "other"
    with open(other, "w+b", buffering=0) as file:
        file.write(b"x" * 64)
        note.drop()
    assert other.read_bytes() == b"x" * 64


def test_no_other_entry(
    process: tuple[int, dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gpusnap recover` puts them back where the journal names nothing else of the container."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap/journal"))
    pid, masks = process
    Path(journal.FOLDER).mkdir(parents=True)
    hold_and_be_killed(pid, list(masks), Path(journal.masks(KEY)))
    (entry,) = journal.entries()
    assert (entry.container, entry.at_work) == (KEY, False)
    assert "a thread that was held" in recover_checkpoint.recover(entry, FakeDriver(), Memory())
    assert {tid: blocked(pid, tid) for tid in masks} == masks
    assert journal.list_noted(journal.MASKS) == ()
    assert journal.entries() == ()


def test_threads_that_have_ended(
    process: tuple[int, dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is to get such masks: their file goes with the next lock of the container, or by recover."""
    pid, masks = process
    path, folder = tmp_path / "masks", tmp_path / "journal"
    folder.mkdir()
    monkeypatch.setattr(journal, "FOLDER", str(folder))
    noted = folder / f"{KEY}.masks"
    hold_and_be_killed(pid, list(masks), path)
    noted.write_bytes(path.read_bytes())
    recover_checkpoint.sweep()
    assert noted.exists()
    os.kill(pid, signal.SIGKILL)
    wait_for(
        lambda: not any(mask.is_there for mask in signal_masks.read(str(path))), "the end of its threads"
    )
    with signal_masks.keep_masks(str(path)):
        pass
    assert not path.exists()
    recover_checkpoint.sweep()
    assert os.listdir(folder) == []
