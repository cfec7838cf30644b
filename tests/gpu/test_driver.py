"""Nvidia against NVIDIA's own driver: suspend, resume, refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpusnap.runtime_shim.gpu import find_driver, holders
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import (
    IllegalState,
    InvalidRequest,
    LockTimeout,
    NotSupported,
    ProcessGone,
)
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia

SIZE = 64 << 20
PROGRAM = Path(__file__).with_name("program.py")

TORCH = """
import sys, torch
torch.manual_seed(7)
model = torch.nn.Linear(512, 512).cuda()
x = torch.randn(64, 512, device="cuda")
before = model(x).sum().item()
print("ready", flush=True)
for line in sys.stdin:
    print("right" if model(x).sum().item() == before else "wrong", flush=True)
"""


class Program:
    def __init__(self, *argv: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.pid = self.process.pid
        self.expect("ready")

    def expect(self, word: str) -> None:
        """Read a line, in a thread that has a deadline, and see that it ends in `word`."""
        found: list[str] = []
        assert self.process.stdout
        read = self.process.stdout.readline
        reader = threading.Thread(target=lambda: found.append(read()), daemon=True)
        reader.start()
        reader.join(120)
        assert found
        assert found[0].split()[-1:] == [word], found[0]

    def say(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def works(self) -> None:
        """See that its memory is what it was, and that it computes."""
        self.say("go")
        self.expect("right")


Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Program] = []

    def begin(*argv: str, **environment: str) -> Program:
        programs.append(Program(*(argv or (str(PROGRAM), str(SIZE))), **environment))
        return programs[-1]

    yield begin
    for program in programs:
        program.process.kill()
        program.process.communicate()


def test_host(driver: Nvidia) -> None:
    host = driver.host()
    assert host.vendor == "nvidia"
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", host.driver_version)
    assert re.fullmatch(r"\d+\.\d", host.cuda_version)
    assert len({gpu.uuid for gpu in host.gpus}) == len({gpu.minor for gpu in host.gpus}) == len(host.gpus)
    for index, gpu in enumerate(host.gpus):
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu.uuid)
        assert gpu.index == index
        assert gpu.model
        assert re.fullmatch(r"\d+\.\d", gpu.compute_capability)
        assert 0 <= gpu.memory_used < gpu.memory_total
        assert gpu.compute_mode in ("default", "exclusive-process", "prohibited")


def test_who_holds_a_gpu(driver: Nvidia, start: Start) -> None:
    program = start()
    plain = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        assert holders(driver, [plain.pid, program.pid]) == (program.pid,)
        assert driver.state(plain.pid) is None
    finally:
        plain.communicate()
    assert "/dev/nvidiactl" in driver.list_handles(program.pid)
    assert set(driver.list_visible(program.pid)) <= {gpu.uuid for gpu in driver.host().gpus}
    assert driver.list_visible(program.pid)
    used = driver.memory_used([program.pid])
    if used:  # NVML counts in the host's PID namespace
        assert sum(size or 0 for size in used[program.pid].values()) >= SIZE
    assert find_driver() is not None


def test_suspend_and_resume(driver: Nvidia, start: Start) -> None:
    program = start()
    pid = program.pid
    assert driver.state(pid) is ProcessState.RUNNING
    assert driver.restore_thread(pid) > 0
    with pytest.raises(IllegalState):
        driver.checkpoint(pid)
    with pytest.raises(IllegalState):
        driver.unlock(pid)
    driver.lock(pid, timeout=10)
    assert driver.state(pid) is ProcessState.LOCKED
    visible = driver.list_visible(pid)
    driver.checkpoint(pid)
    assert driver.state(pid) is ProcessState.CHECKPOINTED
    assert driver.list_handles(pid) == ()
    assert holders(driver, [pid]) == (pid,)  # by its library
    assert driver.list_visible(pid) == visible  # by its /dev
    wrong = "GPU-00000000-0000-0000-0000-000000000000"
    with pytest.raises(InvalidRequest) as caught:
        driver.restore(pid, [(wrong, wrong)])
    assert "every GPU" in caught.value.hint
    assert driver.state(pid) is ProcessState.CHECKPOINTED
    driver.restore(pid, [(uuid, uuid) for uuid in visible])
    assert driver.state(pid) is ProcessState.LOCKED
    driver.unlock(pid)
    program.works()


def test_several_at_once_and_again(driver: Nvidia, start: Start) -> None:
    programs = [start() for _ in range(3)]
    pids = [program.pid for program in programs]
    for _ in range(2):
        run_at_once(lambda pid: driver.lock(pid, timeout=10), pids).raise_first()
        for step in (driver.checkpoint, driver.restore, driver.unlock):
            run_at_once(step, pids).raise_first()
        for program in programs:
            program.works()


def test_from_one_gpu_to_another(driver: Nvidia, start: Start) -> None:
    """Of a program that uses one GPU and could see more: `visible` has all that the driver wants named."""
    if len(driver.host().gpus) < 2:
        pytest.skip("needs two GPUs")
    program = start(CUDA_VISIBLE_DEVICES="0")
    visible = driver.list_visible(program.pid)
    assert len(visible) == len(driver.host().gpus)
    driver.lock(program.pid, timeout=10)
    driver.checkpoint(program.pid)
    driver.restore(program.pid, list(zip(visible, (*visible[1:], visible[0]), strict=True)))
    driver.unlock(program.pid)
    program.works()


def test_managed_memory_is_refused_and_lives_on(driver: Nvidia, start: Start) -> None:
    program = start(str(PROGRAM), str(SIZE), "managed")
    driver.lock(program.pid, timeout=10)
    with pytest.raises(NotSupported) as caught:
        driver.checkpoint(program.pid)
    assert caught.value.code_name == "CUDA_ERROR_NOT_SUPPORTED"
    assert "cudaMallocManaged" in caught.value.sentence()
    assert driver.state(program.pid) is ProcessState.LOCKED
    driver.unlock(program.pid)
    program.works()


def test_lock_timeout(driver: Nvidia, start: Start) -> None:
    size = 1 << 30
    program = start(str(PROGRAM), str(size))
    program.say("spin 20000")  # 20 TB written: seconds of work on any GPU
    program.expect("spinning")
    with pytest.raises(LockTimeout, match=r"did not stop within 0\.1 s"):
        driver.lock(program.pid, timeout=0.1)
    assert driver.state(program.pid) is ProcessState.RUNNING


def test_a_process_that_ends(driver: Nvidia, start: Start) -> None:
    program = start()
    driver.lock(program.pid, timeout=10)
    program.process.kill()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessGone):
        driver.checkpoint(program.pid)
    program.process.wait()
    assert driver.state(program.pid) is None


def test_torch(driver: Nvidia, start: Start) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    program = start("-c", TORCH)
    driver.lock(program.pid, timeout=10)
    driver.checkpoint(program.pid)
    driver.restore(program.pid)
    driver.unlock(program.pid)
    program.works()
