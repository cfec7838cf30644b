"""What a killed restore left: half a container is removed, and one that runs never is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from criu_images import INVENTORY
from fakes import ID, KEY, Scene, a_manifest, wait_for

from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import GpusnapError, RuntimeFailed
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import NotInitialized
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.records import manifest_json
from gpusnap.runtime_shim.records.manifest import RegionRecord
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.shim import dispatch
from gpusnap.runtime_shim.shim.suspended import answer as answer_watched
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.recovery import incomplete_restore
from gpusnap.runtime_shim.snapshot.recovery import restore as recover_restore
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.restoring.record import Restore, Stage

RUNNING, LOCKED, CHECKPOINTED = ProcessState.RUNNING, ProcessState.LOCKED, ProcessState.CHECKPOINTED
BEFORE, AFTER = b'{"before":  1}', b'{"after": 1}'


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Scene]:
    monkeypatch.setattr(scratch_files, "scratch", lambda: str(tmp_path))
    monkeypatch.setattr(stage, "FOLDER", str(tmp_path / "stage"))
    with Scene(tmp_path, monkeypatch, capfd) as found:
        yield found


def cut_off(
    scene: Scene, *states: ProcessState, standing: bool = False, status: str = "running", **changed: Any
) -> Restore:
    """A restored container whose GPU processes are in these states, and what the journal says of it."""
    pids = [scene.driver.use(scene.family.spawn(), state=state) for state in states]
    if standing:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda pid=pid: proc.is_still(pid), "that it stands")  # type: ignore[misc]
    scene.runtime.knows(scene.state(status=status), [*pids, scene.family.init])
    (scene.bundle / "config.json").write_bytes(AFTER)
    (scene.folder / "pid").write_text("4194304", "ascii")
    init = proc.process(scene.family.init)
    assert init is not None
    scene.image.mkdir(exist_ok=True)
    entry = Restore(
        key=KEY,
        image=str(scene.image),
        owner=(init.pid, init.start + 1),
        command=(str(scene.runtime.path),),
        bundle=str(scene.bundle),
        pid_file=str(scene.folder / "pid"),
        detach=True,
        processes=tuple(pids),
        stage=Stage.GPUS,
        init=(init.pid, init.start),
    )
    fields: dict[str, Any] = {**restore_record.describe_change(BEFORE, AFTER), **changed}
    entry = replace(entry, **fields)
    restore_record.write(entry)
    return entry


def removed(scene: Scene) -> None:
    """Take it away, and see that nothing is left."""
    assert recover_restore.recover(KEY, scene.driver) == (
        f"the incomplete container was removed; its checkpoint in {scene.image} is unharmed"
    )
    assert scene.runtime.calls("delete") == [f"delete --force {ID}"]
    assert (scene.bundle / "config.json").read_bytes() == BEFORE
    assert not (scene.folder / "pid").exists()
    assert restore_record.entries() == ()


def kept(scene: Scene, said: str) -> None:
    """It runs, and stays as it is."""
    assert recover_restore.recover(KEY, scene.driver) == said
    assert scene.runtime.calls("delete") == []
    assert (scene.bundle / "config.json").read_bytes() == AFTER
    assert restore_record.entries() == ()
    assert proc.is_running(scene.family.init)


ALONE = "another container with that ID is running now, and was not touched"


def test_the_journal(scene: Scene) -> None:
    """What was written is read; what another version wrote is said to."""
    entry = cut_off(scene, CHECKPOINTED)
    assert restore_record.entries() == (entry,)
    assert restore_record.read(KEY) == entry
    assert journal.entries() == (), "it is no checkpoint's"
    Path(journal.FOLDER, f"{KEY}.restore").write_text('{"version": 0}')
    with pytest.raises(
        GpusnapError, match=f"restore of container {ID} was not written by this version of gpusnap"
    ):
        restore_record.read(KEY)


@pytest.mark.parametrize("reached", [Stage.RESTORE, Stage.SETTLE, Stage.GPUS])
def test_it_stands(scene: Scene, reached: Stage) -> None:
    """Processes as CRIU restores them, of which the driver's thread alone is let run, to answer."""
    entry = cut_off(scene, CHECKPOINTED, CHECKPOINTED, standing=True)
    restore_record.write(replace(entry, stage=reached, init=None if reached is Stage.RESTORE else entry.init))
    stood: list[bool] = []
    for pid in entry.processes:
        scene.driver.when("state", lambda pid: stood.append(proc.is_stopped(pid)), pid)
    removed(scene)
    assert stood == [False, False]
    assert {*scene.driver.of("restore"), *scene.driver.of("unlock")} == set()


@pytest.mark.parametrize("states", [(LOCKED,), (LOCKED, CHECKPOINTED), ()], ids=["one", "two", "none"])
def test_memory_was_on_its_way(scene: Scene, states: tuple[ProcessState, ...]) -> None:
    """The driver may have read what never came, or the kernel has ended the process: it is taken away."""
    cut_off(scene, *states, standing=True, arriving=True)
    removed(scene)
    assert {*scene.driver.of("restore"), *scene.driver.of("unlock")} == set()


def test_memory_was_on_its_way_to_another_one(scene: Scene) -> None:
    """A later container of that ID has nothing to do with it."""
    cut_off(scene, RUNNING, arriving=True, init=(scene.family.init, 1))
    kept(scene, ALONE)


def test_one_has_its_state(scene: Scene) -> None:
    """Cut off in the middle of the driver's restores: half is nothing."""
    entry = cut_off(scene, RUNNING, CHECKPOINTED)
    os.kill(entry.processes[1], signal.SIGSTOP)
    wait_for(lambda: proc.is_still(entry.processes[1]), "that it stands")
    removed(scene)


def test_somebody_let_it_go_on(scene: Scene) -> None:
    """Processes that run without their GPU state are no container that runs."""
    cut_off(scene, CHECKPOINTED, RUNNING)
    removed(scene)


def test_it_had_come_up(scene: Scene) -> None:
    """All run with their GPU state: only the entry was left."""
    entry = cut_off(scene, RUNNING, RUNNING)
    kept(scene, "running: " + " ".join(map(str, entry.processes)))


def test_only_the_unlock_was_missing(scene: Scene) -> None:
    """It is made up for."""
    entry = cut_off(scene, RUNNING, LOCKED)
    kept(scene, "running: " + " ".join(map(str, entry.processes)))
    assert scene.driver.of("unlock") == [entry.processes[1]]


def test_the_unlock_was_under_way(scene: Scene) -> None:
    """The driver ends what a killed gpusnap had asked for: then it is unlocked already."""
    entry = cut_off(scene, LOCKED)
    scene.driver.when("unlock", lambda pid: scene.driver.states.update({pid: RUNNING}))
    kept(scene, f"running: {entry.processes[0]}")


SINCE = "it was complete, because a checkpoint or a suspend of it has begun since; it was not touched"


def test_a_checkpoint_has_begun_since(scene: Scene) -> None:
    """Its GPU state is missing because a killed checkpoint took it: that is repaired, not the restore."""
    entry = cut_off(scene, CHECKPOINTED, RUNNING)
    journal.write(KEY, str(scene.image), {entry.processes[0]: ()})
    kept(scene, SINCE)
    assert journal.read(KEY) is not None


@pytest.mark.parametrize("asleep", list(suspensions.Stage))
def test_a_suspend_has_begun_since(scene: Scene, asleep: suspensions.Stage) -> None:
    """Likewise, whether it was killed or not."""
    entry = cut_off(
        scene, CHECKPOINTED, status="paused" if asleep is suspensions.Stage.SUSPENDED else "running"
    )
    assert entry.init is not None
    suspensions.write(Suspension(KEY, "w", "podman", "", asleep, (1, 1), entry.init, "", "crun"))
    kept(scene, SINCE)
    assert suspensions.read(KEY) is not None


def test_a_checkpoint_of_an_earlier_one(scene: Scene) -> None:
    """Its processes have ended: the restored container is another, and incomplete."""
    gone = scene.family.spawn()
    cut_off(scene, CHECKPOINTED, standing=True)
    journal.write(KEY, str(scene.image), {gone: ()})
    scene.family.end(gone)
    removed(scene)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver's thread may be at ends soon."""
    monkeypatch.setattr(driver_calls, "let_finish", partial(driver_calls.let_finish, quiet=0.01))


every_stage = pytest.mark.parametrize("reached", [Stage.SETTLE, Stage.GPUS])


@every_stage
@pytest.mark.parametrize("ended", [1, 2])
def test_one_has_ended(scene: Scene, reached: Stage, ended: int) -> None:
    """It ran for days, and a GPU process ended as it should: what is left runs on."""
    entry = cut_off(scene, RUNNING, RUNNING, stage=reached)
    for pid in entry.processes[:ended]:
        scene.family.end(pid)
    left = entry.processes[ended:] or (scene.family.init,)
    kept(scene, "running: " + " ".join(map(str, left)))
    assert all(proc.is_running(pid) for pid in left)


@pytest.mark.parametrize("stands", [False, True])
def test_one_is_done_with_the_gpu(scene: Scene, stands: bool) -> None:
    """It has no GPU state any more, and is nobody's to let go on either."""
    entry = cut_off(scene, RUNNING, RUNNING)
    first, second = entry.processes
    del scene.driver.states[first]
    if stands:
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: proc.is_still(first), "that it stands")
        scene.monkeypatch.setattr(scene.driver, "restore_thread", no_thread_of(first))
    kept(scene, f"running: {second}")
    assert proc.is_running(first)
    assert proc.is_still(first) is stands


def no_thread_of(other: int) -> Callable[[int], int]:
    """As NVIDIA's driver answers for a process without GPU state."""

    def thread(pid: int) -> int:
        if pid == other:
            raise NotInitialized("it has no GPU state", pid=pid)
        return pid

    return thread


@every_stage
@pytest.mark.parametrize("state", [RUNNING, LOCKED])
def test_it_stands_with_its_state(scene: Scene, quick: None, state: ProcessState, reached: Stage) -> None:
    """Cut off after the driver's restore, or stopped by somebody since: it goes on."""
    entry = cut_off(scene, state, state, standing=True, stage=reached)
    kept(scene, "running: " + " ".join(map(str, entry.processes)))
    assert scene.all_running()
    assert not any(proc.is_stopped(pid) for pid in entry.processes)


def test_its_memory_was_never_checked(scene: Scene, quick: None) -> None:
    """Chunks that are not what their digests say: it does not go on, and what is wrong is named."""
    entry = cut_off(scene, LOCKED, standing=True, stage=Stage.GPUS)
    layout = Layout(Path(entry.image, "gpusnap")).create()
    blob = layout.add_blob(b"as it was")
    table = Table(9, (Chunk(0, 9, blob.digest, blob.digest, 9, "plain"),))
    process = replace(a_manifest().processes[0], regions=(RegionRecord(4096, table),))
    Path(entry.image, "gpusnap/manifest.json").write_bytes(
        manifest_json.encode(replace(a_manifest(), processes=(process,), pages="chunks"))
    )
    path = Path(entry.image, "gpusnap/blobs/sha256", blob.digest.partition(":")[2])
    path.write_bytes(b"as it is!")
    assert blob.digest in refused(scene)
    assert proc.is_still(entry.processes[0])
    path.write_bytes(b"as it was")
    kept(scene, f"running: {entry.processes[0]}")


def test_it_failed(scene: Scene) -> None:
    """One that the driver has given up is not let go on, and the others are not removed for it."""
    entry = cut_off(scene, ProcessState.FAILED, RUNNING)
    os.kill(entry.processes[0], signal.SIGSTOP)
    wait_for(lambda: proc.is_still(entry.processes[0]), "that it stands")
    kept(scene, f"running: {entry.processes[1]}")
    assert proc.is_still(entry.processes[0])


@pytest.mark.parametrize("init", [None, (1, 1)], ids=["unknown", "another"])
def test_a_later_container(scene: Scene, init: tuple[int, int] | None) -> None:
    """One that somebody started under that ID since is nobody's to remove."""
    cut_off(scene, RUNNING, init=init, stage=Stage.RESTORE if init is None else Stage.GPUS)
    kept(scene, ALONE)


def test_a_later_container_stands(scene: Scene) -> None:
    """Somebody stopped a process of one that came after the restore: it is left as it is."""
    entry = cut_off(scene, RUNNING, standing=True, init=None, stage=Stage.RESTORE)
    kept(scene, ALONE)
    assert proc.is_still(entry.processes[0])


def test_the_runtime_was_not_called(scene: Scene) -> None:
    """Whatever container there is, it is not from that restore; config.json is put back."""
    cut_off(scene, RUNNING, stage=Stage.PREPARE, init=None)
    recover_restore.recover(KEY, scene.driver)
    assert scene.runtime.calls("delete") == []
    assert (scene.bundle / "config.json").read_bytes() == BEFORE


@pytest.mark.parametrize("host", ["GPUs", "none"])
@every_stage
def test_without_gpu_processes(scene: Scene, reached: Stage, host: str) -> None:
    """Nothing stands then, and without a driver SETTLE is the last stage: it runs."""
    cut_off(scene, stage=reached)
    said = recover_restore.recover(KEY, scene.driver if host == "GPUs" else None)
    assert said == f"running: {scene.family.init}"
    assert scene.runtime.calls("delete") == []
    assert proc.is_running(scene.family.init)
    assert restore_record.entries() == ()


def test_without_a_driver(scene: Scene) -> None:
    """Nobody can say whether a container with GPU processes is complete, so nothing is done."""
    cut_off(scene, RUNNING)
    with pytest.raises(GpusnapError) as caught:
        recover_restore.recover(KEY, None)
    assert caught.value.sentence() == (
        "this host currently has no GPU driver, which is needed to determine whether the restore of "
        f"container {ID} was complete; load the driver, then run gpusnap recover {ID} [GPS-301]"
    )
    assert restore_record.read(KEY) is not None
    assert scene.runtime.calls("delete") == []


def test_the_runtime_does_not_say(scene: Scene) -> None:
    """A container whose state cannot be read may run all the same."""
    cut_off(scene, CHECKPOINTED, standing=True)
    (scene.runtime.folder / "state.json").unlink()
    (scene.runtime.folder / "state.json").mkdir()
    assert f"the state of container {ID} cannot be read" in refused(scene)
    assert scene.runtime.calls("delete") == []


def test_it_ended(scene: Scene) -> None:
    """A container without an init, or none at all: what the runtime has of it goes."""
    entry = cut_off(scene, stage=Stage.RESTORE, init=None)
    (scene.runtime.folder / "state.json").unlink()
    assert recover_restore.recover(KEY, scene.driver) == (
        "crun knows no such container, and it is unknown whether processes of it are left; its checkpoint "
        f"in {entry.image} is unharmed"
    )
    assert restore_record.entries() == ()


def test_its_image_has_gone(scene: Scene) -> None:
    """Podman removes its copy with a container that it could not import: no word that this is unharmed."""
    cut_off(scene, stage=Stage.RESTORE, init=None)
    (scene.runtime.folder / "state.json").unlink()
    scene.image.rmdir()
    said = recover_restore.recover(KEY, scene.driver)
    assert said.endswith("ore it again from its checkpoint")


def test_its_runtime_does_not_know_it(scene: Scene) -> None:
    """Killed with its runtime and CRIU: what stands there is ended, and only that is said."""
    entry = cut_off(scene, stage=Stage.RESTORE, init=None)
    (scene.runtime.folder / "state.json").unlink()
    mark = scratch_files.mark_of(entry.owner)
    config = str(scene.folder / f"gpusnap-criu-{mark}-abc.conf")
    with subprocess.Popen(["sleep", "600"], env={**os.environ, scratch_files.CONFIG: config}) as left:
        wait_for(lambda: scratch_files.children(entry.owner), "its environment")
        assert recover_restore.recover(KEY, scene.driver) == (
            f"crun knows no such container, but processes of it existed and were killed: {left.pid}; its "
            f"checkpoint in {entry.image} is unharmed"
        )
        assert left.wait(60) == -signal.SIGKILL
    assert restore_record.entries() == ()


def test_config_was_written_since(scene: Scene) -> None:
    """Podman writes it at every start: only our own change is taken back."""
    cut_off(scene, CHECKPOINTED, standing=True)
    (scene.bundle / "config.json").write_bytes(b"{}")
    recover_restore.recover(KEY, scene.driver)
    assert (scene.bundle / "config.json").read_bytes() == b"{}"


def test_the_bundle_is_gone(scene: Scene) -> None:
    """`podman rm` takes it away; then there is nothing to put back."""
    cut_off(scene, CHECKPOINTED, standing=True)
    (scene.bundle / "config.json").unlink()
    recover_restore.recover(KEY, scene.driver)
    assert restore_record.entries() == ()


def test_files_for_a_moment(scene: Scene) -> None:
    """CRIU's configuration, the view of the images and notes of threads go too; others' stay."""
    entry = cut_off(scene, CHECKPOINTED, standing=True)
    mark = scratch_files.mark_of(entry.owner)
    (scene.folder / f"gpusnap-criu-{mark}-abc.conf").touch()
    (scene.folder / f"gpusnap-images-{mark}-abc").mkdir()
    (scene.folder / "gpusnap-criu-1.1-abc.conf").touch()
    for name in (f"{KEY}.77", f"{ID}2.77"):
        Path(journal.FOLDER, f"{name}.thread").write_text("{}")
    removed(scene)
    assert [p.name for p in scene.folder.glob("gpusnap-*")] == ["gpusnap-criu-1.1-abc.conf"]
    assert [p.name for p in Path(journal.FOLDER).glob("*.thread")] == [f"{ID}2.77.thread"]


def refused(scene: Scene) -> str:
    """The sentence of a recover that does nothing, or not all."""
    with pytest.raises(GpusnapError) as caught:
        recover_restore.recover(KEY, scene.driver)
    assert restore_record.read(KEY) is not None
    return caught.value.sentence()


def test_it_is_under_way(scene: Scene) -> None:
    """A restore whose gpusnap is there is not touched, by nobody."""
    entry = cut_off(scene, CHECKPOINTED, standing=True)
    restore_record.write(replace(entry, owner=entry.init))  # type: ignore[arg-type]
    said = f"gpusnap (process {scene.family.init}) is still working on container {ID}; wait for it [GPS-020]"
    assert refused(scene) == said
    assert scene.restore("--detach", "--tcp-established").sentence() != ""
    assert scene.runtime.calls("delete") == []


def test_it_is_held(scene: Scene) -> None:
    """Nor one that somebody else takes away just now."""
    cut_off(scene, CHECKPOINTED, standing=True)
    with journal.hold(KEY):
        assert f"another gpusnap is still working on container {ID}" in refused(scene)
    assert scene.runtime.calls("delete") == []


def test_two_at_once(scene: Scene) -> None:
    """While one removes it a second one, and a restore, do nothing; it is removed once."""
    cut_off(scene, CHECKPOINTED, standing=True)
    at_it, go = scene.folder / "at-it", scene.folder / "go"
    scene.runtime.script("delete", f"touch {at_it}; until [ -e {go} ]; do sleep 0.01; done", default=True)
    said: list[str] = []
    first = threading.Thread(target=lambda: said.append(recover_restore.recover(KEY, scene.driver)))
    first.start()
    try:
        wait_for(at_it.exists, "the removal")
        assert f"another gpusnap is still working on container {ID}" in refused(scene)
        assert "another gpusnap is still working" in scene.restore("--detach").sentence()
    finally:
        go.touch()
        first.join()
    assert said == [f"the incomplete container was removed; its checkpoint in {scene.image} is unharmed"]
    assert len(scene.runtime.calls("delete")) == 1
    assert recover_restore.recover(KEY, scene.driver) == "nothing is left of it"


def test_a_checkpoint_meanwhile(scene: Scene) -> None:
    """It waits for a recover that makes up for the unlock, and changes no process' state."""
    entry = cut_off(scene, RUNNING, LOCKED)
    outcomes: list[str] = []
    scene.driver.when("unlock", lambda _: outcomes.append(scene.checkpoint().sentence()))
    kept(scene, "running: " + " ".join(map(str, entry.processes)))
    assert outcomes == [f"another gpusnap is still working on container {ID}; wait for it [GPS-020]"]
    assert scene.driver.of("lock") == []
    assert scene.all_running()


def test_a_restore_began_meanwhile(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the entry and the lock: the new entry counts, and its gpusnap is there."""
    entry = cut_off(scene, CHECKPOINTED, standing=True)
    held = journal.hold

    @contextmanager
    def late(container: str) -> Iterator[None]:
        with held(container):
            restore_record.write(replace(entry, owner=entry.init or (0, 0)))
            yield

    monkeypatch.setattr(journal, "hold", late)
    assert f"gpusnap (process {scene.family.init}) is still working on container {ID}" in refused(scene)
    assert scene.runtime.calls("delete") == []


def test_it_is_paused(scene: Scene) -> None:
    """Frozen processes look as if they stood; nobody can say, so the user has to."""
    cut_off(scene, RUNNING, status="paused")
    assert refused(scene) == (
        f"container {ID} is paused, so gpusnap cannot determine whether its restore was complete; unpause "
        f"it, then run gpusnap recover {ID} [GPS-203]"
    )


def test_it_cannot_be_removed(scene: Scene) -> None:
    """The runtime's words are told, and it can be tried again."""
    cut_off(scene, CHECKPOINTED, standing=True)
    scene.runtime.script("delete", 'say "device busy"; exit 1')
    assert refused(scene) == f"container {ID} could not be removed: device busy [GPS-022]"
    scene.runtime.script("delete", "", default=True)
    recover_restore.recover(KEY, scene.driver)
    assert restore_record.entries() == ()


def test_delete_of_nothing(scene: Scene) -> None:
    """A container that is not there needs no removing; any other failure is told."""
    scene.runtime.script("delete", 'say "container does not exist"; exit 1')
    recover_restore.delete([str(scene.runtime.path)], ID)
    scene.runtime.script("delete", 'say "device busy"; exit 1')
    with pytest.raises(RuntimeFailed, match="device busy"):
        recover_restore.delete([str(scene.runtime.path)], ID)


@pytest.mark.parametrize(
    ("words", "at_work", "spared"),
    [
        (["--force", ID], False, True),
        ([ID], False, True),
        (["--force", ID], True, True),
        ([ID], True, False),
        (["--force", "beef"], False, False),
    ],
)
@pytest.mark.parametrize("root", [None, "/run/crun"])
def test_a_delete_by_an_engine(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    at_work: bool,
    spared: bool,
    root: str | None,
) -> None:
    """What the runtime has mounted for CRIU is unmounted first; of a restore at work only if it is forced."""
    init = proc.process(scene.family.init)
    assert init is not None
    owner: dict[str, Any] = {"owner": (init.pid, init.start)} if at_work else {}
    cut_off(scene, CHECKPOINTED, state="/state", **owner)
    unmounted: list[list[str]] = []
    monkeypatch.setattr(incomplete_restore, "unmount_root", unmounted.append)
    assert answer_watched("delete", words, root, lambda: 1) is None
    assert unmounted == ([[str(scene.bundle), "/state"]] if spared else [])
    assert answer_watched("delete", words, "/run/other", lambda: 1) is None
    assert answer_watched("pause", words, root, lambda: 1) is None
    assert len(unmounted) == spared


def test_nothing_waits(scene: Scene) -> None:
    """Somebody else may have done it."""
    assert recover_restore.recover(KEY, scene.driver) == "nothing is left of it"


# What a restore writes.


def suspended(scene: Scene) -> list[int]:
    """An image of two GPU processes, which are what the runtime brings back."""
    pids = [scene.driver.use(scene.family.spawn(), state=CHECKPOINTED) for _ in range(2)]
    scene.image.mkdir(exist_ok=True)
    draft, record = Draft(str(scene.image)), a_manifest(pids=pids)
    draft.begin()
    draft.prepare(record)
    draft.finish(record)
    (scene.image / "inventory.img").write_bytes(INVENTORY)
    return pids


def test_the_stages(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is on file before what it tells of is done; afterwards nothing is, and nobody is kept away."""
    monkeypatch.setattr(dispatch, "open_driver", lambda *_, **__: nullcontext())  # it asks beside
    pids = suspended(scene)
    seen: list[Restore | None] = []
    at_restore = scene.folder / "at-restore.json"
    note = Path(journal.FOLDER, f"{KEY}.restore")
    scene.runtime.script("restore", f"cp {note} {at_restore}", default=True)
    scene.driver.when("host", lambda _: seen.append(restore_record.read(KEY)))
    scene.driver.when("restore", lambda _: seen.append(restore_record.read(KEY)))
    assert scene.restore("--detach").code == 0
    prepare, gpus = seen
    assert prepare is not None
    assert gpus is not None
    init = proc.process(scene.family.init)
    assert init is not None
    assert (prepare.stage, prepare.init, prepare.processes) == (Stage.PREPARE, None, tuple(pids))
    assert json.loads(at_restore.read_text())["stage"] == "restore"
    assert (gpus.stage, gpus.init) == (Stage.GPUS, (init.pid, init.start))
    assert gpus.command == (str(scene.runtime.path), "--root", container_key.root(None, "crun"))
    assert gpus.at_work
    assert os.listdir(journal.FOLDER) == []


@pytest.mark.parametrize("removable", [True, False])
def test_a_failed_restore(scene: Scene, removable: bool) -> None:
    """What its undo has removed is forgotten; what it has not waits for `gpusnap recover`."""
    suspended(scene)
    scene.runtime.script("restore", "exit 3", default=False)
    if not removable:
        scene.runtime.script("delete", 'say "device busy"; exit 1')
    assert scene.restore("--detach").code == 3
    assert [entry.stage for entry in restore_record.entries()] == ([] if removable else [Stage.RESTORE])


def test_the_next_restore(scene: Scene) -> None:
    """It first takes away what a killed one left, and says so."""
    entry = cut_off(scene, CHECKPOINTED, standing=True)
    (scene.folder / "pid").unlink()
    (standing,) = entry.processes
    scene.runtime.script("delete", f'kill -9 {standing}; rm -f "$here/state.json"')
    suspended(scene)
    (scene.bundle / "config.json").write_bytes(BEFORE)
    outcome = scene.restore("--detach")
    assert (outcome.code, outcome.log) == (0, ())
    assert outcome.stderr.startswith(
        "gpusnap: note: an earlier restore was interrupted; the incomplete container was removed"
    )
    assert scene.all_running()


@pytest.mark.parametrize("reached", [Stage.RESTORE, Stage.SETTLE, Stage.GPUS])
def test_the_next_checkpoint(scene: Scene, reached: Stage) -> None:
    """A checkpoint removes nothing, not even half a container: it says who does."""
    entry = cut_off(scene, CHECKPOINTED, RUNNING, stage=reached)
    restore_record.write(replace(entry, init=None if reached is Stage.RESTORE else entry.init))
    assert scene.checkpoint().sentence() == (
        f"a restore of container {ID} was interrupted, and its remains must be removed; gpusnap recover "
        f"{ID} [GPS-022]"
    )
    assert scene.runtime.calls("delete") == []
    assert all(proc.is_running(pid) for pid in entry.processes)
    assert restore_record.read(KEY) is not None


@pytest.mark.parametrize("since", ["nothing", "", "done with the GPU", "a stop"])
def test_the_next_checkpoint_of_one_that_runs(scene: Scene, quick: None, since: str) -> None:
    """Killed after it had come up: whatever its processes did since, it is checkpointed and runs on."""
    entry = cut_off(scene, RUNNING, RUNNING)
    first, second = entry.processes
    if since == "":
        scene.family.end(first)
    elif since == "done with the GPU":
        del scene.driver.states[first]
    elif since == "a stop":
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: proc.is_still(first), "that it stands")
    outcome = scene.checkpoint("--leave-running")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr.startswith("gpusnap: note: an earlier restore was interrupted; running: ")
    assert scene.runtime.calls("delete") == []
    assert [pid for pid in (first, second) if proc.is_running(pid) and not proc.is_stopped(pid)] == (
        [second] if since == "" else [first, second]
    )
    assert scene.all_running()
    assert restore_record.entries() == ()


def test_the_steps_are_announced(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    """With --debug, on stderr as they begin, and not in the log: Podman reads one line of that."""
    suspended(scene)
    scene.runtime.knows(scene.state(), [*scene.family.pids, scene.family.init], restored=True)
    first = ["--debug", "--log", str(scene.log), "--log-format", "json"]
    place = ["--image-path", str(scene.image), "--bundle", str(scene.bundle)]
    assert dispatch.main([*first, "restore", "--detach", *place, ID]) == 0
    said = capfd.readouterr().err.splitlines()
    steps = [line.removeprefix("gpusnap: step ") for line in said if line.startswith("gpusnap: step ")]
    assert len(steps) == len(said)
    assert [s for s in steps if s in ("plan", "restore", "driver restore")] == [
        "plan",
        "restore",
        "driver restore",
    ]
    assert not scene.log.exists()
