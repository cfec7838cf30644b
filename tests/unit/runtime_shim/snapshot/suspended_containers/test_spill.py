"""A spill that fails at any step: the bytes are in RAM or in the store as a whole."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import DEADLINE, wait_for

from gpusnap.oci.base import threads
from gpusnap.oci.base.errors import Cancelled
from gpusnap.oci.base.threads import Crew
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Interrupted
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.settings import Settings, Store
from gpusnap.runtime_shim.snapshot.memory import transfer
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
    layout = SimpleNamespace(path=LAYOUT, close=lambda: None, sync_blobs=lambda **_: None)
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


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when the store answers again."""
    monkeypatch.setattr(threads, "_ENDING", 0.01)
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name == "gpusnap-oci":
            thread.join(DEADLINE)


SILENT = ["begin", "mark", "write", "sync", "commit", "check"]
"""The steps that wait for the store."""


def be_silent(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, step: str, wait: Callable[[], object]
) -> SimpleNamespace:
    """Have a step wait for the store; return what stands for that."""
    layout = SimpleNamespace(path=LAYOUT, close=lambda: None, sync_blobs=lambda **_: None)
    home = SimpleNamespace(layout=layout, place="", mark_needed=lambda: None, commit=lambda *_, **__: None)
    monkeypatch.setattr(spill, "StoreDestination", lambda *_, **__: home)
    where, name = {
        "begin": (pages, "prepare"),
        "mark": (home, "mark_needed"),
        "write": (pages, "write"),
        "sync": (layout, "sync_blobs"),
        "commit": (home, "commit"),
        "check": (spill, "_check_linked"),
    }[step]
    monkeypatch.setattr(where, name, lambda *_, **__: wait(), raising=False)
    return home


@pytest.mark.parametrize("step", SILENT)
def test_a_store_that_does_not_answer(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, answered: threading.Event, step: str
) -> None:
    """It is waited for with a deadline; the bytes are in RAM, and nobody waits for what was written."""
    monkeypatch.setattr(transfer, "STALL", 0.01)
    monkeypatch.setattr(spill, "_SYNCING", 0.01)
    be_silent(pages, monkeypatch, step, lambda: answered.wait(DEADLINE))
    before = journal.read(KEY)
    with pytest.raises(
        ImageError, match=r"cannot be moved to the store .* did not respond in time"
    ) as caught:
        spill.spill(KEY, Settings())
    assert not answered.is_set()
    assert "w is suspended as before, with its memory in RAM" in caught.value.hint
    assert (journal.read(KEY), pages.done) == (before, [])


@pytest.mark.parametrize("step", SILENT)
def test_an_interrupt_while_the_store_does_not_answer(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, answered: threading.Event, step: str
) -> None:
    def wait() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        answered.wait(DEADLINE)

    be_silent(pages, monkeypatch, step, wait)
    before = journal.read(KEY)
    with pytest.raises(Interrupted):
        spill.spill(KEY, Settings())
    assert not answered.is_set()
    assert journal.read(KEY) == before


def test_a_slow_store(pages: Pages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each chunk begins the deadline anew, and each piece of one; what is synced may take longer."""
    moves: list[float] = []
    monkeypatch.setattr(Crew, "note_progress", lambda _, *, more=0.0: moves.append(more))
    store = Layout(tmp_path / "store").create()

    def write(moved: Callable[[], object]) -> None:
        store.add_blob(bytes(2 << 20))
        moved()

    home = be_silent(pages, monkeypatch, "write", lambda: None)
    monkeypatch.setattr(pages, "write", write)
    home.layout = store
    spill.spill(KEY, Settings())
    slow = spill._SYNCING - transfer.STALL
    assert moves == [slow, slow, 0.0, 0.0, 0.0, 0.0, slow, slow]


def test_threads_that_are_left_behind_end(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, answered: threading.Event
) -> None:
    """At their next chunk, when the store answers: they write no more."""
    monkeypatch.setattr(transfer, "STALL", 0.01)
    ended: list[str] = []

    def write(moved: Callable[[], object]) -> None:
        answered.wait(DEADLINE)
        try:
            moved()
        except Cancelled:
            ended.append("the thread")
            raise

    be_silent(pages, monkeypatch, "write", lambda: None)
    monkeypatch.setattr(pages, "write", write)
    with pytest.raises(ImageError, match="did not respond"):
        spill.spill(KEY, Settings())
    answered.set()
    wait_for(lambda: ended == ["the thread"], "the end of the thread")


def test_a_removal_that_does_not_end(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, answered: threading.Event
) -> None:
    """After an error: it is told, and what removes what is left. A large one gets its time."""
    real, waits = deadlines.ask, []

    def ask(question: Callable[[], Any], what: str, *, within: float) -> Any:
        waits.append(within)
        return real(question, what, within=0.01)

    monkeypatch.setattr(deadlines, "ask", ask)
    monkeypatch.setattr(pages, "discard", lambda **_: answered.wait(DEADLINE))
    monkeypatch.setattr(journal, "write", fail)
    with pytest.raises(GpusnapError, match="no room") as caught:
        spill.spill(KEY, Settings())
    assert "gpusnap gc removes" in caught.value.hint
    assert waits == [spill._SYNCING]
    assert not answered.is_set()


def fail(*_: object, **__: object) -> Any:
    raise GpusnapError("no room")
