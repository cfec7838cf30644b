"""pod.py: the namespaces of a container in a pod, whose infra container is another process by now."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gpusnap.runtime_shim.base.errors import ContainerError, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.podman import pod

POD, INFRA, MEMBER, OTHER = ("0" * 63 + each for each in "abcd")
OLD, NEW, STRANGER = 100, 200, 300


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The cgroup of each running process, by PID."""
    groups = {
        NEW: f"/libpod_parent/{POD}/libpod-{INFRA}",
        STRANGER: f"/libpod_parent/libpod-{OTHER}",
    }
    monkeypatch.setattr(proc, "is_running", groups.__contains__)
    monkeypatch.setattr(proc, "cgroups", lambda pid: {"": groups[pid]})
    monkeypatch.setattr(proc, "parent", lambda pid: 1)
    monkeypatch.setattr(proc, "start_time", lambda pid: 1)
    monkeypatch.setattr(proc, "command", lambda pid: ("/sbin/init",))
    return groups


class Podman:
    """Its directories, with the pod's infra container, a member, and one that is in no pod."""

    def __init__(self, at: Path, sandbox: str = INFRA) -> None:
        self.storage, self.run = at / "storage/overlay-containers", at / "run/overlay-containers"
        self.config = self.add(MEMBER, POD, sandbox)
        self.add(INFRA, POD)
        self.add(OTHER, "libpod")
        self.write_pid(INFRA, f"{NEW}")

    def add(self, name: str, parent: str, sandbox: str = "") -> dict[str, Any]:
        annotations = {"io.container.manager": "libpod"}
        if sandbox:
            annotations["io.kubernetes.cri-o.SandboxID"] = sandbox
        config: dict[str, Any] = {
            "annotations": annotations,
            "linux": {
                "cgroupsPath": f"/libpod_parent/{parent}/libpod-{name}",
                "namespaces": [
                    {"type": "pid"},
                    {"type": "ipc", "path": f"/proc/{OLD}/ns/ipc"},
                    {"type": "uts", "path": f"/proc/{OLD}/ns/uts"},
                    {"type": "network", "path": "/run/netns/a"},
                ],
            },
            "mounts": [
                {
                    "destination": "/run/.containerenv",
                    "source": f"{self.run}/{name}/userdata/.containerenv",
                    "options": ["bind"],
                }
            ],
        }
        folder = self.storage / name / "userdata"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        return config

    def write_pid(self, name: str, text: str) -> None:
        folder = self.run / name / "userdata"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pidfile").write_text(text)

    def find(self, bundle: Path | None = None, *, checkpointed: float = 0.0) -> dict[str, str]:
        folder = str(bundle or self.storage / MEMBER / "userdata")
        return pod.find_namespaces(self.config, folder, "w", checkpointed=checkpointed)


RIGHT = {f"/proc/{OLD}/ns/{kind}": f"/proc/{NEW}/ns/{kind}" for kind in ("ipc", "uts")}


@pytest.mark.parametrize("sandbox", [INFRA, POD])
@pytest.mark.parametrize("there", [False, True])
def test_another_process(tmp_path: Path, processes: dict[int, str], there: bool, sandbox: str) -> None:
    """The infra container's process of now, also if a stranger has the old PID; other paths stay."""
    if there:
        processes[OLD] = processes[STRANGER]
    assert Podman(tmp_path, sandbox).find() == RIGHT


def test_storage_behind_a_link(tmp_path: Path) -> None:
    """The runtime may be given the bundle by another path."""
    podman = Podman(tmp_path)
    (tmp_path / "link").symlink_to(podman.storage / MEMBER)
    assert podman.find(tmp_path / "link/userdata") == RIGHT


def test_it_has_run_since_the_checkpoint(
    tmp_path: Path, processes: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not the infra container's: the container has joined a namespace of a third one."""
    processes[OLD] = processes[STRANGER]
    ticks = os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(proc, "start_time", {OLD: ticks * 1000}.get)
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    podman = Podman(tmp_path)
    assert podman.find(checkpointed=boot + 1100) == {}
    assert podman.find(checkpointed=boot + 900) == RIGHT
    del processes[OLD]
    assert podman.find(checkpointed=boot + 1100) == RIGHT


def test_the_same_process(tmp_path: Path) -> None:
    """Nothing is to be changed."""
    podman = Podman(tmp_path)
    for each in podman.config["linux"]["namespaces"][1:3]:
        each["path"] = each["path"].replace(f"{OLD}", f"{NEW}")
    assert podman.find() == {}


def test_without_a_cgroup(tmp_path: Path, processes: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With --cgroups=disabled, its conmon shows that it is the infra container's."""
    processes[NEW] = "/user.slice"
    podman = Podman(tmp_path)
    with pytest.raises(Refused):
        podman.find()
    monkeypatch.setattr(proc, "command", lambda pid: ("conmon", "-c", INFRA))
    assert podman.find() == RIGHT


@pytest.mark.parametrize("pid", ["", "-1", f"{STRANGER}", f"{OLD}", "none"])
def test_it_does_not_run(tmp_path: Path, pid: str) -> None:
    """Podman has removed the PID file, or it names a process that has ended, or a stranger."""
    podman = Podman(tmp_path)
    if pid == "none":
        os.unlink(podman.run / INFRA / "userdata/pidfile")
    else:
        podman.write_pid(INFRA, pid)
    with pytest.raises(Refused, match=f"infra container {INFRA[:12]} does not run") as caught:
        podman.find()
    assert caught.value.code == "GPS-531"
    assert caught.value.hint.startswith(f"podman start {INFRA[:12]}, ")


def test_it_is_not_known(tmp_path: Path, processes: dict[int, str]) -> None:
    """The pod's own process is right; a stranger's namespaces are never joined."""
    podman = Podman(tmp_path, POD)
    (podman.storage / INFRA / "userdata/config.json").unlink()
    processes[OLD] = processes[NEW]
    assert podman.find() == {}
    processes[OLD] = processes[STRANGER]
    with pytest.raises(Refused, match="is not known"):
        podman.find()


def test_of_nobody_else(tmp_path: Path) -> None:
    """A container in no pod, another engine's, and one whose paths are not of a process."""
    podman = Podman(tmp_path)
    del podman.config["annotations"]["io.kubernetes.cri-o.SandboxID"]
    assert podman.find() == {}
    other = Podman(tmp_path / "other")
    other.config["annotations"]["io.container.manager"] = "containerd"
    assert other.find() == {}
    third = Podman(tmp_path / "third")
    del third.config["linux"]["namespaces"][1:3]
    assert third.find() == {}
    third.config["linux"] = third.config["annotations"] = None
    assert third.find() == {}


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """It is an error: unknown is not the same as not running."""
    podman = Podman(tmp_path)
    path = podman.run / INFRA / "userdata/pidfile"
    path.unlink()
    path.mkdir()
    with pytest.raises(ContainerError, match="pidfile cannot be read"):
        podman.find()
