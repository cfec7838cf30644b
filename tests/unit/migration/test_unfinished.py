"""A migration that was cut off: killed at any point, either its note stands or nothing is left here."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive, keep, leave_export
from outgoing import outgoing
from synced import Synced

from gpusnap.base.progress import Progress
from gpusnap.checkpoints import migrations
from gpusnap.checkpoints.locator import InStore
from gpusnap.checkpoints.migrations import OutgoingMigration
from gpusnap.engines import podman
from gpusnap.migration import unfinished
from gpusnap.oci.store.store import Store
from gpusnap.operations.restoring import in_podman
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused


class Cut(BaseException):
    """A SIGKILL."""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """Podman with the container w, which has ended."""
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has(status="exited", checkpointed=True)
    return found


@pytest.fixture
def leaving(
    host_store: Store, fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OutgoingMigration:
    """One whose container has ended here, with its checkpoint in the store, and its note."""
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(migrations, "FOLDER", str(tmp_path / "state" / "migrations"))
    digest = keep(host_store, an_archive(tmp_path), ["w:20261122-100000"])
    found = outgoing(
        container=ID,
        store=host_store.path,
        checkpoint="w:20261122-100000",
        digest=digest,
        since="2026-11-22T10:00:00+00:00",
    )
    found.write()
    monkeypatch.setattr(unfinished, "tell_settled", lambda leaving: None)
    return found


def test_its_note(leaving: OutgoingMigration) -> None:
    """It is read as it was written; another checkpoint has none."""
    (found,) = migrations.list_outgoing()
    assert replace(found, owner=(0, 0), boot="") == leaving
    assert not found.at_work  # it is this process
    assert migrations.find("sha256:" + "1" * 64) is None
    migrations.check("sha256:" + "1" * 64)
    with pytest.raises(Refused, match="w may run on gpu2") as raised:
        migrations.check(leaving.digest)
    assert "run gpusnap recover, which asks gpu2" in raised.value.hint
    assert "gpusnap restore --not-migrated w:20261122-100000" in raised.value.hint


def test_its_note_does_not_come_back(
    leaving: OutgoingMigration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash, the other host would be asked, which has forgotten that it runs the container."""
    disk = Synced(tmp_path, monkeypatch)
    (note,) = os.listdir(migrations.FOLDER)
    assert disk.has(Path(migrations.FOLDER, note))
    unfinished.clear(replace(leaving, keep=True))
    assert not disk.has(Path(migrations.FOLDER, note))


def test_its_gpusnap_lives(leaving: OutgoingMigration) -> None:
    """Then nobody else may touch it; a process of another boot is another one."""
    path = Path(migrations.FOLDER, leaving.digest.removeprefix("sha256:") + ".leaving")
    value = json.loads(path.read_text())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        path.write_text(json.dumps(value | {"owner": state_files.owner(child.pid)}))
        with pytest.raises(Refused, match="w is being migrated to gpu2"):
            migrations.check(leaving.digest)
        path.write_text(json.dumps(value | {"owner": state_files.owner(child.pid), "boot": "another"}))
        with pytest.raises(Refused, match="w may run on gpu2"):
            migrations.check(leaving.digest)


@pytest.mark.parametrize(
    ("since", "refused"), [("2026-02-03T04:05:06+00:00", True), ("2026-02-03T04:05:07+00:00", False)]
)
def test_its_last_checkpoint_while_its_memory_is_sent(
    leaving: OutgoingMigration, fake: FakePodman, host_store: Store, since: str, refused: bool
) -> None:
    """It has no note of its own yet, and is about to run on the other host; an earlier one is restored."""
    leaving.remove()
    ahead = replace(leaving, digest="", since=since)
    ahead.write()
    request = RestoreRequest(what=InStore(host_store, leaving.checkpoint))
    path = Path(migrations.FOLDER, f"{ahead.id}.leaving")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"owner": state_files.owner(child.pid)}))
        if refused:
            with pytest.raises(Refused, match="w is being migrated to gpu2"):
                restoring.restore(request, Progress(shown=False))
            assert fake.calls() == []
    if not refused:
        restoring.restore(request, Progress(shown=False))
        assert len(fake.calls()) == 1


@pytest.mark.parametrize("user", [0, 1000])
def test_notes_that_may_not_be_read(
    leaving: OutgoingMigration, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    """Only root migrates: the stores of other users have nothing that may run on another host."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(state_files, "read", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert migrations.host_of(leaving.digest) == ("another host" if user == 0 else "")
    for check in (migrations.list_outgoing, lambda: migrations.check(leaving.digest)):
        with pytest.raises(GpusnapError, match="cannot be read") if user == 0 else nullcontext():
            check()


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2}', "{}"])
def test_a_note_that_is_not_understood(leaving: OutgoingMigration, content: str) -> None:
    """The checkpoint is not restored."""
    path = Path(migrations.FOLDER, leaving.digest.removeprefix("sha256:") + ".leaving")
    path.write_text(content)
    with pytest.raises(
        GpusnapError, match="gpusnap cannot determine whether the container runs on another host"
    ):
        migrations.check(leaving.digest)


@pytest.mark.parametrize("at", ["before podman", "after podman", "after the store", "never"])
def test_killed_while_it_is_removed(
    leaving: OutgoingMigration, host_store: Store, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """While the checkpoint is here, so is the note; whoever is next removes the rest."""
    monkeypatch.setattr(unfinished, "ask", lambda leaving: "confirmed")
    gone: list[str] = []

    def remove(container: str) -> None:
        if at == "before podman":
            raise Cut
        gone.append(container)
        if at == "after podman":
            raise Cut

    real = OutgoingMigration.remove

    def remove_note(note: OutgoingMigration) -> None:
        if at == "after the store":
            raise Cut
        real(note)

    with monkeypatch.context() as patched:
        patched.setattr(podman, "remove", remove)
        patched.setattr(OutgoingMigration, "remove", remove_note)
        if at == "never":
            assert "w was migrated to gpu2" in unfinished.recover_leaving(leaving)
        else:
            with pytest.raises(Cut):
                unfinished.recover_leaving(leaving)
    assert bool(migrations.list_outgoing()) == (at != "never")
    assert bool(host_store.entries()) == (at in ("before podman", "after podman"))
    for note in migrations.list_outgoing():
        monkeypatch.setattr(podman, "remove", gone.append)
        unfinished.recover_leaving(note)
    assert gone.count(ID) >= 1
    assert migrations.list_outgoing() == ()
    assert host_store.entries() == ()


def test_it_does_not_run_there(
    leaving: OutgoingMigration, host_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it may be restored here: its checkpoint stays, and the note goes."""
    monkeypatch.setattr(unfinished, "ask", lambda leaving: "undone")
    said = unfinished.recover_leaving(leaving)
    assert said == "w does not run on gpu2; gpusnap restore w:20261122-100000 continues it here"
    migrations.check(leaving.digest)
    assert [each.name for each in host_store.entries()] == ["w:20261122-100000"]


def test_it_is_to_be_kept(
    leaving: OutgoingMigration, host_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--keep: the ended container and its checkpoint stay."""
    monkeypatch.setattr(unfinished, "ask", lambda leaving: "confirmed")
    monkeypatch.setattr(podman, "remove", lambda container: pytest.fail("removed"))
    said = unfinished.recover_leaving(replace(leaving, keep=True))
    assert said.endswith("stays here")
    assert len(host_store.entries()) == 1
    assert migrations.list_outgoing() == ()


@pytest.mark.parametrize(
    ("status", "checkpointed", "at", "stays"),
    [
        ("exited", True, "2026-11-22T10:00:00Z", False),
        ("exited", True, "2100-01-01T00:00:00Z", True),
        ("exited", False, "0001-01-01T00:00:00Z", True),
        ("running", False, "0001-01-01T00:00:00Z", True),
    ],
)
def test_it_has_come_back(
    leaving: OutgoingMigration,
    fake: FakePodman,
    host_store: Store,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    checkpointed: bool,
    at: str,
    stays: bool,
) -> None:
    """It has the same ID then, and is not removed: neither while it runs, nor after it has ended again."""
    monkeypatch.setattr(unfinished, "ask", lambda leaving: "confirmed")
    fake.has(State={"Status": status, "Checkpointed": checkpointed, "CheckpointedAt": at})
    said = unfinished.recover_leaving(leaving)
    assert (
        said.endswith("the container here stays: it may have been started after that (podman ps shows it)")
        == stays
    )
    assert fake.calls() == ([] if stays else [f"rm {ID}"])
    assert host_store.entries() == ()
    assert migrations.list_outgoing() == ()


def test_nobody_answers(
    leaving: OutgoingMigration, host_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is changed."""

    def ask(leaving: OutgoingMigration) -> str:
        raise GpusnapError("gpu2 cannot be reached")

    monkeypatch.setattr(unfinished, "ask", ask)
    with pytest.raises(GpusnapError, match="gpu2 cannot be reached"):
        unfinished.recover_leaving(leaving)
    assert len(migrations.list_outgoing()) == len(host_store.entries()) == 1


def test_a_checkpoint_that_was_removed(leaving: OutgoingMigration, host_store: Store) -> None:
    """Nothing can be restored twice any more, and nobody need be asked."""
    host_store.remove(leaving.digest)
    assert "no longer exists" in unfinished.recover_leaving(leaving)
    assert migrations.list_outgoing() == ()


@pytest.mark.parametrize("state", ["running", "checkpointed", "stopped", "unknown", "a later one"])
def test_one_that_was_sent_ahead(
    leaving: OutgoingMigration, host_store: Store, fake: FakePodman, tmp_path: Path, state: str
) -> None:
    """Its checkpoint goes, unless it is all that is left, as after a loss of power."""
    leaving.remove()
    host_store.tag("w:20261122-100000", "w:migrating")
    if state != "a later one":
        host_store.remove("w:20261122-100000")
    status = state if state in ("running", "exited") else "exited"
    fake.has(status=status, checkpointed=state == "checkpointed")
    if state == "unknown":
        (fake.folder / "inspect.json").unlink()
    ahead = replace(leaving, digest="", since="2026-01-01T10:00:00+00:00")
    ahead.write()
    said = unfinished.recover_leaving(*migrations.list_outgoing())
    assert said.startswith("w was not migrated to gpu2")
    left = ["w:migrating"] if state in ("stopped", "unknown") else []
    left += ["w:20261122-100000"] if state == "a later one" else []
    assert [each.name for each in host_store.entries()] == left
    first = "" if state == "unknown" else "podman rm w && "
    assert said.endswith(
        f"; if it does not run here, and gpusnap recover names nothing newer of it, {first}gpusnap restore "
        "w:migrating continues it from the checkpoint that was sent ahead"
    ) == (left == ["w:migrating"])
    assert migrations.list_outgoing() == ()


def test_one_that_podman_can_restore(
    leaving: OutgoingMigration, host_store: Store, fake: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman forgets after a loss of power that it has a checkpoint, which is later than what went ahead."""
    leaving.remove()
    host_store.tag("w:20261122-100000", "w:migrating")
    host_store.remove("w:20261122-100000")
    fake.has(status="exited", checkpointed=False)
    there = in_podman.StoppedContainer(podman.inspect_container("w"), host_store.path, frozenset())
    monkeypatch.setattr(in_podman, "list_restorable", lambda store: (there,))
    ahead = replace(leaving, digest="", since="2026-01-01T10:00:00+00:00")
    assert unfinished.recover_leaving(ahead) == (
        "w was not migrated to gpu2; podman container restore w continues it; if that fails, podman rm w && "
        "gpusnap restore w:migrating continues it from the checkpoint that was sent ahead"
    )
    assert [each.name for each in host_store.entries()] == ["w:migrating"]


def test_killed_between_its_notes(
    leaving: OutgoingMigration, host_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one counts alone: by the earlier one, the container would be continued here as well."""
    replace(leaving, digest="").write()
    monkeypatch.setattr(unfinished, "ask", lambda leaving: "confirmed")
    (found,) = migrations.list_outgoing()
    assert found.digest == leaving.digest
    assert "w was migrated to gpu2" in unfinished.recover_leaving(found)
    assert migrations.list_outgoing() == ()
    assert host_store.entries() == ()


@pytest.mark.parametrize(
    ("status", "checkpointed", "since", "said"),
    [
        ("running", False, "2026-11-22", ", and is running here"),
        ("exited", True, "2026-11-22", "; podman container restore w continues it"),
        (
            "exited",
            False,
            "2000-01-01",
            "; if it does not run here, gpusnap restore w:20261122-100000 continues it",
        ),
        (
            "exited",
            False,
            "2100-01-01",
            "; if it does not run here, gpusnap recover names what is left of it",
        ),
    ],
)
def test_what_continues_it(
    leaving: OutgoingMigration,
    fake: FakePodman,
    status: str,
    checkpointed: bool,
    since: str,
    said: str,
) -> None:
    """Of a killed migration that had asked nobody to restore it: no checkpoint of the time before."""
    leaving.remove()
    fake.has(status=status, checkpointed=checkpointed)
    ahead = replace(leaving, digest="", since=f"{since}T10:00:00+00:00")
    assert unfinished.recover_leaving(ahead) == f"w was not migrated to gpu2{said}"


@pytest.mark.parametrize(("since", "is_named"), [("2026-01-01", True), ("2100-01-01", False)])
def test_an_export_that_continues_it(
    leaving: OutgoingMigration,
    host_store: Store,
    fake: FakePodman,
    tmp_path: Path,
    since: str,
    is_named: bool,
) -> None:
    """Of a container with --rm it is all that is left; one that an earlier command left is not meant."""
    leaving.remove()
    (fake.folder / "inspect.json").unlink()
    archive = leave_export(host_store, tmp_path / "exported")
    ahead = replace(leaving, digest="", since=f"{since}T10:00:00+00:00")
    said = unfinished.recover_leaving(ahead)
    command = f"podman container restore --import {archive}"
    assert said.endswith(f"; what Podman exported of the container k: {command}") == is_named
    assert said.startswith("w was not migrated to gpu2; ")


@pytest.mark.parametrize("word", ["w", "w:latest"])
def test_restore_of_one_that_was_sent_ahead(
    leaving: OutgoingMigration, host_store: Store, fake: FakePodman, word: str
) -> None:
    """It is not the newest checkpoint of the container, which ran on; its full name restores it."""
    leaving.remove()
    host_store.tag(leaving.digest, "w:migrating")
    host_store.remove("w:20261122-100000")
    ahead = replace(leaving, digest="", checkpoint="w:migrating")
    ahead.write()

    def restore(wanted: str) -> restoring.RestoreResult:
        request = RestoreRequest(what=InStore(host_store, wanted))
        return restoring.restore(request, Progress(shown=False))

    with pytest.raises(Refused, match="is w:migrating, which its interrupted migration to gpu2 sent ahead"):
        restore(word)
    assert fake.calls() == []
    assert restore("w:migrating").container == ID
    for note in migrations.list_outgoing():
        note.remove()
    Path(migrations.FOLDER, f"{'c' * 64}.leaving").write_text("broken")  # another migration's
    assert restore(word).container == ID
