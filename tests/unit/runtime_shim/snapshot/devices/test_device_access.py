"""Device nodes that a container may not open any more; what the kernel says is a test's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import bundle, cgroup_freezer
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.container import Container
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.snapshot.devices import device_access

CONTROL, FIRST, SECOND = (
    Node(f"/dev/nvidia{name}", 195, n) for name, n in (("ctl", 255), ("0", 0), ("1", 1))
)
NODES = (CONTROL, FIRST, SECOND)
DENY = {"allow": False, "access": "rwm"}


class Cgroup:
    """What a container may open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.denied: set[Node] = set()
        self.frozen = False
        self.asked = 0
        monkeypatch.setattr(containers, "cgroup_folder", lambda pid: f"/{int(pid == 7)}")
        monkeypatch.setattr(cgroup_freezer, "is_standing", lambda _: self.frozen)
        monkeypatch.setattr(question_process, "ask", self._ask)

    def _ask(self, pid: int, *words: Any) -> list[str]:
        self.asked += 1
        paths = {f"/proc/{pid}/root{node.path}" for node in self.denied}
        return [path for path in words[-1] if path in paths]


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> Cgroup:
    return Cgroup(monkeypatch)


def never(_: Sequence[Node]) -> Sequence[Node]:
    pytest.fail("nothing is lacking")


def test_it_may_open_them(cgroup: Cgroup, capsys: pytest.CaptureFixture[str]) -> None:
    device_access.check(7, "w", NODES, never)
    assert cgroup.asked == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["frozen", "none", "ours", "unanswered"])
def test_where_it_cannot_be_told(cgroup: Cgroup, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nothing is claimed, and nothing done; whoever enters a frozen cgroup would stand as well."""
    cgroup.denied = {FIRST}
    match kind:
        case "frozen":
            cgroup.frozen = True
        case "none":
            monkeypatch.setattr(containers, "cgroup_folder", lambda _: None)
        case "ours":
            monkeypatch.setattr(containers, "cgroup_folder", lambda _: "/same")
        case "unanswered":

            def fail(*_: object) -> None:
                raise GpusnapError("no answer")

            monkeypatch.setattr(question_process, "ask", fail)
    device_access.check(7, "w", NODES, never)
    assert cgroup.asked == 0


def test_they_are_given_back(cgroup: Cgroup, capsys: pytest.CaptureFixture[str]) -> None:
    cgroup.denied = {CONTROL, FIRST}

    def allow(nodes: Sequence[Node]) -> Sequence[Node]:
        cgroup.denied = set()
        return nodes

    device_access.check(7, "w", NODES, allow)
    said = capsys.readouterr().err
    assert "container w could no longer open /dev/nvidiactl, /dev/nvidia0" in said


@pytest.mark.parametrize("held", [SECOND, None])
def test_one_that_its_configuration_does_not_give_it(
    cgroup: Cgroup, monkeypatch: pytest.MonkeyPatch, held: Node | None
) -> None:
    """It is lost where a process has it open, as NVIDIA's hook gave it; nobody can give it back."""
    cgroup.denied = {FIRST, SECOND}
    monkeypatch.setattr(cgroup_freezer, "members", lambda _: [7, 8])
    paths = {8: held.path} if held is not None else {}
    monkeypatch.setattr(proc, "open_files", lambda pid: [("/proc/x", paths.get(pid, "/dev/null"))])

    def allow(nodes: Sequence[Node]) -> Sequence[Node]:
        assert nodes == [FIRST, SECOND]
        cgroup.denied = {SECOND}
        return [FIRST]

    if held is None:
        device_access.check(7, "w", NODES, allow)
        return
    with pytest.raises(Refused, match=r"^container w may no longer open /dev/nvidia1"):
        device_access.check(7, "w", NODES, allow)


def test_one_that_it_was_never_given(
    cgroup: Cgroup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --volume /dev:/dev it sees nodes that are not its own."""
    cgroup.denied = {SECOND}
    monkeypatch.setattr(cgroup_freezer, "members", lambda _: [])
    device_access.check(7, "w", NODES, lambda _: ())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("why", ["", "crun 1.21 update failed: no"])
def test_they_stay_away(cgroup: Cgroup, why: str) -> None:
    cgroup.denied = {FIRST}

    def allow(nodes: Sequence[Node]) -> Sequence[Node]:
        if why:
            raise GpusnapError(why)
        return nodes

    with pytest.raises(Refused, match=r"^container w may no longer open /dev/nvidia0") as caught:
        device_access.check(7, "w", NODES, allow)
    assert str(caught.value).endswith(f": {why}" if why else "its GPU state")
    assert caught.value.code == "GPS-217"


@pytest.mark.parametrize(
    ("linux", "given"),
    [
        ({}, ()),
        ({"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]}, (FIRST,)),
        ({"resources": {"devices": [DENY]}, "devices": [{"type": "c", "major": 195, "minor": 1}]}, (SECOND,)),
        ({"resources": {"devices": [{"allow": True, "access": "rwm"}]}}, NODES),  # --privileged
        (
            {"resources": {"devices": [DENY, {"allow": True, "type": "c", "major": 195, "access": "rw"}]}},
            NODES,
        ),
        ({"resources": {"devices": [DENY, {"allow": True, "type": "c", "major": 195, "access": "r"}]}}, ()),
        ({"resources": {"devices": [DENY, {"allow": True, "type": "b", "major": 195, "minor": 0}]}}, ()),
        ({"resources": {"devices": "no referrers API, so the list"}, "devices": "none either"}, ()),
    ],
)
def test_what_its_configuration_gives_it(
    tmp_path: Path, linux: Mapping[str, Any], given: Sequence[Node]
) -> None:
    """These rules its runtime writes again; where they give it none of the nodes, nothing is run."""
    runtime, told = tmp_path / "crun", tmp_path / "told"
    runtime.write_text(
        f'#!/bin/sh\necho "$@" > {told}\nwhile [ $# -gt 2 ]; do shift; done\ncat "$1" >> {told}\n'
    )
    runtime.chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps({"linux": linux}))
    container = Container("abc", 7, "running", str(tmp_path), {}, root="/run/crun")
    real = RealRuntime(runtime, "crun", (1, 21))
    assert tuple(device_access.update(real, container, NODES)) == tuple(given)
    assert told.exists() == bool(given)
    if given:
        line, _, rules = told.read_text().partition("\n")
        assert line.startswith("--root /run/crun update --resources ")
        assert line.endswith(" abc")
        found = json.loads(rules)["devices"]
        for node in NODES:
            assert ("w" in bundle.access(found, "c", node.major, node.minor)) == (node in given)
        assert [each for each in found if not each["allow"]] == [
            each for each in linux.get("resources", {}).get("devices", ()) if not each["allow"]
        ]


def test_a_runtime_that_fails(tmp_path: Path) -> None:
    runtime = tmp_path / "crun"
    runtime.write_text("#!/bin/sh\necho why >&2\nexit 1\n")
    runtime.chmod(0o755)
    config = {"linux": {"devices": [{"type": "c", "major": 195, "minor": 0}]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    container = Container("abc", 7, "running", str(tmp_path), {})
    with pytest.raises(GpusnapError, match=r"^crun 1\.21 update failed: why$"):
        device_access.update(RealRuntime(runtime, "crun", (1, 21)), container, NODES)


@pytest.mark.parametrize("there", [True, False])
def test_a_child_that_cannot_return(tmp_path: Path, there: bool) -> None:
    """It does not enter the container's cgroup, and makes no file in place of its own one."""
    group, own, node = tmp_path / "group", tmp_path / "own", tmp_path / "node"
    members, back = group / "cgroup.procs", own / "cgroup.procs"
    for file in (members, node, *([back] if there else [])):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    with nullcontext() if there else pytest.raises(FileNotFoundError):
        assert device_access._ask(str(group), str(own), [str(node), str(tmp_path / "none")]) == []
    assert members.read_text() == ("0" if there else "")
    assert back.read_text() == "0" if there else not back.exists()
