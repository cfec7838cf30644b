"""A container's processes, from /proc alone, and its state from the real runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells import cgroup_top
from fakes import ID, POISON, FakeRuntime, Family, unshare_works

from gpusnap.runtime_shim.base.errors import ContainerError, RuntimeFailed, SettingsError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container
from gpusnap.runtime_shim.runtime.container import (
    Container,
    bundle_annotations,
    bundle_config,
    find,
    inner_pids,
    processes,
)

PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
needs_pid_namespace = pytest.mark.skipif(
    not unshare_works("--pid", "--fork"), reason="making a PID namespace is not allowed here"
)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of its own, with one inside it."""
    top = cgroup_top()
    if top is None:
        pytest.skip("no cgroup hierarchy is writable here")
    folder = top / f"gpusnap-test-{os.getpid()}"
    try:
        (folder / "inner").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {top}: {error.strerror}")
    yield folder
    (folder / "inner").rmdir()
    folder.rmdir()


def pids(init: int, container_id: str = "none") -> set[int]:
    return {process.pid for process in processes(init, container_id)}


def test_descendants() -> None:
    """In our own namespaces and cgroups: init and all below it, and nobody else."""
    with Family() as family, Family() as other:
        children = {family.spawn(), family.spawn()}
        other.spawn()
        assert pids(family.init) == {family.init, *children}
        found = processes(family.init, "none")
        assert [process.pid for process in found] == sorted(process.pid for process in found)


def test_ourselves_are_never_part_of_it() -> None:
    """A container that we run in, as in a test host, is not dumped with us in it."""
    assert os.getpid() not in pids(os.getppid())
    assert os.getpid() not in pids(os.getpid())


def test_zombies_are_left_out() -> None:
    """A process that has ended is no member."""
    with Family() as family:
        pid = family.spawn()
        family.end(pid)
        assert pids(family.init) == {family.init}


def test_an_init_that_is_gone() -> None:
    """No init, no processes; ours are not taken for its."""
    assert processes(4194304, "none") == ()


def test_nested_cgroups(cgroup: Path) -> None:
    """Everything in the container's cgroup and below it, also what is no descendant of init."""
    with (
        Family(cgroup=str(cgroup)) as family,
        Family(cgroup=str(cgroup / "inner")) as exec_,
        Family() as other,
    ):
        members = {family.init, family.spawn(), exec_.init, exec_.spawn()}
        other.spawn()
        assert pids(family.init, cgroup.name) == members
        # Init itself may be further down, as systemd is.
        assert pids(exec_.init, cgroup.name) == members
        # A cgroup that is not named after the container may be anybody's.
        assert pids(family.init, "other") == {family.init, *family.pids}


@pytest.mark.parametrize("name", ["a1", "libpod-a1", "libpod-a1.scope", "crio-a1", "cri-containerd:k8s:a1"])
def test_names_of_cgroups(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As Podman, CRI-O and containerd name them; /pod/a12 is not within /pod/a1."""
    groups = {os.getpid(): "/system", 10: f"/pod/{name}", 11: f"/pod/{name}/b", 12: "/pod/a12", 13: "/pod"}
    monkeypatch.setattr(proc, "parents_by_start", lambda: {(pid, 1): 0 for pid in groups})
    monkeypatch.setattr(proc, "cgroups", lambda pid: {"": groups[pid]})
    monkeypatch.setattr(proc, "namespace", lambda pid, kind: "pid:[1]")
    monkeypatch.setattr(proc, "process", lambda pid: proc.Process(pid, (pid,), "x", (), 1))
    assert pids(10, "a1") == {10, 11}
    assert pids(12, "a1") == {12}
    assert pids(13, "a1") == {13}


@pytest.mark.parametrize(
    ("path", "folder"), [("/", "/sys/fs/cgroup"), ("/..a/b", "/sys/fs/cgroup/..a/b"), ("/../../b", None)]
)
def test_the_directory_of_a_cgroup(monkeypatch: pytest.MonkeyPatch, path: str, folder: str | None) -> None:
    """One outside the cgroup namespace has none: the path would lead to another place, such as the root."""
    mount = proc.Mount("0:26", "/", "/sys/fs/cgroup", (), (), "cgroup2")
    monkeypatch.setattr(proc, "mounts", lambda _: [mount])
    monkeypatch.setattr(proc, "cgroups", lambda _: {"": path})
    assert container.cgroup_folder(7) == folder


@needs_pid_namespace
def test_pid_namespace() -> None:
    """Everything in init's PID namespace, with the PIDs that a restore will bring back."""
    with Family(*PID_NAMESPACE) as family, Family() as other:
        first, second = family.spawn(), family.spawn()
        other.spawn()
        members = processes(family.init, "none")
        assert {process.pid for process in members} == {family.init, first, second}
        inner = inner_pids(family.init, members)
        assert inner[family.init] == 1
        assert 1 < inner[first] < inner[second]


def test_inner_pids_of_nested_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a namespace below the container's own has the PID that the container's init sees."""

    def process(pid: int, *spaces: int) -> proc.Process:
        return proc.Process(pid, (pid, *spaces), "x", (), 1)

    members = [process(100, 1), process(200, 7, 1), process(300, 9)]
    monkeypatch.setattr(proc, "process", lambda pid: {100: members[0]}.get(pid))
    assert inner_pids(100, members) == {100: 1, 200: 7, 300: 9}
    shared = [process(100), process(200)]
    monkeypatch.setattr(proc, "process", lambda pid: shared[0])
    assert inner_pids(100, shared) == {100: 100, 200: 200}


# The state.


def test_find(tmp_path: Path) -> None:
    """The state as the real runtime gives it."""
    runtime = FakeRuntime(tmp_path / "r")
    runtime.knows({"id": ID, "pid": 7, "status": "running", "bundle": "/b", "annotations": {"a": "b"}}, [])
    assert find([str(runtime.path)], ID) == Container(ID, 7, "running", "/b", {"a": "b"})
    runtime.knows({"id": ID, "pid": 0, "status": "stopped", "bundle": "/b", "annotations": None}, [])
    assert find([str(runtime.path)], ID) == Container(ID, 0, "stopped", "/b", {})


def test_find_nothing(tmp_path: Path) -> None:
    """A container that the runtime does not know, in words that Podman leaves alone."""
    runtime = FakeRuntime(tmp_path / "r")
    with pytest.raises(ContainerError) as caught:
        find([str(runtime.path)], ID)
    assert (
        caught.value.sentence() == f"the state of container {ID} cannot be read: there is no such container"
    )
    assert not [words for words in POISON if words in str(caught.value).lower()]


@pytest.mark.parametrize(
    "output", ["", "[]", "{}", '{"id": "a", "status": "running"}', '{"id": "a", "pid": "x"}']
)
def test_find_nonsense(tmp_path: Path, output: str) -> None:
    """A runtime that answers something else is said to."""
    runtime = FakeRuntime(tmp_path / "r")
    (runtime.folder / "state.json").write_text(output, "ascii")
    with pytest.raises(RuntimeFailed, match="printed no container state"):
        find([str(runtime.path)], ID)


def test_find_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that does not answer is waited for so long."""
    runtime = tmp_path / "r"
    runtime.write_text("#!/bin/sh\nexec sleep 1000\n")
    runtime.chmod(0o755)
    monkeypatch.setattr(container, "_PATIENCE", 0.2)
    with pytest.raises(RuntimeFailed, match=r"did not finish within 0\.2 s"):
        find([str(runtime)], ID)


def test_find_without_a_runtime(tmp_path: Path) -> None:
    """A runtime that cannot be started is named, in words that Podman leaves alone."""
    with pytest.raises(RuntimeFailed) as caught:
        find([str(tmp_path / "none")], ID)
    assert str(tmp_path / "none") in str(caught.value)
    assert caught.value.exit_code == 127
    assert not [words for words in POISON if words in str(caught.value).lower()]


# The bundle.


@pytest.mark.parametrize("content", [None, "", "{", "[]", "null", "\x00"])
def test_bundle_config_that_is_none(tmp_path: Path, content: str | None) -> None:
    """A config.json that is missing or broken is named."""
    if content is not None:
        (tmp_path / "config.json").write_text(content, "utf-8")
    with pytest.raises(ContainerError) as caught:
        bundle_config(str(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert not [words for words in POISON if words in caught.value.sentence().lower()]


def test_bundle_annotations(tmp_path: Path) -> None:
    """A map of strings, or nothing; anything else is an error."""
    (tmp_path / "config.json").write_text('{"annotations": {"a": "b"}}', "utf-8")
    assert bundle_annotations(bundle_config(str(tmp_path))) == {"a": "b"}
    assert bundle_annotations({}) == {}
    assert bundle_annotations({"annotations": None}) == {}
    for wrong in (["a"], {"a": 1}, "a"):
        with pytest.raises(SettingsError):
            bundle_annotations({"annotations": wrong})


def test_the_words_for_a_missing_container() -> None:
    """crun's and runc's own words for it become ours; others stay as they are."""
    assert container._reword("open /run/x: No such file or directory") == "there is no such container"
    assert container._reword("container does not exist") == "there is no such container"
    assert container._reword("cannot parse state") == "cannot parse state"


def test_no_init() -> None:
    """A runtime says 0 of a container that has ended, and 0 is the parent of all that runs on the host."""
    assert processes(0, "c0ffee") == ()
    assert processes(-1, "c0ffee") == ()
