"""Checkpoints and restores that a plugin of CRIU's does: what is left to gpusnap, and what is not done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from criu_images import INVENTORY
from fakes import FakeDriver, Scene, a_manifest, gpu, uuid, wait_for

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu.api.criu_plugin import AMDGPU, CUDA, Plugin
from gpusnap.runtime_shim.gpu.api.driver import Host, ProcessState
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.container import Container
from gpusnap.runtime_shim.runtime.criu import plugins
from gpusnap.runtime_shim.settings import Memory, Nvidia, Settings, Store
from gpusnap.runtime_shim.snapshot import checkpoint
from gpusnap.runtime_shim.snapshot.devices import choose
from gpusnap.runtime_shim.snapshot.devices import choose as choosing
from gpusnap.runtime_shim.snapshot.gpu_processes import choose_driver, plugin_checkpoint
from gpusnap.runtime_shim.snapshot.gpu_processes.gpu_state import find_idle_holders
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination

STEPS = ("lock", "checkpoint", "restore", "unlock")


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Scene]:
    """A host that has CRIU's CUDA plugin, and settings that ask for it."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "cuda_plugin.so").write_text("cuCheckpointProcessLock")
    monkeypatch.setattr(plugins, "FOLDERS", (str(folder),))
    with Scene(tmp_path, monkeypatch, capfd) as found:
        found.driver.plugin = CUDA
        found.set(nvidia=Nvidia(driver="criu-plugin"))
        yield found


def untouched(scene: Scene) -> bool:
    """Whether no process was suspended or resumed by us."""
    return not any(scene.driver.of(step) for step in STEPS)


def image(scene: Scene, record: Manifest) -> None:
    scene.image.mkdir(exist_ok=True)
    (scene.image / "inventory.img").write_bytes(INVENTORY)
    draft = Draft(str(scene.image))
    draft.begin()
    draft.prepare(record)
    draft.finish(record)


def test_checkpoint(scene: Scene) -> None:
    """CRIU is given the plugin, the manifest says so, and nobody is locked or stopped by us."""
    pids = scene.gpu_processes(2)
    stops = [proc.is_still(pid) for pid in pids]
    outcome = scene.checkpoint()
    assert (outcome.code, outcome.stderr) == (0, "")
    assert untouched(scene)
    assert stops == [False, False]
    record = manifest_file.read(str(scene.image))
    assert record.plugin == "cuda_plugin"
    assert record.pages == "criu"
    assert [process.pid for process in record.processes] == sorted(pids)
    assert f"libdir {scene.folder}/plugins\n" in scene.runtime.criu_config()


def test_leave_running(scene: Scene) -> None:
    """It is CRIU that lets them go on."""
    scene.gpu_processes(1)
    assert scene.checkpoint("--leave-running").code == 0
    assert untouched(scene)


def test_a_failed_dump(scene: Scene) -> None:
    """There is nothing of ours to undo, and it is not tried again: CRIU asks for newcomers by itself."""
    pids = scene.gpu_processes(1)
    scene.runtime.script("checkpoint", 'say "it is Tuesday"; exit 1')
    outcome = scene.checkpoint()
    assert "it is Tuesday" in outcome.sentence()
    assert untouched(scene)
    assert proc.is_running(pids[0])
    assert len(scene.runtime.calls("checkpoint")) == 1
    assert "gpusnap/manifest.json" not in scene.content()


def test_one_that_ends_meanwhile(scene: Scene) -> None:
    """The processes run until CRIU stops them; one that has ended by then is not in the manifest."""
    staying, going = scene.gpu_processes(2)
    scene.driver.when("memory_used", lambda _: scene.family.end(going))
    assert scene.checkpoint().code == 0
    assert [process.pid for process in manifest_file.read(str(scene.image)).processes] == [staying]


def test_no_plugin_on_this_host(scene: Scene) -> None:
    """Refused before anything is touched."""
    os.unlink(scene.folder / "plugins" / "cuda_plugin.so")
    scene.gpu_processes(1)
    assert "there is no cuda_plugin.so" in scene.checkpoint().sentence()
    assert not scene.image.exists()


def test_none_is_needed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that was given a GPU and uses none needs no plugin."""
    os.unlink(scene.folder / "plugins" / "cuda_plugin.so")
    scene.family.spawn()
    monkeypatch.setattr("gpusnap.runtime_shim.shim.dispatch._concerns_us", lambda driver, container: True)
    assert scene.checkpoint().code == 0
    assert manifest_file.read(str(scene.image)).processes == ()


def test_paused(scene: Scene) -> None:
    """The plugin waits for an answer of processes that cannot give one."""
    here = replace(container(scene.family.init), status="paused")
    with pytest.raises(Refused, match="is paused, but CRIU's CUDA plugin needs") as caught:
        plugin_checkpoint.refuse_impossible(scene.driver, here, (), scene.settings)
    assert 'nvidia.driver = "native"' in caught.value.hint
    plugin_checkpoint.refuse_impossible(FakeDriver(), here, (), scene.settings)
    plugin_checkpoint.refuse_impossible(FakeDriver(vendor="amd", plugin=AMDGPU), here, (), scene.settings)


def test_inherited_files(scene: Scene) -> None:
    """What gpusnap would take away by itself, the plugin does not."""
    scene.gpu_processes(1)
    child = scene.family.spawn()
    scene.driver.idle[child] = ("/dev/nvidia0",)
    members = [each for each in (proc.process(child),) if each is not None]
    with pytest.raises(Refused, match="leaves that file to CRIU") as caught:
        plugin_checkpoint.refuse_inherited(CUDA, lambda: find_idle_holders(scene.driver, members))
    assert "spawn" in caught.value.hint


def test_a_process_that_is_just_starting(scene: Scene) -> None:
    """Has the files open before it has GPU state, and is not refused for that."""
    scene.gpu_processes(1)
    child = scene.family.spawn()
    scene.driver.idle[child] = ("/dev/nvidia0",)
    members = [each for each in (proc.process(child),) if each is not None]
    answers = [find_idle_holders(scene.driver, members), {}]
    plugin_checkpoint.refuse_inherited(CUDA, lambda: answers.pop(0))
    assert answers == []


def test_room_in_memory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for where the GPU's memory passes through the process, as NVIDIA's does and AMD's does not."""
    monkeypatch.setattr(proc, "available_memory", lambda: 1 << 20)
    pid = scene.driver.use(scene.family.spawn(), memory=1 << 30)
    assert "of GPU memory must move to RAM" in scene.checkpoint("--leave-running").sentence()
    (scene.folder / "plugins" / "amdgpu_plugin.so").touch()
    scene.driver.plugin = AMDGPU
    assert scene.checkpoint("--leave-running").code == 0
    assert proc.is_running(pid)


# The way back.


def restored(scene: Scene, plugin: str = "cuda_plugin") -> int:
    pid = scene.driver.use(scene.family.spawn())
    image(scene, replace(a_manifest(pids=(pid,)), plugin=plugin))
    return pid


def test_restore(scene: Scene) -> None:
    """CRIU brings them back; they are neither stopped nor filled."""
    restored(scene)
    outcome = scene.restore("--detach")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert untouched(scene)
    assert f"libdir {scene.folder}/plugins\n" in scene.runtime.criu_config()


def test_one_that_is_done(scene: Scene) -> None:
    """They run on from CRIU's hands, so one may have ended, or have let go of its GPU."""
    pid = restored(scene)
    record = manifest_file.read(str(scene.image))
    image(scene, replace(record, processes=(*record.processes, replace(record.processes[0], pid=4000000))))
    scene.driver.states.pop(pid)
    assert scene.restore("--detach").code == 0


def test_one_that_is_left_suspended(scene: Scene) -> None:
    """A plugin that forgot one has not restored the container."""
    pid = restored(scene)
    scene.driver.states[pid] = ProcessState.CHECKPOINTED
    assert "was not restored with its GPU state" in scene.restore("--detach").sentence()
    wait_for(lambda: not proc.is_running(pid), "the end of the container")


def test_restore_without_the_plugin(scene: Scene) -> None:
    """Refused before the runtime is called."""
    restored(scene)
    os.unlink(scene.folder / "plugins" / "cuda_plugin.so")
    assert "there is no cuda_plugin.so" in scene.restore("--detach").sentence()
    assert scene.runtime.calls("restore") == []


def test_the_way_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of this host's first driver, nor of its settings."""
    native, plugged, amd = FakeDriver(), FakeDriver(plugin=CUDA), FakeDriver(vendor="amd", plugin=AMDGPU)
    ways = {("nvidia", "cuda_plugin"): plugged, ("nvidia", ""): native, ("amd", "amdgpu_plugin"): amd}
    monkeypatch.setattr(choose, "driver_of", lambda vendor, plugin="": ways.get((vendor, plugin)))
    ours, theirs = a_manifest(), replace(a_manifest(), plugin="cuda_plugin")
    other = replace(
        theirs, plugin="amdgpu_plugin", host=replace(theirs.host, vendor="amd", cuda_version="unknown")
    )
    assert choose.choose_driver(ours, native) is native
    assert choose.choose_driver(theirs, native) is plugged
    assert choose.choose_driver(other, native) is amd
    assert choose.choose_driver(other, amd) is amd
    assert choose.choose_driver(ours, amd) is native
    ways.clear()
    assert choose.choose_driver(ours, None) is None


def test_gpus_stay(scene: Scene) -> None:
    """For a plugin that cannot change them: the map is the same GPUs, or there is a sentence why not."""
    record = replace(a_manifest(), plugin="cuda_plugin")
    here = Host("nvidia", "580.159.04", "13.0", (gpu(0), gpu(1)))
    assert choose.make_same_gpu_map(record, here, ()) == ((uuid(0), uuid(0)),)
    assert choose.make_same_gpu_map(record, here, (("0", "0"),)) == ((uuid(0), uuid(0)),)
    with pytest.raises(Refused, match="the GPU map assigns 1") as caught:
        choose.make_same_gpu_map(record, here, (("0", "1"),))
    assert 'nvidia.driver = "native" can move' in caught.value.hint
    elsewhere = replace(here, gpus=(gpu(1),))
    with pytest.raises(Refused, match="this host does not have it"):
        choose.make_same_gpu_map(record, elsewhere, ())
    assert choose.make_same_gpu_map(replace(record, plugin="amdgpu_plugin"), elsewhere, (("0", "1"),)) == ()
    assert choose.make_same_gpu_map(a_manifest(), elsewhere, ()) == ()
    # What the settings say for all containers does not move it, and is no reason to refuse.
    assert choosing.choose(record, here, (), (("0", "1"),), {}).pairs == ((uuid(0), uuid(0)),)


# Which driver.


def container(pid: int) -> Container:
    return Container("c0ffee", pid, "running", "/nowhere", {})


@pytest.fixture
def two(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeDriver, FakeDriver]:
    nvidia, amd = FakeDriver(), FakeDriver(vendor="amd", plugin=AMDGPU)
    monkeypatch.setattr(choose_driver, "find_drivers", lambda: (nvidia, amd))
    members = lambda pid, name: [proc.process(each) for each in scene.family.pids]  # noqa: E731
    monkeypatch.setattr(containers, "processes", members)
    return nvidia, amd


def test_the_vendor_that_is_held(scene: Scene, two: tuple[FakeDriver, FakeDriver]) -> None:
    """The processes' device files decide, or else the nodes in /dev; both at once are refused."""
    nvidia, amd = two
    pid = scene.family.spawn()
    here, settings = container(scene.family.init), Settings()
    assert choose_driver.choose_driver(nvidia, here, settings) is nvidia
    amd.use(pid)
    assert choose_driver.choose_driver(nvidia, here, settings) is amd
    nvidia.use(pid)
    with pytest.raises(Refused, match="use GPUs of NVIDIA and AMD"):
        choose_driver.choose_driver(nvidia, here, settings)


def test_the_way_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's by plugin where it is asked for; AMD's in any case."""
    plugged = FakeDriver(plugin=CUDA)
    monkeypatch.setattr(choose_driver, "find_drivers", lambda: ())
    monkeypatch.setattr(choose_driver, "driver_of", lambda vendor, plugin: plugged)
    asked = Settings(nvidia=Nvidia(driver="criu-plugin"))
    native, amd = FakeDriver(), FakeDriver(vendor="amd", plugin=AMDGPU)
    assert choose_driver.choose_driver(native, container(0), Settings()) is native
    assert choose_driver.choose_driver(native, container(0), asked) is plugged
    assert choose_driver.choose_driver(amd, container(0), asked) is amd


def test_pages() -> None:
    """In CRIU's images; these go into the store where that is asked for."""
    here = container(1)
    store = StoreDestination("/nowhere/store", "/nowhere", here.id, Memory())
    for destination, name in ((None, "criu"), (store, "store")):
        assert plugin_checkpoint.make_pages("/nowhere", here, Memory(), destination).name == name


@pytest.mark.parametrize("asleep", [True, False])
@pytest.mark.parametrize("plugin", [AMDGPU, None])
def test_the_rate_of_the_setting(tmp_path: Path, asleep: bool, plugin: Plugin | None) -> None:
    """Whoever takes the memory into a store, it is encoded for the disk of the settings."""
    given = Settings(memory=Memory(pages="store"), store=Store(path=str(tmp_path), read_rate=5 << 30))
    call: Any = SimpleNamespace(images=lambda: tmp_path, leave_running=False)
    driver = FakeDriver(vendor="amd", plugin=plugin)
    of = Container("c", 1, "running", "", {})
    destination = checkpoint._choose_destination(call, given, of, None)
    pages = checkpoint._choose_pages(call, given, driver, of, destination, asleep=asleep, ahead=True)
    assert isinstance(pages, Chunks)
    assert pages._destination.speed is not None
    assert pages._destination.speed.disk == 5 << 30
