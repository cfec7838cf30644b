"""What the softgpu tests share: a box with device nodes and a state directory of its own, and agents in it.

A box is a private mount namespace with a tmpfs over /dev, because GPU nodes must stand at /dev/nvidia*;
nothing of it is on the machine or outlives its test. An agent is tests/workload/cuda_agent.py in a box: a
process with CUDA that does what it is told.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "tests/workload/cuda_agent.py"
LIB = ROOT / "softgpu/build/lib"
OLD = ROOT / "softgpu/build/old"
GPUWORK = ROOT / "softgpu/build/bin/gpuwork"
MIB = 1 << 20
GIB = 1 << 30
DEADLINE = 90.0
OK = "CUDA_SUCCESS"
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)


def uuid(minor: int) -> str:
    return f"GPU-5067b0de-0000-4000-8000-{minor:012x}"


def gpu_line(
    minor: int,
    *,
    memory: str = "1GiB",
    model: str = "NVIDIA H100 80GB HBM3",
    cc: str = "9.0",
    extra: str = "",
) -> str:
    return f"gpu minor={minor} uuid={uuid(minor)} cc={cc} memory={memory} {extra} name={model}"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < limit, f"not within {DEADLINE} s: {what}"
        select.select([], [], [], 0.005)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints; at the deadline it is killed, and there is none."""
    assert process.stdout
    late = threading.Timer(DEADLINE, process.kill)
    late.start()
    try:
        return process.stdout.readline()
    finally:
        late.cancel()
        late.join()


@functools.cache
def build() -> None:
    subprocess.run(["make", "-C", str(ROOT / "softgpu")], check=True, stdout=subprocess.DEVNULL)


@functools.cache
def why_not() -> str | None:
    """Why boxes cannot be made here, or None."""
    make_node = "mount -t tmpfs tmpfs /dev && mknod /dev/nvidia0 c 195 0"
    script = f"{make_node} && {{ : < /dev/nvidia0; }} 2>&1 | grep -q 'No such device'"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"cannot make GPU device nodes in a private /dev: {done.stderr.strip()}"


class Agent:
    """One process with CUDA in a box; attributes are the functions of cuda_agent.py."""

    def __init__(self, process: subprocess.Popen[str], *, boxed: bool = False) -> None:
        self.process = process
        # With a PID namespace of its own, the agent is the child of unshare.
        self.pid = process.pid
        if boxed:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_until(lambda: bool(children.read_text().split()), "the agent's process in its PID namespace")
            self.pid = int(children.read_text().split()[0])

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return functools.partial(self.call, function)

    def call(self, function: str, *arguments: Any) -> Any:
        self.send(function, *arguments)
        return self.receive()

    def send(self, function: str, *arguments: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([function, *arguments]) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE)
        assert ready, f"the agent does not respond within {DEADLINE} s"
        line = self.process.stdout.readline()
        return json.loads(line) if line else f"ended with {self.process.wait(DEADLINE)}"

    def answers_within(self, seconds: float) -> bool:
        assert self.process.stdout
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def start(self, *ordinals: int) -> Agent:
        assert self.init() == OK
        for ordinal in ordinals:
            assert self.context(ordinal) == OK
        return self

    def gpu_descriptors(self) -> list[str]:
        found = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            found.append(os.readlink(entry))
        return sorted(target for target in found if target.startswith("/dev/nvidia"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)


class Box:
    """Device nodes and processes that see them."""

    def __init__(
        self, state: Path, gpus: list[str], nodes: range | list[int], *, options: str = "mode=755"
    ) -> None:
        self.state = state
        self.agents: list[Agent] = []
        state.mkdir(exist_ok=True)
        self.describe(gpus)
        setup = f"mount -t tmpfs -o {options} tmpfs /dev && mkdir /dev/shm && echo up && cat"
        self.holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout
        assert self.holder.stdout.readline() == "up\n"
        self.enter = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", "--"]
        for spec in ("null c 1 3", "zero c 1 5", "urandom c 1 9", "nvidiactl c 195 255"):
            self.run("mknod", "-m", "666", *f"/dev/{spec}".split())
        for minor in nodes:
            self.add_node(minor)

    def describe(self, gpus: list[str], *, driver: str = "580.95.05") -> None:
        (self.state / "gpus.conf").write_text("\n".join([f"driver {driver}", "cuda 13.0", *gpus, ""]))

    def faults(self, *lines: str) -> None:
        (self.state / "faults").write_text("".join(f"{line}\n" for line in lines))

    def run(self, *command: str) -> None:
        subprocess.run([*self.enter, *command], check=True)

    def add_node(self, minor: int, name: str | None = None) -> None:
        self.run("mknod", "-m", "666", f"/dev/{name or f'nvidia{minor}'}", "c", "195", str(minor))

    def remove_node(self, minor: int) -> None:
        self.run("rm", f"/dev/nvidia{minor}")

    def popen(self, command: list[str], *, lib: Path = LIB, **environment: str) -> subprocess.Popen[str]:
        env = {**os.environ, "SOFTGPU_DIR": str(self.state), "LD_LIBRARY_PATH": str(lib), **environment}
        return subprocess.Popen(
            [*self.enter, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def agent(self, *, lib: Path = LIB, own_pids: bool = False, **environment: str) -> Agent:
        command = [sys.executable, str(AGENT)]
        if own_pids:
            command = ["unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", *command]
        agent = Agent(self.popen(command, lib=lib, **environment), boxed=own_pids)
        self.agents.append(agent)
        return agent

    def client_files(self) -> list[Path]:
        return sorted(self.state.glob("mem/*/*"))

    def close(self) -> None:
        for agent in self.agents:
            agent.process.kill()
            agent.process.communicate()
        self.holder.communicate()


@contextmanager
def open_boxes(state: Path) -> Iterator[Callable[..., Box]]:
    """A function that opens boxes on one state directory: as many containers of one host."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    build()
    boxes: list[Box] = []

    def make(
        count: int = 1, *, gpus: list[str] | None = None, nodes: list[int] | None = None, **options: str
    ) -> Box:
        listed = gpus if gpus is not None else [gpu_line(i) for i in range(count)]
        boxes.append(Box(state, listed, range(count) if nodes is None else nodes, **options))
        return boxes[-1]

    try:
        yield make
    finally:
        for box in boxes:
            box.close()
