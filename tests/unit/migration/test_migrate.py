"""A migration whose last steps fail: the container runs on this host again, whatever the error is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tar_of
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive
from outgoing import outgoing

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import Damaged
from gpusnap.checkpoints import migrations
from gpusnap.checkpoints.migrations import OutgoingMigration
from gpusnap.container_hooks.pairs import CHECKPOINT
from gpusnap.engines import podman
from gpusnap.migration import migrate, unfinished
from gpusnap.migration.link import Destination, Route
from gpusnap.migration.migrate import MigrationRequest
from gpusnap.oci.base.errors import DiskError
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import Entry
from gpusnap.operations.checkpointing import checkpoint as checkpointing
from gpusnap.operations.checkpointing.checkpoint import CheckpointRequest, CheckpointResult
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.restore import RestoreResult
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted
from gpusnap.runtime_shim.settings import ANNOTATION_PREFIX
from gpusnap.runtime_shim.shim import overrides

Answer = Callable[[], dict[str, Any]]


class OtherSide:
    """The channel to a gpusnap that answers each request; `instead` has other answers, by the request."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.instead: dict[str, Answer] = {}
        self.patience = 0.0

    def send(self, frame: Mapping[str, Any], payload: Iterable[bytes] = (), size: int = 0) -> None:
        self.asked.append(str(frame["ask"]))

    def receive(self) -> dict[str, Any]:
        what = self.asked[-1]
        if what in self.instead:
            return self.instead[what]()
        return {"ok": {"free": 1 << 40, "image": True, "pairs": [], "bytes": 0}}

    def keep_alive(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def fake(tmp_path: Path, host_store: Store, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """Podman with the container w, which runs."""
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(migrations, "FOLDER", str(tmp_path / "state" / "migrations"))
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(migrate, "find_driver", lambda: None)
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has()
    found.exports(an_archive(tmp_path))
    return found


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherSide:
    """The other host, which says of an earlier migration that nothing of it is left."""
    found = OtherSide()

    @contextmanager
    def connect(route: Route) -> Iterator[OtherSide]:
        yield found

    monkeypatch.setattr(migrate, "connect", connect)
    monkeypatch.setattr(unfinished, "ask", lambda leaving: "undone")
    return found


def move(ahead: int = 0) -> GpusnapError:
    """Migrate it; the error."""
    request = MigrationRequest(container="w", route=Route(to=Destination("gpu2")), ahead=ahead)
    with pytest.raises(GpusnapError) as raised:
        migrate.migrate(request, Progress(shown=False))
    return raised.value


def fail(error: BaseException) -> Answer:
    """Fail while the other side's answer is waited for."""

    def answer() -> dict[str, Any]:
        raise error

    return answer


@pytest.mark.parametrize(
    ("what", "instead", "said"),
    [
        ("restore", lambda: {"error": "no GPU"}, "gpu2: no GPU"),
        ("fetch", lambda: {"ok": {}}, "KeyError: 'bytes'"),
        ("restore", lambda: {"ok": {}}, "KeyError: 'container'"),
        ("restore", fail(RuntimeError("can't start new thread")), "a thread cannot be started"),
        ("fetch", fail(KeyboardInterrupt()), "interrupted"),
    ],
)
def test_an_error_of_any_kind(
    fake: FakePodman, other: OtherSide, what: str, instead: Answer, said: str
) -> None:
    """Also if the other side's answer lacks something, or this host is short of something."""
    other.instead[what] = instead
    error = move()
    assert str(error).startswith(f"w was not migrated, and runs on this host again: {said}")
    assert isinstance(error, Interrupted) == (said == "interrupted")
    assert "confirm" not in other.asked
    assert fake.status() == "running"
    assert migrations.list_outgoing() == ()


def test_it_cannot_be_restored_here(
    fake: FakePodman, other: OtherSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever that error is, the sentence says what continues the container."""
    other.instead["fetch"] = lambda: {"error": "no room"}
    monkeypatch.setattr(restoring, "restore", lambda *_: fail(OSError(5, "EIO", "f"))())
    error = move()
    assert str(error).startswith(
        "w was not migrated to gpu2 (gpu2: no room), and cannot be restored here: f: "
    )
    assert error.hint.startswith("gpusnap restore w:")


def test_its_checkpoint_is_damaged(
    fake: FakePodman, other: OtherSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not said to be complete; the other host may have the right blobs."""
    other.instead["fetch"] = lambda: {"error": "the digest is wrong"}
    monkeypatch.setattr(restoring, "restore", lambda *_: fail(Damaged("the blob is damaged"))())
    error = move()
    assert str(error).endswith("and cannot be restored here: the blob is damaged")
    assert re.fullmatch(
        r"gpusnap verify w:[\d-]+ lists all damage; do not remove what gpu2 has", error.hint
    ), error.hint


def test_one_without_a_gpu(fake: FakePodman, other: OtherSide) -> None:
    """Podman can move it by itself; a checkpoint alone would not."""
    fake.has(runtime="crun")
    (fake.folder / "path").write_text("/usr/bin/crun\n")
    hint = move().hint
    assert hint.startswith(
        "if it uses no GPU, run podman container checkpoint --export FILE w here, and podman"
    )
    assert "podman container restore --import FILE on the other host; otherwise remove it" in hint
    assert not other.asked


def test_it_was_started_here_meanwhile(fake: FakePodman, other: OtherSide, host_store: Store) -> None:
    """Then it does not run on the other host, too, and its checkpoint stays."""

    def fetch() -> dict[str, Any]:
        fake.has()
        return {"ok": {"bytes": 0}}

    other.instead["fetch"] = fetch
    error = move()
    assert str(error) == (
        "w was not migrated, and runs on this host: w was started here while its memory was sent"
    )
    assert "restore" not in other.asked
    assert [line.split()[1] for line in fake.calls()] == ["checkpoint"]
    (kept,) = host_store.entries()
    assert error.hint == f"migrate it again; its checkpoint {kept.name} is kept"
    assert migrations.list_outgoing() == ()


def test_another_gpusnap_migrates_it(fake: FakePodman, other: OtherSide, host_store: Store) -> None:
    """It is left alone, and so is what that has sent ahead."""
    with elsewhere() as theirs:
        error = move()
        assert str(error) == "w is being migrated to gpu3"
        assert "fetch" not in other.asked
        assert fake.calls() == []
        assert [each.id for each in migrations.list_outgoing()] == [theirs.id]
    move()
    assert "restore" in other.asked


@contextmanager
def elsewhere() -> Iterator[OutgoingMigration]:
    """A migration of w by another process, from a minute ago on."""
    found = outgoing(
        id="1" * 32,
        container=ID,
        host="gpu3",
        route=("gpu3", "", "0", "ssh", "gpusnap"),
        since=(datetime.now(UTC) - timedelta(minutes=1)).isoformat(),
    )
    found.write()
    path = Path(migrations.FOLDER, f"{found.id}.leaving")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"owner": state_files.owner(child.pid)}))
        yield found


def test_its_last_checkpoint_fails_after_the_end(fake: FakePodman, other: OtherSide) -> None:
    """Podman has it in its storage, and restores it from there."""
    ends = f"{fake.ends('inventory.img')} cp $F/error.txt $F/error"
    fake.first(f'case "$2" in checkpoint) {ends};; *) rm $F/error;; esac')
    (fake.folder / "error.txt").write_text("Error: writing the archive: no such device")
    error = move()
    assert str(error) == (
        "Podman failed: writing the archive: no such device; Podman has restored w from the checkpoint"
    )
    assert fake.calls()[-1] == f"container restore {ID}"
    assert fake.status() == "running"
    assert "fetch" not in other.asked


@pytest.mark.parametrize("volumes", [(), ("data",), ("removed",), ("data", "removed")])
def test_its_last_checkpoint_fails_after_its_removal(
    fake: FakePodman, other: OtherSide, host_store: Store, tmp_path: Path, volumes: tuple[str, ...]
) -> None:
    """With --rm, Podman restores it from its export, of which nothing is left then; its volumes stay.

    One that Podman has removed with it is made from the export; if none is left, Podman makes all.
    """
    files = {name: tar_of({name: b"files"}) for name in ("data", "removed")}
    (tmp_path / "other").mkdir()
    fake.exports(an_archive(tmp_path / "other", volumes=files))
    fake.has(auto_remove=True, volumes=dict.fromkeys(volumes, ""))
    fake.has_volumes("data")
    made = 'cp $F/archive "$4"; rm $F/inspect.json; cp $F/error.txt $F/error'
    fake.first(f'case "$2" in checkpoint) {made};; *) rm $F/error;; esac')
    (fake.folder / "error.txt").write_text("Error: no such device")
    error = move()
    assert str(error) == "Podman failed: no such device; Podman has restored w from the checkpoint"
    assert fake.calls()[-1].startswith("container restore --import ")
    assert fake.calls()[-1].endswith(" --ignore-volumes") == ("data" in volumes)
    if volumes == ("data", "removed"):
        assert fake.volumes() == ["data", "removed"]
        assert fake.filled("removed") == files["removed"]
    else:
        assert fake.volumes() == ["data"]
    assert (fake.folder / "imported").read_bytes() == (fake.folder / "archive").read_bytes()
    assert list(Path(host_store.path, "staging").iterdir()) == []


def test_podman_does_not_restore_it(fake: FakePodman, other: OtherSide) -> None:
    """Then the sentence says what does."""
    fake.first(fake.ends("inventory.img"))
    fake.fails("Error: no such device")
    error = move()
    assert str(error) == (
        "Podman failed: no such device; nothing is lost: Podman has the checkpoint of w in its storage; "
        "an attempt to restore it failed: Podman failed: no such device"
    )
    assert error.hint == "podman container restore w restores it"
    assert fake.calls()[-1] == f"container restore {ID}"


@pytest.mark.parametrize("before", ["", "echo before"])
def test_its_command_after_a_restore(fake: FakePodman, other: OtherSide, before: str) -> None:
    """It runs once after Podman has restored the container, with and without a command before."""
    labels = {f"{ANNOTATION_PREFIX}{CHECKPOINT.after}": "echo after"}
    if before:
        labels[f"{ANNOTATION_PREFIX}{CHECKPOINT.before}"] = before
    fake.has(Config={"Labels": labels})
    fake.first(
        f'case "$2" in checkpoint) {fake.ends("inventory.img")} cp $F/text $F/error;; *) rm $F/error;; esac'
    )
    (fake.folder / "text").write_text("Error: no such device")
    assert str(move()).endswith("Podman has restored w from the checkpoint")
    assert [line.rpartition(" ")[2] for line in fake.calls() if line.startswith("exec ")] == [
        *(["before"] if before else []),
        "after",
    ]
    assert fake.calls()[-1].endswith("after")


def test_podman_learns_of_its_end_later(
    fake: FakePodman, other: OtherSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed Podman still lists it as running; it restores no container of which it thinks so."""
    fake.has(init=1 << 30)
    running = "{ echo Error: it is running >&2; exit 125; }"
    made = ": >$F/checkpoint/inventory.img; cp $F/text $F/error"
    fake.first(
        f'case "$2" in checkpoint) mkdir $F/checkpoint; {made};; '
        f"*) grep -q exited $F/inspect.json || {running}; rm $F/error;; esac"
    )
    (fake.folder / "text").write_text("Error: no such device")
    inspect, asked = podman.inspect_container, list[str]()

    def inspect_later(wanted: str) -> podman.Container:
        found = inspect(wanted)
        if (fake.folder / "error").exists():
            asked.append(found.status)
            if len(asked) == 3:
                fake.has(status="exited")
        return found

    monkeypatch.setattr(podman, "inspect_container", inspect_later)
    assert str(move()).endswith("Podman has restored w from the checkpoint")
    assert asked[:4] == ["running", "running", "running", "exited"]
    assert fake.status() == "running"


@pytest.mark.parametrize("ahead", [0, 1])
def test_its_note_while_the_memory_is_sent(fake: FakePodman, other: OtherSide, ahead: int) -> None:
    """By it, `gpusnap recover` names the container of a command that is killed meanwhile."""
    noted: list[str] = []

    def fetch() -> dict[str, Any]:
        noted.extend(each.name for each in migrations.list_outgoing())
        return {"error": "no room"}

    other.instead["fetch"] = fetch
    move(ahead)
    assert noted == ["w"]
    assert migrations.list_outgoing() == ()


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interruption_after_its_last_checkpoint(
    fake: FakePodman,
    other: OtherSide,
    host_store: Store,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
) -> None:
    """It is stored, but nobody has got its digest: the container is restored from it all the same."""
    make = checkpointing.checkpoint

    def checkpoint(request: CheckpointRequest, progress: Progress) -> CheckpointResult:
        make(request, progress)
        raise raised

    monkeypatch.setattr(checkpointing, "checkpoint", checkpoint)
    error = move()
    assert str(error).startswith("w was not migrated, and runs on this host again: ")
    assert isinstance(error, Interrupted) == isinstance(raised, KeyboardInterrupt)
    assert fake.status() == "running"
    assert host_store.entries() == ()
    assert "fetch" not in other.asked


@pytest.mark.parametrize("failed", ["a second signal", "EIO"])
def test_its_last_checkpoint_is_searched_for(
    fake: FakePodman, other: OtherSide, host_store: Store, monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    """A second Ctrl-C does not leave the container stopped; if it cannot be found, the sentence names it."""
    make, find, signals = checkpointing.checkpoint, Store.find_exactly, iter([signal.SIGINT])

    def checkpoint(request: CheckpointRequest, progress: Progress) -> CheckpointResult:
        make(request, progress)
        raise KeyboardInterrupt

    def find_exactly(store: Store, wanted: str) -> Entry:
        if failed == "EIO":
            raise DiskError("the index cannot be read")
        for number in signals:
            os.kill(os.getpid(), number)
        return find(store, wanted)

    monkeypatch.setattr(checkpointing, "checkpoint", checkpoint)
    monkeypatch.setattr(Store, "find_exactly", find_exactly)
    try:
        error = move()
    except KeyboardInterrupt:
        pytest.fail("the second signal ended the command")
    assert isinstance(error, Interrupted)
    if failed == "EIO":
        (kept,) = host_store.entries()
        assert str(error).endswith("w may be stopped, and the store cannot be read: the index cannot be read")
        assert error.hint == f"if podman ps does not show it, gpusnap restore {kept.name} continues it here"
    else:
        assert str(error).startswith("w was not migrated, and runs on this host again: interrupted")
        assert fake.status() == "running"


def test_an_interruption_while_its_last_checkpoint_is_stored(
    fake: FakePodman, other: OtherSide, host_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman has restored the container then; the checkpoint is complete, and is named."""
    commit = Staging.commit

    def interrupted(*words: Any, **more: Any) -> None:
        commit(*words, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "commit", interrupted)
    error = move()
    assert isinstance(error, Interrupted)
    assert str(error) == (
        "w was not migrated, and runs on this host: interrupted during the checkpoint; Podman has restored w "
        "from the checkpoint"
    )
    assert fake.status() == "running"
    (kept,) = host_store.entries()
    assert error.hint == f"its checkpoint {kept.name} is kept"


def test_its_note_while_it_is_restored_here(
    fake: FakePodman, other: OtherSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it, `gpusnap recover` names the container of a command that is killed then."""
    other.instead["restore"] = lambda: {"error": "no GPU"}
    restore, noted = restoring.restore, list[tuple[str, str]]()

    def restore_noted(*words: Any) -> RestoreResult:
        noted.extend((each.name, each.digest) for each in migrations.list_outgoing())
        return restore(*words)

    monkeypatch.setattr(restoring, "restore", restore_noted)
    move()
    assert noted == [("w", "")]
    assert fake.status() == "running"
    assert migrations.list_outgoing() == ()


@pytest.mark.parametrize("at", ["the last request", "the end of ssh"])
@pytest.mark.parametrize("what", ["fetch", "restore"])
def test_a_second_interruption(
    fake: FakePodman, other: OtherSide, monkeypatch: pytest.MonkeyPatch, at: str, what: str
) -> None:
    """One that comes while the connection is closed ends only the wait for that."""
    other.instead[what] = fail(KeyboardInterrupt())

    def send(frame: Mapping[str, Any], payload: Iterable[bytes] = (), size: int = 0) -> None:
        other.asked.append(str(frame["ask"]))
        if at == "the last request" and frame["ask"] == "end":
            raise KeyboardInterrupt

    @contextmanager
    def connect(route: Route) -> Iterator[OtherSide]:
        yield other
        if at == "the end of ssh":
            raise KeyboardInterrupt

    monkeypatch.setattr(other, "send", send)
    monkeypatch.setattr(migrate, "connect", connect)
    error = move()
    assert str(error).startswith("w was not migrated, and runs on this host again: interrupted")
    assert fake.status() == "running"


@pytest.mark.parametrize("started", [False, True])
def test_its_remains(fake: FakePodman, other: OtherSide, host_store: Store, started: bool) -> None:
    """The container that was checkpointed is removed here; one that somebody has started meanwhile stays."""

    def restore() -> dict[str, Any]:
        fake.has(status="running" if started else "exited", checkpointed=not started)
        return {"ok": {"container": "w", "containerId": ID}}

    other.instead["restore"] = restore
    request = MigrationRequest(container="w", route=Route(to=Destination("gpu2")), ahead=0)
    if started:
        with pytest.raises(GpusnapError, match="runs there, but the container on this host stays, because"):
            migrate.migrate(request, Progress(shown=False))
    else:
        assert migrate.migrate(request, Progress(shown=False)).id == ID
    assert (fake.calls()[-1] == f"rm {ID}") != started
    assert host_store.entries() == ()
    assert migrations.list_outgoing() == ()


def test_an_interruption_while_its_remains_are_removed(
    fake: FakePodman, other: OtherSide, host_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not said that the command can be run again: the container runs over there."""
    monkeypatch.setattr(unfinished, "clear", lambda _: fail(KeyboardInterrupt())())
    other.instead["restore"] = lambda: {"ok": {"container": "w", "containerId": ID}}
    with pytest.raises(Interrupted) as raised:
        migrate.migrate(
            MigrationRequest(container="w", route=Route(to=Destination("gpu2")), ahead=0),
            Progress(shown=False),
        )
    said = "w was migrated to gpu2 and runs there, but its remains here cannot be removed: interrupted"
    assert raised.value.sentence().startswith(f"{said}; run gpusnap recover to try again")
    assert [each.name for each in migrations.list_outgoing()] == ["w"]
