"""What a host keeps of a container that comes to it: nothing runs twice, and nobody else's is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusnap.engines import podman
from gpusnap.migration import records
from gpusnap.migration.records import Record
from gpusnap.runtime_shim.errors import Refused
from gpusnap.runtime_shim.process import proc

ID = "0" * 32


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What Podman was told to remove; its container `w` has the ID `new` and runs."""
    gone: list[str] = []

    def said(*words: str, wanted: str) -> str:
        gone.append(words[-1])
        return ""

    found = podman.Container(id="new", name="w", runtime="", status="running", init=100)
    monkeypatch.setattr(records, "FOLDER", str(tmp_path / "gpusnap" / "migrations"))
    (tmp_path / "gpusnap").mkdir()
    monkeypatch.setattr(podman, "container", lambda wanted: found)
    monkeypatch.setattr(podman, "said", said)
    monkeypatch.setattr(proc, "parent", lambda pid: pid - 1)
    return gone


def test_a_request_that_is_late(removed: list[str]) -> None:
    """Once it has been told that nothing came, nothing comes; also when it is asked again."""
    assert records.settle(ID) == "undone"
    assert records.settle(ID) == "undone"
    with pytest.raises(Refused, match="has given up this migration"):
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


def test_by_its_id(removed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known: whatever it is called by then."""
    monkeypatch.setattr(proc, "environment", lambda pid: {})
    records.remove_restored(Record(ID, "running", "another name", (), "new"))
    assert removed == ["new"]
