"""Which container is meant."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import ID, Family

from gpusnap.base.user_errors import NotFound
from gpusnap.doctor.base import subject
from gpusnap.engines import podman
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, SettingsError

TASKS = "io.containerd.runtime.v2.task"


@pytest.fixture
def family() -> Iterator[Family]:
    with Family() as found:
        yield found


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "userdata"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"annotations": {"io.gpusnap.criu.ghost-limit": "1M"}}))
    return path


def podmans(monkeypatch: pytest.MonkeyPatch, found: podman.Container | GpusnapError) -> None:
    def answer(wanted: str) -> podman.Container:
        if isinstance(found, GpusnapError):
            raise found
        return found

    monkeypatch.setattr(podman, "inspect_container", answer)


def of_podman(
    bundle: Path, init: int, status: str = "running", runtime: str = "gpusnap-runtime"
) -> podman.Container:
    return podman.Container(ID, "w", runtime, status, str(bundle / "checkpoint"), init)


def test_podmans(monkeypatch: pytest.MonkeyPatch, bundle: Path, family: Family) -> None:
    """Its bundle, its processes, and the settings with its annotations on top."""
    child = family.spawn()
    podmans(monkeypatch, of_podman(bundle, family.init))
    found = subject.find("w")
    assert (found.engine, found.name, found.container.bundle) == ("Podman", "w", str(bundle))
    assert [process.pid for process in found.processes] == sorted([family.init, child])
    assert found.settings.criu.ghost_limit == 1 << 20
    assert found.objection is None


@pytest.mark.parametrize(
    ("status", "runtime", "said"),
    [
        ("paused", "gpusnap-runtime", "is paused, and Podman does not checkpoint paused containers"),
        ("running", "/usr/bin/crun", "does not support GPUs"),
    ],
)
def test_what_podman_cannot_have_checkpointed(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, family: Family, status: str, runtime: str, said: str
) -> None:
    """It is looked into all the same."""
    podmans(monkeypatch, of_podman(bundle, family.init, status, runtime))
    found = subject.find("w")
    assert said in str(found.objection)


@pytest.mark.parametrize(("init", "status"), [(0, "created"), (7, "exited")])
def test_one_that_does_not_run(monkeypatch: pytest.MonkeyPatch, bundle: Path, init: int, status: str) -> None:
    """There is nothing to look into."""
    podmans(monkeypatch, of_podman(bundle, init, status))
    with pytest.raises(ContainerError, match=f"is not running: it is {status}"):
        subject.find("w")


def test_a_bad_annotation(monkeypatch: pytest.MonkeyPatch, bundle: Path, family: Family) -> None:
    """As a checkpoint refuses it."""
    (bundle / "config.json").write_text(json.dumps({"annotations": {"io.gpusnap.nothing": "1"}}))
    podmans(monkeypatch, of_podman(bundle, family.init))
    with pytest.raises(SettingsError, match=r"io\.gpusnap\.nothing"):
        subject.find("w")


def task(state: Path, namespace: str, name: str, init: int) -> None:
    path = state / TASKS / namespace / name
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "init.pid").write_text(str(init))


@pytest.mark.parametrize("error", [NotFound("no such container"), GpusnapError("podman cannot be run")])
def test_containerds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: Family, error: GpusnapError
) -> None:
    """Where Podman has none of that name, or is not here; and by its namespace, without asking Podman."""
    podmans(monkeypatch, error)
    task(tmp_path, "k8s.io", "t", family.init)
    for namespace in ("", "k8s.io"):
        found = subject.find("t", namespace=namespace, state=str(tmp_path))
        assert (found.engine, found.container.pid, found.container.status) == (
            "containerd",
            family.init,
            "running",
        )
    with pytest.raises(type(error), match=str(error)):
        subject.find("other", state=str(tmp_path))
    with pytest.raises(NotFound, match="no task t in containerd's namespace default"):
        subject.find("t", namespace="default", state=str(tmp_path))


def test_containerds_in_two_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has to be said which."""
    podmans(monkeypatch, NotFound("no such container"))
    for namespace in ("a", "b"):
        task(tmp_path, namespace, "t", os.getpid())
    with pytest.raises(GpusnapError, match="several tasks t: a/t, b/t"):
        subject.find("t", state=str(tmp_path))


def test_containerds_that_does_not_run(tmp_path: Path) -> None:
    """A task that was made and not started, or has ended."""
    task(tmp_path, "a", "t", 1 << 22)
    with pytest.raises(ContainerError, match="is not running"):
        subject.find("t", namespace="a", state=str(tmp_path))


def test_containerds_by_the_beginning_of_its_id(tmp_path: Path, family: Family) -> None:
    """As crictl shows it; a few letters are no ID."""
    name = "0123456789abcdef" * 4
    task(tmp_path, "k8s.io", name, family.init)
    assert subject.find(name[:13], namespace="k8s.io", state=str(tmp_path)).container.id == name
    with pytest.raises(NotFound):
        subject.find(name[:6], namespace="k8s.io", state=str(tmp_path))
