"""Nvidia against softgpu's libcuda and libnvidia-ml, which it cannot tell from NVIDIA's."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from softgpu_box import LIB, MIB, OK, OLD, ROOT, Agent, Box, gpu_line, uuid

pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
CALLER = Path(__file__).parents[3] / "gpu_caller.py"


class Caller:
    """gpu_caller.py in a box."""

    def __init__(self, box: Box, *, lib: Path = LIB, **environment: str) -> None:
        command = [sys.executable, str(CALLER)]
        self.agent = Agent(box.popen(command, lib=lib, PYTHONPATH=str(ROOT), **environment))
        box.agents.append(self.agent)

    def do(self, method: str, *arguments: Any) -> Any:
        kind, value = self.agent.call(method, *arguments)
        assert kind == "", value
        return value

    def refused(self, method: str, *arguments: Any) -> tuple[str, str, str]:
        """Class, sentence and code name of the error that it raises."""
        kind, value = self.agent.call(method, *arguments)
        assert kind, f"{method} answered {value}"
        return kind, value[0], value[1]


@pytest.fixture
def box(boxes: Callable[..., Box]) -> Box:
    return boxes(2)


@pytest.fixture
def caller(box: Box) -> Caller:
    return Caller(box)


def loaded(box: Box, seed: int) -> tuple[Agent, int, str]:
    """An agent with 3 MiB on GPU 0; the address, and the digest of its bytes."""
    agent = box.agent().start(0)
    address = agent.alloc(3 * MIB)
    assert agent.write(address, seed, 3 * MIB) == OK
    return agent, address, agent.read(address, 3 * MIB)


def test_host(boxes: Callable[..., Box]) -> None:
    extra = "mig=on compute-mode=exclusive-process"
    gpus = [
        gpu_line(3, memory="80GiB"),
        gpu_line(1, memory="24GiB", model="NVIDIA A30", cc="8.0", extra=extra),
    ]
    caller = Caller(boxes(gpus=gpus, nodes=[1, 3]))
    host = caller.do("host")
    assert (host["vendor"], host["driver_version"], host["cuda_version"]) == ("nvidia", "580.95.05", "13.0")
    first, second = host["gpus"]
    assert first == {
        "uuid": uuid(3),
        "minor": 3,
        "index": 0,
        "model": "NVIDIA H100 80GB HBM3",
        "compute_capability": "9.0",
        "memory_total": 80 << 30,
        "memory_used": 0,
        "mig": False,
        "compute_mode": "default",
        "pci": "0000:01:00.0",
    }
    assert (second["minor"], second["mig"], second["compute_mode"]) == (1, True, "exclusive-process")


def test_who_holds_a_gpu(box: Box, caller: Caller) -> None:
    agent, _, _ = loaded(box, 1)
    assert caller.do("found")
    assert caller.do("holders", [os.getpid(), agent.pid]) == [agent.pid]
    assert caller.do("handles", agent.pid) == ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]
    assert caller.do("visible", agent.pid) == [uuid(0), uuid(1)]
    assert caller.do("memory_used", [agent.pid])[str(agent.pid)][uuid(0)] >= 3 * MIB
    assert caller.do("state", os.getpid()) is None


def test_there_and_back(box: Box, caller: Caller) -> None:
    agent, address, digest = loaded(box, 1)
    tasks = os.listdir(f"/proc/{agent.pid}/task")
    assert str(caller.do("restore_thread", agent.pid)) in tasks
    steps = [("lock", LOCKED), ("checkpoint", CHECKPOINTED), ("restore", LOCKED), ("unlock", RUNNING)]
    for step, state in steps:
        caller.do(step, agent.pid)
        assert caller.do("state", agent.pid) == state
        if state == CHECKPOINTED:
            assert caller.do("handles", agent.pid) == []
            assert caller.do("holders", [agent.pid]) == [agent.pid]
            assert caller.do("visible", agent.pid) == [uuid(0), uuid(1)]
    assert agent.read(address, 3 * MIB) == digest


def test_all_at_once(box: Box, caller: Caller) -> None:
    """Each process takes a second to checkpoint, so all of them take one and not six."""
    targets = [loaded(box, seed) for seed in range(6)]
    pids = [agent.pid for agent, _, _ in targets]
    everyone = {str(pid): None for pid in pids}
    box.faults("checkpoint hang=1000")
    assert caller.do("all", "lock", pids) == [everyone, {}]
    begun = time.monotonic()
    assert caller.do("all", "checkpoint", pids) == [everyone, {}]
    assert 1 <= time.monotonic() - begun < 5
    for step in ("restore", "unlock"):
        assert caller.do("all", step, pids) == [everyone, {}]
    for agent, address, digest in targets:
        assert agent.read(address, 3 * MIB) == digest


def test_one_of_several_fails(box: Box, caller: Caller) -> None:
    agents = [loaded(box, seed)[0] for seed in range(3)]
    pids = [agent.pid for agent in agents]
    assert agents[1].managed(MIB)
    assert caller.do("all", "lock", pids)[1] == {}
    results, errors = caller.do("all", "checkpoint", pids)
    assert sorted(results) == sorted([str(pids[0]), str(pids[2])])
    assert errors == {str(pids[1]): "NotSupported"}


def test_managed_memory(box: Box, caller: Caller) -> None:
    agent, address, digest = loaded(box, 1)
    assert agent.managed(MIB)
    caller.do("lock", agent.pid)
    kind, sentence, code = caller.refused("checkpoint", agent.pid)
    assert (kind, code) == ("NotSupported", "CUDA_ERROR_NOT_SUPPORTED")
    assert f"process {agent.pid} (python" in sentence
    assert "cudaMallocManaged" in sentence
    assert caller.do("state", agent.pid) == LOCKED
    caller.do("unlock", agent.pid)
    assert agent.read(address, 3 * MIB) == digest


def test_steps_out_of_order(box: Box, caller: Caller) -> None:
    agent, _, _ = loaded(box, 1)
    for step in ("checkpoint", "restore", "unlock"):
        assert caller.refused(step, agent.pid)[::2] == ("IllegalState", "CUDA_ERROR_ILLEGAL_STATE")
    assert caller.do("state", agent.pid) == RUNNING


def test_a_lock_that_times_out(box: Box, caller: Caller) -> None:
    agent, address, digest = loaded(box, 1)
    box.faults("lock hang=60000 count=1")
    kind, sentence, code = caller.refused("lock", agent.pid, 0.05)
    assert (kind, code) == ("LockTimeout", "CUDA_ERROR_NOT_READY")
    assert "did not stop within 0.05 s" in sentence
    assert caller.do("state", agent.pid) == RUNNING
    assert agent.read(address, 3 * MIB) == digest
    caller.do("lock", agent.pid)


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", "unlock"])
def test_a_process_that_dies_in_the_middle(box: Box, caller: Caller, step: str) -> None:
    agent, _, _ = loaded(box, 1)
    box.faults(f"{step} die")
    steps = ["lock", "checkpoint", "restore", "unlock"]
    for before in steps[: steps.index(step)]:
        caller.do(before, agent.pid)
    kind, sentence, _ = caller.refused(step, agent.pid)
    assert kind == "ProcessGone"
    assert f"process {agent.pid} exited while the GPU driver was about to {step} it" in sentence
    assert caller.do("state", agent.pid) is None
    assert caller.do("holders", [agent.pid]) == []


def test_a_process_that_is_killed_from_outside(box: Box, caller: Caller) -> None:
    agent, _, _ = loaded(box, 1)
    box.faults("checkpoint hang=60000")
    caller.do("lock", agent.pid)
    caller.agent.send("checkpoint", agent.pid)
    threading.Thread(target=os.kill, args=(agent.pid, signal.SIGKILL)).start()
    kind, _ = caller.agent.receive()
    assert kind == "ProcessGone"


def test_restore_on_other_gpus(box: Box, caller: Caller) -> None:
    agent, address, digest = loaded(box, 1)
    caller.do("lock", agent.pid)
    caller.do("checkpoint", agent.pid)
    kind, sentence, code = caller.refused("restore", agent.pid, [(uuid(0), uuid(1))])
    assert (kind, code) == ("InvalidRequest", "CUDA_ERROR_INVALID_VALUE")
    assert "every GPU that the process could see" in sentence
    assert caller.refused("restore", agent.pid, [("GPU-1", uuid(1))])[0] == "InvalidRequest"
    assert caller.do("state", agent.pid) == CHECKPOINTED
    caller.do("restore", agent.pid, [(uuid(0), uuid(1)), (uuid(1), uuid(0))])
    caller.do("unlock", agent.pid)
    assert agent.read(address, 3 * MIB) == digest
    assert list(caller.do("memory_used", [agent.pid])[str(agent.pid)]) == [uuid(1)]


def test_no_room_on_the_target(box: Box, caller: Caller) -> None:
    agent, _, _ = loaded(box, 1)
    caller.do("lock", agent.pid)
    caller.do("checkpoint", agent.pid)
    box.describe([gpu_line(0, memory="2MiB"), gpu_line(1)])
    kind, sentence, _ = caller.refused("restore", agent.pid)
    assert kind == "GpuOutOfMemory"
    assert "choose another GPU" in sentence


def test_another_result(box: Box, caller: Caller) -> None:
    agent, _, _ = loaded(box, 1)
    box.faults("lock result=CUDA_ERROR_ECC_UNCORRECTABLE")
    assert caller.refused("lock", agent.pid)[::2] == ("HardwareFault", "CUDA_ERROR_ECC_UNCORRECTABLE")


def test_the_old_driver(box: Box) -> None:
    box.describe([gpu_line(0)], driver="550.54.15")
    old = Caller(box, lib=OLD, LD_LIBRARY_PATH=f"{OLD}:{LIB}")
    kind, sentence, _ = old.refused("open")
    assert kind == "DriverTooOld"
    assert "550.54.15" in sentence
    assert "570" in sentence


def test_no_driver_at_all(box: Box, tmp_path: Path) -> None:
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this host has NVIDIA's driver")
    none = Caller(box, lib=tmp_path)
    assert none.refused("open")[0] == "DriverMissing"
    assert none.refused("host")[::2] == ("DriverMissing", "NVML_ERROR_LIBRARY_NOT_FOUND")


def test_the_library_without_the_kernel_driver(boxes: Callable[..., Box]) -> None:
    box = boxes(1, nodes=[])
    box.run("rm", "/dev/nvidiactl")
    caller = Caller(box)
    assert not caller.do("found")
    kind, sentence, code = caller.refused("open")
    assert (kind, code) == ("DriverMissing", "CUDA_ERROR_NO_DEVICE")
    assert "kernel driver is not loaded" in sentence


def test_no_gpu(boxes: Callable[..., Box]) -> None:
    kind, _, code = Caller(boxes(1, nodes=[])).refused("open")
    assert (kind, code) == ("NoDevice", "CUDA_ERROR_NO_DEVICE")


def test_the_callers_choice_of_gpus_does_not_count(box: Box) -> None:
    Caller(box, CUDA_VISIBLE_DEVICES="").do("open")
