"""Commands that a killed gpusnap has not run: what is noted meanwhile, and what `gpusnap recover` does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive

from gpusnap.base.progress import Progress
from gpusnap.checkpoints.locator import InFile
from gpusnap.container_hooks import commands, due, pairs
from gpusnap.container_hooks.pairs import CHECKPOINT, SUSPEND, Pair
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import checkpoint as checkpointing
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring import volumes
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, Interrupted
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension

QUIET = Progress(shown=False)
BOTH = {
    "io.gpusnap.pre-checkpoint": "sleep now",
    "io.gpusnap.post-restore": "wake up",
    "io.gpusnap.pre-suspend": "lie down",
    "io.gpusnap.post-resume": "get up",
}
DEAD = (4194304, 1)


@pytest.fixture
def fake(host_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """A Podman with a container that has commands, and that this process is the first one of."""
    assert host_store
    monkeypatch.setattr(overrides, "_SWEEPING", 0.0)
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.exports(an_archive(tmp_path))
    has(found)
    return found


@pytest.fixture
def child() -> Iterator[int]:
    """Another process."""
    with subprocess.Popen(["sleep", "1000"]) as found:
        yield found.pid
        found.kill()


def has(fake: FakePodman, annotations: dict[str, str] = BOTH, **more: object) -> None:
    more = {"init": os.getpid(), "Config": {"Annotations": annotations}, **more}
    fake.has(**more)  # type: ignore[arg-type]


def notes() -> list[str]:
    return sorted(name for name in os.listdir(journal.FOLDER) if not name.endswith(".lock"))


def abandon(
    pair: Pair = CHECKPOINT, *, init: int | None = None, mark: str = "", owner: tuple[int, int] = DEAD
) -> None:
    """The note that a killed gpusnap leaves."""
    pairs.note(ID, pair, init=os.getpid() if init is None else init, mark=mark)
    path = Path(journal.FOLDER, f"{ID}.{pair.before}")
    path.write_text(json.dumps({**json.loads(path.read_text()), "owner": owner}))


def ran(fake: FakePodman) -> list[str]:
    return [" ".join(line.split()[-2:]) for line in fake.calls() if line.startswith("exec ")]


def the_one() -> due.DueCommand:
    [found] = due.list_due({})
    return found


@pytest.mark.parametrize(
    ("leave_running", "error"),
    [(True, ""), (False, ""), (True, "Error: it broke")],
    ids=["runs", "ends", "fails"],
)
def test_noted_until_the_one_after(fake: FakePodman, leave_running: bool, error: str) -> None:
    """From before the first one to the end of the second, or of the container: so it outlives a kill."""
    (fake.folder / "exec.sh").write_text(f"ls {journal.FOLDER} >>$F/noted\n")
    fake.first(f"ls {journal.FOLDER} >>$F/noted\n")
    if error:
        fake.fails(error)
    request = checkpointing.CheckpointRequest(container="w", leave_running=leave_running)
    with pytest.raises(GpusnapError, match="it broke") if error else nullcontext():
        checkpointing.checkpoint(request, QUIET)
    times = 3 if leave_running else 2
    assert (fake.folder / "noted").read_text().split() == [f"{ID}.pre-checkpoint"] * times
    assert notes() == []


def test_no_room_for_the_note(fake: FakePodman, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the one before does not run either; the one after does in any case."""
    monkeypatch.setattr(journal, "FOLDER", "/dev/null/journal")
    found = podman.inspect_container("w")
    with pytest.raises(GpusnapError, match="cannot be written"):
        commands.run_before(found, CHECKPOINT, QUIET)
    assert ran(fake) == ["wake up"]
    assert not pairs.note_ahead(ID, CHECKPOINT)


def test_recovered(fake: FakePodman) -> None:
    """The one after is run, once, and nothing is due then."""
    abandon()
    one = the_one()
    assert (one.container, one.why) == (
        ID,
        "gpusnap was killed before its command post-restore: gpusnap recover runs it",
    )
    assert ran(fake) == []
    assert due.run(one) == "its command post-restore was run, which a killed gpusnap had not done"
    assert due.run(one) == "its command post-restore is no longer due"
    assert ran(fake) == ["wake up"]
    assert notes() == []


def test_at_work(fake: FakePodman) -> None:
    """Nothing is due while the gpusnap that runs the commands lives, and nobody else runs one meanwhile."""
    pairs.note(ID, CHECKPOINT, init=os.getpid())
    assert due.list_due({}) == ()
    due.sweep()
    assert not pairs.note_ahead(ID, CHECKPOINT)
    abandon()
    one = the_one()
    with overrides.keep_commands_alone(ID), pytest.raises(ContainerError, match="in progress"):
        due.run(one)
    due.sweep()
    assert ran(fake) == []
    assert notes() == [f"{ID}.pre-checkpoint"]
    due.run_all(ID[::-1])
    assert ran(fake) == []
    due.run_all(ID)
    assert ran(fake) == ["wake up"]


def test_it_fails(fake: FakePodman) -> None:
    """It is due still, and `recover` can be run again; so, too, if `recover` is killed while it runs."""
    abandon()
    (fake.folder / "exec.sh").write_text("echo no; exit 4\n")
    with pytest.raises(ContainerError) as raised:
        due.run(the_one())
    assert "the command post-restore of the container w ended with exit code 4: no" in str(raised.value)
    assert "podman exec w sh -c 'wake up'" in raised.value.hint
    path = f"{journal.FOLDER}/{ID}.pre-checkpoint"
    assert raised.value.hint.endswith(f"; gpusnap recover runs it again, until {path} is removed")
    opened = pairs.read(ID, CHECKPOINT)
    assert opened is not None
    assert opened.mark
    abandon(mark=opened.mark)
    (fake.folder / "exec.sh").unlink()
    assert due.run(the_one()).startswith("its command post-restore was run")
    assert notes() == []


@pytest.mark.parametrize("first", [True, False])
def test_killed_while_it_ran(fake: FakePodman, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """What it has left running is killed before the next one: by `recover`, or by the next checkpoint."""
    abandon(mark="c0ffee")
    killed: list[str] = []
    monkeypatch.setattr(commands, "_kill_rest", lambda _, mark: killed.append(mark))
    if first:
        due.run(the_one())
    else:
        commands.run_before(podman.inspect_container("w"), CHECKPOINT, QUIET)
    assert killed[0] == "c0ffee"
    assert len(killed) == 2


@pytest.mark.parametrize(
    ("changes", "pair", "later"),
    [
        ({"status": "exited"}, CHECKPOINT, None),
        (
            {"status": "exited", "checkpointed": True},
            CHECKPOINT,
            "gpusnap restore runs it; after podman container restore w, gpusnap recover does",
        ),
        ({"status": "exited", "checkpointed": True}, SUSPEND, None),
        ({"status": "paused"}, SUSPEND, "run gpusnap recover after podman unpause w"),
        ({"annotations": {}}, CHECKPOINT, None),
        ({"init": 1}, CHECKPOINT, None),
    ],
    ids=["ended", "checkpointed", "checkpointed while suspended", "paused", "no command", "started anew"],
)
def test_what_became_of_it(
    fake: FakePodman, changes: dict[str, object], pair: Pair, later: str | None
) -> None:
    """The container may have ended, or be as it cannot run a command: then nothing is run."""
    abandon(pair)
    before = due.list_due({})
    has(fake, **changes)  # type: ignore[arg-type]
    found = due.list_due({})
    assert [each.later for each in found] == ([] if later is None else [later])
    said = due.run(before[0])
    assert said == (f"its command {pair.after} is no longer due" if later is None else found[0].why)
    due.sweep()
    assert notes() == ([] if later is None else [f"{ID}.{pair.before}"])
    assert ran(fake) == []


def test_it_is_gone(fake: FakePodman) -> None:
    """Podman has removed it: nothing is due, and the note goes."""
    abandon()
    (fake.folder / "inspect.json").unlink()
    assert due.list_due({}) == ()
    due.sweep()
    assert notes() == []


def test_podman_does_not_say(fake: FakePodman) -> None:
    """Then nobody knows, and the note stays."""
    abandon()
    one = the_one()
    (fake.folder / "inspect.json").write_text("[]")
    unreadable: dict[str, GpusnapError] = {}
    assert due.list_due(unreadable) == ()
    assert list(unreadable) == [ID]
    due.sweep()
    with pytest.raises(GpusnapError, match="cannot be parsed"):
        due.run(one)
    assert notes() == [f"{ID}.pre-checkpoint"]


@pytest.mark.parametrize("init", [None, 0])
def test_restored_since(fake: FakePodman, child: int, init: int | None) -> None:
    """From its checkpoint, it goes on where the command before left it; a restore has no process to name."""
    abandon(init=init)
    has(fake, init=child)
    assert due.list_due({}) == ()
    has(fake, State={"Status": "running", "Pid": child, "Restored": True})
    assert the_one().later == ""


def test_a_name_in_the_place_of_an_id(fake: FakePodman) -> None:
    """As a checkpoint may have it: it is nobody's, and the note goes."""
    pairs.note("w", CHECKPOINT)
    path = Path(journal.FOLDER, "w.pre-checkpoint")
    path.write_text(json.dumps({**json.loads(path.read_text()), "owner": DEAD}))
    assert due.list_due({}) == ()
    due.sweep()
    assert not path.exists()
    assert ran(fake) == []


def test_written_while_podman_is_asked(fake: FakePodman, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore begins then: its note is not the one that is of no use any more."""
    abandon(init=0)
    look = due._look

    def begin(opened: pairs.OpenPair) -> due.DueCommand | None:
        found = look(opened)
        abandon(init=0, mark="c0ffee")
        return found

    monkeypatch.setattr(due, "_look", begin)
    due.sweep()
    left = pairs.read(ID, CHECKPOINT)
    assert left is not None
    assert left.mark == "c0ffee"


@pytest.mark.parametrize("text", [f"{ID}@0123456789ab", "web", "../../x"])
def test_a_checkpoint_with_another_text_for_its_id(
    fake: FakePodman, archive: str, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It reaches no other container's note."""
    texts = {"name": "w", "id": text}
    monkeypatch.setattr(volumes, "read_text", lambda _, key: texts.get(key, ""))
    fake.fails("Error: it broke")
    with pytest.raises(GpusnapError, match="it broke"):
        restoring.restore(RestoreRequest(what=InFile(archive)), QUIET)
    assert (fake.folder / "noted").read_text().split() == ["restore"]
    assert not os.path.exists(journal.FOLDER)


def test_what_was_left_running_is_known_after_a_resume(fake: FakePodman) -> None:
    """The command before of a killed suspend, frozen with the container: the one after kills it first."""
    abandon(SUSPEND, mark="c0ffee")
    assert pairs.note_ahead(ID, SUSPEND, init=os.getpid())
    found = pairs.read(ID, SUSPEND)
    assert found is not None
    assert found.mark == "c0ffee"


@pytest.mark.parametrize("stage", [Stage.SUSPENDED, Stage.SUSPENDING])
@pytest.mark.parametrize("pair", [CHECKPOINT, SUSPEND])
def test_suspended(fake: FakePodman, monkeypatch: pytest.MonkeyPatch, stage: Stage, pair: Pair) -> None:
    """A resume runs its own command; a command in frozen processes would not end."""
    me = state_files.owner()
    found = Suspension(f"{ID}@123456789abc", "w", "podman", "", stage, DEAD, me, "", "crun")
    suspensions.write(found)
    monkeypatch.setattr(journal, "entries", lambda _: (journal.Entry(found.key, "/i", DEAD, ()),))
    abandon(pair)
    if stage is Stage.SUSPENDING:
        said = f"its command {pair.after} is due when it is recovered: run gpusnap recover again then"
        assert due.run(the_one()) == said
    elif pair is CHECKPOINT:
        said = (
            "gpusnap was killed before its command post-restore: run gpusnap recover after gpusnap resume w"
        )
        assert due.run(the_one()) == the_one().why == said
    else:
        assert due.list_due({}) == ()
    assert ran(fake) == []


@pytest.mark.parametrize(("alive", "code"), [(True, "GPS-020"), (False, "GPS-021")])
def test_a_checkpoint_during_a_suspend(fake: FakePodman, child: int, alive: bool, code: str) -> None:
    """Only if its gpusnap was killed, `gpusnap recover` is what helps; no command is run in either case."""
    owner = state_files.owner(child) if alive else DEAD
    me = state_files.owner()
    suspensions.write(
        Suspension(f"{ID}@123456789abc", "w", "podman", "", Stage.SUSPENDING, owner, me, "", "crun")
    )
    with pytest.raises(GpusnapError) as raised:
        checkpointing.checkpoint(checkpointing.CheckpointRequest(container="w"), QUIET)
    assert raised.value.code == code
    assert ran(fake) == []


def test_of_another_version(fake: FakePodman) -> None:
    """It is kept, and named with its file; other containers are not concerned."""
    abandon()
    abandon(SUSPEND)
    path = Path(journal.FOLDER, f"{ID}.pre-checkpoint")
    for text in ('{"version": 2}', '{"version": 1}', "[]", "{"):
        path.write_text(text)
        unreadable: dict[str, GpusnapError] = {}
        assert [each.opened.pair for each in due.list_due(unreadable)] == [SUSPEND]
        assert unreadable[ID].code == "GPS-023"
        assert pairs.find(ID, CHECKPOINT) is None
        assert path.exists()
    assert ran(fake) == []


@pytest.fixture
def archive(fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the container, which has ended."""
    texts = {"name": "w", "id": ID}
    monkeypatch.setattr(volumes, "read_text", lambda _, key: texts.get(key, ""))
    choose = volumes.choose
    monkeypatch.setattr(
        volumes, "choose", lambda inside, **more: choose(replace(inside, annotated=True), **more)
    )
    has(fake, status="exited")
    fake.first(f"echo $2 >>$F/noted; ls {journal.FOLDER} >>$F/noted\n")
    (fake.folder / "exec.sh").write_text(f"echo exec >>$F/noted; ls {journal.FOLDER} >>$F/noted\n")
    (tmp_path / "kept").mkdir()
    return an_archive(tmp_path / "kept")


@pytest.mark.parametrize("name", ["w", "another"])
def test_around_a_restore(fake: FakePodman, archive: str, name: str) -> None:
    """Noted before Podman begins it; with another name, the container gets an ID that is not known yet."""
    restoring.restore(RestoreRequest(what=InFile(archive), name=name), QUIET)
    note = f"{ID}.pre-checkpoint"
    ahead = ["restore", note] if name == "w" else ["restore"]
    assert (fake.folder / "noted").read_text().split() == [*ahead, "exec", note]
    assert notes() == []


@pytest.mark.parametrize("left", [False, True])
def test_a_restore_that_fails(fake: FakePodman, archive: str, left: bool) -> None:
    """The note is as it was before: the container may still be restored by Podman alone."""
    if left:
        abandon()
    before = pairs.find(ID, CHECKPOINT)
    fake.fails("Error: it broke")
    with pytest.raises(GpusnapError, match="it broke"):
        restoring.restore(RestoreRequest(what=InFile(archive)), QUIET)
    assert pairs.find(ID, CHECKPOINT) == before
    assert (fake.folder / "noted").read_text().split() == ["restore", f"{ID}.pre-checkpoint"]


def test_around_a_resume(fake: FakePodman, child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted before it begins; not if it leaves the container suspended, or another one has resumed it."""
    me = state_files.owner()
    found = Suspension(f"{ID}@123456789abc", "w", "podman", "", Stage.SUSPENDED, DEAD, me, "", "crun")
    now: list[Suspension | None] = [found]
    monkeypatch.setattr(suspensions, "read", lambda _: now[0])

    def resume(error: BaseException | None = None) -> None:
        with commands.run_after_resume(found):
            assert notes() == [f"{ID}.pre-suspend"]
            if error is not None:
                raise error

    for each, left in (
        (found, []),
        (None, []),
        (replace(found, stage=Stage.RESUMING), [f"{ID}.pre-suspend"]),
    ):
        now[0] = each
        with pytest.raises(ContainerError):
            resume(ContainerError("no"))
        assert notes() == left
    now[0] = None
    with pytest.raises(Interrupted):
        resume(Interrupted("no"))
    assert notes() == [f"{ID}.pre-suspend"]
    assert ran(fake) == []
    resume()
    assert ran(fake) == ["get up"]
    assert notes() == []
    abandon(SUSPEND, owner=state_files.owner(child))
    now[0] = None
    with pytest.raises(ContainerError):
        resume(ContainerError("another one has resumed it"))
    assert notes() == [f"{ID}.pre-suspend"]
