"""Which staging directories of a store belong to a suspended container, and which are removed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import DEADLINE

from gpusnap.oci.base.errors import BlobError
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.snapshot.memory import suspended_memory
from gpusnap.runtime_shim.snapshot.records import journal, origin
from gpusnap.runtime_shim.snapshot.suspended_containers import spill, spilled

KEY = "c0ffee@0123456789ab"
DATA = bytes(range(256)) * 64


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "journal"))
    return Store(tmp_path / "store").create()


def spilled_of(store: Store, key: str = KEY) -> Path:
    """A staging directory with the memory of a suspended container, whose writer has ended."""
    staging = store.stage()
    staging.mark_precious(spilled.make_mark(key))
    path = Path(staging.layout.path)
    staging.close(leave=True)
    return path


def name(layout: Path) -> None:
    """The journal names it."""
    journal.write(KEY, "", {1: ()}, layout=str(layout))


def test_of_nobody(store: Store) -> None:
    """As after a reboot, or with a key that none can be."""
    made = [spilled_of(store), spilled_of(store, "no key")]
    spilled.sweep(store.path)
    assert [path for path in made if path.exists()] == []


def test_earlier_versions_leave_it_alone() -> None:
    """They take all that begins like their own marks for theirs."""
    assert not spilled.make_mark(KEY).startswith("GPU memory of the suspended container ")


@pytest.mark.parametrize("other", ["another boot of another host", "another /run", "an earlier version"])
def test_of_others(store: Store, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Only they know whether the container still exists; gc names whose it is."""
    with monkeypatch.context() as there:
        if other == "another boot of another host":
            there.setattr(origin, "_identify_host", lambda: ("elsewhere", "0123"))
            there.setattr(state_files, "boot", lambda: "another")
        elif other == "another /run":
            there.setattr(origin, "_identify_records", lambda: "1:1")
        else:
            there.setattr(spilled, "make_mark", lambda key: f"GPU memory of the suspended container {key}")
        layout = spilled_of(store)
    spilled.sweep(store.path)
    assert layout.exists()
    (left,) = store.collect().spared
    assert KEY in left.why
    assert other != "another boot of another host" or "elsewhere" in left.why


@pytest.mark.parametrize("machine", ["0123", ""])
def test_of_an_earlier_boot(store: Store, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """Its containers are gone; a host without an ID may be another one."""
    monkeypatch.setattr(origin, "_identify_host", lambda: ("here", machine))
    with monkeypatch.context() as earlier:
        earlier.setattr(state_files, "boot", lambda: "earlier")
        earlier.setattr(origin, "_identify_records", lambda: "1:1")
        layout = spilled_of(store)
    spilled.sweep(store.path)
    assert layout.exists() == (not machine)


def test_of_a_container(store: Store) -> None:
    """An earlier one of the same container goes."""
    earlier, now = spilled_of(store), spilled_of(store)
    name(now)
    spilled.sweep(store.path)
    assert (earlier.exists(), now.exists()) == (False, True)


def test_a_store_that_was_moved(store: Store, tmp_path: Path) -> None:
    """With a link in its old place, by which the journal names the memory: it is the only copy."""
    layout = spilled_of(store)
    name(layout)
    Path(store.path).rename(tmp_path / "moved")
    Path(store.path).symlink_to(tmp_path / "moved")
    spilled.sweep(store.path)
    assert layout.exists()


def test_a_spill_that_ends_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names its directory when the sweep has found that nobody does, and ends: the directory stays."""
    layout, real = spilled_of(store), journal.hold

    @contextmanager
    def hold(key: str, **more: float) -> Iterator[None]:
        name(layout)
        with real(key, **more):
            yield

    monkeypatch.setattr(journal, "hold", hold)
    spilled.sweep(store.path)
    assert layout.exists()


def test_a_container_at_work(store: Store) -> None:
    """Somebody has its lock, and may be about to name it."""
    layout = spilled_of(store)
    with journal.hold(KEY):
        spilled.sweep(store.path)
    assert layout.exists()


def test_a_store_that_does_not_answer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps nobody from a container whose memory is in RAM."""
    layout, answered = spilled_of(store), threading.Event()
    real = deadlines.ask

    def ask(question: Any, what: str, **_: float) -> Any:
        return real(lambda: answered.wait(DEADLINE) and question(), what, within=0.1)

    monkeypatch.setattr(deadlines, "ask", ask)
    spilled.sweep(store.path)
    answered.set()
    assert layout.exists()


def test_a_removal_that_does_not_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that is resumed does not wait for it."""
    answered = threading.Event()
    real = deadlines.ask

    def ask(question: Any, what: str, **_: float) -> Any:
        return real(lambda: answered.wait(DEADLINE) and question(), what, within=0.01)

    monkeypatch.setattr(deadlines, "ask", ask)
    with pytest.raises(ImageError, match="cannot be removed: its file system did not respond in time"):
        suspended_memory.discard(str(spilled_of(store)))
    answered.set()


@pytest.mark.parametrize("damaged", [False, True])
def test_linked_chunks_are_read(tmp_path: Path, damaged: bool) -> None:
    """A blob that an earlier checkpoint wrote is compared with its digest; one of its own is not."""
    earlier, layout = Layout(tmp_path / "earlier").create(), Layout(tmp_path / "now").create()
    chunk = earlier.add_blob(DATA, media_type="application/octet-stream")
    own = layout.add_blob(DATA[:4096], media_type="application/octet-stream")
    assert not layout.link_durable([chunk], earlier)
    blobs = tmp_path / "now/blobs/sha256"
    (blobs / own.digest.partition(":")[2]).write_bytes(bytes(4096))  # nobody reads it again
    if damaged:
        (blobs / chunk.digest.partition(":")[2]).write_bytes(DATA[:-1] + b"x")
    size = len(DATA)
    chunks = (
        Chunk(0, size, chunk.digest, chunk.digest, size, "plain"),
        Chunk(size, 4096, own.digest, own.digest, 4096, "plain"),
    )
    tables = [Table(size + 4096, chunks)]
    if not damaged:
        spill._check_linked(layout, tables, 2)
        return
    with pytest.raises(ImageError, match="does not match its digest") as raised:
        spill._check_linked(layout, tables, 2)
    assert isinstance(raised.value.__cause__, BlobError)
