"""A container that runs is paused for a dump, and never while a process of it waits within vfork(2)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from cells import ID, Cell, cell, folder
from fakes import Scene, wait_for

from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, RuntimeFailed
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import neighbours
from gpusnap.runtime_shim.runtime.criu import run, scratch_files
from gpusnap.runtime_shim.snapshot.gpu_processes import dump_pause
from gpusnap.runtime_shim.snapshot.gpu_processes.dump_pause import DumpPause
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry, Pause
from gpusnap.runtime_shim.stopping import vfork
from gpusnap.runtime_shim.stopping.stop import stop
from gpusnap.runtime_shim.stopping.vfork import WaitingParent

__all__ = ["cell", "folder"]


@pytest.fixture
def command(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A real runtime that notes what it is told, and pauses as they do; the container runs."""
    # Where version 2 is, here, for whoever has version 1 beside it.
    top = next(mount.destination for mount in proc.mounts("self") if mount.kind == "cgroup2")
    monkeypatch.setattr(neighbours, "UNIFIED", top)
    cell.freeze(0)
    path = tmp_path / "runtime"
    path.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n'
        f"case $2 in pause) echo 1 >{cell.group}/cgroup.freeze;; resume) touch {tmp_path}/resumed;; esac\n"
    )
    path.chmod(0o755)
    return [str(path), "--global"]


def made(cell: Cell, command: list[str]) -> DumpPause:
    container = containers.Container(ID, cell.pids[0], "running", "/b", {})
    return DumpPause(container, command)


def waits(monkeypatch: pytest.MonkeyPatch, times: float, look: Callable[[], None] = lambda: None) -> None:
    """The first so many looks find one that waits."""
    looks = iter(range(1_000_000))

    def waiting(pids: Iterable[int]) -> Iterator[WaitingParent]:
        look()
        if next(looks) < times:
            yield WaitingParent(*sorted(pids))

    monkeypatch.setattr(vfork, "iterate_waiting", waiting)


def test_paused_and_let_go(cell: Cell, command: list[str], folder: Path, tmp_path: Path) -> None:
    """By the runtime's own command; no process runs until the end."""
    pause = made(cell, command)
    pause.begin(timeout=60)
    assert cell.frozen()
    assert (tmp_path / "calls").read_text() == f"--global pause {ID}\n"
    entry = journal.read(ID)
    assert entry is not None
    assert entry.paused is not None
    assert entry.paused.groups == (str(cell.group),)
    for _ in range(2):
        pause.let_go_on()
        cell.run()
    assert list(folder.iterdir()) == []


def test_one_waits(cell: Cell, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on for a moment, as often as one waits, and is frozen whenever that is looked at."""
    seen = []
    # On a busy machine, no process of it may have a core in one such moment.
    waits(monkeypatch, 20, lambda: seen.append((cell.frozen(), *cell.counts())))
    pause = made(cell, command)
    pause.begin(timeout=60)
    assert cell.frozen()
    assert len(seen) == 21
    assert all(frozen for frozen, *_ in seen)
    assert len({tuple(counts) for _, *counts in seen}) > 1
    pause.let_go_on()
    cell.run()


def test_one_waits_for_good(
    cell: Cell, command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and the container goes on."""
    waits(monkeypatch, float("inf"))
    with pytest.raises(GpusnapError, match=rf"process {min(cell.pids)} .* longer than 0\.1 s"):
        made(cell, command).begin(timeout=0.1)
    cell.run()
    assert list(folder.iterdir()) == []


def test_all_stand(cell: Cell, command: list[str], folder: Path) -> None:
    """Then nobody starts anything, and there is nothing to do."""
    assert made(cell, command).is_wanted()
    stop(cell.pids, timeout=60)
    assert not made(cell, command).is_wanted()
    assert not folder.exists()


def test_somebody_elses_pause(cell: Cell, command: list[str]) -> None:
    """It is not ours to end."""
    cell.freeze(1)
    pause = made(cell, command)
    assert not pause.is_wanted()
    pause.let_go_on()
    assert cell.frozen()


def test_no_cgroup_of_its_own(cell: Cell, command: list[str]) -> None:
    """What would be frozen is not the container alone."""
    container = containers.Container("other", cell.pids[0], "running", "/b", {})
    assert not DumpPause(container, command).is_wanted()


def test_the_runtime_pauses_it_half(cell: Cell, command: list[str], folder: Path) -> None:
    """runc freezes the group, and gives up where a process takes too long: it goes on."""
    Path(command[0]).write_text(f"#!/bin/sh\necho 1 >{cell.group}/cgroup.freeze; exit 1\n")
    pause = made(cell, command)
    pause.begin(timeout=60)
    cell.run()
    assert list(folder.iterdir()) == []


def test_the_runtime_hangs(
    cell: Cell, command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed, and the container goes on although the runtime had frozen it."""
    Path(command[0]).write_text(f"#!/bin/sh\necho 1 >{cell.group}/cgroup.freeze; exec sleep 600\n")
    monkeypatch.setattr(run, "_CONTROL", 0.5)
    with pytest.raises(RuntimeFailed, match=r"did not finish within 0\.5 s"):
        made(cell, command).begin(timeout=60)
    cell.run()
    assert list(folder.iterdir()) == []


def test_version_1_beside_version_2(cell: Cell, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There the runtimes use version 1, and what would be frozen is not what we look at."""
    assert made(cell, command).is_wanted()
    monkeypatch.setattr(neighbours, "UNIFIED", os.path.dirname(neighbours.UNIFIED))
    assert not made(cell, command).is_wanted()


@pytest.mark.parametrize("code", [0, 1])
def test_the_runtime_does_not_pause_it(
    cell: Cell, command: list[str], folder: Path, tmp_path: Path, code: int
) -> None:
    """The dump is left to try; whatever else the runtime froze goes on."""
    Path(command[0]).write_text(
        f"#!/bin/sh\necho $2 >>{tmp_path}/calls; echo $CRIU_CONFIG_FILE >>{tmp_path}/marks; exit {code}\n"
    )
    pause = made(cell, command)
    pause.begin(timeout=60)
    assert (tmp_path / "calls").read_text().split() == ["pause", "resume"][: 2 - code]
    assert (tmp_path / "marks").read_text() == (scratch_files.prefix("criu") + "none\n") * (2 - code)
    pause.let_go_on()
    cell.run()
    assert list(folder.iterdir()) == []


def test_left_by_a_killed_one(cell: Cell, command: list[str]) -> None:
    """It goes on, and nobody takes a pause for ours afterwards."""
    made(cell, command).begin(timeout=60)
    entry = journal.read(ID)
    assert entry is not None
    assert dump_pause.put_right(entry).paused is None
    cell.run()
    assert journal.read(ID) is None


def test_noted_before_the_pause(cell: Cell, command: list[str]) -> None:
    """Killed as the runtime freezes it: by then the note has the groups that it may freeze."""
    Path(command[0]).write_text(f"#!/bin/sh\necho 1 >{cell.group}/cgroup.freeze\nkill -9 $PPID\n")
    program = (
        "import sys\nfrom gpusnap.runtime_shim.runtime import container, neighbours; "
        "from gpusnap.runtime_shim.snapshot.records import journal\n"
        "from gpusnap.runtime_shim.snapshot.gpu_processes.dump_pause import DumpPause\n"
        "journal.FOLDER, neighbours.UNIFIED = sys.argv[1:3]\n"
        "one = container.Container(sys.argv[3], int(sys.argv[4]), 'running', '/b', {})\n"
        "DumpPause(one, sys.argv[5:]).begin(timeout=60)\n"
    )
    words = [journal.FOLDER, neighbours.UNIFIED, ID, str(cell.pids[0]), *command]
    assert subprocess.run([sys.executable, "-c", program, *words], check=False).returncode == -9
    wait_for(cell.frozen, "the pause")
    entry = journal.read(ID)
    assert entry is not None
    dump_pause.put_right(entry)
    cell.run()


def test_nothing_to_put_right(cell: Cell) -> None:
    """Somebody else's pause stays: of the same container, of another since, or where ours is over."""
    cell.freeze(1)
    own = proc.process(os.getpid())
    init = proc.process(cell.pids[0])
    assert own is not None
    assert init is not None
    here = (str(cell.group),)
    for pause in (
        None,
        Pause((1, 1), str(cell.group), False, ()),
        Pause((1, 1), "", False, (), init=(init.pid, init.start + 1), groups=here),
        Pause((1, 1), "", False, (), init=(own.pid, own.start), groups=()),
        Pause((1, 1), "", False, (), init=(init.pid, init.start), groups=("/none",)),
    ):
        dump_pause.put_right(Entry(ID, "", (1, 1), (), paused=pause))
        assert cell.frozen()


def test_a_signal_in_the_pause(
    cell: Cell, command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the dump has begun: the container goes on, and nothing is dumped."""
    asked = iter([False, True])

    def stop_if_asked() -> None:
        if next(asked):
            raise Interrupted("interrupted by SIGINT")

    monkeypatch.setattr(dump_pause, "stop_if_asked", stop_if_asked)
    waits(monkeypatch, 1)
    with pytest.raises(Interrupted):
        made(cell, command).begin(timeout=60)
    cell.run()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--leave-running",)])
def test_it_stays_paused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    """Once all is dumped the checkpoint is whole, whatever becomes of the pause; no driver is asked then."""

    def end(_: DumpPause) -> None:
        raise GpusnapError("the cgroup /g cannot be thawed: the device is busy")

    with Scene(tmp_path, monkeypatch, capfd) as scene:
        (pid,) = scene.gpu_processes(1)
        monkeypatch.setattr(DumpPause, "let_go_on", end)
        done = scene.checkpoint(*options)
        assert (scene.image / "gpusnap/manifest.json").exists()
        assert "is still paused: the cgroup /g cannot be thawed" in done.stderr
        assert "gpusnap recover" in done.stderr
        assert done.code == (1 if options else 0)
        assert scene.driver.states[pid] is ProcessState.CHECKPOINTED
