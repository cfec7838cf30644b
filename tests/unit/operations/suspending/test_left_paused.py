"""Containers of pods that containerd left paused, or has as paused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from gpusnap.engines import ctr
from gpusnap.operations.suspending import left_paused, targets
from gpusnap.operations.suspending.left_paused import PausedContainer
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import container
from gpusnap.runtime_shim.snapshot.records import journal


@dataclass
class Node:
    """A node of Kubernetes: its tasks, and what the kernel and containerd say of them."""

    tasks: list[tuple[str, str, int]] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)
    recorded: dict[str, str] = field(default_factory=dict)
    at_work: set[str] = field(default_factory=set)
    asked: int = 0
    meanwhile: set[str] = field(default_factory=set)
    """What is frozen, or thawed, while containerd is asked."""

    def list_states(self, namespace: str) -> dict[str, str]:
        assert namespace == "k8s.io"
        self.asked += 1
        self.frozen ^= self.meanwhile
        return self.recorded

    @contextmanager
    def hold(self, key: str, *, patience: float) -> Iterator[None]:
        assert patience == 0
        if any(each in key for each in self.at_work):
            raise GpusnapError("another gpusnap works on it")
        yield


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node([("k8s.io", "one", 11), ("k8s.io", "two", 12), ("default", "three", 13)])
    monkeypatch.setattr(targets, "tasks", lambda: iter(made.tasks))
    monkeypatch.setattr(
        container, "frozen_group", lambda pid, name: f"/sys/fs/cgroup/{name}" if name in made.frozen else None
    )
    monkeypatch.setattr(ctr, "list_states", made.list_states)
    monkeypatch.setattr(journal, "hold", made.hold)
    return made


def test_nothing_is_paused(node: Node) -> None:
    assert left_paused.list_paused() == ()


def test_frozen(node: Node) -> None:
    """Of a pod, not of another user of containerd."""
    node.frozen, node.recorded = {"two", "three"}, {"one": "RUNNING", "two": "PAUSED"}
    (found,) = left_paused.list_paused()
    assert found == PausedContainer("two", (12,))
    assert found.why.endswith("unless one is in progress: ctr --namespace k8s.io tasks resume two")


def test_paused_by_the_record_alone(node: Node) -> None:
    """runc resumes only what is paused, so it is paused first."""
    node.recorded = {"one": "PAUSED", "two": "RUNNING", "three": "PAUSED"}
    (found,) = left_paused.list_paused()
    assert found == PausedContainer("one", (11,), frozen=False)
    assert found.why.endswith(
        "in progress: gpusnap-runtime --root /run/containerd/runc/k8s.io pause one && "
        "ctr --namespace k8s.io tasks resume one"
    )


def test_frozen_but_not_by_the_record(node: Node) -> None:
    """containerd does not resume what it has as running, so the runtime does."""
    node.frozen, node.recorded = {"one"}, {"one": "RUNNING"}
    (found,) = left_paused.list_paused()
    assert found == PausedContainer("one", (11,), recorded=False)
    assert found.why.endswith("in progress: gpusnap-runtime --root /run/containerd/runc/k8s.io resume one")


def test_the_shim_has_ended(node: Node) -> None:
    """containerd cannot resume what it no longer has."""
    node.frozen, node.recorded = {"one"}, {"two": "RUNNING"}
    (found,) = left_paused.list_paused()
    assert found == PausedContainer("one", (11,), listed=False)
    assert found.why.endswith(
        "to end it: gpusnap-runtime --root /run/containerd/runc/k8s.io delete --force one"
    )


def test_gpusnap_is_at_work(node: Node) -> None:
    """It thaws a container that containerd has paused, while it works."""
    node.recorded, node.at_work = {"one": "PAUSED"}, {"one"}
    assert left_paused.list_paused() == ()


@pytest.mark.parametrize(("frozen", "state"), [(set(), "PAUSED"), ({"one"}, "RUNNING")])
def test_it_changes_meanwhile(node: Node, frozen: set[str], state: str) -> None:
    """A checkpoint begins just then, or ends."""
    node.frozen, node.recorded, node.meanwhile = frozen, {"one": state}, {"one"}
    assert left_paused.list_paused() == ()


def test_containerd_does_not_answer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> dict[str, str]:
        raise GpusnapError("ctr cannot be run")

    monkeypatch.setattr(ctr, "list_states", fail)
    node.frozen = {"two"}
    assert left_paused.list_paused() == (PausedContainer("two", (12,)),)


def test_containerd_is_not_asked_without_pods(node: Node) -> None:
    node.tasks = [("default", "three", 13)]
    assert left_paused.list_paused() == ()
    assert node.asked == 0
