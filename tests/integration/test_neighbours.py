"""Containers that share namespaces: each is checkpointed alone, and its neighbours never notice."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import Container, good, members, podman, sentence, until


@contextmanager
def undisturbed(container: Container) -> Iterator[None]:
    """Its processes are the same before and after the block, and none misses a tick or finds a wrong byte."""
    before = members(container)
    yield
    container.goes_on()
    assert members(container) == before


def pair(share: str, options: tuple[str, ...] = ()) -> tuple[Container, Container]:
    """Two that share one namespace, by joining the first one's, or several, in a pod."""
    if share.startswith("pod:"):
        good(podman("pod", "create", "--name", "p", "--share", share.removeprefix("pod:")))
        first, second = ["--pod", "p"], ["--pod", "p"]
    else:
        first, second = ["--ipc", "shareable"], [f"--{share}", "container:a"]
    words = ("--mib", "2")
    a = Container.start("a", *words, "--seed", "1", options=[*first, *options])
    return a, Container.start("b", *words, "--seed", "2", options=[*second, *options])


@pytest.fixture(autouse=True)
def tidy(real: str) -> Iterator[None]:
    """What joined another's namespace has to be removed first."""
    yield
    podman("pod", "rm", "--force", "--all", "--time", "0")
    podman("rm", "--force", "--all", "--time", "0")


# Each namespace under each runtime, joined from a container, whose owner is checkpointed as well. Containers
# of a pod join as that other one does: one namespace under one runtime, all of them under both.
RUNTIMES = ("crun", "runc")
SHARED = [
    (real, share) for share in ("pid", "ipc", "network", "uts", "pod:pid,ipc,net,uts") for real in RUNTIMES
]
SHARED += [("crun", "pod:pid"), ("runc", "pod:ipc"), ("crun", "pod:net"), ("runc", "pod:uts")]


@pytest.mark.parametrize(("real", "share"), SHARED, indirect=["real"])
def test_each_alone(real: str, share: str) -> None:
    """Checkpointed while it runs on, then ended and restored in place; the other one ticks all the time."""
    a, b = pair(share)
    # b first: its configuration names the namespaces that a has now, and not those it will be restored with.
    for one, other in ((b, a), (a, b)):
        with undisturbed(other):
            good(podman("container", "checkpoint", "--leave-running", one.name))
            one.goes_on()
        if share == "pid" and one is a:
            continue  # it is refused: see below
        with undisturbed(other):
            good(podman("container", "checkpoint", one.name))
            assert one.inspect()["State"]["Status"] == "exited"
            good(podman("container", "restore", one.name))
            one.goes_on()


def test_the_owner_of_a_shared_namespace() -> None:
    """When its PID 1 ends, so does all in the namespace: refused, until the other has ended."""
    a, b = pair("pid")
    with undisturbed(b):
        said = sentence(podman("container", "checkpoint", "a"))
        assert f"process {b.pid} (gpuwork) of another container shares the PID namespace" in said
        assert "--leave-running" in said
        a.unharmed()
    b.remove()
    good(podman("container", "checkpoint", "a"))
    good(podman("container", "restore", "a"))
    a.goes_on()


def test_a_neighbour_without_a_gpu() -> None:
    """It would be killed as well; and one with a GPU is not by a container that has none."""
    a = Container.start("a", "--mib", "4")
    good(podman("run", "-d", "--name", "b", "--pid", "container:a", "localhost/base", "sleep", "600"))
    assert "(sleep) of another container" in sentence(podman("container", "checkpoint", "a"))
    a.unharmed()
    assert good(podman("inspect", "--format", "{{.State.Status}}", "b")) == "running"
    loop = "while :; do sleep 1; done"
    good(podman("run", "-d", "--name", "c", "localhost/base", "sh", "-c", loop))
    d = Container.start("d", "--mib", "4", options=["--pid", "container:c"])
    with undisturbed(d):
        said = sentence(podman("container", "checkpoint", "c"))
        assert f"process {d.pid} (gpuwork) of another container" in said


def test_a_daemon_of_the_neighbour() -> None:
    """It has become a child of the namespace's owner; it is neither's to dump, and each says so at once."""
    a = Container.start("a", "--mib", "4")
    daemon = "/gpuwork --mib 4 --tick 30 --seed 3"
    script = f"({daemon} &); exec {daemon} --seed 4"
    b = Container.start("b", script=script, workers=2, options=["--pid", "container:a"])
    assert len(members(b)) == 2
    for one, said in ((a, "of another container became a child"), (b, "became a child of another")):
        for words in ((), ("--leave-running",)):
            begun = time.monotonic()
            assert said in sentence(podman("container", "checkpoint", *words, one.name))
            assert time.monotonic() - begun < 60
            a.unharmed()
            b.unharmed()


def test_what_exec_started() -> None:
    """CRIU leaves out what podman exec started; if that uses a GPU, nothing is begun."""
    a = Container.start("a", "--mib", "4")
    good(podman("exec", "--detach", "a", "sh", "-c", "exec /gpuwork --mib 4 --seed 5 >/proc/1/fd/1"))
    until(lambda: len(a.ticks()) == 2, "the second worker's ticks")
    assert "is not a descendant of the init" in sentence(podman("container", "checkpoint", "a"))
    a.unharmed()
    (exec_,) = [pid for pid in members(a) if pid != a.pid]
    os.kill(exec_, 9)
    until(lambda: len(members(a)) == 1, "the end of the second worker")
    good(podman("container", "checkpoint", "a"))
