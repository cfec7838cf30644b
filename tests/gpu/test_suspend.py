"""A container off a real GPU and back, and two that change places on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realhost import Machine, Program, Workload
from support import Done, good, podman, run, sentence
from test_containers import TORCH, needs, same_as_uninterrupted

from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia

COMMAND = "/usr/local/bin/gpusnap"


def gpusnap(*words: str) -> Done:
    return run(COMMAND, *words)


def state(name: str) -> dict[str, Any]:
    listed = json.loads(good(gpusnap("ps", "--json")))["containers"]
    return next((each for each in listed if each["name"] == name), {})


def runs_on_and_comes_back(program: Program, digest: str) -> None:
    """It computes as nobody had checkpointed it, and so does what its checkpoint brings back."""
    program.goes_on(more=5)
    same_as_uninterrupted(program, TORCH)
    program.remove()
    good(gpusnap("restore", digest))
    program.goes_on(more=5)
    same_as_uninterrupted(program, TORCH)
    good(gpusnap("rm", "--all", digest))


@contextmanager
def taking_all_but(spare: int, driver: Nvidia) -> Iterator[None]:
    """Another process takes the GPU's free memory but for so many bytes."""
    gpu = driver.host().gpus[0]
    size = gpu.memory_total - gpu.memory_used - spare
    words = [sys.executable, str(Path(__file__).with_name("program.py")), str(size)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout
            assert other.stdout.readline() == "ready\n"
            yield
        finally:
            other.kill()


def test_memory_taken_meanwhile(real: str, machine: Machine, driver: Nvidia) -> None:
    """Without room on the GPU a container stays suspended, and resumes when there is room again."""
    program = Program.begin("w", Workload.gpuwork(4096), machine.options())
    good(gpusnap("suspend", "w"))
    with taking_all_but(2 << 30, driver):
        assert "free" in sentence(gpusnap("resume", "w"))
        assert state("w")["state"] == "suspended"
    good(gpusnap("resume", "w"))
    program.goes_on()


def test_there_and_back(real: str, machine: Machine, driver: Nvidia) -> None:
    """Its memory leaves the GPU and comes back three times; what is computed is as without that."""
    needs(TORCH)
    program = Program.begin("w", TORCH, machine.options())
    init = program.inspect()["State"]["Pid"]
    for _ in range(3):
        assert any(driver.memory_used([init]).values())
        good(gpusnap("suspend", "w"))
        found = state("w")
        assert found["state"] == "suspended"
        assert found["ram"] >= TORCH.mib << 20
        assert not any(driver.memory_used([init]).values())
        assert "gpusnap resume w" in sentence(podman("unpause", "w"))
        good(gpusnap("resume", "w"))
        program.goes_on(more=5)
    same_as_uninterrupted(program, TORCH)


def test_a_checkpoint_from_ram(real: str, machine: Machine) -> None:
    """Made while the container is suspended; both it and what is restored compute on."""
    needs(TORCH)
    program = Program.begin("w", TORCH, machine.options())
    good(gpusnap("suspend", "w"))
    made = json.loads(good(gpusnap("checkpoint", "w", "--json")))
    assert state("w")["state"] == "suspended"
    good(gpusnap("resume", "w"))
    runs_on_and_comes_back(program, made["digest"])


def test_swaps(real: str, machine: Machine) -> None:
    """Two containers change places, from RAM and from the store, and every word of theirs is checked."""
    load = Workload.gpuwork(512)
    first = Program.begin("first", load, machine.options())
    good(gpusnap("suspend", "first"))
    second = Program.begin("second", load, machine.options())
    for out, into in ((second, first), (first, second)) * 3:
        good(gpusnap("swap", out.name, into.name))
        into.goes_on()
    good(gpusnap("suspend", "--spill", "--wait", "first"))
    assert state("first")["ram"] == 0
    good(gpusnap("swap", "second", "first"))
    first.goes_on()
    good(gpusnap("resume", "second"))
    second.goes_on()


def test_an_update_of_podmans(real: str, machine: Machine) -> None:
    """It may forbid all devices: a suspend, a resume and a checkpoint that follow have them open again."""
    needs(TORCH)
    program = Program.begin("w", TORCH, machine.options())
    good(podman("update", "--memory", "64g", "w"))
    good(gpusnap("suspend", "w"))
    good(podman("update", "--memory", "65g", "w"))
    good(gpusnap("resume", "w"))
    program.goes_on(more=5)
    good(podman("update", "--memory", "64g", "w"))
    made = json.loads(good(gpusnap("checkpoint", "--leave-running", "w", "--json")))
    runs_on_and_comes_back(program, made["digest"])
