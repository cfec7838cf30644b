"""A restore where Podman still has the container that the checkpoint ended."""

from __future__ import annotations

import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from archives import CONFIG_DUMP, CREATED
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive, keep

from gpusnap.base.progress import Progress
from gpusnap.checkpoints.locator import InFile, InStore, Place
from gpusnap.oci.store.store import Store
from gpusnap.operations.restoring import in_place, volumes
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.operations.restoring.volumes import PodmanObjects, VolumeChoice
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.records.manifest import Manifest

QUIET = Progress(shown=False)
NAME = str(CONFIG_DUMP["name"])


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store


@pytest.fixture
def archive(tmp_path: Path) -> str:
    return an_archive(tmp_path)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: str) -> FakePodman:
    """It has the container that the checkpoint in the archive ended, and its images."""
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has(status="exited", name=NAME, checkpointed=True)
    found.lists(ID)
    with tarfile.open(archive) as whole:
        images = [each for each in whole.getmembers() if each.name.startswith("checkpoint/")]
        whole.extractall(found.folder, images, filter="data")
    return found


def restored(what: Place, **more: object) -> list[str]:
    """Restore it; the ID."""
    done = restoring.restore(RestoreRequest(what=what, **more), QUIET)  # type: ignore[arg-type]
    return [done.container]


def test_from_a_file(fake: FakePodman, archive: str) -> None:
    """Podman is asked for the container, and nothing is imported or removed."""
    assert restored(InFile(archive), tcp_established=True, gpu_map="0=1") == [ID]
    assert fake.calls() == [f"container restore --tcp-established {ID}"]
    assert fake.environment()["GPUSNAP_GPU_MAP"] == "0=1"


def test_from_a_store(fake: FakePodman, archive: str, store: Store) -> None:
    """The runtime finds the memory in that store; the chunks are no part of what Podman has then."""
    for name in ("blobs", "oci-layout", "index.json"):
        os.rename(fake.folder / "checkpoint/gpusnap" / name, fake.folder / name)
    keep(store, archive, ["w"])
    assert restored(InStore(store, "w")) == [ID]
    assert fake.calls() == [f"container restore {ID}"]
    assert fake.environment()["GPUSNAP_STORE"] == store.path


def test_its_own_name() -> None:
    """Named as it is called, it is the same; that of the archive here no --name can be."""
    assert in_place._select_options(("--name", "w", "--tcp-close"), "w") == ("--tcp-close",)
    assert in_place._select_options(("--name", "v", "--tcp-close"), "w") is None


@pytest.mark.parametrize("users", ["", "other"])
def test_its_volumes(
    fake: FakePodman, tmp_path: Path, users: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are its own: nothing is said of them, unless another container runs with one."""
    choice = VolumeChoice(PodmanObjects(("data",)), True, {"data": tuple(users.split())})
    with volumes.report_kept_volumes(volumes.keep_volumes(choice)):
        pass
    assert ("data (also used by other)" in capsys.readouterr().err) is bool(users)


def test_volumes_as_they_are(fake: FakePodman, archive: str) -> None:
    """In place it is so anyway."""
    restored(InFile(archive), ignore_volumes=True)
    assert fake.calls() == [f"container restore {ID}"]


def imports(fake: FakePodman) -> bool:
    (call,) = fake.calls()
    return "--import" in call


@pytest.mark.parametrize("options", [{"name": "other"}, {"ignore_rootfs": True}])
def test_what_needs_an_import(fake: FakePodman, archive: str, options: dict[str, object]) -> None:
    """Podman takes these options only with one."""
    restored(InFile(archive), **options)
    assert imports(fake)


@pytest.mark.parametrize(
    "state",
    [
        {"checkpointed": False},  # started since, or another end
        {"status": "running"},
        {"status": "paused"},
        {"name": "renamed"},
    ],
)
def test_another_state(fake: FakePodman, archive: str, state: dict[str, object]) -> None:
    """What is not stopped by that checkpoint is Podman's to refuse."""
    whole = {"status": "exited", "name": NAME, "checkpointed": True, **state}
    fake.has(**whole)  # type: ignore[arg-type]
    restored(InFile(archive))
    assert imports(fake)


def has_steps(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The manifest has these steps of the checkpoint."""
    read = manifest_file.read

    def read_with_steps(path: str) -> Manifest:
        return replace(read(path), timing=tuple(Step(name, 0.0, 0.1) for name in names))

    monkeypatch.setattr(manifest_file, "read", read_with_steps)


@pytest.mark.parametrize("auto_remove", [False, True])
@pytest.mark.parametrize("started", ["2000-01-01T00:00:00.123456789Z", "2999-01-01T00:00:00Z", ""])
def test_after_a_restart_of_the_host(
    fake: FakePodman, archive: str, started: str, auto_remove: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman has forgotten that the checkpoint ended it; its manifest says so, if nobody started it since."""
    has_steps(monkeypatch, "lock", "dump")
    state = {"Status": "exited", "Pid": 0, "Checkpointed": False, "StartedAt": started}
    fake.has(name=NAME, State=state, HostConfig={"AutoRemove": auto_remove})
    restored(InFile(archive))
    assert imports(fake) is (auto_remove or not started or started > CREATED)


@pytest.mark.parametrize("steps", [("lock", "dump", "resume"), ("adopt", "dump"), ()])
def test_it_ran_on_until_the_restart(
    fake: FakePodman, archive: str, steps: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may be later than the checkpoint: they are not replaced."""
    has_steps(monkeypatch, *steps)
    fake.has(name=NAME, State={"Status": "exited", "Pid": 0, "StartedAt": "2000-01-01T00:00:00Z"})
    restored(InFile(archive))
    assert imports(fake)


def _longer(folder: Path) -> None:
    with open(folder / "pages-1.img", "ab") as file:
        file.write(b"x")


def _other(folder: Path) -> None:
    path = folder / "inventory.img"
    path.write_bytes(bytes(len(path.read_bytes())))


@pytest.mark.parametrize(
    "change",
    [
        _longer,
        _other,
        lambda folder: (folder / "inventory.img").unlink(),
        lambda folder: (folder / "core-7.img").write_bytes(b"more"),
        lambda folder: (folder / "gpusnap/manifest.json").write_bytes(b"{}"),
    ],
)
def test_another_checkpoint(fake: FakePodman, archive: str, change: object) -> None:
    """Podman has an earlier or a later one of that container: it is not restored for this one."""
    assert callable(change)
    change(fake.folder / "checkpoint")
    restored(InFile(archive))
    assert imports(fake)


def test_no_container_of_that_id(fake: FakePodman, archive: str) -> None:
    """Then Podman is not asked any further."""
    fake.lists()
    restored(InFile(archive))
    assert imports(fake)


def test_it_fails(fake: FakePodman, archive: str) -> None:
    """The container stays, and the sentence says so, with the reason first."""
    fake.fails("gpusnap: no GPU fits [GPS-312]\n")
    with pytest.raises(GpusnapError) as raised:
        restored(InFile(archive))
    assert str(raised.value) == (
        f"no GPU fits; nothing is lost: Podman still has {NAME}, stopped, and its checkpoint"
    )
    assert (raised.value.code, raised.value.hint[:12]) == ("GPS-312", "correct that")
    assert "rm" not in " ".join(fake.calls())
    assert fake.status() == "exited"
