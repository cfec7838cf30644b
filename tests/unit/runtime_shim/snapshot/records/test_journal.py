"""The journal: what was written in another PID namespace says nothing of the processes here."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.digests import digest_of
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, OtherNamespace
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest import RegionRecord
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record

# In a PID namespace of its own, as in a toolbox that has the host's /run.
_ELSEWHERE = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
_READ = (
    "import sys; from gpusnap.runtime_shim.snapshot.records import journal; "
    "from gpusnap.runtime_shim.base.errors import GpusnapError\n"
    "journal.FOLDER = sys.argv[1]\n"
    "try: print(journal.entries())\n"
    "except GpusnapError as error: print(error.sentence())"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap" / "journal"))
    return Path(journal.FOLDER)


def test_a_large_entry_leaves_blake3_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fitted before fits now; it only makes it quicker to read the chunks."""
    digest = digest_of(b"a")
    chunk = Chunk(0, 4096, digest, digest, 4096, "plain", "ab" * 32)
    regions = {1: (RegionRecord(4096, Table(4096, (chunk,))),)}

    def read() -> object:
        (entry,) = journal.entries()
        return entry.processes[0].regions[0].table.chunks[0]

    journal.write("w", "/image", {1: (RegionRecord(4096, Table(4096, (replace(chunk, blake3=""),))),)})
    most = (folder / "w.json").stat().st_size
    journal.write("w", "/image", regions)
    assert read() == chunk
    monkeypatch.setattr(journal, "_MOST", most)
    journal.write("w", "/image", regions)
    assert read() == replace(chunk, blake3="")
    monkeypatch.setattr(journal, "_MOST", most - 1)
    with pytest.raises(GpusnapError, match="the journal of container w would have"):
        journal.write("w", "/image", regions)


def test_read_in_another_namespace(folder: Path) -> None:
    """Nobody there takes the processes for gone; here they are known."""
    journal.write("w", "/image", {1: ()})
    done = subprocess.run(
        [*_ELSEWHERE, _READ, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"{folder}/w.json was written in another PID namespace"), done.stdout
    assert "run gpusnap on the host itself" in done.stdout
    (entry,) = journal.entries()
    assert proc.is_same(entry.processes[0].pid, entry.processes[0].start)


def test_one_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hides no other one; its container may need any layout. In another PID namespace nothing is known."""
    journal.write("w", "/image", {1: ()}, layout="/store/staging/w")
    journal.write("bad", "/image", {1: ()})
    (folder / "bad.json").write_text("{")
    with pytest.raises(GpusnapError, match=r"bad\.json is not valid JSON$") as caught:
        journal.entries()
    assert "then remove the file" in caught.value.hint
    unreadable: dict[str, GpusnapError] = {}
    assert [entry.container for entry in journal.entries(unreadable)] == ["w"]
    assert list(unreadable) == ["bad"]
    assert journal.list_layouts() == (frozenset({"/store/staging/w"}), frozenset({"bad"}))
    monkeypatch.setattr(proc, "namespace", lambda pid, kind: "pid:[1]")
    with pytest.raises(OtherNamespace):
        journal.entries(unreadable)


@pytest.mark.parametrize("kind", ["restore", "paused"])
def test_what_else_names_processes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes of restores and of pauses likewise."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(proc, "namespace", lambda pid, kind: "pid:[1]")
        if kind == "restore":
            journal.write_document("w", kind, {"version": 1})
        else:
            journal.note_pause("w", journal.Pause((1, 1), "", False, ()))
    with pytest.raises(GpusnapError, match="was written in another PID namespace"):
        restore_record.read("w") if kind == "restore" else journal.read("w")


def test_masks_that_nobody_can_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may be held: that is not taken for none."""

    def fail(path: str, *, follow: bool) -> bool:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(journal, "exists", fail)
    with pytest.raises(GpusnapError, match=r"w\.masks cannot be read: Input/output error"):
        journal.read("w")


@pytest.mark.parametrize(
    ("number", "hint", "code"),
    [
        (errno.EROFS, "check that gpusnap runs as root, and that /run has free space", "GPS-007"),
        (errno.ENOSPC, "free some space there", "GPS-007"),
        (errno.EMFILE, "raise the limit on open files", ""),
    ],
)
def test_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, number: int, hint: str, code: str) -> None:
    """Only who is not root, or finds /run read-only, is told to look at that."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(GpusnapError, match=r"w\.json cannot be written: ") as caught:
        journal.write("w", "/image", {1: ()})
    assert caught.value.hint.startswith(hint)
    assert caught.value.code == code


def test_what_processes_need(folder: Path) -> None:
    """By PID and start time; it goes with the entry."""
    found = proc.process(os.getpid())
    assert found is not None
    journal.note_needs("c0ffee", {found.pid: [("GPU-1", 5 << 30), ("GPU-2", 0)]})
    assert journal.read_needs("c0ffee") == {(found.pid, found.start): [("GPU-1", 5 << 30), ("GPU-2", 0)]}
    journal.remove("c0ffee")
    assert journal.read_needs("c0ffee") == {}
    others: list[object] = [[], {"processes": [[1]]}, {"processes": [[1, 2, [["GPU-1"]]]]}, {"processes": 5}]
    for other in others:
        state_files.write(str(folder / "c0ffee.needs"), json.dumps(other).encode())
        assert journal.read_needs("c0ffee") == {}


def test_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(GpusnapError, match="cannot be read: Cannot allocate memory") as caught:
        journal.list_noted("paused")
    assert (caught.value.hint, caught.value.code) == ("free some memory and try again", "")


@pytest.mark.parametrize("kind", ["json", journal.PAUSED, restore_record.KIND])
def test_of_a_newer_version(folder: Path, kind: str) -> None:
    """Its members may mean something else: it is not read, and kept."""
    journal.write("w", "/image", {1: ()})
    journal.note_pause("w", journal.Pause((1, 1), "", False, ()))
    journal.write_document("w", kind, {**(journal.load("w", kind) or {}), "version": 99})
    with pytest.raises(GpusnapError, match="was not written by this version of gpusnap: it has version 99"):
        restore_record.read("w") if kind == restore_record.KIND else journal.read("w")
    assert journal.load("w", kind)["version"] == 99


def test_of_an_earlier_version(folder: Path) -> None:
    """It does not say, and is read."""
    journal.write("w", "/image", {1: ()})
    path = folder / "w.json"
    path.write_text(path.read_text().replace('"space": ', '"other": '))
    assert [entry.container for entry in journal.entries()] == ["w"]


def test_a_working_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended container has no image, whose path would be looked for from there."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    journal.write("c0ffee", "", {1: ()})
    entry = journal.read("c0ffee")
    assert entry is not None
    assert entry.file_system.mount == ""
