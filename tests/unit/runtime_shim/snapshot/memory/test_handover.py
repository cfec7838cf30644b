"""Memory that a runtime hands over to a command, and what becomes of it if the command is killed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from kept_checkpoints import hand_over_pages, keep_pages

from gpusnap.oci.base.errors import DiskError, NotThere, StagingBusy
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.unsynced import Unsynced
from gpusnap.oci.store import staging as staging_module
from gpusnap.oci.store import staging_lock
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ManifestError
from gpusnap.runtime_shim.records.artifact import write_artifact
from gpusnap.runtime_shim.snapshot.memory import handover
from gpusnap.runtime_shim.snapshot.records import journal, origin

NAME = "handed"
GONE = (1, 0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store").create()


def staging_of(store: Store) -> Path:
    (found,) = (Path(store.path) / "staging").iterdir()
    return found


def test_taken_over(store: Store) -> None:
    """With its manifest, by one process."""
    made = hand_over_pages(store, NAME, state_files.owner())
    taken = handover.take_over(store, NAME)
    assert taken is not None
    assert taken.commit() == made
    with pytest.raises(StagingBusy):
        handover.take_over(store, NAME)
    taken.remove()
    assert handover.take_over(store, NAME) is None


@pytest.mark.parametrize("killed", [False, True])
def test_what_is_synced_at_the_commit(store: Store, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """What was added: the manifest, and its config. The chunks were synced before.

    What a command wrote before it was killed was not.
    """
    made = hand_over_pages(store, NAME)
    chunks = set(os.listdir(staging_of(store) / "blobs" / "sha256"))
    if killed:
        write_artifact(Layout(staging_of(store)), made)
    taken = handover.take_over(store, NAME)
    assert taken is not None
    synced: set[str] = set()
    really = Unsynced._sync

    def sync(self: Unsynced, name: str, descriptor: int) -> None:
        synced.add(name)
        really(self, name, descriptor)

    monkeypatch.setattr(Unsynced, "_sync", sync)
    taken.commit()
    taken.remove()
    assert chunks
    assert synced == set(os.listdir(Path(store.path) / "blobs" / "sha256")) - chunks
    assert len(synced) == 2


def test_not_handed_over(store: Store) -> None:
    """What its writer has not completed is for `Store.adopt` alone."""
    with store.stage(NAME) as staging:
        staging.mark_precious("for a test")
    assert handover.take_over(store, NAME) is None
    with pytest.raises(NotThere, match="was not handed over"):
        store.take_over(NAME)
    assert handover.list_left(store) == ()
    assert tuple(handover.commit_left(store)) == ()
    store.adopt(staging.path).close()
    assert staging_of(store).exists()


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_a_directory_that_cannot_be_opened(store: Store, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """That is not said to be none: the command would look for the chunks elsewhere, and recover drop them."""
    hand_over_pages(store, NAME)

    def refuse(*_: str) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(staging_lock, "open_folder", refuse)
        with pytest.raises(DiskError, match=os.strerror(error)):
            handover.take_over(store, NAME)
    taken = handover.take_over(store, NAME)
    assert taken is not None
    taken.leave()


def test_left_by_a_command(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is committed without records, once; not if the journal names it."""
    made = hand_over_pages(store, NAME, GONE)
    staging = staging_of(store)
    assert handover.list_left(store) == (made,)
    with monkeypatch.context() as patch:
        patch.setattr(
            journal, "entries", lambda _: [journal.Entry("c0ffee", "/image", (1, 1), (), str(staging))]
        )
        assert tuple(handover.commit_left(store)) == ()
    assert tuple(handover.commit_left(store)) == (made,)
    assert tuple(handover.commit_left(store)) == ()
    (entry,) = store.entries()
    assert entry.name == ""
    assert not staging.exists()
    assert store.collect().blobs == 0


def test_an_entry_that_cannot_be_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of its container is left as it is; that of another one is committed."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap" / "journal"))
    (tmp_path / "gpusnap").mkdir()
    made = hand_over_pages(store, NAME, GONE)
    for container in (made.container, "another"):
        journal.write(container, "/image", {1: ()})
        entry = Path(journal.FOLDER, f"{container}.json")
        entry.write_text("{")
        if container == made.container:
            assert tuple(handover.commit_left(store)) == ()
            assert handover.take_unneeded(store, NAME) is None
            assert handover.list_left(store) == (made,)
            entry.unlink()
    assert tuple(handover.commit_left(store)) == (made,)


def test_a_directory_that_cannot_be_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is committed, and that is said; the next one removes it, and commits nothing again."""
    made = hand_over_pages(store, NAME, GONE)

    def fail(_: object) -> None:
        raise DiskError("it cannot be removed")

    with monkeypatch.context() as patch:
        patch.setattr(staging_module.Staging, "unmark_precious", fail)
        assert tuple(handover.commit_left(store)) == (made,)
    assert staging_of(store).exists()
    assert tuple(handover.commit_left(store)) == (made,)
    assert len(store.entries()) == 1
    assert list((Path(store.path) / "staging").iterdir()) == []


def test_another_process_commits_it(store: Store) -> None:
    """Two may come at once: one does it, and the other goes on."""
    hand_over_pages(store, NAME, GONE)
    taken = handover.take_over(store, NAME)
    assert taken is not None
    assert tuple(handover.commit_left(store)) == ()
    taken.commit()
    taken.remove()
    assert tuple(handover.commit_left(store)) == ()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has an ID."""
    monkeypatch.setattr(origin, "_identify_host", lambda: ("here", "0123"))


@pytest.mark.parametrize("earlier_version", [False, True])
def test_its_command_lives(
    store: Store, machine: None, monkeypatch: pytest.MonkeyPatch, earlier_version: bool
) -> None:
    """It has not taken it over yet. After a boot, a process with its PID and start time is another one."""
    hand_over_pages(store, NAME, state_files.owner())
    if earlier_version:
        path = staging_of(store) / "complete"
        own = json.dumps([state_files.boot(), *state_files.owner()])
        path.write_bytes(own.encode() + b"\n" + path.read_bytes().partition(b"\n")[2])
    assert handover.list_left(store) == ()
    assert tuple(handover.commit_left(store)) == ()
    monkeypatch.setattr(state_files, "boot", lambda: "another")
    assert len(tuple(handover.commit_left(store))) == 1


@pytest.mark.parametrize("other", ["host", "boot of another host", "/run", "clone without an ID"])
def test_of_another_gpusnap(store: Store, machine: None, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Only that one knows whether its command lives, even if a process here looks like it."""
    with monkeypatch.context() as there:
        if other in ("host", "boot of another host"):
            there.setattr(origin, "_identify_host", lambda: ("elsewhere", "4567"))
        if other == "clone without an ID":
            monkeypatch.setattr(origin, "_identify_host", lambda: ("here", ""))
        if other != "/run":
            there.setattr(state_files, "boot", lambda: "another")
        else:
            there.setattr(origin, "_identify_records", lambda: "1:1")
        made = hand_over_pages(store, NAME, GONE)
        assert handover.list_left(store) == (made,)
    assert handover.list_left(store) == ()
    assert tuple(handover.commit_left(store)) == ()
    (left,) = store.collect().spared
    assert NAME in left.path


@pytest.mark.parametrize(
    ("machine_id", "count"),
    [pytest.param("0123+4567", 1, id="with its firmware's"), pytest.param("0123", 0, id="alone")],
)
def test_renamed_before_a_reboot(
    store: Store, monkeypatch: pytest.MonkeyPatch, machine_id: str, count: int
) -> None:
    """The host is the same one if its firmware says so, too: a clone may have the machine ID."""
    monkeypatch.setattr(origin, "_identify_host", lambda: ("gpu1", machine_id))
    hand_over_pages(store, NAME, GONE)
    monkeypatch.setattr(origin, "_identify_host", lambda: ("gpu1.example.com", machine_id))
    monkeypatch.setattr(state_files, "boot", lambda: "another")
    assert len(tuple(handover.commit_left(store))) == count


def test_records_that_cannot_be_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may live."""
    hand_over_pages(store, NAME, GONE)

    def fail() -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(origin, "_identify_records", fail)
    assert tuple(handover.commit_left(store)) == ()


def test_committed_already(store: Store) -> None:
    """By a command that was killed before it removed the directory; nothing is committed twice."""
    store.tag(keep_pages(store), "mine")
    made = hand_over_pages(store, NAME, GONE)
    assert tuple(handover.commit_left(store)) == (made,)
    assert [each.name for each in store.entries()] == ["mine"]
    assert store.list_handed_over() == {}


def test_killed_in_the_removal(store: Store) -> None:
    """What is not precious any more was committed, or nobody needs it: gc removes it."""
    hand_over_pages(store, NAME, GONE)
    staging = staging_of(store)
    (staging / "precious").unlink()
    assert tuple(handover.commit_left(store)) == ()
    store.collect()
    assert not staging.exists()


@pytest.mark.parametrize("damage", ["unreadable", "damaged"])
def test_one_that_is_damaged_hides_no_other(store: Store, damage: str) -> None:
    """The others are listed and committed, and then the error is raised."""
    made = hand_over_pages(store, "bb", GONE)
    hand_over_pages(store, "aa", GONE)
    note = Path(store.path) / "staging/aa/complete"
    if damage == "unreadable":
        note.unlink()
        note.mkdir()
    else:
        note.write_text("")
    assert handover.list_left(store) == (made,)
    committing = handover.commit_left(store)
    assert next(committing) == made
    with pytest.raises((DiskError, ManifestError)):
        next(committing)
    assert os.listdir(f"{store.path}/staging") == ["aa"]
    assert len(store.entries()) == 1


@pytest.mark.parametrize("damage", ["", "no line", '["boot", 1]\n{}', "[1]\n\0"])
def test_a_note_that_is_damaged(store: Store, damage: str) -> None:
    """The error names it, and nothing is removed."""
    hand_over_pages(store, NAME, GONE)
    staging = staging_of(store)
    (staging / "complete").write_text(damage)
    with pytest.raises(ManifestError, match=f"the manifest of the staging {NAME}"):
        tuple(handover.commit_left(store))
    store.collect()
    assert (staging / "precious").exists()
    store.adopt(str(staging)).close(leave=True)


def test_files_of_somebody_else(store: Store) -> None:
    """They are no staging directories, and keep nobody from finding one."""
    folder = Path(store.path) / "staging"
    made = hand_over_pages(store, NAME, GONE)
    (folder / "a-file").touch()
    (folder / "another").mkdir()
    assert tuple(handover.commit_left(store)) == (made,)
    (folder / "a-file").unlink()
    (folder / "another").rmdir()


def test_a_store_that_is_none(tmp_path: Path) -> None:
    """An empty directory, and none."""
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        assert tuple(handover.commit_left(Store(tmp_path / name))) == ()
