"""All checks of a container, of real processes with a driver that does as it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import ID, MIB, FakeDriver, Family, gpu

from gpusnap.doctor import container
from gpusnap.doctor.base import free_space
from gpusnap.doctor.base.check import Check
from gpusnap.doctor.base.subject import Subject
from gpusnap.doctor.container_checks import gpu_use
from gpusnap.engines import podman_options
from gpusnap.runtime_shim.base.errors import ContainerError, Refused
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import DriverTooOld, GpuBusy
from gpusnap.runtime_shim.records.cri_layout import OF_CRI
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.settings import Nvidia, Settings, Store
from gpusnap.runtime_shim.snapshot.devices import bind_mounted_nodes
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.preflight import nccl, space
from gpusnap.runtime_shim.snapshot.preflight.nccl import Sharing
from gpusnap.runtime_shim.snapshot.records import suspensions


@pytest.fixture
def family() -> Iterator[Family]:
    with Family() as found:
        yield found


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(bind_mounted_nodes, "device_nodes", lambda init: ())
    return FakeDriver(gpus=(gpu(0),))


@pytest.fixture
def subject(family: Family, tmp_path: Path) -> Subject:
    family.spawn()
    found = containers.Container(ID, family.init, "running", str(tmp_path), {})
    settings = Settings(store=Store(path=str(tmp_path / "store")))
    # A process of the host's has its mounts, so the configuration has them all.
    config = {"mounts": [{"destination": "/"}]}
    return Subject("w", "Podman", found, containers.processes(family.init, ID), config, settings)


def by_name(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {each.name: each for each in checks}


def test_all(subject: Subject, driver: FakeDriver, family: Family) -> None:
    """GPU work that can be checkpointed; the driver is asked, and nothing is locked or checkpointed."""
    driver.use(family.pids[0], memory=5 * MIB)
    found = by_name(container.checks(subject, driver))
    assert found["GPU processes"].facts["bytes"] == 5 * MIB
    for name in (
        "container",
        "GPU state",
        "left-over handles",
        "shared GPU memory",
        "RAM",
        "disk",
        "devices",
    ):
        assert found[name].verdict.value == "ok", found[name]
    assert found["duration"].facts["gpu"] == 5 * MIB
    asked = {"open", "host", "state", "memory_used", "nodes", "visible"}
    assert {call.operation for call in driver.calls} <= asked


def test_volumes(subject: Subject, driver: FakeDriver, tmp_path: Path) -> None:
    """Podman's are listed with their sizes, and count for the time that a checkpoint takes."""
    before = by_name(container.checks(subject, driver))
    assert before["volumes"].says == "no named volume"
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume/large").write_bytes(bytes(3 * MIB))
    found = by_name(container.checks(replace(subject, volumes={"vol": str(tmp_path / "volume")}), driver))
    (told,) = found["volumes"].facts["volumes"]
    assert told["name"] == "vol"
    assert told["size"] >= 3 * MIB
    assert found["volumes"].says.startswith("vol (3.0 MiB): a checkpoint includes the files, unless --ignore")
    assert found["duration"].facts["volumes"] == told["size"]
    assert found["duration"].facts["high"] > before["duration"].facts["high"]
    assert "volumes" not in by_name(container.checks(replace(subject, engine="containerd"), driver))


def test_options_that_podman_does_not_restore(subject: Subject, driver: FakeDriver) -> None:
    """A failure where the restore fails, and a warning where something is only missing then."""
    assert by_name(container.checks(subject, driver))["Podman's options"].verdict.value == "ok"
    found = {"Config": {"Secrets": [{}], "Healthcheck": {"Test": ["CMD", "true"]}}}
    options = tuple(podman_options.list_unrestored(found))
    checks = container.checks(replace(subject, unrestored=options), driver)
    told = [each for each in checks if each.name == "Podman's options"]
    assert [each.verdict.value for each in told] == ["failure", "warning"]
    assert "a secret that is a file" in told[0].says
    assert "a health check, which Podman does not continue after a restore" in told[1].says


def test_bytes_that_the_driver_does_not_tell(subject: Subject, driver: FakeDriver, family: Family) -> None:
    """Then all that the GPU has in use counts, as in a checkpoint."""
    driver.gpus = (gpu(0, used=7 * MIB),)
    driver.use(family.pids[0])
    del driver.used[family.pids[0]]
    found = by_name(container.checks(subject, driver))
    assert found["GPU processes"].facts["bytes"] == 7 * MIB
    assert found["GPU processes"].facts["processes"][0]["gpus"] == {driver.gpus[0].uuid: 7 * MIB}
    assert found["duration"].facts["gpu"] == 7 * MIB


def test_a_suspended_one(subject: Subject, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPU memory is none of any GPU, and counts for how long a checkpoint takes."""
    asleep = SimpleNamespace(gpu_memory=5 << 30)
    monkeypatch.setattr(suspensions, "find_by_container", lambda wanted: asleep if wanted == ID else None)
    found = by_name(container.checks(subject, driver))
    assert "its 5.0 GiB of GPU memory are in RAM or the store" in found["GPU processes"].says
    assert found["duration"].facts["gpu"] == 5 << 30
    assert driver.calls == []


def test_the_disk_of_the_store(
    subject: Subject, driver: FakeDriver, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman's images fit into its storage, and the store, where `gpusnap checkpoint` writes, is full."""
    driver.use(family.pids[0], memory=5 * MIB)
    asked: list[str] = []

    def look(images: str, *rest: object, place: str = "") -> None:
        asked.append(place)
        if place:
            raise Refused("the store is full", hint="free some space")

    monkeypatch.setattr(space, "check_disk", look)
    found = by_name(container.checks(subject, driver))
    assert (found["disk"].verdict.value, found["disk"].says) == ("failure", "the store is full")
    assert asked == ["", gpu_use._find_existing(subject.settings.store.path)]


def test_what_the_driver_fails_to_say(subject: Subject, driver: FakeDriver, family: Family) -> None:
    """A question that the driver does not answer is a warning, and the others are asked all the same."""
    driver.fail("nodes", None, GpuBusy("the driver does not respond"))
    found = by_name(container.checks(subject, driver))
    assert found["GPU state"].says == "cannot determine: the driver does not respond"
    assert "duration" in found


def test_shared_memory_that_is_allowed(
    subject: Subject, driver: FakeDriver, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia.allow-nccl does not keep doctor from looking, and makes a warning of what it finds."""
    driver.use(family.pids[0], memory=MIB)
    shares = Sharing(subject.processes[0], "shares GPU memory", "run it with NCCL_P2P_DISABLE=1", "GPS-214")
    monkeypatch.setattr(preflight, "find_sharing", lambda users, version: shares)
    for allow, verdict in ((False, "failure"), (True, "warning")):
        settings = replace(subject.settings, nvidia=Nvidia(allow_nccl=allow))
        check = by_name(container.checks(replace(subject, settings=settings), driver))["shared GPU memory"]
        assert check.verdict.value == verdict
        assert "shares GPU memory" in check.says
        assert check.says.endswith("; allowed by nvidia.allow-nccl") is allow
        assert check.todo.startswith("run it with NCCL_P2P_DISABLE=1")
        assert ("--force" in check.todo) is not allow


def test_ranks_beside_others(
    subject: Subject, driver: FakeDriver, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a checkpoint after which they run on is refused."""
    driver.use(family.pids[0], memory=MIB)
    driver.used[os.getpid()] = MIB
    monkeypatch.setattr(nccl, "is_job", lambda users: True)
    check = by_name(container.checks(subject, driver))["shared GPUs"]
    assert check.verdict.value == "warning"
    assert check.says.endswith("; a checkpoint without --leave-running is possible")
    assert check.todo == "stop the other process, or make the checkpoint without --leave-running"


@pytest.mark.parametrize(("namespace", "folder"), [("default", "TMPDIR"), ("k8s.io", "/var/lib/containerd")])
def test_where_containerds_checkpoints_go(
    subject: Subject,
    driver: FakeDriver,
    family: Family,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    namespace: str,
    folder: str,
) -> None:
    """Not to the bundle, which is on a tmpfs; what lacks room is a warning, for it may go elsewhere."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    bundle = f"/run/containerd/io.containerd.runtime.v2.task/{namespace}/w"
    task = replace(subject, engine="containerd", container=replace(subject.container, bundle=bundle))
    wanted = str(tmp_path) if folder == "TMPDIR" else folder
    assert gpu_use.find_image_folder(task) == wanted
    assert gpu_use.find_image_folder(subject) == subject.container.bundle
    driver.use(family.init, memory=1 << 60)
    monkeypatch.setattr(free_space, "in_memory", lambda path: path == wanted)
    monkeypatch.setattr(free_space, "speed", lambda path: pytest.fail(f"{path} was measured"))
    found = by_name(container.checks(task, driver))
    assert found["disk"].verdict.value == "warning"
    assert "containerd may use another directory" in found["disk"].says
    assert found["duration"].facts["disk"] is None


def test_without_a_driver(subject: Subject) -> None:
    """What CRIU may stumble over is looked at in any case."""
    found = by_name(container.checks(subject, None))
    assert found["GPU processes"].verdict.value == "ok"
    assert {"kernel files", "sockets", "duration"} <= {*found}
    assert "GPU state" not in found


def test_a_driver_that_refuses(subject: Subject, driver: FakeDriver) -> None:
    """Its sentence, and the rest."""
    driver.fail("open", None, DriverTooOld("no checkpoint API", hint="install 570"))
    found = by_name(container.checks(subject, driver))
    assert (found["GPU processes"].verdict.value, found["GPU processes"].says) == (
        "failure",
        "no checkpoint API",
    )
    assert "duration" in found


def test_paused(subject: Subject, driver: FakeDriver) -> None:
    """Its processes are not asked."""
    paused = replace(subject, container=replace(subject.container, status="paused"))
    found = by_name(container.checks(paused, driver))
    assert found["GPU processes"].verdict.value == "warning"
    assert driver.calls == []


def test_objection(subject: Subject) -> None:
    """Why gpusnap checkpoint would not begin."""
    found = container.checks(replace(subject, objection=ContainerError("no", hint="do that")), None)
    assert (found[0].name, found[0].verdict.value, found[0].todo) == ("container", "failure", "do that")


def test_refusals(
    subject: Subject, driver: FakeDriver, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of pre-flight's is told, not the first alone."""
    driver.use(family.init, memory=1 << 60, state=ProcessState.CHECKPOINTED)
    monkeypatch.setattr(bind_mounted_nodes, "device_nodes", lambda init: (("c", 10, 229, "/dev/fuse"),))
    found = by_name(container.checks(subject, driver))
    for name, said in (
        ("GPU state", "is already checkpointed"),
        ("RAM", "must move to RAM"),
        ("disk", "the checkpoint needs up to"),
        ("devices", "/dev/fuse"),
    ):
        assert found[name].verdict.value == "failure"
        assert said in found[name].says
        assert found[name].todo


def test_strange_devices_that_are_given(subject: Subject, driver: FakeDriver) -> None:
    """One of the configuration is no stranger; another is."""
    given = {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}
    with_fuse = replace(subject, config={"linux": {"devices": [given]}})
    fuse = ("c", 10, 229, "/dev/fuse")
    gpu_use.refuse_strange_devices(with_fuse, driver, devices=[fuse])
    with pytest.raises(Refused, match="/dev/fuse"):
        gpu_use.refuse_strange_devices(subject, driver, devices=[fuse])


def test_a_pods_container(subject: Subject, driver: FakeDriver) -> None:
    """Its probes and its volumes are told of, and of others' not."""
    own = ("liveness probe", "pod's volumes")
    assert not set(own) & set(by_name(container.checks(subject, driver)))
    annotations = {OF_CRI: "container"}
    mounts = [{"destination": "/dev/shm", "source": "/run/sandboxes/a/shm", "options": ["rbind"]}]
    config = subject.config | {"annotations": annotations, "mounts": [*subject.config["mounts"], *mounts]}
    pod = replace(subject, config=config, container=replace(subject.container, annotations=annotations))
    found = by_name(container.checks(pod, driver))
    assert found["liveness probe"].facts["pause"] == found["duration"].facts["high"]
    assert set(own) <= set(found)
