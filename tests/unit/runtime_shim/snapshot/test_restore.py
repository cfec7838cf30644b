"""A restore: refused before anything is done, or done whole, or taken back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from criu_images import CORE, INVENTORY, PAGE, pagemap
from fakes import ID, KEY, HandedOverMemory, Scene, a_manifest, gpu, uuid, wait_for

from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.gpu.api.driver import Node, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import DriverFailed
from gpusnap.runtime_shim.gpu.api.gpu_map import GPU_MAP
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.records.manifest import DriverMount, Manifest, RegionRecord
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.shim import dispatch
from gpusnap.runtime_shim.snapshot import restore
from gpusnap.runtime_shim.snapshot.gpu_processes import gpu_state
from gpusnap.runtime_shim.snapshot.loading.demand_paging import WaitTotals
from gpusnap.runtime_shim.snapshot.loading.source import BlobSource
from gpusnap.runtime_shim.snapshot.memory import bulk_copy
from gpusnap.runtime_shim.snapshot.memory.bulk_copy import CopyTotals
from gpusnap.runtime_shim.snapshot.records import journal, reservations
from gpusnap.runtime_shim.snapshot.restoring import gpus as restore_gpus
from gpusnap.runtime_shim.snapshot.restoring import plan as restore_plan
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.restoring.job import RestoreJob
from gpusnap.runtime_shim.snapshot.restoring.place import Place

CHECKPOINTED = ProcessState.CHECKPOINTED


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Scene]:
    with Scene(tmp_path, monkeypatch, capfd) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    def ours() -> int:  # without those that stay, once a test has used them
        staying = ("copies", "gpusnap-question")
        return sum(not thread.name.startswith(staying) for thread in threading.enumerate())

    before = ours()
    yield
    wait_for(lambda: ours() <= before, "the end of every thread")


def image(scene: Scene, record: Manifest) -> None:
    scene.image.mkdir()
    draft = Draft(str(scene.image))
    draft.begin()
    draft.prepare(record)
    draft.finish(record)
    (scene.image / "inventory.img").write_bytes(INVENTORY)


def suspended(scene: Scene, count: int = 2) -> list[int]:
    """An image of so many GPU processes, which are what the runtime brings back."""
    pids = [scene.driver.use(scene.family.spawn(), state=CHECKPOINTED) for _ in range(count)]
    image(scene, a_manifest(pids=pids))
    return pids


def refused(scene: Scene, *options: str) -> str:
    """The sentence of a restore that was refused before the runtime was asked for it."""
    sentence = scene.restore("--detach", *options).sentence()
    assert scene.runtime.calls("restore") == []
    assert scene.runtime.calls("delete") == []
    assert scene.driver.of("restore") == []
    return sentence


# It works.


def test_detached(scene: Scene) -> None:
    """The processes come back, all at once, and the caller's options reach the runtime."""
    pids = suspended(scene)
    together = threading.Barrier(2, timeout=60)
    for pid in pids:
        scene.driver.when("restore", lambda _: together.wait(), pid)
    outcome = scene.restore("--detach", "--tcp-established")
    assert (outcome.code, outcome.stderr, outcome.log) == (0, "", ())
    assert scene.all_running()
    (line,) = scene.runtime.calls("restore")
    assert {"--detach", "--tcp-established"} <= set(line.split())
    assert str(scene.log) not in line
    assert scene.runtime.calls("delete") == []


@pytest.mark.parametrize("code", [0, 3])
def test_in_the_foreground(scene: Scene, code: int) -> None:
    """Without --detach the GPUs come back while the runtime stays, and its exit code is the container's."""
    suspended(scene)
    (scene.runtime.folder / "held").touch()
    hold = """while [ -e "$here/held" ]; do read -r _ <"$here/gate"; done; exit """
    os.mkfifo(scene.runtime.folder / "gate")
    scene.runtime.script(
        "restore", f'cp "$here/restored.json" "$here/state.json"; cat "$here/pid" >"$pid_file"; {hold}{code}'
    )

    def release(_: int) -> None:
        (scene.runtime.folder / "held").unlink()
        threading.Thread(target=(scene.runtime.folder / "gate").write_text, args=("\n", "ascii")).start()

    scene.driver.when("unlock", release)
    outcome = scene.restore()
    assert (outcome.code, outcome.stderr, outcome.log) == (code, "", ())
    assert scene.all_running()
    assert scene.runtime.calls("delete") == []


def test_an_old_pid_file(scene: Scene) -> None:
    """A PID file of an earlier run does not say that the container is back already."""
    suspended(scene)
    path = scene.folder / "pid"
    path.write_text("1", "ascii")
    scene.runtime.script("restore", '[ ! -e "$pid_file" ] || touch "$here/old"; say "no"; exit 5')
    assert scene.restore("--pid-file", str(path)).code == 5
    assert not (scene.runtime.folder / "old").exists()


class Bulk:
    """Stands in for BulkCopy."""

    def __init__(self, error: GpusnapError | None = None, wrong: GpusnapError | None = None) -> None:
        self.error, self.wrong, self.totals = error, wrong, CopyTotals(7, 1, 0.5)
        self.closed = False

    def offer(self) -> tuple[str, dict[str, str]]:
        return "/launcher", {"GPUSNAP_GATE": "/gate"}

    def check(self) -> None:
        if self.wrong is not None:
            raise self.wrong

    def close(self) -> None:
        self.closed = True


def bulk_of(monkeypatch: pytest.MonkeyPatch, bulk: Bulk) -> Bulk:
    monkeypatch.setattr(bulk_copy, "begin", lambda *_, **__: bulk)
    return bulk


def test_criu_asks_gpusnap(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what to run at its stages, and whom that asks; the timing says what was written."""
    suspended(scene)
    bulk = bulk_of(monkeypatch, Bulk())
    assert scene.restore("--detach").code == 0
    assert "action-script /launcher\n" in scene.runtime.criu_config()
    timing = json.loads((scene.image / restore.TIMING).read_text())
    assert timing["copied"] == {"bytes": 7, "processes": 1, "seconds": 0.5}
    assert bulk.closed


def test_memory_that_cannot_be_written(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU fails then, and the restore says why."""
    suspended(scene)
    bulk = bulk_of(monkeypatch, Bulk(GpusnapError("no room", code="GPS-523")))
    scene.runtime.script("restore", "exit 1")
    assert "no room [GPS-523]" in scene.restore("--detach").sentence()
    assert bulk.closed


def test_memory_that_was_not_written(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CRIU that has not asked: the container is taken away."""
    suspended(scene)
    bulk_of(monkeypatch, Bulk(wrong=ImageError("not written")))
    assert "not written" in scene.restore("--detach").sentence()
    assert scene.runtime.calls("delete")


@pytest.mark.parametrize("changed", [{"parallel_restore": False}, {"ceiling": 1 << 30}], ids=str)
def test_criu_restores_all_memory(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """By the settings: CRIU is told of no program."""
    suspended(scene)
    bulk_of(monkeypatch, Bulk())
    scene.settings = replace(scene.settings, memory=replace(scene.settings.memory, **changed))
    assert scene.restore("--detach").code == 0
    assert "action-script" not in scene.runtime.criu_config()


def test_no_driver_for_no_process(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in which no process used a GPU needs none."""
    monkeypatch.setattr(restore, "find_driver", lambda: None)
    image(scene, replace(a_manifest(), processes=(), gpus=(), nodes=()))
    assert scene.restore("--detach").code == 0


def test_the_mounts_are_declared(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU is told where this host has the driver's files."""
    monkeypatch.setattr(
        "gpusnap.runtime_shim.runtime.criu.external_mounts.check_mounts", lambda *mounts: None
    )
    (pid,) = [scene.driver.use(scene.family.spawn(), state=CHECKPOINTED)]
    mount = DriverMount("gpusnap-0", "/usr/bin/nvidia-smi", "/opt/nvidia-smi")
    image(scene, replace(a_manifest(pids=(pid,)), mounts=(mount,)))
    assert scene.restore("--detach").code == 0
    assert "external mnt[gpusnap-0]:/opt/nvidia-smi\n" in scene.runtime.criu_config()


# Refused.


def test_not_ours(scene: Scene) -> None:
    """An image that gpusnap did not make is the real runtime's."""
    scene.image.mkdir()
    with pytest.raises(HandedOverMemory, match="handed over"):
        scene.restore("--detach")


def test_manifest_missing(scene: Scene) -> None:
    """An image that gpusnap began and did not finish is no checkpoint."""
    suspended(scene)
    path = scene.image / "gpusnap" / "manifest.json"
    path.unlink()
    assert "is incomplete: it has no gpusnap/manifest.json" in refused(scene)
    path.with_name("manifest.pending").touch()
    assert "interrupted while it was being written" in refused(scene)


def test_manifest_cut_short(scene: Scene) -> None:
    """A manifest whose end is missing is refused."""
    suspended(scene)
    path = scene.image / "gpusnap" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert "is cut short or not JSON" in refused(scene)


def test_manifest_of_another_version(scene: Scene) -> None:
    """A manifest of an unknown major version is refused by name."""
    suspended(scene)
    path = scene.image / "gpusnap" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"version": "2.0"}), "ascii")
    assert "has version '2.0', but gpusnap" in refused(scene)


def test_no_driver(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a GPU cannot take it."""
    suspended(scene)
    monkeypatch.setattr(restore, "find_driver", lambda: None)
    sentence = refused(scene)
    assert "holds the state of 1 GPU (NVIDIA H100 80GB HBM3), but this host has no NVIDIA driver" in sentence


def test_processes_without_any_gpu(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that names no GPU, which only a made-up one does, is refused like any other."""
    monkeypatch.setattr(restore, "find_driver", lambda: None)
    process = replace(a_manifest().processes[0], gpus=())
    image(scene, replace(a_manifest(), gpus=(), nodes=(), processes=(process,)))
    assert "this host has no NVIDIA driver" in refused(scene)


def test_a_driver_that_does_not_open(scene: Scene) -> None:
    """A driver that cannot be used refuses in its own words."""
    suspended(scene)
    scene.driver.fail("open", None, DriverFailed("the driver is asleep"))
    assert "the driver is asleep" in refused(scene)


def test_a_container_that_exists(scene: Scene) -> None:
    """A container of that name is refused, and above all not removed."""
    suspended(scene)
    scene.runtime.knows(scene.state(status="stopped"), [*scene.family.pids])
    assert f"the container {scene.state()['id']} already exists, and it is stopped" in refused(scene)
    assert proc.is_running(scene.family.init)


def test_a_bundle_that_is_removed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """containerd removes it with a pod, and the runtime works in it: that is said, and nothing is done."""
    suspended(scene)
    monkeypatch.chdir(scene.bundle)
    shutil.rmtree(scene.bundle)
    sentence = refused(scene)
    assert "config.json cannot be read" in sentence
    assert "internal error" not in sentence


@pytest.fixture
def cgroup(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the processes of the cgroup in which the container is to be restored."""
    path = scene.bundle / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"linux": {"cgroupsPath": "/default/w"}}))
    top = scene.folder / "cgroups"
    monkeypatch.setattr(containers, "_list_mounted", lambda: [str(top)])
    found = top / "default/w/cgroup.procs"
    found.parent.mkdir(parents=True)
    found.write_text("")
    return found


def test_a_cgroup_of_another_container(scene: Scene, cgroup: Path) -> None:
    """What runs there would end with a restore that fails, and stays as it is."""
    suspended(scene)
    cgroup.write_text(f"{os.getpid()}\n")
    sentence = refused(scene)
    assert f"the cgroup /default/w, which is also that of container {ID}, is used by process" in sentence
    assert "[GPS-526]" in sentence
    assert not journal.list_noted(restore_record.KIND)
    cgroup.write_text("")
    assert scene.restore("--detach").code == 0


@pytest.mark.parametrize("at_work", [True, False])
def test_another_restore_into_the_cgroup(scene: Scene, cgroup: Path, at_work: bool) -> None:
    """It has no process yet. One that was killed is none of ours, and keeps nobody from a restore."""
    suspended(scene)
    bundle = str(scene.bundle)
    other = restore_record.Restore(
        key=container_key.key("/run/other", "first"),
        image=str(scene.image),
        owner=state_files.owner() if at_work else (os.getpid(), 1),
        command=(),
        bundle=bundle,
        pid_file="",
        detach=True,
        processes=(),
        place=Place.from_config({"linux": {"cgroupsPath": "/default/w"}}, bundle, "first"),
    )
    restore_record.write(other)
    if at_work:
        assert "is used by container first:" in refused(scene)
    else:
        assert scene.restore("--detach").code == 0


def test_whether_there_is_one_is_open(scene: Scene) -> None:
    """A runtime that cannot say so for a moment knows it perhaps: the undo would remove it, while it runs."""
    suspended(scene)
    scene.runtime.knows(scene.state(), [scene.family.init])
    state = scene.runtime.folder / "state.json"
    state.unlink()
    state.mkdir()  # so that `state` fails
    scene.runtime.script("restore", "echo 'container already exists' >&2; exit 1")
    sentence = scene.restore("--detach").sentence()
    assert scene.runtime.calls("delete") == [], sentence
    assert "the state of container c0ffee cannot be read" in sentence
    assert scene.runtime.calls("delete") == []
    assert proc.is_running(scene.family.init)


@pytest.mark.parametrize("whose", ["its own", "an earlier version's", "another engine's"])
def test_a_checkpoint_that_was_cut_off(scene: Scene, whose: str) -> None:
    """What waits for its memory under the same key is not put at risk; under another it is none of ours."""
    pid, _ = suspended(scene)
    key = {
        "its own": KEY,
        "an earlier version's": ID,
        "another engine's": container_key.key("/run/other", ID),
    }[whose]
    journal.write(key, str(scene.image), {pid: ()})
    outcome = scene.restore("--detach")
    if whose == "its own":
        assert outcome.sentence() == (
            f"a checkpoint of container {ID} was interrupted, and the processes that it stopped still "
            f"wait: {pid}; gpusnap recover {ID} [GPS-021]"
        )
        assert scene.runtime.calls("restore") == []
    else:
        assert outcome.code == 0
    assert [entry.key for entry in journal.entries()] == [key]


def test_a_mount_of_somebody_elses(scene: Scene) -> None:
    """A manifest that asks for a path of this host is refused."""
    mount = DriverMount("gpusnap-0", "/usr/bin/nvidia-smi", "/etc/shadow")
    image(scene, replace(a_manifest(), mounts=(mount,)))
    assert "asks to mount /etc/shadow" in refused(scene)


def test_a_pid_file_that_cannot_be_made(scene: Scene) -> None:
    """Without --detach, a PID file that cannot be used is said to."""
    suspended(scene)
    (scene.folder / "pid").mkdir()
    sentence = scene.restore("--pid-file", str(scene.folder / "pid")).sentence()
    assert f"the PID file {scene.folder / 'pid'} cannot be used" in sentence
    assert scene.runtime.calls("restore") == []


def test_images_are_looked_at_before_the_runtime_is_called(scene: Scene) -> None:
    """Pages that end before their pagemap says so would keep CRIU for ever."""
    suspended(scene)
    (scene.image / "pagemap-1.img").write_bytes(pagemap(1, [(0x1000, 2, 4)]))
    (scene.image / "pages-1.img").write_bytes(bytes(PAGE))
    assert "pages-1.img" in refused(scene)


@pytest.mark.parametrize("name", [restore.TIMING, "restore.log", "stats-restore"])
def test_no_link_is_followed_where_a_restore_writes(scene: Scene, name: str) -> None:
    """The engine may have unpacked one there."""
    suspended(scene)
    precious = scene.folder / "precious"
    precious.write_text("as it was", "ascii")
    (scene.image / name).symlink_to(precious)
    assert scene.restore("--detach").code == 0
    assert precious.read_text("ascii") == "as it was"
    assert not (scene.image / name).is_symlink()
    assert (scene.image / restore.TIMING).stat().st_mode & 0o777 == 0o600


# On other GPUs.


def moved(scene: Scene, *options: str) -> dict[int, tuple[tuple[str, str], ...]]:
    """The pairs that each process was restored with, when the container has /dev/nvidia1 afterwards."""
    scene.driver.dev = (Node("/dev/nvidia1", 195, 1, uuid(1)), Node("/dev/nvidiactl", 195, 255))
    outcome = scene.restore("--detach", *options)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert scene.all_running()
    return scene.driver.pairs


def test_another_gpu(scene: Scene) -> None:
    """Every process gets the pair, config.json the new node and its rule; the runtime's options stay."""
    pids = suspended(scene)
    scene.driver.gpus = (gpu(1),)
    device = {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}
    rule = {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rwm"}
    config = {"annotations": {}, "linux": {"devices": [device], "resources": {"devices": [rule]}}}
    (scene.bundle / "config.json").write_text(json.dumps(config))
    assert moved(scene) == dict.fromkeys(pids, ((uuid(0), uuid(1)),))
    linux = json.loads((scene.bundle / "config.json").read_text())["linux"]
    assert linux["devices"] == [{**device, "path": "/dev/nvidia1", "minor": 1}]
    assert linux["resources"]["devices"] == [{**rule, "minor": 1}]
    assert (scene.folder / "gpusnap" / "room").is_dir()
    assert [p.name for p in (scene.folder / "gpusnap" / "room").iterdir()] == []


def test_the_same_gpu_needs_no_pairs(scene: Scene) -> None:
    """Where nothing moves the driver is asked for nothing, and config.json is not written."""
    suspended(scene)
    scene.driver.gpus = (gpu(1), gpu(0))
    scene.driver.dev = (Node("/dev/nvidia0", 195, 0, uuid(0)), Node("/dev/nvidiactl", 195, 255))
    before = (scene.bundle / "config.json").stat()
    assert scene.restore("--detach").code == 0
    assert set(scene.driver.pairs.values()) == {()}
    after = (scene.bundle / "config.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("how", ["option", "environment", "annotation", "settings"])
def test_the_caller_chooses(scene: Scene, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A map is taken from the command line, the environment, an annotation, the settings."""
    suspended(scene)
    scene.driver.gpus = (gpu(0), gpu(1))
    options: tuple[str, ...] = ()
    if how == "option":
        options = ("--gpu-map", f"0={uuid(1)}")
        monkeypatch.setenv(GPU_MAP, "0=0")  # the command line counts before it
    if how == "environment":
        monkeypatch.setenv(GPU_MAP, "0=1")
        scene.set(gpu_map=(("0", "0"),))  # it counts before the settings
    if how == "annotation":
        scene.write_config({"io.gpusnap.gpu-map": "0=1,7=0"})
    if how == "settings":
        scene.set(gpu_map=(("0", "1"), ("5", "0")))
    assert set(moved(scene, *options).values()) == {((uuid(0), uuid(1)),)}
    assert "gpu-map" not in scene.runtime.calls("restore")[0]


@pytest.mark.parametrize(
    "annotation", ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"]
)
def test_a_pods_gpus(scene: Scene, annotation: str) -> None:
    """A pod's container gets the GPUs of its new configuration, though the old one is there and free."""
    pids = suspended(scene)
    scene.driver.gpus = (gpu(0), gpu(1))
    device = {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}
    config = {"annotations": {annotation: "container"}, "linux": {"devices": [device]}}
    (scene.bundle / "config.json").write_text(json.dumps(config))
    assert moved(scene) == dict.fromkeys(pids, ((uuid(0), uuid(1)),))
    linux = json.loads((scene.bundle / "config.json").read_text())["linux"]
    assert linux["devices"] == [device]


def test_a_pod_with_another_gpu(scene: Scene) -> None:
    """Where those that it is given do not fit, no other is taken."""
    suspended(scene)
    scene.driver.gpus = (gpu(0), replace(gpu(1), model="Another"))
    device = {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}
    config = {
        "annotations": {"io.kubernetes.cri.container-type": "container"},
        "linux": {"devices": [device]},
    }
    (scene.bundle / "config.json").write_text(json.dumps(config))
    said = refused(scene)
    assert "not among the GPUs of the new container" in said
    assert "another model: Another" in said
    assert "give the new container as many GPUs" in said


@pytest.mark.parametrize("hook", ["", "/usr/bin/nvidia-container-runtime-hook", "/usr/bin/nvidia-cdi-hook"])
def test_a_pod_without_a_gpu(scene: Scene, hook: str) -> None:
    """Refused, whatever is free, unless NVIDIA's runtime gives GPUs by its hook and not by the configuration.

    And the host's own map does not speak for a pod.
    """
    pids = suspended(scene)
    scene.driver.gpus = (gpu(0), gpu(1))
    scene.set(gpu_map=(("0", "1"),))
    hooks = {"prestart": [{"path": hook}]} if hook else {}
    config = {"annotations": {"io.kubernetes.cri.container-type": "container"}, "hooks": hooks, "linux": {}}
    (scene.bundle / "config.json").write_text(json.dumps(config))
    if "runtime-hook" in hook:
        assert moved(scene) == dict.fromkeys(pids, ((uuid(0), uuid(1)),))
    else:
        assert "not among the GPUs of the new container" in refused(scene)


@pytest.mark.parametrize(
    ("gpu_map", "said"), [("0=7", "7"), ("3=0", "3"), ("0", "it must be"), ("0=1", "another model")]
)
def test_a_map_that_cannot_be(scene: Scene, gpu_map: str, said: str) -> None:
    """A GPU that is on neither side, no map at all, and a GPU that does not fit."""
    suspended(scene)
    scene.driver.gpus = (gpu(0), replace(gpu(1), model="Another"))
    assert said in refused(scene, "--gpu-map", gpu_map)


def test_no_gpu_fits(scene: Scene) -> None:
    """Refused before the runtime is called, with the reason; nothing is changed or kept."""
    suspended(scene)
    before = scene.content(), (scene.bundle / "config.json").read_bytes()
    scene.driver.gpus = (replace(gpu(1), model="Another"),)
    assert "another model: Another" in refused(scene)
    assert (scene.content(), (scene.bundle / "config.json").read_bytes()) == before


def test_somebody_else_has_the_room(scene: Scene) -> None:
    """What another restore under way has claimed is not free."""
    suspended(scene)
    with reservations.claim(scene.room) as other:
        other.record({uuid(0): scene.driver.gpus[0].memory_total})
        assert "another restore" in refused(scene)
    assert scene.restore("--detach").code == 0


@pytest.mark.parametrize("joined", [True, False])
def test_memory_is_claimed(scene: Scene, monkeypatch: pytest.MonkeyPatch, joined: bool) -> None:
    """The GPUs' memory passes through RAM: a checkpoint meanwhile does not count on it. Not claimed twice."""
    pid = scene.driver.use(scene.family.spawn(), state=CHECKPOINTED)
    record = a_manifest(pids=[pid])
    region = RegionRecord(4096, Table(8192, ()))
    image(scene, replace(record, processes=(replace(record.processes[0], regions=(region,)),)))
    monkeypatch.setattr(WrongContent, "_wrong", lambda _: None)
    monkeypatch.setattr(WrongContent, "waits_so_far", WaitTotals(0, 0.0), raising=False)
    monkeypatch.setattr(restore_plan, "Prefetch", WrongContent)
    read = restore_plan._start_reading

    def start_reading(job: RestoreJob) -> object:
        found = read(job)
        job.joined_regions = joined
        return found

    monkeypatch.setattr(restore_plan, "_start_reading", start_reading)
    claimed: list[int] = []
    look = reservations.read_reserved
    scene.driver.when("restore", lambda _: claimed.append(look(scene.room).get(reservations.RAM, 0)), pid)
    assert scene.restore("--detach").code == 0
    assert claimed == [0 if joined else 8192]
    assert look(scene.room) == {}


def test_the_wrong_devices(scene: Scene) -> None:
    """A container whose GPU devices are not the plan's is not let run: it is removed."""
    suspended(scene)
    scene.driver.gpus = (gpu(1),)
    scene.driver.dev = (Node("/dev/nvidia0", 195, 0, uuid(0)),)
    sentence = scene.restore("--detach").sentence()
    assert "has the GPU devices /dev/nvidia0 (195:0) after the restore" in sentence
    assert "/dev/nvidia1 (195:1)" in sentence
    assert scene.driver.of("restore") == []
    assert len(scene.runtime.calls("delete")) == 1


def test_a_container_without_gpu_processes(scene: Scene) -> None:
    """Its devices are changed too where this host has a driver."""
    image(scene, replace(a_manifest(), processes=()))
    scene.driver.gpus = (gpu(1),)
    assert moved(scene) == {}


# Processes that the manifest does not list, and some that end.


def test_one_is_not_listed(scene: Scene) -> None:
    """A suspended process that the manifest has forgotten would stand for ever: the restore fails instead."""
    first, second = (scene.driver.use(scene.family.spawn(), state=CHECKPOINTED) for _ in range(2))
    image(scene, a_manifest(pids=[first]))
    sentence = scene.restore("--detach").sentence()
    assert f"process {second} (sleep) was restored with its GPU state checkpointed" in sentence
    assert "does not list it" in sentence
    assert scene.driver.of("restore") == [], "none goes on before all are known"
    assert len(scene.runtime.calls("delete")) == 1


@pytest.mark.parametrize("gpus", [True, False], ids=["of a GPU", "of none"])
def test_none_is_listed(scene: Scene, gpus: bool) -> None:
    """A manifest without any process, or of a checkpoint that is said to have none, is asked about, too."""
    pid = scene.driver.use(scene.family.spawn(), state=CHECKPOINTED)
    record = replace(a_manifest(), processes=())
    image(scene, record if gpus else of_no_gpu())
    assert f"process {pid} (sleep) was restored with" in scene.restore("--detach").sentence()
    assert len(scene.runtime.calls("delete")) == 1


def test_none_is_suspended_without_the_interface(scene: Scene) -> None:
    """A driver that does not open has suspended none, and is no reason to fail."""
    image(scene, of_no_gpu())
    scene.driver.fail("open", None, DriverFailed("the driver is asleep"))
    assert scene.restore("--detach").code == 0


def of_no_gpu() -> Manifest:
    """A manifest that has no use for this host's driver."""
    record = a_manifest()
    return replace(record, host=replace(record.host, vendor="amd"), processes=(), gpus=(), nodes=())


def test_one_has_ended_before(scene: Scene) -> None:
    """CRIU brought it back and it ended: that is a note, and the others run on."""
    first, second = suspended(scene)
    (scene.image / f"core-{first}.img").write_bytes(CORE)
    # It is dead only a while after that, on a busy machine.
    dead = f"! grep -q '^State:.[^ZX]' /proc/{first}/status 2>/dev/null"
    scene.runtime.script(
        "restore", f"kill -9 {first}; for i in $(seq 2000); do {dead} && break; done", default=True
    )
    outcome = scene.restore("--detach")
    assert outcome.code == 0
    assert outcome.stderr == (
        f"gpusnap: note: process {first} (sleep) exited before its GPU state could be restored; the rest "
        "of the container continues to run [GPS-511]\n"
    )
    assert scene.driver.of("restore") == [second]
    assert scene.runtime.calls("delete") == []


def test_one_was_never_dumped(scene: Scene) -> None:
    """What CRIU's images do not have did not end by itself."""
    first, _ = suspended(scene)
    scene.runtime.script("restore", f"kill -9 {first}", default=True)
    sentence = scene.restore("--detach").sentence()
    assert (
        f"process {first} (sleep) of the checkpoint was not restored: it is not in CRIU's images" in sentence
    )
    assert len(scene.runtime.calls("delete")) == 1


def test_one_ends_as_it_goes_on(scene: Scene) -> None:
    """It had all of its state, and nobody reads its pipe any more, say: a note."""
    first, second = suspended(scene)
    gone = gpu_state.resume

    def resume(*given: object, **more: object) -> None:
        gone(*given, **more)  # type: ignore[arg-type]
        scene.family.end(first)

    scene.monkeypatch.setattr(restore_gpus, "resume", resume)
    outcome = scene.restore("--detach")
    assert outcome.code == 0
    assert f"process {first} (sleep) exited as soon as it ran again" in outcome.stderr
    assert proc.is_running(second)


def test_its_init_ends(scene: Scene) -> None:
    """Without its init there is no container."""
    init = scene.driver.use(scene.family.init, state=CHECKPOINTED)
    image(scene, a_manifest(pids=[init]))
    gone = gpu_state.resume

    def resume(*given: object, **more: object) -> None:
        gone(*given, **more)  # type: ignore[arg-type]
        scene.family.end(init)

    scene.monkeypatch.setattr(restore_gpus, "resume", resume)
    assert "was not restored with its GPU state" in scene.restore("--detach").sentence()


# It fails.


def test_it_ends_at_once(scene: Scene) -> None:
    """A container without an init has no processes: nobody else's is touched, and it is removed."""
    suspended(scene)
    ended = json.dumps({**scene.state(), "pid": 0, "status": "stopped"})
    (scene.folder / "ended.json").write_text(ended)
    scene.runtime.script("restore", f'cp {scene.folder}/ended.json "$here/state.json"')
    assert "exited as soon as it was restored" in scene.restore("--detach").sentence()
    assert scene.driver.of("restore") == []
    assert len(scene.runtime.calls("delete")) == 1


class WrongContent:
    """A Prefetch whose digests are found wrong in the end."""

    is_loading = False

    def __init__(self, *_: object) -> None:
        self.deliver = self.wait_checked = self.close = lambda *_: None

    def __enter__(self) -> WrongContent:
        self.wait_checked = self._wrong
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _wrong(self, *_: object) -> None:
        raise ImageError("the GPU memory in /image: blob sha256:00 is not what its digest says")


def test_wrong_content_makes_the_driver_fail(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver says of it then is not the cause."""
    monkeypatch.setattr(restore_plan, "Prefetch", WrongContent)
    pid = scene.driver.use(scene.family.spawn(), state=CHECKPOINTED)
    chunk = Chunk(0, 9, "sha256:" + "0" * 64, "sha256:" + "0" * 64, 9, "plain")
    region = RegionRecord(4096, Table(9, (chunk,)))
    process = replace(a_manifest(pids=[pid]).processes[0], regions=(region,))
    image(scene, replace(a_manifest(), processes=(process,), pages="chunks"))
    scene.driver.fail("restore", pid, DriverFailed("bad bytes", hint="look for NVRM and Xid lines"))
    sentence = scene.restore("--detach").sentence()
    assert "is not what its digest says" in sentence
    assert "NVRM" not in sentence


class Coming:
    """A Prefetch that is still filled while the driver restores."""

    is_loading = True
    waits_so_far = WaitTotals(3, 1.5, True)

    def __init__(self, *_: object) -> None:
        self.deliver = self.close = lambda *_: None
        self.wrong = ""
        made.append(self)

    def __enter__(self) -> Coming:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def is_waiting(self, pid: int) -> bool:
        return False

    def wait_checked(self) -> None:
        self.is_loading = False
        if self.wrong:
            raise ImageError(self.wrong)


made: list[Coming] = []


@pytest.fixture
def coming(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A checkpoint of two processes, whose memory comes while the driver restores them; their PIDs."""
    monkeypatch.setattr(restore_plan, "Prefetch", Coming)
    space = "gpusnap.runtime_shim.snapshot.preflight.space"
    monkeypatch.setattr(f"{space}.check_memory_to_restore", lambda *_, **__: None)
    pids = [scene.driver.use(scene.family.spawn(), state=CHECKPOINTED) for _ in range(2)]
    record = a_manifest(pids=pids)
    region = RegionRecord(4096, Table(4096, ()))
    processes = tuple(replace(each, regions=(region,)) for each in record.processes)
    image(scene, replace(record, processes=processes, pages="chunks"))
    yield pids
    made.clear()


def test_the_journal_says_that_memory_is_on_its_way(scene: Scene, coming: list[int]) -> None:
    """From before a process may touch it until all of it was right, and before one goes on."""
    told: list[tuple[str, bool]] = []

    def look(what: str) -> None:
        entry = restore_record.read(KEY)
        assert entry is not None
        told.append((what, entry.arriving))

    for pid in coming:
        scene.driver.when("restore", lambda _: look("restore"), pid)
        scene.driver.when("unlock", lambda _: look("unlock"), pid)
    assert scene.restore("--detach").code == 0
    timing = json.loads((scene.image / restore.TIMING).read_text())
    assert timing["memory"] == {"faults": 3, "complete": 1.5, "early": True}
    assert told[0] == ("restore", True)  # the second may begin when the first has all of its memory
    assert [arriving for what, arriving in told if what == "unlock"] == [False, False]
    assert len(told) == 4


@pytest.mark.parametrize(
    ("pages", "beside"),
    [("chunks", True), ("chunks", False), ("store", False)],
    ids=["archive", "copied", "store"],
)
def test_the_disk_of_its_store_is_measured(
    scene: Scene, coming: list[int], monkeypatch: pytest.MonkeyPatch, pages: str, beside: bool
) -> None:
    """By what reads the memory; a checkpoint that has its chunks beside it has nothing to measure.

    One that was copied from an archive into a store has them there.
    """
    given: list[tuple[Any, ...]] = []

    class Measured(Coming):
        def __init__(self, *each: Any) -> None:
            super().__init__()
            given.append(each)

    monkeypatch.setattr(restore_plan, "Prefetch", Measured)
    monkeypatch.setenv("GPUSNAP_STORE", str(scene.folder / "store"))
    record = replace(manifest_file.read(str(scene.image)), pages=pages)
    shutil.rmtree(scene.image)
    image(scene, record)
    if beside:
        os.mkdir(scene.image / "gpusnap/blobs")
    assert scene.restore("--detach").code == 0
    ((*_, fetching, _, _, meter),) = given
    assert isinstance(fetching, BlobSource) != beside
    assert meter is (None if beside else fetching.meter)


def test_the_bytes_come_from_the_first_moment(
    scene: Scene, coming: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the driver is asked for its GPUs, and also where the restore is refused then."""
    monkeypatch.setattr(dispatch, "open_driver", lambda *_, **__: nullcontext())  # it asks beside
    begun: list[int] = []
    scene.driver.when("host", lambda _: begun.append(len(made)))
    assert scene.restore("--detach").code == 0
    assert begun == [1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "a thread cannot be started"),
        (OSError(errno.EIO, "Input/output error", "/store"), "/store: Input/output error"),
        (ImageError("something is wrong"), "something is wrong"),
    ],
)
def test_what_cannot_be_let_go(
    scene: Scene,
    coming: list[int],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    said: str,
) -> None:
    """The container runs, so the engine is told of no failure: it would take the container away."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Coming, "__exit__", fail)
    outcome = scene.restore("--detach")
    assert outcome.code == 0
    assert (
        f"the container is restored, but some temporary files could not be removed: {said}" in outcome.stderr
    )
    assert restore_record.read(KEY) is None


def test_memory_that_does_not_come_is_the_reason(scene: Scene, coming: list[int]) -> None:
    """The processes were ended for it, so that the driver has nothing to say and none of them is missed."""

    def fail(_: int) -> None:
        made[0].wrong = "the GPU memory in /image: the blob sha256:00 cannot be read"
        for pid in coming:
            scene.family.end(pid)

    scene.driver.when("restore", fail, coming[0])
    sentence = scene.restore("--detach").sentence()
    assert sentence.startswith("the GPU memory in /image: the blob sha256:00 cannot be read")
    assert len(scene.runtime.calls("delete")) == 1


def test_the_runtime_fails(scene: Scene) -> None:
    """Its words and CRIU's are told, its exit code is ours, and what it left is removed."""
    suspended(scene)
    work = scene.folder / "work"
    work.mkdir()
    (work / "restore.log").write_text("(00.1)   12: Error (criu/x.c:1): no such GPU\n", "ascii")
    scene.runtime.script("restore", 'say "CRIU restoring failed"; exit 4')
    outcome = scene.restore("--detach", "--work-path", str(work))
    assert outcome.code == 4
    assert outcome.sentence().startswith(
        "crun 1.21 could not restore container c0ffee: CRIU restoring failed; CRIU says: no such GPU "
    )
    assert scene.driver.of("restore") == []
    assert [line.split()[2:4] for line in scene.runtime.calls("delete")] == [["delete", "--force"]]


def test_what_a_killed_runtime_leaves(scene: Scene) -> None:
    """CRIU goes on without it, and the runtime knows no container: nothing of that stays."""
    suspended(scene)
    left = scene.folder / "left"
    scene.runtime.script("restore", f"sleep 600 </dev/null >/dev/null 2>&1 & echo $! >{left}; kill -9 $$")
    scene.runtime.script("delete", 'say "container does not exist"; exit 1')
    assert scene.restore("--detach").code == 137
    pid = int(left.read_text("ascii"))
    wait_for(lambda: not proc.is_running(pid), "the end of what was killed")
    assert os.listdir(journal.FOLDER) == []


FOREGROUND = 'cp "$here/restored.json" "$here/state.json"; cat "$here/pid" >"$pid_file"; exec sleep 600'


def stays(scene: Scene) -> None:
    """A runtime that stays until the container is deleted."""
    stay = FOREGROUND.replace("exec sleep 600", 'echo " $$" >>"$here/pids"; exec sleep 600')
    scene.runtime.script("restore", stay)


FAILURES: dict[str, tuple[Callable[[Scene, list[int]], object], str]] = {
    "driver restore of one": (
        lambda scene, pids: scene.driver.fail("restore", pids[1], DriverFailed("the GPU fell off the bus")),
        "the GPU fell off the bus",
    ),
    "unlock of one": (
        lambda scene, pids: scene.driver.fail("unlock", pids[1], DriverFailed("the lock is stuck")),
        "the lock is stuck",
    ),
    "a process without its state": (
        lambda scene, pids: scene.driver.states.pop(pids[0]),
        "the GPU driver does not know process",
    ),
    "a process dies in the driver": (
        lambda scene, pids: scene.driver.when("restore", scene.family.end, pids[0]),
        "was not restored with its GPU state",
    ),
    "a signal": (
        lambda scene, pids: scene.driver.when("restore", lambda _: os.kill(os.getpid(), signal.SIGTERM)),
        "stopped by SIGTERM",
    ),
}


@pytest.mark.parametrize("detach", [True, False], ids=["detached", "in the foreground"])
@pytest.mark.parametrize("name", FAILURES)
def test_failure_after_the_runtime(scene: Scene, name: str, detach: bool) -> None:
    """Never half a container: what was restored is deleted, and the sentence says why."""
    pids = suspended(scene)
    if not detach:
        stays(scene)
    FAILURES[name][0](scene, pids)
    outcome = scene.restore(*(["--detach"] if detach else []))
    assert FAILURES[name][1] in outcome.sentence()
    (line,) = scene.runtime.calls("delete")
    assert line.endswith(" delete --force c0ffee")
    for pid in [*pids, scene.family.init]:
        wait_for(lambda pid=pid: not proc.is_running(pid), f"the end of process {pid}")  # type: ignore[misc]
    assert (scene.image / "gpusnap" / "manifest.json").exists()


def test_a_signal_that_the_last_step_swallows(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took it for the failure of something that may fail: the container is not restored all the same."""
    pids = suspended(scene)
    finish = restore._finish

    def swallow(job: RestoreJob) -> None:
        finish(job)
        with suppress(GpusnapError):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(restore, "_finish", swallow)
    assert "stopped by SIGTERM" in scene.restore("--detach").sentence()
    for pid in [*pids, scene.family.init]:
        wait_for(lambda pid=pid: not proc.is_running(pid), f"the end of process {pid}")  # type: ignore[misc]


def test_somebody_takes_the_memory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the plan: the driver is not asked to restore what has no room."""
    monkeypatch.setattr(gpu_state, "_ROOM", 0.0)
    pids = suspended(scene)
    there = gpu_state.resume

    def take(*arguments: Any, **more: Any) -> None:
        scene.driver.gpus = tuple(replace(each, memory_used=each.memory_total) for each in scene.driver.gpus)
        there(*arguments, **more)

    monkeypatch.setattr(restore_gpus, "resume", take)
    assert "has not enough free memory for the container" in scene.restore("--detach").sentence()
    assert scene.driver.of("restore") == []
    for pid in pids:
        wait_for(lambda pid=pid: not proc.is_running(pid), f"the end of process {pid}")  # type: ignore[misc]


def test_a_container_that_cannot_be_removed(scene: Scene) -> None:
    """Where even that fails, the sentence says so."""
    pids = suspended(scene)
    scene.driver.fail("restore", pids[0], DriverFailed("the GPU fell off the bus"))
    scene.runtime.script("delete", 'say "device busy"; exit 1')
    sentence = scene.restore("--detach").sentence()
    assert sentence.startswith(
        "the GPU fell off the bus; while undoing, removing the incomplete container failed"
    )
    assert "container c0ffee could not be removed: device busy" in sentence


def test_an_error_of_ours_in_the_foreground(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails before the runtime is started, beside the thread that waits for it, is the sentence."""
    suspended(scene)
    monkeypatch.setenv("CRIU_CONFIG_FILE", str(scene.folder / "none"))
    sentence = scene.restore().sentence()
    assert sentence.startswith("CRIU's configuration cannot be prepared: it does not exist")
