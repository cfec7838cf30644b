"""What a host keeps of a container that comes to it: nothing runs twice, and nobody else's is removed."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpusnap.checkpoints import migrations
from gpusnap.engines import podman, podman_objects
from gpusnap.migration import records
from gpusnap.migration.records import Record
from gpusnap.oci.base.dataclass import replace
from gpusnap.operations import unknown_containers
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.recovery import restored_containers

ID = "0" * 32


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What Podman was told to remove; its container `w` has the ID `new` and runs."""
    gone: list[str] = []

    def said(*words: str, wanted: str) -> str:
        gone.append(words[-1])
        return ""

    found = podman.Container(id="new", name="w", runtime="", status="running", init=100)
    monkeypatch.setattr(migrations, "FOLDER", str(tmp_path / "gpusnap" / "migrations"))
    (tmp_path / "gpusnap").mkdir()
    monkeypatch.setattr(podman, "inspect_container", lambda wanted: found)
    monkeypatch.setattr(podman, "run_query", said)
    monkeypatch.setattr(proc, "parent", lambda pid: pid - 1)
    return gone


def test_a_request_that_is_late(removed: list[str]) -> None:
    """Once it has been told that nothing came, nothing comes; also when it is asked again."""
    assert records.settle(ID) == "undone"
    assert records.settle(ID) == "undone"
    with pytest.raises(Refused, match="has aborted this migration"):
        records.begin(Record(ID, "restoring", "w"))
    assert removed == []


@pytest.mark.parametrize(("mark", "gone"), [(ID, ["new"]), ("1" * 32, []), (None, [])])
def test_whose_container_it_is(
    removed: list[str], monkeypatch: pytest.MonkeyPatch, mark: str | None, gone: list[str]
) -> None:
    """By what conmon has of the Podman that made it: one of another migration, or of a user, stays."""
    monkeypatch.setattr(proc, "environment", lambda pid: {records.MARK: mark} if mark and pid == 99 else {})
    records.remove_restored(Record(ID, "restoring", "w", ("old",)))
    assert removed == gone
    removed.clear()
    records.remove_restored(Record(ID, "restoring", "w", ("new",)))
    assert removed == []


@pytest.mark.parametrize("known", [False, True])
def test_one_that_podman_does_not_know(
    removed: list[str], monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Its Podman was killed: the runtime is waited for, and what it has restored is ended."""
    done: list[str] = []
    living = [Restored("1" * 64, (50, 1)), Restored("new", (100, 1))]
    monkeypatch.setattr(restored_containers, "list_living", lambda: living if done else [])
    monkeypatch.setattr(proc, "pids", lambda: [99, 100, 101])
    monkeypatch.setattr(proc, "comm", {99: "conmon"}.get)
    monkeypatch.setattr(proc, "parent", {101: 99, 100: 99, 50: 49}.get)
    words = ("gpusnap-runtime", "restore", "--image-path", "/image")
    monkeypatch.setattr(proc, "command", lambda pid: words if pid == 101 and not done else ())
    monkeypatch.setattr(proc, "environment", lambda pid: {records.MARK: ID} if pid in (99, 100, 101) else {})
    monkeypatch.setattr(time, "sleep", lambda seconds: done.append("waited"))

    def end(entry: Restored) -> str | None:
        done.append(entry.container)
        return None if known else "it was killed"

    monkeypatch.setattr(unknown_containers, "end_container", end)
    records.remove_restored(Record(ID, "restoring", "another", (), "", source="old"))
    assert done == ["waited", "new"]
    assert removed == ([] if known else ["new"])


@dataclass(frozen=True)
class Restored:
    """What remove_restored uses of the record of a restored container."""

    container: str
    init: tuple[int, int]


def test_a_runtime_that_does_not_end(removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for no longer than a receiver is, and then nothing is said to be removed."""
    monkeypatch.setattr(records, "PATIENCE", 0.0)
    monkeypatch.setattr(records, "_is_being_restored", lambda migration: True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(GpusnapError, match="is still being undone after 0 s"):
        records.remove_restored(Record(ID, "restoring", "w"))
    assert removed == []


def test_its_volumes(removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that Podman made for the container go with it: the next try would be refused for them."""
    monkeypatch.setattr(proc, "environment", lambda pid: {})
    monkeypatch.setattr(podman_objects, "list_created_with", lambda found: ["data"])
    records.remove_restored(Record(ID, "running", "w", (), "new"))
    assert removed == ["new", "data"]


def test_by_its_id(removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known: whatever it is called by then."""
    monkeypatch.setattr(proc, "environment", lambda pid: {})
    records.remove_restored(Record(ID, "running", "another name", (), "new"))
    assert removed == ["new"]


@pytest.mark.parametrize(
    ("listed", "known", "before", "gone"),
    [
        ({"new": "w"}, "", (), True),
        ({"new": "x"}, "new", (), True),
        ({"other": "w"}, "", (), False),
        ({"new": "x"}, "", (), False),
        ({"new": "w"}, "", ("new",), False),
        ({"other": "w"}, "new", (), False),
    ],
)
def test_one_that_a_loss_of_power_has_damaged(
    removed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    listed: dict[str, str],
    known: str,
    before: tuple[str, ...],
    gone: bool,
) -> None:
    """Podman lists it, and cannot inspect it: it goes, if its ID shows whose it is. Others are told of."""

    def fail(wanted: str) -> podman.Container:
        raise GpusnapError("Podman cannot inspect the container w: readlink overlay: invalid argument")

    monkeypatch.setattr(podman, "inspect_container", fail)
    monkeypatch.setattr(podman, "names", lambda *, seconds, status: listed if status == "created" else {})
    record = Record(ID, "restoring", "w", before, known, source="ne")
    with nullcontext() if gone else pytest.raises(GpusnapError, match="cannot inspect"):
        records.remove_restored(record)
    assert removed == (["new"] if gone else [])


@pytest.mark.parametrize("state", ["restoring", "running"])
def test_one_that_came_later(removed: list[str], monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """It has the name, and perhaps the ID, of the one that this migration restored."""
    found = podman.Container(id="new", name="w", runtime="", status="exited", created="2026-11-27T10:00:00Z")
    monkeypatch.setattr(podman, "inspect_container", lambda wanted: found)
    record = Record(ID, state, "w", (), "new" if state == "running" else "", "2026-11-27T09:00:00Z", "old")
    records.remove_restored(record)
    assert removed == []
    if state == "restoring":  # a checkpoint has ended it: Podman can restore it
        monkeypatch.setattr(podman, "inspect_container", lambda wanted: replace(found, checkpointed=True))
        records.remove_restored(replace(record, source="ne"))
        assert removed == []
        monkeypatch.setattr(podman, "inspect_container", lambda wanted: found)
    records.remove_restored(replace(record, created=found.created, source="ne"))
    assert removed == ["new"]


@pytest.mark.parametrize(
    ("state", "name", "source", "settled"),
    [
        ("running", "w", "", True),
        ("restoring", "w", "", True),
        ("running", "another", "abc", True),
        ("running", "another", "", False),
        ("running", "w", "another", False),
        ("coming", "w", "abc", False),
    ],
)
def test_the_next_migration_of_the_same_container(
    dead: list[str], removed: list[str], state: str, name: str, source: str, settled: bool
) -> None:
    """What a killed receiver left of it is removed before the container comes again, with the same ID."""
    by_a_dead_one(Record(ID, state, name, (), "new" if state == "running" else "", source=source))
    records.begin(Record("1" * 32, "coming", "w", source="abc"))
    assert removed == (["new"] if settled and state == "running" else [])
    removed.clear()
    assert [each.id for each in records.list_records()] == ([] if settled else [ID]) + ["1" * 32]
    if settled:
        assert records.settle(ID) == "undone"
        assert removed == []


@pytest.mark.parametrize(
    "content", ["{}", "[]", "null", "5", '{"state": "running", "name": "w", "before": 5}', '{"state": 1}']
)
def test_a_record_of_another_form(removed: list[str], content: str) -> None:
    """It is named, and nothing is removed for it."""
    Path(migrations.FOLDER).mkdir()
    path = Path(migrations.FOLDER, f"{ID}.coming")
    path.write_text(content)
    for use in (records.list_records, lambda: records.settle(ID)):
        with pytest.raises(GpusnapError, match="it is no record of a migration") as raised:
            use()
        assert raised.value.code == "GPS-005"
    unreadable: dict[str, GpusnapError] = {}
    assert records.list_records(unreadable) == ()
    assert list(unreadable) == [ID]
    assert path.exists()
    assert removed == []


def by_a_dead_one(record: Record) -> None:
    """Write it as a process does that has ended since; see state_files.owner."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        owner = state_files.owner(child.pid)
    record.write()
    path = Path(migrations.FOLDER, f"{record.id}.coming")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"owner": owner}))


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch, removed: list[str]) -> list[str]:
    """The digests that were taken out of the store, beside what Podman removed."""
    gone: list[str] = []
    monkeypatch.setattr(records, "remove_ahead", gone.extend)
    monkeypatch.setattr(proc, "environment", lambda pid: {})
    return gone


@pytest.mark.parametrize("state", ["coming", "restoring", "running"])
def test_a_killed_receiver(dead: list[str], removed: list[str], state: str) -> None:
    """What came ahead goes with a container that was not confirmed; it is found, and then it is not."""
    by_a_dead_one(Record(ID, state, "w", (), "new" if state == "running" else "", ahead=("sha256:a",)))
    (found,) = records.list_records()
    assert (found.name, found.state, found.at_work) == ("w", state, False)
    assert records.settle(ID) == "undone"
    assert dead == ["sha256:a"]
    assert removed == (["new"] if state == "running" else [])
    assert records.list_records() == ()


@pytest.mark.parametrize("state", ["", "coming", "restoring", "running"])
def test_a_full_disk(
    dead: list[str], removed: list[str], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The other host is told that nothing runs here, and continues the container; a late request does not."""
    record = Record(ID, state, "w", (), "new" if state == "running" else "", ahead=("sha256:a",))
    if state:
        by_a_dead_one(record)
    with monkeypatch.context() as full:
        full.setattr(migrations, "write", lambda *_: fail(GpusnapError("no space left")))
        assert records.settle(ID) == records.settle(ID) == "undone"
    assert removed == (["new"] if state == "running" else [])
    assert records.list_records() == ()
    assert records.settle(ID) == "undone"
    with pytest.raises(Refused, match="has aborted this migration"):
        records.advance(record)


def test_a_record_that_can_be_neither_written_nor_removed(
    dead: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said to be undone: a late request would still restore."""
    by_a_dead_one(Record(ID, "coming", "w"))
    monkeypatch.setattr(migrations, "write", lambda *_: fail(GpusnapError("no space left")))
    monkeypatch.setattr(state_files, "remove", lambda *_: fail(OSError(5, "EIO")))
    with pytest.raises(GpusnapError, match="no space left"):
        records.settle(ID)


def fail(error: Exception) -> None:
    raise error


def test_a_living_receiver(dead: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks before its restore ends the migration: it then restores nothing, and undoes it itself."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        coming = Record(ID, "coming", "w", ahead=("sha256:a",))
        records.begin(coming)
        path = Path(migrations.FOLDER, f"{ID}.coming")
        value = json.loads(path.read_text()) | {"owner": state_files.owner(child.pid)}
        path.write_text(json.dumps(value))
        assert records.list_records()[0].at_work
        assert records.settle(ID) == "undone"
    assert dead == []
    with pytest.raises(Refused, match="has aborted this migration"):
        records.advance(Record(ID, "restoring", "w"))
    records.end_record(coming)
    with pytest.raises(Refused, match="has aborted this migration"):
        records.begin(coming)


def test_a_confirmed_one_stays(dead: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the next boot, and however often somebody asks; until it is to be forgotten."""
    Record(ID, "confirmed", "w").write()
    monkeypatch.setattr(state_files, "boot", lambda: "another")
    assert records.settle(ID) == "confirmed"
    records.begin(Record("1" * 32, "coming", "x"))
    assert records.settle(ID) == "confirmed"
    records.forget(ID)
    assert records.settle(ID) == "undone"


def test_after_the_next_boot(dead: list[str], removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the PID of a receiver then is another process; a word for a late request has gone."""
    boot = state_files.boot()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        value = {"state": "running", "name": "w", "container": "new", "boot": boot}
        Path(migrations.FOLDER).mkdir()
        path = Path(migrations.FOLDER, f"{ID}.coming")
        path.write_text(json.dumps(value | {"owner": state_files.owner(child.pid)}))
        assert records.list_records()[0].at_work
        monkeypatch.setattr(state_files, "boot", lambda: "another")
        assert not records.list_records()[0].at_work
        assert records.settle(ID) == "undone"
    assert removed == ["new"]
    assert path.exists()
    monkeypatch.setattr(state_files, "boot", lambda: "a third one")
    records.begin(Record("1" * 32, "coming", "x"))
    assert not path.exists()
