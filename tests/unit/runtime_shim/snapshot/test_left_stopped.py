"""A container with --rm is left stopped after its dump, until its checkpoint is stored."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu.config import Connections
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot import left_stopped
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.recovery import checkpoint as recovery

ID = "c" * 64
KEY = f"{ID}@0123456789ab"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "journal"))
    return tmp_path / "journal"


def job(*, plugin: bool = False, paused: bool = False) -> Any:
    container = containers.Container(ID, os.getpid(), "running", "/b", {})
    driver = SimpleNamespace(plugin="a plugin" if plugin else None)
    return SimpleNamespace(container=container, driver=driver, paused="a pause" if paused else None)


def no_driver() -> Any:
    """Nothing here calls it."""


def note(folder: Path) -> journal.Entry:
    """A checkpoint that the process with PID 1 works on."""
    journal.write(KEY, str(folder), {os.getpid(): ()})
    journal.note_pause(KEY, journal.Pause((1, 1), "", False, ((2, 3),), init=(4, 5), groups=("/g",)))
    found = journal.read(KEY)
    assert found is not None
    return found


def test_who_can_be_left_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plugin of CRIU, and in a control group of its own that nobody else has frozen."""
    groups = ["/g"]
    monkeypatch.setattr(containers, "list_freezable", lambda _: tuple(groups))
    left_stopped.check(job(), Connections.DROPPED)
    for each, connections, why in (
        (job(plugin=True), Connections.DROPPED, "CRIU's plugin"),
        (job(paused=True), Connections.DROPPED, "cannot be paused"),
        (job(), Connections.KEPT, "connections would be closed"),
    ):
        with pytest.raises(Refused, match=why) as raised:
            left_stopped.check(each, connections)
        assert raised.value.code == left_stopped.CODE
    groups.clear()
    with pytest.raises(Refused, match="control group of its own"):
        left_stopped.check(job(), Connections.DROPPED)


def test_the_command_is_at_work(folder: Path) -> None:
    """The rest of the records stays; the command itself may bring it back, and nobody else while it lives."""
    before = note(folder)
    journal.hand_over(KEY, state_files.owner(os.getppid()))
    handed = journal.read(KEY)
    assert handed is not None
    assert handed.left_stopped
    assert not before.left_stopped
    assert (handed.processes, handed.image) == (before.processes, before.image)
    assert handed.paused is not None
    assert (handed.paused.stopped, handed.paused.groups) == (((2, 3),), ("/g",))
    with pytest.raises(GpusnapError, match=f"process {os.getppid()}\\) is still working"):
        handed.check_not_at_work()
    journal.hand_over(KEY, state_files.owner())
    mine = journal.read(KEY)
    assert mine is not None
    mine.check_not_at_work()


def test_it_has_ended(folder: Path) -> None:
    """Nothing of it is left; the records of others stay."""
    note(folder)
    other = f"{'d' * 64}@0123456789ab"
    journal.write(other, str(folder), {os.getpid(): ()})
    left_stopped.forget(ID)
    assert [entry.key for entry in journal.entries()] == [other]


def test_its_runtime_still_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for; any other error is not waited out."""
    errors = [GpusnapError("another gpusnap is still working", code="GPS-020")] * 2
    tried = list[str]()

    def recover(entry: journal.Entry, *_: object) -> str:
        tried.append(entry.key)
        if errors:
            raise errors.pop()
        return "running: 1"

    monkeypatch.setattr(recovery, "recover", recover)
    monkeypatch.setattr(left_stopped, "_EVERY", 0.0)
    note(folder)
    left_stopped.bring_back(ID, no_driver, Memory())
    assert tried == [KEY] * 3
    errors.append(GpusnapError("no driver"))
    with pytest.raises(GpusnapError, match="no driver"):
        left_stopped.bring_back(ID, no_driver, Memory())
    monkeypatch.setattr(left_stopped, "_PATIENCE", -1.0)
    errors.append(GpusnapError("another gpusnap is still working", code="GPS-020"))
    with pytest.raises(GpusnapError, match="still working"):
        left_stopped.bring_back(ID, no_driver, Memory())


def test_its_records_cannot_be_read(folder: Path) -> None:
    """Then it stays stopped, which is not silent; those of another container do not matter."""
    note(folder)
    (folder / f"{KEY}.json").write_text("{")
    with pytest.raises(GpusnapError, match="json"):
        left_stopped.bring_back(ID, no_driver, Memory())
    left_stopped.bring_back("d" * 64, no_driver, Memory())
