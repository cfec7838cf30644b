"""A checkpoint, and its failure at every step: the container runs on, and nothing looks like a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import DEADLINE, Family, HandedOverMemory, Scene, a_manifest, unshare_works, uuid, wait_for

from gpusnap.runtime_shim.base import progress
from gpusnap.runtime_shim.base.errors import ImageError, split_code
from gpusnap.runtime_shim.base.transaction import Transaction
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import DriverFailed, DriverTooOld, LockTimeout, NotSupported
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest
from gpusnap.runtime_shim.records import manifest_file as drafts
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.criu.run import invoke
from gpusnap.runtime_shim.runtime.podman import conmon, dev_shm
from gpusnap.runtime_shim.settings import Nvidia
from gpusnap.runtime_shim.snapshot import checkpoint
from gpusnap.runtime_shim.snapshot.gpu_processes import gpu_state
from gpusnap.runtime_shim.snapshot.gpu_processes.job import CheckpointJob
from gpusnap.runtime_shim.snapshot.memory.pages import Pages
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.preflight import nccl, space
from gpusnap.runtime_shim.snapshot.preflight.nccl import Sharing
from gpusnap.runtime_shim.snapshot.records import reservations, volume_image

MANAGED = "the GPU driver could not checkpoint process 7: it uses managed memory"


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Scene]:
    with Scene(tmp_path, monkeypatch, capfd) as found:
        yield found


def earlier_checkpoint(scene: Scene) -> dict[str, str]:
    """An image directory with a checkpoint in it, and a file that is not CRIU's."""
    scene.image.mkdir()
    draft = Draft(str(scene.image))
    draft.begin()
    draft.prepare(a_manifest(pids=(99,)))
    draft.finish(a_manifest(pids=(99,)))
    for name in ("inventory.img", "pages-1.img", "notes.txt", "dump.log"):
        (scene.image / name).write_text(f"earlier {name}", "ascii")
    return scene.content()


def whole(scene: Scene) -> manifest.Manifest:
    """The manifest of a checkpoint that is whole."""
    record = drafts.read(str(scene.image))
    assert {"inventory.img", "pages-1.img", "gpusnap/manifest.json"} == set(scene.content())
    return record


def stop(_: int = 0) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# It works.


def test_checkpoint(scene: Scene) -> None:
    """Two processes are suspended, dumped and written down; one without a GPU is not."""
    pids = scene.gpu_processes(2)
    scene.family.spawn()
    outcome = scene.checkpoint()
    assert (outcome.code, outcome.stderr, outcome.log) == (0, "", ())
    wait_for(lambda: not proc.is_running(pids[0]), "the end of the container")
    record = whole(scene)
    assert [process.pid for process in record.processes] == sorted(pids)
    assert record.processes[0].gpus == ((uuid(0), 3 << 20),)
    assert [(gpu.uuid, gpu.memory_used) for gpu in record.gpus] == [(uuid(0), 6 << 20)]
    assert (record.host.runtime_name, record.host.runtime_version) == ("crun", "1.21")
    assert [step.name for step in record.timing] == [
        "inspect",
        "prepare",
        "lock",
        "driver checkpoint",
        "pages",
        "write",
        "write manifest",
        "files",
        "dump",
        "sync",
    ]
    assert sorted(scene.driver.of("lock")) == sorted(scene.driver.of("checkpoint")) == sorted(pids)
    assert scene.driver.of("restore") == scene.driver.of("unlock") == []


def test_volumes_of_an_earlier_checkpoint(scene: Scene) -> None:
    """Podman has all checkpoints of a container in one place: a restore would bring earlier files back."""
    scene.gpu_processes(1)
    scene.image.mkdir()
    (scene.image / volume_image.IMAGE).write_text("files of a container that continued")
    assert scene.checkpoint().code == 0
    assert not (scene.image / volume_image.IMAGE).exists()


def test_all_at_once(scene: Scene) -> None:
    """Every process is locked, and then every one is suspended, at the same time as the others."""
    pids = scene.gpu_processes(3)
    for operation in ("lock", "checkpoint"):
        together = threading.Barrier(3, timeout=DEADLINE)
        for pid in pids:
            scene.driver.when(operation, lambda _, together=together: together.wait(), pid)  # type: ignore[misc]
    assert scene.checkpoint().code == 0
    operations = [call.operation for call in scene.driver.calls if call.operation in ("lock", "checkpoint")]
    assert operations == ["lock"] * 3 + ["checkpoint"] * 3


def test_memory_is_claimed(scene: Scene) -> None:
    """For as long as it takes to fill: another one that looks meanwhile does not count on it."""
    (pid,) = scene.gpu_processes(1)
    claimed: list[int] = []
    used = sum(scene.driver.memory_used([pid])[pid].values())

    def look(_: int) -> None:
        claimed.append(reservations.read_reserved(scene.room)[reservations.RAM])

    scene.driver.when("checkpoint", look, pid)
    scene.checkpoint()
    assert claimed == [space.measure_in_processes({pid: used})]
    assert used > 0
    assert reservations.read_reserved(scene.room) == {}


@pytest.mark.parametrize("populated", [False, True])
def test_what_is_filled_is_claimed_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, populated: bool
) -> None:
    """The system no longer reports it as free, so a claim on it would count it twice.

    `populated`: the driver will write into files whose pages were made before.
    """
    pids = scene.gpu_processes(2)
    memory = dict.fromkeys(pids, 50 << 20)
    files = dict.fromkeys(pids, 0)
    need = space.measure_in_processes(
        {pid: sum(scene.driver.memory_used([pid])[pid].values()) for pid in pids}
    )

    def fill(pid: int) -> None:
        if populated:
            files[pid] = 100 << 20
            memory[pid] += 10 << 20
        else:
            memory[pid] += 100 << 20
        # Beside it, the GPU memory of one that is done is claimed already.
        wait_for(lambda: reservations.read_reserved(scene.room)[reservations.RAM] == need - (200 << 20), "it")

    monkeypatch.setattr(proc, "memory", lambda pid: memory.get(pid, 0))
    monkeypatch.setattr(Pages, "measure_populated", lambda _, pid: files[pid])
    for pid in pids:
        scene.driver.when("checkpoint", fill, pid)
    assert scene.checkpoint().code == 0
    assert reservations.read_reserved(scene.room) == {}


@pytest.mark.parametrize(
    ("options", "script", "ends"),
    [(["--leave-running"], "", 0), ([], "", 0), ([], "exit 3", 3)],
    ids=["runs on", "ends", "fails"],
)
def test_gpu_memory_is_reserved(scene: Scene, options: list[str], script: str, ends: int) -> None:
    """From when it is freed until the processes have it again, or have ended: others plan without it."""
    pids = scene.gpu_processes(2)
    wanted = scene.driver.memory_used(pids)
    at_dump, at_restore = scene.folder / "at-dump", set[int]()
    scene.runtime.script("checkpoint", f"cp -r {scene.room} {at_dump}\n{script}", default=not script)

    def is_kept(pid: int) -> None:
        [path] = Path(scene.room).glob(f"*.{pid}.json")
        assert json.loads(path.read_text())["bytes"] == wanted[pid]
        at_restore.add(pid)

    for pid in pids:
        scene.driver.when("restore", is_kept, pid)
    assert scene.checkpoint(*options).code == ends
    claims = [json.loads(path.read_text()) for path in at_dump.glob("*.json")]
    assert {each["pid"]: each["bytes"] for each in claims} == wanted
    assert {each["pid"]: each["start"] for each in claims} == {pid: proc.start_time(pid) for pid in pids}
    assert at_restore == (set(pids) if options or ends else set())
    assert os.listdir(scene.room) == []


def test_gpu_memory_stays_reserved(scene: Scene) -> None:
    """For a process that does not get it back, also when gpusnap has ended; `recover` tries again."""
    good, bad = scene.gpu_processes(2)
    scene.driver.fail("restore", bad, DriverFailed("the GPU fell off the bus"))
    assert scene.checkpoint("--leave-running").code != 0
    assert [name.split(".")[-2] for name in os.listdir(scene.room)] == [str(bad)]
    assert reservations.read_reserved(scene.room) == scene.driver.memory_used([bad])[bad]
    assert proc.is_running(good)


def test_leave_running(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes run on before anything is brought to disk, and before there is a manifest."""
    pids = scene.gpu_processes(2)
    seen: list[str] = []
    sync = checkpoint._sync
    final = scene.image / "gpusnap" / "manifest.json"

    def synced(job: CheckpointJob, *, but: Sequence[str]) -> None:
        assert scene.all_running()
        assert not final.exists()
        seen.append("sync")
        sync(job, but=but)

    scene.driver.when("restore", lambda _: seen.append(f"restore, manifest {final.exists()}"))
    monkeypatch.setattr(checkpoint, "_sync", synced)
    assert scene.checkpoint("--leave-running").code == 0
    assert seen == ["restore, manifest False", "sync"]
    assert all(proc.is_running(pid) for pid in pids)
    assert scene.all_running()
    assert [step.name for step in whole(scene).timing][-4:] == ["resume", "write", "files", "sync"]


@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])
def test_ranks_beside_others(scene: Scene, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    """They would run on beside another process, after the driver has restored them: refused, untouched."""
    scene.gpu_processes(2)
    monkeypatch.setattr(nccl, "is_job", lambda users: True)
    scene.driver.used[os.getpid()] = 1 << 20
    done = scene.checkpoint(*options)
    if not options:
        assert done.code == 0
        return
    assert done.sentence().endswith("or set nvidia.allow-nccl [GPS-219]")
    assert scene.driver.of("lock") == []
    assert scene.all_running()


def test_leave_running_and_resume_fails(scene: Scene) -> None:
    """The error says so, and that the checkpoint is whole; what can be resumed is."""
    broken, other = scene.gpu_processes(2)
    scene.driver.fail("restore", broken, DriverFailed("the GPU fell off the bus"))
    sentence = scene.checkpoint("--leave-running").sentence()
    assert "the GPU fell off the bus" in sentence
    assert f"the checkpoint in {scene.image} is complete; run gpusnap recover " in sentence
    assert scene.driver.states[other] is ProcessState.RUNNING
    assert scene.driver.of("restore").count(broken) > 1
    assert len(whole(scene).processes) == 2


def test_leave_running_and_resume_fails_for_a_moment(scene: Scene) -> None:
    """A restore that fails for a passing reason is tried again."""
    pids = scene.gpu_processes(2)
    scene.driver.fail("restore", pids[0], DriverFailed("another has the memory"), times=2)
    assert scene.checkpoint("--leave-running").code == 0
    assert scene.all_running()
    assert scene.driver.of("restore").count(pids[0]) == 3
    assert scene.driver.of("restore").count(pids[1]) == 1


def test_leave_running_and_somebody_takes_the_memory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is not asked to restore what has no room; the message says how the container continues."""
    monkeypatch.setattr(gpu_state, "_ROOM", 0.0)
    (pid,) = scene.gpu_processes(1)
    (free,) = scene.driver.gpus

    def take(_: int) -> None:
        scene.driver.gpus = (replace(free, memory_used=free.memory_total - (1 << 20)),)

    scene.driver.when("checkpoint", take, pid)
    sentence = scene.checkpoint("--leave-running").sentence()
    assert "GPU 0 has not enough free memory" in sentence
    assert "(1.0 MiB free, 83.0 MiB needed)" in sentence
    assert f"the checkpoint in {scene.image} is complete" in sentence
    assert scene.driver.of("restore") == []
    assert len(whole(scene).processes) == 1


def test_leave_running_with_two_failures(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the disk's failure nor the GPU's is kept from the user."""
    (pid,) = scene.gpu_processes(1)
    scene.driver.fail("restore", pid, DriverFailed("the GPU fell off the bus"))

    def full(path: str, *, but: Sequence[str]) -> None:
        raise ImageError("the disk is full")

    monkeypatch.setattr(checkpoint, "_sync", full)
    sentence = scene.checkpoint("--leave-running").sentence()
    assert "the disk is full" in sentence
    assert "the GPU fell off the bus" in sentence
    assert "is complete" not in sentence


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("can't start new thread"),
            "a thread cannot be started: can't start new thread;",
        ),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/proc/self/x"), "/proc/self/x: Input/output error"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])
def test_what_nobody_foresaw_after_the_dump(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], error: Exception, said: str
) -> None:
    """What has become of the container is said of every kind of error."""
    scene.gpu_processes(1)

    def failing(_: object, *, but: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "_sync", failing)
    sentence, code = split_code(scene.checkpoint(*options).sentence())
    assert sentence.startswith(said)
    assert code
    if options:
        assert sentence.endswith("; the container continues to run")
        assert scene.all_running()
    else:
        assert sentence.endswith("; the container is dumped: run gpusnap recover c0ffee to try again")


def test_no_sync_no_manifest(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that are not on disk are no checkpoint."""
    scene.gpu_processes(1)

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    scene.driver.when("restore", lambda _: monkeypatch.setattr(os, "fsync", failing))
    sentence = scene.checkpoint("--leave-running").sentence()
    monkeypatch.undo()
    assert "cannot be flushed to disk" in sentence
    assert scene.all_running()
    assert "gpusnap/manifest.json" not in scene.content()


@pytest.mark.skipif(not unshare_works("--pid", "--fork"), reason="making a PID namespace is not allowed here")
@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])
def test_pids_are_the_containers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    """The manifest has the PIDs that a restore brings back, also when the container is gone by then."""
    with Scene(tmp_path, monkeypatch, capfd, "unshare", "--pid", "--fork", "--kill-child") as scene:
        pids = scene.gpu_processes(2)
        inner = [found.ns_pids[-1] for pid in pids if (found := proc.process(pid))]
        assert scene.checkpoint(*options).code == 0
        assert [process.pid for process in whole(scene).processes] == inner
        assert not set(inner) & set(pids)


def test_what_the_runtime_gets(scene: Scene) -> None:
    """The caller's options, CRIU's configuration, and a log that is not the caller's."""
    scene.gpu_processes(1)
    scene.set(criu=replace(scene.settings.criu, manage_cgroups="ignore", options=("skip-in-flight",)))
    assert scene.checkpoint("--tcp-established").code == 0
    (line,) = scene.runtime.calls("checkpoint")
    assert "--tcp-established" in line.split()
    assert "--manage-cgroups-mode ignore" in line
    assert str(scene.log) not in line
    assert "skip-in-flight\n" in scene.runtime.criu_config()


def test_an_earlier_checkpoint_is_replaced(scene: Scene) -> None:
    """A checkpoint into the directory of an earlier one is whole, and is the new one."""
    earlier_checkpoint(scene)
    (pid,) = scene.gpu_processes(1)
    assert scene.checkpoint().code == 0
    assert [process.pid for process in drafts.read(str(scene.image)).processes] == [pid]
    assert (scene.image / "notes.txt").read_text("ascii") == "earlier notes.txt"


def test_warnings_are_passed_on(scene: Scene) -> None:
    """What the runtime warned of is said also after a success."""
    scene.gpu_processes(1)
    warn = """echo '{"msg":"careful","level":"warning"}' >>"$log" """
    scene.runtime.script("checkpoint", warn, default=True)
    outcome = scene.checkpoint()
    assert (outcome.code, outcome.stderr, outcome.log) == (0, "gpusnap: note: careful\n", ())


# It fails.

Prepare = Callable[[Scene, list[int], pytest.MonkeyPatch], object]


def no_inspect(scene: Scene, _pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    scene.driver.fail("open", None, DriverTooOld("the driver has no checkpoint API"))


def no_inventory(scene: Scene, _pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    scene.driver.fail("host", None, DriverFailed("the driver has no inventory"))


def no_bundle(scene: Scene, _pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    (scene.bundle / "config.json").unlink()


def no_option(scene: Scene, _pids: list[int], patch: pytest.MonkeyPatch) -> None:
    scene.set(criu=replace(scene.settings.criu, manage_cgroups="ignore"))
    from gpusnap.runtime_shim.runtime.identify import parse_version
    from gpusnap.runtime_shim.shim import dispatch

    real = parse_version(scene.runtime.path, "runc version 1.1.15")
    patch.setattr(dispatch, "identify", lambda _: real)


def suspended(scene: Scene, pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    scene.driver.idle[scene.family.spawn()] = ("/dev/nvidia0",)
    _patch.setattr(preflight, "_STARTING", 0.0)


def no_folder(scene: Scene, _pids: list[int], patch: pytest.MonkeyPatch) -> None:
    write = drafts._write

    def refusing(path: str, data: bytes) -> None:
        if not data:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        write(path, data)

    patch.setattr(drafts, "_write", refusing)


def no_memory(_scene: Scene, _pids: list[int], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(space, "_measure_available", lambda: 1 << 20)


def memory_for_another(_scene: Scene, _pids: list[int], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reservations, "_read_others", lambda *_, **__: {reservations.RAM: 1 << 60})


def no_lock(scene: Scene, pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    scene.set(nvidia=Nvidia(lock_timeout=0.3))
    scene.driver.fail("lock", pids[1], LockTimeout("it is busy"))


def no_checkpoint(scene: Scene, pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    scene.driver.fail("checkpoint", pids[1], NotSupported(MANAGED))


def dies(scene: Scene, pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    scene.driver.when("checkpoint", lambda pid: scene.family.end(pid), pids[1])


def dies_after(scene: Scene, _pids: list[int], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pages, "take_out", lambda _, pids: scene.family.end(pids[0]))


def late_and_no_lock(scene: Scene, pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    def start(_: int) -> None:
        late = scene.driver.use(scene.family.spawn())
        scene.driver.fail("lock", late, LockTimeout("the late one's work did not stop"))

    scene.driver.when("checkpoint", start, pids[0])


def late_again_and_again(scene: Scene, pids: list[int], _patch: pytest.MonkeyPatch) -> None:
    def start(_: int) -> None:
        scene.driver.when("checkpoint", start, scene.driver.use(scene.family.spawn()))

    scene.driver.when("checkpoint", start, pids[0])


def no_room_for_manifest(_scene: Scene, _pids: list[int], patch: pytest.MonkeyPatch) -> None:
    write = drafts._write

    def full(path: str, data: bytes) -> None:
        if data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write(path, data)

    patch.setattr(drafts, "_write", full)


BEFORE_THE_DUMP: dict[str, tuple[Prepare, str]] = {
    "driver too old": (no_inspect, "the driver has no checkpoint API"),
    "no inventory of GPUs": (no_inventory, "the driver has no inventory"),
    "no config.json": (no_bundle, "config.json cannot be read: it does not exist"),
    "an option that the runtime lacks": (no_option, "does not support --manage-cgroups-mode ignore"),
    "a leftover handle": (suspended, "no CUDA state of its own"),
    "folder not writable": (no_folder, "gpusnap cannot be written: access is refused"),
    "no memory": (no_memory, "of GPU memory must move to RAM"),
    "memory for another": (memory_for_another, "this host leaves only 0 B"),
    "lock of one": (no_lock, "its GPU work did not stop within 0.3 s"),
    "driver checkpoint of one": (no_checkpoint, MANAGED),
    "a process dies in the driver": (dies, "has ended"),
    "a process dies after it": (dies_after, "exited before it could be dumped"),
    "lock of a late starter": (late_and_no_lock, "the late one's work did not stop"),
    "always another late starter": (late_again_and_again, "keep starting to use a GPU"),
    "no room for the manifest": (no_room_for_manifest, "manifest.pending cannot be written: No space left"),
}


@pytest.mark.parametrize("name", BEFORE_THE_DUMP)
def test_failure_before_the_dump(scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One sentence; every process runs on; the image directory, an earlier checkpoint in it, is as it was."""
    before = earlier_checkpoint(scene)
    prepare, said = BEFORE_THE_DUMP[name]
    pids = scene.gpu_processes(3)
    prepare(scene, pids, monkeypatch)
    assert said in scene.checkpoint().sentence()
    assert scene.all_running()
    assert any(proc.is_running(pid) for pid in pids)
    assert scene.content() == before
    assert scene.runtime.calls("checkpoint") == []


@pytest.mark.parametrize("name", BEFORE_THE_DUMP)
def test_failure_before_the_dump_in_a_new_place(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing is left in a directory that held nothing."""
    pids = scene.gpu_processes(3)
    BEFORE_THE_DUMP[name][0](scene, pids, monkeypatch)
    scene.checkpoint().sentence()
    assert not scene.image.exists() or list(scene.image.iterdir()) == []


def test_the_image_path_is_a_file(scene: Scene) -> None:
    """A path that cannot be a directory is refused before any process is touched."""
    scene.gpu_processes(1)
    scene.image.touch()
    assert f"directory {scene.image} cannot be used" in scene.checkpoint().sentence()
    assert scene.driver.of("lock") == []


def test_an_option_of_another_runtime(scene: Scene) -> None:
    """What the caller asks for and this runtime lacks is refused before anything is overwritten."""
    before = earlier_checkpoint(scene)
    scene.gpu_processes(1)
    assert "crun 1.21 takes no --empty-ns" in scene.checkpoint("--empty-ns", "network").sentence()
    assert scene.driver.of("lock") == []
    assert scene.content() == before


def test_paused(scene: Scene) -> None:
    """A paused container is refused before any process is touched."""
    scene.gpu_processes(1)
    assert "is paused" in scene.checkpoint(status="paused").sentence()
    assert scene.driver.of("lock") == []
    assert not scene.image.exists()


def test_suspended_already(scene: Scene) -> None:
    """What somebody else has suspended is refused and left as it is."""
    (pid,) = scene.gpu_processes(1)
    scene.driver.states[pid] = ProcessState.CHECKPOINTED
    sentence = scene.checkpoint().sentence()
    assert f"process {pid} (" in sentence
    assert "is already checkpointed" in sentence
    assert scene.driver.states[pid] is ProcessState.CHECKPOINTED


def unstartable(scene: Scene) -> None:
    scene.driver.when("checkpoint", lambda _: scene.runtime.path.chmod(0o644))


FAIL = """echo new >"$image/pages-1.img"; echo new >"$image/core-1.img"; echo log >"$work/dump.log"
echo '(00.1) Error (criu/x.c:1): open x: Permission denied' >>"$work/dump.log"; """
DUMP: dict[str, tuple[Callable[[Scene], object], str, int]] = {
    "runtime": (
        lambda scene: scene.runtime.script("checkpoint", FAIL + 'say "CRIU dumping failed"; exit 3'),
        "crun 1.21 could not dump container c0ffee: CRIU dumping failed; CRIU says: open x: access is",
        3,
    ),
    "runtime killed": (
        lambda scene: scene.runtime.script("checkpoint", FAIL + "kill -9 $$"),
        "could not dump container c0ffee: CRIU says",
        137,
    ),
    "no inventory.img": (
        lambda scene: scene.runtime.script("checkpoint", FAIL + 'rm -f "$image/inventory.img"'),
        "reported success, but wrote no inventory.img",
        1,
    ),
    "runtime cannot be started": (unstartable, "cannot be started: access is refused", 127),
}


@pytest.mark.parametrize("name", DUMP)
def test_failure_of_the_dump(scene: Scene, name: str) -> None:
    """Every process runs on; no image of the failed dump and no manifest remains, other files and logs do."""
    earlier_checkpoint(scene)
    pids = scene.gpu_processes(2)
    work = scene.folder / "work"
    work.mkdir()
    prepare, said, code = DUMP[name]
    prepare(scene)
    outcome = scene.checkpoint("--work-path", str(work))
    assert said in outcome.sentence()
    assert outcome.code == code
    assert scene.all_running()
    assert all(proc.is_running(pid) for pid in pids)
    # What this dump did not write may be somebody's; without inventory.img it is no checkpoint.
    kept = {"pages-1.img"} if name == "runtime cannot be started" else set()
    assert set(scene.content()) == {"notes.txt", "dump.log"} | kept
    assert scene.runtime.criu_config() if name != "runtime cannot be started" else True


def test_a_runtime_was_killed_and_its_criu_works_on(scene: Scene) -> None:
    """Nothing is undone before CRIU has ended: it holds the processes, and may freeze them again."""
    scene.gpu_processes(1)
    criu = '(sleep 2; touch "$here/criu-has-ended") >/dev/null 2>&1 &'
    scene.runtime.script("checkpoint", f"{criu} kill -9 $$")
    outcome = scene.checkpoint()
    assert outcome.code == 137
    assert (scene.runtime.folder / "criu-has-ended").exists()
    assert scene.all_running()


def test_runtime_that_fails_after_the_dump(scene: Scene) -> None:
    """The container is gone and its images are all that is left: they are kept, as a whole checkpoint."""
    (pid,) = scene.gpu_processes(1)
    script = """echo pages >"$image/pages-1.img"; echo inventory >"$image/inventory.img"
        kill -9 $(cat "$here/pids"); say "cannot remove the cgroup"; exit 1"""
    scene.runtime.script("checkpoint", script)
    outcome = scene.checkpoint()
    assert outcome.code == 0
    assert "cannot remove the cgroup, but only after the dump" in outcome.stderr
    wait_for(lambda: not proc.is_running(pid), "the end of the container")
    assert [process.pid for process in whole(scene).processes] == [pid]


def test_container_killed_during_the_dump(scene: Scene) -> None:
    """Without CRIU's last file there is no checkpoint, also where an earlier one lay in the same place."""
    earlier_checkpoint(scene)
    scene.gpu_processes(1)
    script = (
        'echo pages >"$image/pages-1.img"; kill -9 $(cat "$here/pids"); say "CRIU dumping failed"; exit 1'
    )
    scene.runtime.script("checkpoint", script)
    outcome = scene.checkpoint()
    assert outcome.code == 1
    assert "could not dump" in outcome.stderr
    assert not [name for name in scene.content() if name.endswith((".img", "manifest.json"))]


def test_undo_in_reverse(scene: Scene) -> None:
    """First the processes get their GPUs back, all at once, then the image goes."""
    pids = scene.gpu_processes(2)
    seen: list[bool] = []
    pending = scene.image / "gpusnap" / "manifest.pending"
    together = threading.Barrier(2, timeout=DEADLINE)
    for pid in pids:
        scene.driver.when("restore", lambda _: together.wait(), pid)
    scene.driver.when("unlock", lambda _: seen.append(pending.exists()))
    late = scene.driver.use(scene.family.spawn())
    scene.driver.fail("checkpoint", late, NotSupported(MANAGED))
    scene.checkpoint().sentence()
    assert seen == [True]
    assert not pending.exists()
    assert sorted(scene.driver.of("unlock")) == sorted([*pids, late])
    assert scene.all_running()


def test_undo_that_the_driver_refuses(scene: Scene) -> None:
    """Where the driver cannot resume a process the sentence says so, and the others run on."""
    pids = scene.gpu_processes(3)
    scene.driver.fail("checkpoint", pids[0], NotSupported(MANAGED))
    scene.driver.fail("restore", pids[1], DriverFailed("the GPU fell off the bus"))
    sentence = scene.checkpoint().sentence()
    assert sentence.startswith(MANAGED)
    assert "while undoing, resuming the GPU processes failed: the GPU fell off the bus" in sentence
    assert [scene.driver.states[pid].name for pid in pids] == ["RUNNING", "CHECKPOINTED", "RUNNING"]


@pytest.mark.parametrize(
    ("asleep", "paused", "said"),
    [
        (None, None, "nothing of this checkpoint is left, and the container continues to run"),
        (
            SimpleNamespace(),
            SimpleNamespace(),
            "nothing of this checkpoint is left, and the container stays suspended",
        ),
        (None, SimpleNamespace(), ""),
    ],
)
def test_what_became_of_the_container(asleep: object, paused: object, said: str) -> None:
    """One that was suspended stays so, and is not said to run; of one still paused nothing is said."""
    me = proc.process(os.getpid())
    job: Any = SimpleNamespace(asleep=asleep, paused=paused, init=me, transaction=Transaction())
    with pytest.raises(ImageError) as caught, checkpoint._name_whole_failure(job):
        raise ImageError("the disk is full")
    assert caught.value.hint == said


def test_a_suspended_container_is_not_said_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when its dump fails, nor when its image cannot be finished, nor in the progress."""
    suspended: Any = SimpleNamespace(name="w", processes=())
    resumed: list[int] = []
    monkeypatch.setattr(progress.reporter, "note_resumed", lambda: resumed.append(1))
    job: Any = SimpleNamespace(
        asleep=suspended,
        real=SimpleNamespace(name="crun"),
        container=SimpleNamespace(id="c0ffee"),
        call=SimpleNamespace(work=lambda: "/work"),
        runs_on=True,
        remover=None,
        image_path="/image",
        record=object(),
    )
    done: Any = SimpleNamespace(explain=lambda _: "no", code=1)
    assert checkpoint._dump_error(job, done).hint == "the container stays suspended"
    monkeypatch.setattr(checkpoint, "_write", lambda _: (_ for _ in ()).throw(ImageError("the disk is full")))
    monkeypatch.setattr(checkpoint, "_discard", lambda _: None)
    job.pages = SimpleNamespace(record_places=lambda _: None)
    with pytest.raises(ImageError) as caught:
        checkpoint._finish_image(job, Draft("/image"))
    assert caught.value.hint == "the container stays suspended"
    assert resumed == []


def test_no_false_promise(scene: Scene) -> None:
    """A failed dump whose undo fails does not say that the container runs on."""
    (pid,) = scene.gpu_processes(1)
    scene.driver.fail("restore", pid, DriverFailed("the GPU fell off the bus"))
    scene.runtime.script("checkpoint", 'say "no"; exit 1')
    assert "continues to run" not in scene.checkpoint().sentence()


def test_a_state_that_cannot_be_read(scene: Scene) -> None:
    """One process about which the driver says nothing does not keep the others suspended."""
    first, second = sorted(scene.gpu_processes(2))

    def start(_: int) -> None:
        scene.driver.fail("state", first, DriverFailed("no answer"))

    scene.driver.when("checkpoint", start, second)
    scene.driver.fail("checkpoint", first, NotSupported(MANAGED))
    scene.checkpoint().sentence()
    assert scene.driver.states[second] is ProcessState.RUNNING


# Processes that start to use a GPU meanwhile.


def test_a_late_starter(scene: Scene) -> None:
    """A process that starts CUDA between lock and dump is suspended in a second round."""
    (pid,) = scene.gpu_processes(1)
    late: list[int] = []
    scene.driver.when("checkpoint", lambda _: late.append(scene.driver.use(scene.family.spawn())))
    assert scene.checkpoint().code == 0
    assert scene.driver.of("lock") == [pid, *late]
    assert len(whole(scene).processes) == 2


def test_one_that_exec_starts_meanwhile(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dump would leave it out, and every restore miss it: refused, as before the first lock."""
    pid = scene.driver.use(scene.family.spawn())
    late: list[int] = []
    scene.driver.when("checkpoint", lambda _: late.append(scene.driver.use(scene.family.spawn())))
    descends = containers.is_descendant
    monkeypatch.setattr(
        containers, "is_descendant", lambda pid, init: pid not in late and descends(pid, init)
    )
    sentence = scene.checkpoint().sentence()
    assert f"GPU process {late[0]} (sleep) is not a descendant of the init" in sentence
    assert scene.driver.of("lock") == [pid]
    assert scene.runtime.calls("checkpoint") == []
    assert scene.all_running()


def test_an_exec_session_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU it is left out, and the user is told before anything is done."""
    scene.gpu_processes(1)
    session = scene.family.spawn()
    descends = containers.is_descendant
    monkeypatch.setattr(containers, "is_descendant", lambda pid, init: pid != session and descends(pid, init))
    outcome = scene.checkpoint()
    assert outcome.code == 0
    assert outcome.stderr == (
        "gpusnap: note: processes that exec started in the container are not in its checkpoint: process "
        f"{session} (sleep) [GPS-212]\n"
    )


def test_no_retries(scene: Scene) -> None:
    """With retries = 0 a container whose processes keep to themselves is checkpointed all the same."""
    scene.set(retries=0)
    scene.gpu_processes(2)
    assert scene.checkpoint().code == 0


def starts_during_the_dump(scene: Scene, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """So many dumps fail, each because another process began to use a GPU."""
    late: list[int] = []

    def invoked(*arguments: Any, **named: Any) -> Any:
        if len(late) < times:
            late.append(scene.driver.use(scene.family.spawn()))
            (scene.runtime.folder / "busy").touch()
            pids = [*scene.family.pids, scene.family.init]
            scene.runtime.knows(scene.state(), pids)
        return invoke(*arguments, **named)

    monkeypatch.setattr(checkpoint, "invoke", invoked)
    busy = (
        """if [ -e "$here/busy" ]; then rm "$here/busy"; echo x >"$image/core-9.img"; say busy; exit 1; fi"""
    )
    scene.runtime.script("checkpoint", busy, default=True)
    return late


def test_a_dump_is_tried_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump that failed because a process began to use a GPU: that one is suspended too, and again."""
    scene.gpu_processes(1)
    late = starts_during_the_dump(scene, monkeypatch, 2)
    assert scene.checkpoint().code == 0
    assert len(late) == 2
    assert len(scene.runtime.calls("checkpoint")) == 3
    assert len(whole(scene).processes) == 3


def test_a_dump_is_not_tried_for_ever(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `retries` more dumps it is given up, and everything runs on."""
    scene.set(retries=2)
    scene.gpu_processes(1)
    starts_during_the_dump(scene, monkeypatch, 100)
    assert "keep starting to use a GPU" in scene.checkpoint().sentence()
    assert len(scene.runtime.calls("checkpoint")) == 3
    assert scene.all_running()
    assert scene.content() == {}


def test_a_dump_that_fails_by_itself_is_not_tried_again(scene: Scene) -> None:
    """Without a newcomer there is no reason to try again."""
    scene.gpu_processes(1)
    scene.runtime.script("checkpoint", 'say "no"; exit 1')
    scene.checkpoint().sentence()
    assert len(scene.runtime.calls("checkpoint")) == 1


# Signals.


def in_prepare(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    begin = Draft.begin

    def began(draft: Draft) -> None:
        begin(draft)
        stop()

    patch.setattr(Draft, "begin", began)


SIGNALS: dict[str, Callable[[Scene, pytest.MonkeyPatch], object]] = {
    "inspect": lambda _, patch: patch.setattr(preflight, "check_criu_library", lambda *_: stop()),
    "prepare": in_prepare,
    "lock": lambda scene, _: scene.driver.when("lock", stop),
    "driver checkpoint": lambda scene, _: scene.driver.when("checkpoint", stop),
    "pages": lambda _, patch: patch.setattr(Pages, "take_out", lambda *_: stop()),
}


@pytest.mark.parametrize("step", SIGNALS)
def test_a_signal_before_the_dump(scene: Scene, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """SIGTERM at any step before the dump undoes everything."""
    before = earlier_checkpoint(scene)
    scene.gpu_processes(2)
    SIGNALS[step](scene, monkeypatch)
    sentence = scene.checkpoint().sentence()
    assert sentence == "stopped by SIGTERM; the container was left in its original state"
    assert scene.all_running()
    assert scene.content() == before
    assert scene.runtime.calls("checkpoint") == []


def test_a_signal_while_it_is_undone(scene: Scene) -> None:
    """A second signal does not break into the undoing."""
    pids = scene.gpu_processes(2)
    scene.driver.when("lock", stop, pids[0])
    scene.driver.when("unlock", stop, pids[1])
    assert "stopped by SIGTERM" in scene.checkpoint().sentence()
    assert scene.all_running()


def test_a_signal_during_a_dump_that_fails(scene: Scene) -> None:
    """SIGTERM while CRIU dumps waits for its end, and then everything is undone."""
    scene.gpu_processes(2)
    scene.runtime.script("checkpoint", 'kill -TERM $PPID; echo x >"$image/core-1.img"; say "no"; exit 1')
    assert "stopped by SIGTERM" in scene.checkpoint().sentence()
    assert scene.all_running()
    assert scene.content() == {}


@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])
@pytest.mark.parametrize("at", ["write manifest", "dump", "resume", "sync"])
def test_a_signal_when_there_is_no_way_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], at: str
) -> None:
    """SIGTERM from the moment on at which the dump replaces the container: the checkpoint becomes whole."""
    scene.gpu_processes(2)
    if at == "write manifest":
        write = checkpoint._manifest
        monkeypatch.setattr(checkpoint, "_manifest", lambda job: (stop(), write(job))[1])  # type: ignore[func-returns-value]
    elif at == "dump":
        scene.runtime.script("checkpoint", "kill -TERM $PPID", default=True)
    elif at == "resume":
        scene.driver.when("restore", stop)
    else:
        sync = checkpoint._sync
        monkeypatch.setattr(checkpoint, "_sync", lambda path, **but: (stop(), sync(path, **but))[1])  # type: ignore[func-returns-value]
    assert scene.checkpoint(*options).code == 0
    assert scene.all_running()
    assert len(whole(scene).processes) == 2


# Not ours.


def handed_over(scene: Scene) -> None:
    with pytest.raises(HandedOverMemory, match="handed over"):
        scene.checkpoint()
    assert not scene.image.exists()
    assert scene.driver.of("lock") == []


def test_without_a_driver(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host without a GPU the real runtime does it."""
    from gpusnap.runtime_shim.shim import dispatch

    monkeypatch.setattr(dispatch, "find_driver", lambda: None)
    # Of a checkpoint that left it running, when the host had a driver.
    link = scene.image.parent / dev_shm.LINK[0]
    link.symlink_to(dev_shm.LINK[1])
    handed_over(scene)
    assert not link.is_symlink()


@pytest.mark.parametrize("source", ["/dev/shm", "shm"])
def test_without_a_gpu_process(scene: Scene, source: str) -> None:
    """A container without a GPU is the real runtime's; but Podman keeps no /dev/shm of others."""
    scene.family.spawn()
    source = os.path.join(scene.bundle, source)
    mount = {"destination": "/dev/shm", "source": source, "options": ["bind"]}
    config = {"annotations": {"io.container.manager": "libpod"}, "mounts": [mount]}
    (scene.bundle / "config.json").write_text(json.dumps(config))
    handed_over(scene)
    assert (scene.bundle / dev_shm.LINK[0]).is_symlink() == (source == "/dev/shm")


def test_a_neighbour_with_a_gpu(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without a GPU does not take one with it whose process uses one."""
    monkeypatch.setattr(preflight, "_STARTING", 0.1)
    with Family() as other:
        found = proc.process(other.init)
        assert found is not None
        monkeypatch.setattr(containers, "list_beside", lambda init, container_id: (found,))
        handed_over(scene)
        scene.driver.use(other.init)
        outcome = scene.checkpoint()
        assert f"process {other.init} (sh) of another container" in outcome.sentence()
        with pytest.raises(HandedOverMemory, match="handed over"):
            scene.checkpoint("--leave-running")


def test_an_unknown_container(scene: Scene) -> None:
    """A container that nobody knows is the real runtime's to complain of, in the caller's log, once."""
    with pytest.raises(HandedOverMemory, match="handed over"):
        scene._run("checkpoint", "none")
    assert not scene.log.exists()


def test_a_bad_annotation(scene: Scene) -> None:
    """A container's own settings are checked before anything is done."""
    scene.gpu_processes(1)
    annotations = {"io.gpusnap.retries": "many"}
    assert "io.gpusnap.retries" in scene.checkpoint(annotations=annotations).sentence()
    assert scene.driver.of("lock") == []


def test_an_annotation_reaches_the_driver(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock's deadline comes from the container's annotation."""
    scene.gpu_processes(1)
    seen: list[float] = []
    lock = scene.driver.lock

    def locked(pid: int, *, timeout: float) -> None:
        seen.append(timeout)
        lock(pid, timeout=timeout)

    monkeypatch.setattr(scene.driver, "lock", locked)
    assert scene.checkpoint(annotations={"io.gpusnap.nvidia.lock-timeout": "2.5"}).code == 0
    assert seen == [2.5]


def test_a_long_command_line(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """More arguments than the manifest takes are no reason to refuse."""
    scene.gpu_processes(1)
    monkeypatch.setattr(proc, "command", lambda pid: ("a",) * 10_000)
    assert scene.checkpoint().code == 0
    assert len(whole(scene).processes[0].command) == 4096


def test_an_oserror_of_ours(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system that no module has worded is a sentence all the same, and undone."""
    scene.gpu_processes(1)

    def failing(_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/odd")

    monkeypatch.setattr(checkpoint, "_manifest", failing)
    assert scene.checkpoint().sentence().startswith("/odd: it does not exist")
    assert scene.all_running()
    assert scene.content() == {}


def test_the_fakes_leave_nothing() -> None:
    """A family's processes end with it: what these tests start does not stay."""
    with Family() as family:
        pids = [family.init, family.spawn()]
        assert all(proc.is_running(pid) for pid in pids)
    assert not any(proc.is_running(pid) for pid in pids)


def test_memory_that_is_shared_since_it_was_looked_at(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for again when all stand, in every process: none of it has been taken, and they run on."""
    pids = scene.gpu_processes(2)
    looked: list[tuple[list[int], bool]] = []

    def sharing(users: Sequence[proc.Process], version: str) -> Sharing | None:
        looked.append((sorted(user.pid for user in users), all(proc.is_still(user.pid) for user in users)))
        return Sharing(users[1], "is a rank of a job", "run it alone", "GPS-214") if len(looked) > 1 else None

    monkeypatch.setattr(preflight, "find_sharing", sharing)
    done = scene.checkpoint()
    assert "is a rank of a job; run it alone" in done.sentence()
    assert looked == [(sorted(pids), False), (sorted(pids), True)]
    assert scene.driver.of("checkpoint") == []
    assert scene.all_running()


@pytest.mark.parametrize("ends", [False, True])
def test_podman_is_killed_before_the_dump(scene: Scene, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Nobody would export it, and one with --rm would be removed with its checkpoint: it runs on."""
    (pid,) = scene.gpu_processes(1)
    real, parents = proc.comm, iter([77])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1 if ends else 77))
    monkeypatch.setattr(proc, "comm", lambda each: "podman" if each == 77 else real(each))
    done = scene.checkpoint()
    assert (done.code != 0) is ends
    if ends:
        assert "Podman ended before the container was dumped" in done.sentence()
        assert proc.is_running(pid)
        assert scene.all_running()


@pytest.mark.parametrize(
    ("words", "options", "removed", "refused"),
    [
        ("podman --log-level=info system service", (), "TRUE", True),
        ("podman --runtime crun system service --time 0 unix:///run/a.sock", (), "TRUE", True),
        ("podman system service", ("--leave-running",), "TRUE", False),
        ("podman system service", (), None, False),
        ("podman container checkpoint --export a.tar service", (), "TRUE", False),
    ],
)
@pytest.mark.parametrize("script", [False, True])
def test_removed_by_the_api_service(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    options: tuple[str, ...],
    removed: str | None,
    refused: bool,
    script: bool,
) -> None:
    """Podman's service keeps no copy of a container that Podman removes when it ends: it is not touched."""
    (pid,) = scene.gpu_processes(1)
    comm, command = proc.comm, proc.command
    ancestors = [75, 77, 78] if script else [77, 78]
    monkeypatch.setattr(proc, "list_ancestors", lambda each: ancestors)
    monkeypatch.setattr(
        proc, "comm", lambda each: {75: "sh", 77: "podman", 78: "podman"}.get(each) or comm(each)
    )
    above = ("podman", "system", "service") if not refused else ("podman",)
    lines = {77: tuple(words.split()), 78: above}
    monkeypatch.setattr(proc, "command", lambda each: lines.get(each) or command(each))
    annotations = {"io.podman.annotations.autoremove": removed} if removed else {}
    done = scene.checkpoint(*options, annotations=annotations)
    assert (done.code != 0) is refused
    if refused:
        assert "Podman's API service keeps no copy" in done.sentence()
        assert "GPS-220" in done.sentence()
        assert scene.driver.of("lock") == []
        assert proc.is_running(pid)
        assert scene.all_running()


@pytest.mark.parametrize(
    "caller", ["podman", "docker", "script", "init", "reaper", "shell", "service", "somebody"]
)
def test_podman_is_killed_before_anybody_looks(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caller: str
) -> None:
    """Its container and its directory say whose checkpoint it is: the container is not touched.

    Somebody may give the same command in a shell, which is in the same session as what it starts.
    """
    (pid,) = scene.gpu_processes(1)
    parent = 1 if caller in ("init", "service") else 77
    if caller != "somebody":
        scene.image = scene.bundle / "checkpoint"
    real, programs = proc.comm, {"podman": "podman", "docker": "docker"}
    readlink = os.readlink
    monkeypatch.setattr(proc, "list_ancestors", lambda each: [76] if caller == "script" else [])
    monkeypatch.setattr(conmon, "podman_of", lambda words, container: ("/usr/bin/podman",))
    monkeypatch.setattr(os, "getppid", lambda: parent)
    own = os.getpid() if caller == "service" else 71  # systemd starts it in a session of its own
    monkeypatch.setattr(os, "getsid", lambda each: 70 if each == parent and caller == "reaper" else own)
    comms = {76: "podman", parent: programs.get(caller, caller)}
    monkeypatch.setattr(proc, "comm", lambda each: comms.get(each) or real(each))
    # A link to Podman's program, as podman-docker has it.
    monkeypatch.setattr(
        os,
        "readlink",
        lambda path, **more: (
            f"/usr/bin/{'podman' if caller == 'docker' else caller}"
            if path == f"/proc/{parent}/exe"
            else readlink(path, **more)
        ),
    )
    done = scene.checkpoint()
    assert (done.code != 0) is (caller in ("init", "reaper"))
    if done.code:
        assert "Podman ended before the container was dumped" in done.sentence()
        assert scene.driver.of("lock") == []
        assert proc.is_running(pid)
        assert scene.all_running()
