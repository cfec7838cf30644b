"""Whether `find_sharing` tells jobs that come back from such that do not, by asking the driver itself.

Each job runs as plain processes; the driver suspends and restores them all. CRIU has no part in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpusnap.runtime_shim.gpu.api.errors import ProcessGone
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.gpu_processes.lock import lock
from gpusnap.runtime_shim.snapshot.preflight.nccl import IPC_DRIVER, VARIABLES, find_sharing

PROGRAM = Path(__file__).with_name("programs") / "nccl_rank.py"
P2P, CUMEM, HOST, SHM = (
    "NCCL_P2P_DISABLE=1",
    "NCCL_CUMEM_ENABLE=0",
    "NCCL_CUMEM_HOST_ENABLE=0",
    "NCCL_SHM_DISABLE=1",
)
ALL = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
START = 90.0
"""Seconds that PyTorch and NCCL may take to tick."""


class Job:
    """Processes in sessions of their own, that tick."""

    def __init__(self, folder: Path, kind: str, ranks: int, environment: dict[str, str]) -> None:
        self.folder = folder
        port = _free_port()
        self.files: list[Path] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            self.files.append(folder / f"ticks.{rank}")
            where = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            self._start([str(PROGRAM), kind, str(self.files[-1])], {**where, **environment})

    def _start(self, argv: list[str], environment: dict[str, str]) -> None:
        with (self.folder / "said").open("ab") as said:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *argv],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            )

    def ticks(self) -> list[int]:
        """How often each rank has ticked."""
        return [len(file.read_text().split()) if file.exists() else 0 for file in self.files]

    def go_on(self, more: int, within: float) -> bool:
        """Whether each rank ticks so many times more in time."""
        before, deadline = self.ticks(), time.monotonic() + within
        while time.monotonic() < deadline:
            if all(now >= then + more for now, then in zip(self.ticks(), before, strict=True)):
                return True
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.1)
        return False

    def gpu_processes(self, driver: Nvidia) -> list[proc.Process]:
        """Those of the job's sessions that have CUDA state: one a rank at least."""
        sessions = {process.pid for process in self.processes}
        members = []
        for pid in proc.pids():
            try:
                if os.getsid(pid) in sessions and driver.state(pid) is not None:
                    members.append(proc.process(pid))
            except (ProcessLookupError, ProcessGone):
                continue
        found = [member for member in members if member is not None]
        assert len(found) >= len(self.processes), (self.folder / "said").read_text()[-800:]
        return found

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(kind: str, ranks: int, *settings: str, **more: str) -> Job:
        environment = dict(each.split("=", 1) for each in " ".join(settings).split()) | more
        jobs.append(Job(tmp_path, kind, ranks, environment))
        assert jobs[-1].go_on(5, START), (tmp_path / "said").read_text()[-800:]
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def comes_back(driver: Nvidia, job: Job) -> bool:
    """Have the driver suspend and restore all of the job; whether it then ticks on."""
    pids = [process.pid for process in job.gpu_processes(driver)]
    lock(driver, pids, timeout=15)
    run_at_once(driver.checkpoint, pids).raise_first()  # which never fails: that is the trap
    if run_at_once(lambda pid: driver.restore(pid, ()), pids).errors:
        return False
    run_at_once(driver.unlock, pids).raise_first()
    return job.go_on(5, 60)


# The last of each: whether the job comes back, with driver 580.
CASES = [
    ("nccl", 2, "", {}, False),
    ("nccl", 2, P2P, {}, False),
    ("nccl", 2, SHM, {}, False),
    ("nccl", 2, f"{CUMEM} {HOST}", {}, False),
    ("nccl", 2, f"{P2P} {CUMEM}", {}, True),
    ("nccl", 2, f"{P2P} {HOST}", {}, True),
    ("nccl", 2, ALL, {}, True),
    ("nccl", 2, f"{ALL} {SHM}", {}, True),
    ("nccl", 2, f"{P2P} {SHM}", {}, True),
    ("nccl", 2, "", {"LATE": ALL}, True),
    ("gloo", 2, "", {}, True),
    ("destroyed", 2, "", {}, True),
    ("nccl", 1, "", {}, True),
    ("several", 1, "", {}, True),
    ("ipc", 1, "", {}, False),
    ("ipc-done", 1, "", {}, True),
]


@pytest.mark.parametrize(("kind", "ranks", "settings", "more", "good"), CASES)
def test_what_is_said_is_what_happens(
    driver: Nvidia,
    start: Callable[..., Job],
    kind: str,
    ranks: int,
    settings: str,
    more: dict[str, str],
    good: bool,
) -> None:
    """Refused if and only if the driver does not bring the job back, which is what was seen before."""
    host = driver.host()
    if len(host.gpus) < 2:
        pytest.skip("needs two GPUs")
    job = start(kind, ranks, settings, **more)
    good = good or (kind == "ipc" and int(host.driver_version.partition(".")[0]) >= IPC_DRIVER)
    found = find_sharing(job.gpu_processes(driver), host)
    assert (found is None) is good, found
    assert comes_back(driver, job) is good
