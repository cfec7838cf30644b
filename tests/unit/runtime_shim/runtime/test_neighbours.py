"""Containers that share a PID namespace: each has its own processes, wherever their parents are."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import pytest
from cells import cgroup_top
from fakes import Family, unshare_works, wait_for

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import neighbours
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall
from gpusnap.runtime_shim.runtime.container import (
    Container,
    inner_pids,
    is_descendant,
    list_beside,
    list_left_out,
    processes,
)
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight

A, B = "a" * 64, "b" * 64
OWN_SPACE = ("unshare", "--pid", "--mount", "--fork", "--kill-child")

pytestmark = pytest.mark.skipif(
    not unshare_works("--pid", "--mount", "--fork"), reason="making namespaces is not allowed here"
)


def join(init: int, *more: str) -> tuple[str, ...]:
    """A command that runs another container's init in the PID namespace of this one."""
    return ("nsenter", f"--pid=/proc/{init}/ns/pid", *(more or ("unshare", "--mount")))


@pytest.fixture
def groups() -> Iterator[dict[str, str]]:
    """A cgroup for each of the two, side by side; named after them."""
    top = cgroup_top()
    if top is None:
        pytest.skip("no cgroup hierarchy is writable here")
    folder = top / f"gpusnap-test-{os.getpid()}"
    made = {name: folder / name for name in (f"libpod-{A}.scope", f"libpod-{B}.scope", "plain-a", "plain-b")}
    try:
        for path in made.values():
            path.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {top}: {error.strerror}")
    yield {name: str(path) for name, path in made.items()}
    for path in (*made.values(), folder):
        wait_for(lambda path=path: _removed(path), f"an empty {path}")  # type: ignore[misc]


def _removed(path: Path) -> bool:
    with suppress(OSError):
        path.rmdir()
    return not path.exists()


def pids(init: int, name: str) -> set[int]:
    return {process.pid for process in processes(init, name)}


def near(init: int, name: str) -> set[int]:
    return {process.pid for process in list_beside(init, name)}


@pytest.fixture(params=["named", "plain", "none"])
def names(request: pytest.FixtureRequest, groups: dict[str, str]) -> tuple[str, str, str, str]:
    """ID and cgroup of each: with IDs as most engines give them, with others, and without a cgroup."""
    kind: str = request.param
    if kind == "named":
        return A, B, groups[f"libpod-{A}.scope"], groups[f"libpod-{B}.scope"]
    if kind == "plain":
        return "plain-a", "plain-b", groups["plain-a"], groups["plain-b"]
    return A, B, "", ""


def test_joined(names: tuple[str, str, str, str]) -> None:
    """What joined is no member of the owner, nor the other way round."""
    a, b, of_a, of_b = names
    with Family(*OWN_SPACE, cgroup=of_a) as owner, Family(*join(owner.init), cgroup=of_b) as other:
        mine, theirs = {owner.init, owner.spawn()}, {other.init, other.spawn()}
        assert proc.namespace(owner.init, "pid") == proc.namespace(other.init, "pid")
        assert pids(owner.init, a) == mine
        assert near(owner.init, a) == theirs
        assert pids(other.init, b) == theirs
        assert near(other.init, b) == set()
        inner = inner_pids(other.init, processes(other.init, b))
        assert 1 not in inner.values()
        assert inner.keys() == theirs


def test_both_joined_a_third(groups: dict[str, str]) -> None:
    """As in a pod, whose PID 1 is its pause container's."""
    with ExitStack() as stack:
        pause = stack.enter_context(Family(*OWN_SPACE))
        a = stack.enter_context(Family(*join(pause.init), cgroup=groups["plain-a"]))
        b = stack.enter_context(Family(*join(pause.init), cgroup=groups["plain-b"]))
        of_a, of_b = {a.init, a.spawn()}, {b.init, b.spawn()}
        assert pids(a.init, "plain-a") == of_a
        assert pids(b.init, "plain-b") == of_b
        assert near(a.init, "plain-a") == near(b.init, "plain-b") == set()


@pytest.mark.parametrize("name", ["plain-b", f"libpod-{B}.scope"])
def test_adopted(groups: dict[str, str], name: str) -> None:
    """A process that lost its parent stays its container's: its new one is the other's init."""
    b = B if B in name else name
    with ExitStack() as stack:
        owner = stack.enter_context(Family(*OWN_SPACE, cgroup=groups["plain-a"]))
        with Family(*join(owner.init), cgroup=groups[name]) as other:
            child = other.lose(owner.init)  # as a daemon begins
            assert proc.parent(child) == owner.init
            assert pids(owner.init, "plain-a") == {owner.init}
            assert near(owner.init, "plain-a") == {other.init, child}
            found = processes(other.init, b)
            assert {process.pid for process in found} == {other.init, child}
            assert [process.pid for process in list_left_out(other.init, found)] == [child]
            assert is_descendant(child, owner.init)
            assert not is_descendant(child, other.init)
            # Also when that container has ended, and what is left of it is about to.
            os.kill(other.init, signal.SIGKILL)
            wait_for(lambda: not proc.is_running(other.init), "the end of the other's init")
            assert pids(owner.init, "plain-a") == {owner.init}
            os.kill(child, signal.SIGKILL)


def test_what_exec_starts_is_a_member() -> None:
    """It comes into the namespace from outside too, but has the container's mounts."""
    with Family(*OWN_SPACE) as owner:
        mounts = f"--mount=/proc/{owner.init}/ns/mnt"
        with Family("nsenter", mounts, f"--pid=/proc/{owner.init}/ns/pid") as session:
            members = {owner.init, session.init, session.spawn()}
            assert pids(owner.init, A) == members
            assert near(owner.init, A) == set()
            assert list_left_out(owner.init, processes(owner.init, A)) == ()


def test_restored_outside_its_cgroup(groups: dict[str, str]) -> None:
    """As crun 1.26 leaves descendants of init in its own: they are members all the same."""
    with Family(*OWN_SPACE, cgroup=groups["plain-a"]) as owner:
        child = owner.spawn()
        for place in (groups["plain-b"], str(Path(groups["plain-b"]).parent)):
            (Path(place) / "cgroup.procs").write_text(str(child))
            assert pids(owner.init, "plain-a") == {owner.init, child}
        # In the cgroup of another container it is that one's.
        (Path(groups[f"libpod-{B}.scope"]) / "cgroup.procs").write_text(str(child))
        assert pids(owner.init, "plain-a") == {owner.init}


# What pre-flight makes of it.


class Tree:
    """Cgroups of version 2, whose files a test writes; the kernel's own answer is asked of nobody."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top, self.asked = top, list[int]()
        monkeypatch.setattr(neighbours, "UNIFIED", str(top))
        monkeypatch.setattr(neighbours, "is_inside", self._is_inside)

    def _is_inside(self, pid: int, group: neighbours.Cgroup) -> bool:
        self.asked.append(pid)
        return pid in (os.getpid(), 7)

    def put(self, path: str, *pids: int) -> Path:
        folder = self.top / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        return folder

    def within(self, init: int = 5, hierarchy: str = "") -> set[int]:
        return neighbours._list_within((hierarchy, "/one"), init, {5, 6, 7, 8, 9})


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path / "cgroup", monkeypatch)


def test_a_cgroup_lists_its_processes(tree: Tree) -> None:
    """Below it too, and no others; 0 is one of another PID namespace."""
    tree.put("one", 5, 0)
    tree.put("one/below/deeper", 6, 4000)
    tree.put("two", 8)
    assert tree.within() == {5, 6}
    assert tree.asked == []


def refuse_threaded(tree: Tree) -> None:
    (tree.put("one/threaded") / "cgroup.procs").unlink()
    (tree.top / "one/threaded/cgroup.procs").symlink_to("cgroup.procs")  # ELOOP, in place of EOPNOTSUPP


def grow(tree: Tree) -> None:
    for number in range(neighbours._MOST):
        tree.put(f"one/{number}")


def list_without_init(tree: Tree) -> None:
    tree.put("one", 6)


@pytest.mark.parametrize("happens", [refuse_threaded, grow, list_without_init])
def test_a_cgroup_that_does_not_list_them(tree: Tree, happens: Callable[[Tree], None]) -> None:
    """Then each process is asked: threaded ones, too many, and one of another part of the tree."""
    tree.put("one", 5)
    happens(tree)
    assert tree.within() == {7}
    assert sorted(tree.asked) == [5, 6, 7, 8, 9]


def test_version_1_lists_none(tree: Tree) -> None:
    tree.put("one", 5)
    assert tree.within(hierarchy="pids") == {7}


@pytest.mark.parametrize("order", [("one", "one/below"), ("one/below", "one")])
def test_a_process_that_moves_meanwhile(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """Down or up, just as the first or the second file is read."""
    real, (before, after) = open, order
    for moment in range(4):
        tree.put("one", 5)
        tree.put("one/below")
        tree.put(before, 5, 6)
        tree.put(after, *([5] if after == "one" else []))
        reads = iter(range(10))

        def read(path: str, mode: str, reads: Iterator[int] = reads, moment: int = moment) -> IO[bytes]:
            if next(reads) == moment:
                tree.put(before, *([5] if before == "one" else []))
                tree.put(after, 5, 6)
            return real(path, mode)

        monkeypatch.setattr(neighbours, "open", read, raising=False)
        assert tree.within() == {5, 6}, moment


def test_a_cgroup_that_is_removed_meanwhile(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.put("one", 5)
    below = tree.put("one/below")
    real = open

    def read(path: str, mode: str) -> IO[bytes]:
        if below.exists():
            shutil.rmtree(below)
        return real(path, mode)

    monkeypatch.setattr(neighbours, "open", read, raising=False)
    assert tree.within() == {5}
    assert tree.asked == []


def test_a_later_process_of_the_same_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps its PID namespace. Nothing is kept of one that is gone."""
    said = iter(["", "pid:[1]", "pid:[2]"])
    monkeypatch.setattr(proc, "namespace", lambda pid, kind: next(said))
    asked = [(11, 100), (11, 100), (11, 100), (11, 200), (11, 100)]
    monkeypatch.setattr(neighbours, "_spaces", {})
    found = [neighbours._find_space(pid, start) for pid, start in asked]
    assert found == ["", "pid:[1]", "pid:[1]", "pid:[2]", "pid:[1]"]


def container(init: int, name: str) -> Container:
    return Container(name, init, "running", "/b", {})


def test_one_that_would_end_too(groups: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the namespace does not end while another is in it; that one may, and the owner run on."""
    monkeypatch.setattr(preflight, "_STARTING", 0.1)
    ends, runs = CheckpointCall(container_id="a"), CheckpointCall(container_id="a", leave_running=True)
    with Family(*OWN_SPACE, cgroup=groups["plain-a"]) as owner:
        a = container(owner.init, "plain-a")
        preflight.refuse_neighbours(ends, a)
        with Family(*join(owner.init), cgroup=groups["plain-b"]) as other:
            with pytest.raises(Refused, match=f"process {other.init} .* would be killed") as caught:
                preflight.refuse_neighbours(ends, a)
            assert "--leave-running" in caught.value.hint
            preflight.refuse_neighbours(runs, a)
            preflight.refuse_neighbours(ends, container(other.init, "plain-b"))
            preflight.refuse_adopted(a)


def test_adopted_is_refused_for_both(groups: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU can dump neither the one with a stranger in its tree, nor the other's process outside of its."""
    monkeypatch.setattr(preflight, "_STARTING", 0.1)
    with ExitStack() as stack:
        owner = stack.enter_context(Family(*OWN_SPACE, cgroup=groups["plain-a"]))
        with Family(*join(owner.init), cgroup=groups["plain-b"]) as other:
            preflight.check_complete(container(other.init, "plain-b"), processes(other.init, "plain-b"), [])
            child = other.lose(owner.init)
            with pytest.raises(Refused, match=f"process {child} .* became a child of container plain-a"):
                preflight.refuse_adopted(container(owner.init, "plain-a"))
            with pytest.raises(Refused, match=f"process {child} .* of container plain-b became a child"):
                preflight.check_complete(
                    container(other.init, "plain-b"), processes(other.init, "plain-b"), []
                )
            os.kill(child, signal.SIGKILL)


def test_a_gpu_process_beside_the_tree() -> None:
    """What podman exec started is left out of a dump: no matter, unless it has GPU state."""
    with Family(*OWN_SPACE) as owner:
        mounts = f"--mount=/proc/{owner.init}/ns/mnt"
        with Family("nsenter", mounts, f"--pid=/proc/{owner.init}/ns/pid") as session:
            a, members = container(owner.init, A), processes(owner.init, A)
            preflight.check_complete(a, members, [each for each in members if each.pid == owner.init])
            with pytest.raises(Refused, match=f"GPU process {session.init} .* would not include it"):
                preflight.check_complete(a, members, members)
        ended = [each for each in members if each.pid == session.init]
        assert ended
        wait_for(lambda: not proc.is_alive(session.init), "the end of what podman exec started")
        preflight.check_complete(a, members, ended)
