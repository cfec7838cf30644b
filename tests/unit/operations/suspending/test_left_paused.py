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
    recorded: set[str] = field(default_factory=set)
    at_work: set[str] = field(default_factory=set)
    asked: int = 0
    meanwhile: set[str] = field(default_factory=set)
    """What is frozen once containerd has been asked."""

    def list_paused(self, namespace: str) -> frozenset[str]:
        assert namespace == "k8s.io"
        self.asked += 1
        self.frozen |= self.meanwhile
        return frozenset(self.recorded)

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
    monkeypatch.setattr(ctr, "list_paused", made.list_paused)
    monkeypatch.setattr(journal, "hold", made.hold)
    return made


def test_nothing_is_paused(node: Node) -> None:
    assert left_paused.list_paused() == ()


def test_frozen(node: Node) -> None:
    """Of a pod, not of another user of containerd."""
    node.frozen = {"two", "three"}
    (found,) = left_paused.list_paused()
    assert found == PausedContainer("two", (12,))
    assert found.why.endswith("unless one is in progress: ctr --namespace k8s.io tasks resume two")


def test_paused_by_the_record_alone(node: Node) -> None:
    """runc resumes only what is paused, so it is paused first."""
    node.recorded = {"one", "three"}
    (found,) = left_paused.list_paused()
    assert found == PausedContainer("one", (11,), runs=True)
    assert found.why.endswith(
        "in progress: gpusnap-runtime --root /run/containerd/runc/k8s.io pause one && "
        "ctr --namespace k8s.io tasks resume one"
    )


def test_gpusnap_is_at_work(node: Node) -> None:
    """It thaws a container that containerd has paused, while it works."""
    node.recorded, node.at_work = {"one"}, {"one"}
    assert left_paused.list_paused() == ()


def test_it_is_paused_meanwhile(node: Node) -> None:
    """A checkpoint begins just then."""
    node.recorded = node.meanwhile = {"one"}
    assert left_paused.list_paused() == ()


def test_containerd_does_not_answer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> frozenset[str]:
        raise GpusnapError("ctr cannot be run")

    monkeypatch.setattr(ctr, "list_paused", fail)
    node.frozen = {"two"}
    assert left_paused.list_paused() == (PausedContainer("two", (12,)),)


def test_containerd_is_not_asked_without_pods(node: Node) -> None:
    node.tasks = [("default", "three", 13)]
    assert left_paused.list_paused() == ()
    assert node.asked == 0
