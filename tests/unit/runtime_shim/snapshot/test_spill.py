"""A spill that fails at any step: the bytes are in RAM or in the store as a whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.settings import Settings, Store
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.journal import StagedRegion
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import spill

KEY, LAYOUT = "c0ffee@0123456789ab", "/store/staging/1"


class Pages:
    """What the bytes go through; whether what was written was kept."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.given: Any = []
        """What its place in the store was made with."""

    def records(self) -> dict[int, tuple[()]]:
        return {os.getpid(): ()}

    def discard(self, *, layout: bool) -> None:
        self.done.append("discard")

    def close(self) -> None:
        self.done.append("close")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    """A container that is suspended, with its bytes in RAM."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path))
    made = Pages()
    layout = SimpleNamespace(path=LAYOUT, close=lambda: None)
    home = SimpleNamespace(layout=layout, place="", mark_needed=lambda: None, commit=lambda *_, **__: None)
    monkeypatch.setattr(spill, "StoreDestination", lambda *_, **given: made.given.append(given) or home)
    monkeypatch.setattr(spill, "SuspendedChunks", lambda *_, **__: made)
    monkeypatch.setattr(space, "check_disk", lambda *_: None)
    monkeypatch.setattr(tmpfs, "remove", lambda key: None)
    me = proc.process(os.getpid())
    assert me is not None
    asleep = Suspension(KEY, "w", "podman", "", Stage.SUSPENDED, (1, 1), (me.pid, me.start), "", "crun")
    suspensions.write(asleep)
    journal.write(KEY, "", {me.pid: ()}, staged={me.pid: [StagedRegion("/run/a", 0, 4096)]})
    return made


def layout() -> str:
    found = journal.read(KEY)
    assert found is not None
    return found.layout


def test_all_of_it(pages: Pages) -> None:
    assert spill.spill(KEY, Settings()) == 4096
    assert (layout(), pages.done) == (LAYOUT, [])


def test_the_rate_of_the_setting(pages: Pages) -> None:
    """It is encoded for the disk of the settings."""
    spill.spill(KEY, Settings(store=Store(read_rate=5 << 30)))
    assert [each["read_rate"] for each in pages.given] == [5 << 30]


def test_ram_that_cannot_be_freed(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal names what is in the store by then, which stays, and the next spill frees the RAM."""
    freed: list[str] = []

    def remove(key: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tmpfs, "remove", remove)
    with pytest.raises(GpusnapError, match="in the store, but its RAM cannot be freed"):
        spill.spill(KEY, Settings())
    assert (layout(), pages.done) == (LAYOUT, ["close"])
    monkeypatch.setattr(tmpfs, "remove", freed.append)
    assert spill.spill(KEY, Settings()) == 0
    assert freed == [KEY]


def test_a_journal_that_cannot_be_written(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are in RAM, and what was written is removed."""
    before = layout()
    monkeypatch.setattr(journal, "write", fail)
    with pytest.raises(GpusnapError, match="no room"):
        spill.spill(KEY, Settings())
    assert (layout(), pages.done) == (before, ["discard"])


def test_a_journal_that_cannot_be_read(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether it names what was written: that stays."""
    write = journal.write

    def written(*words: Any, **named: Any) -> None:
        write(*words, **named)
        monkeypatch.setattr(journal, "read", fail)
        fail()

    monkeypatch.setattr(journal, "write", written)
    with pytest.raises(GpusnapError, match="no room"):
        spill.spill(KEY, Settings())
    assert pages.done == ["close"]


def fail(*_: object, **__: object) -> Any:
    raise GpusnapError("no room")
