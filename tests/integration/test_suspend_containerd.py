"""`gpusnap suspend` and `resume` of containerd's tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from containerdhost import Containerd, Work, containerd
from storehost import COMMAND
from support import GPUS_CONF, Done, faults, good, run, sentence
from suspendhost import ends_without_a_trace, nothing_left, usage

from gpusnap.engines import ctr
from gpusnap.runtime_shim.base.errors import AlreadyPaused


@pytest.fixture(scope="module")
def server(host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with containerd(tmp_path_factory.mktemp("containerd")) as found:
        yield found


@pytest.fixture(autouse=True)
def tidy(server: Containerd, real: str) -> Iterator[None]:
    yield
    server.remove_all()


def gpusnap(server: Containerd, *words: str) -> Done:
    """Run the command, by this containerd."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/root", "CONTAINERD_ADDRESS": str(server.address)}
    return run(COMMAND, *words, env=environment)


def test_there_and_back(server: Containerd, real: str, tmp_path: Path) -> None:
    """containerd has it as paused; a resume by ctr is refused, and gpusnap's brings everything back."""
    work = Work.start(server, "w", tmp_path / "w", GPUS_CONF, "--procs", "2", workers=2)
    good(gpusnap(server, "suspend", "default/w"))
    assert server.tasks()["w"][1] == "PAUSED"
    found = usage("w")
    assert (found["state"], found["engine"]) == ("suspended", "containerd")
    assert found["ram"]
    refused = server.ctr("task", "resume", "w", check=False)
    assert refused.returncode != 0
    assert "gpusnap resume w" in refused.stderr
    good(gpusnap(server, "resume", "w"))
    assert server.tasks()["w"][1] == "RUNNING"
    work.goes_on()
    nothing_left()


def test_a_pause_of_somebody_else(
    server: Containerd, real: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told from a pause that failed."""
    Work.start(server, "w", tmp_path / "w", GPUS_CONF)
    monkeypatch.setenv("CONTAINERD_ADDRESS", str(server.address))
    server.ctr("task", "pause", "w")
    with pytest.raises(AlreadyPaused, match="was paused by another process"):
        ctr.pause("default", "w")
    server.ctr("task", "resume", "w")


def test_a_suspend_that_fails(server: Containerd, real: str, tmp_path: Path) -> None:
    """containerd's own process lets the task go on, which is none of ours."""
    work = Work.start(server, "w", tmp_path / "w", GPUS_CONF)
    faults("checkpoint result=CUDA_ERROR_UNKNOWN")
    assert "could not" in sentence(gpusnap(server, "suspend", "w"))
    faults("")
    assert server.tasks()["w"][1] == "RUNNING"
    work.goes_on()
    nothing_left()


def test_the_end_of_a_suspended_task(server: Containerd, real: str, tmp_path: Path) -> None:
    """What was kept for it goes with it."""
    Work.start(server, "w", tmp_path / "w", GPUS_CONF)
    good(gpusnap(server, "suspend", "w"))
    server.remove("w")
    ends_without_a_trace()
    assert "no container w is suspended" in sentence(gpusnap(server, "resume", "w"))
