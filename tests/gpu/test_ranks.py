"""Two ranks of PyTorch on two real GPUs: a checkpoint at any instant, whether they are idle or not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import shimhost
from realhost import Machine, Program, Workload, needs_network_lock
from support import containers_left, good, podman, run
from test_containers import needs

from gpusnap.runtime_shim.gpu.api.driver import Gpu
from gpusnap.runtime_shim.snapshot.preflight.nccl import VARIABLES

TIMES = 20
IDLE = Workload.python("torch_ranks.py", "torch", 64, "--pause", "0.06")
NEVER_IDLE = Workload.python("torch_ranks.py", "torch", 64, "--pause", "0", "--steps", "25")


@pytest.fixture
def runtime(request: pytest.FixtureRequest, machine: Machine) -> Iterator[None]:
    """The real runtime that is asked for, by the settings file."""
    name = str(request.param)
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    before = set(containers_left())
    shimhost.write_settings(f'runtime = "{name}"\n')
    yield
    for left in set(containers_left()) - before:
        podman("rm", "--force", "--time", "0", left)
    shimhost.write_settings("")


def options(machine: Machine, gpus: tuple[Gpu, Gpu]) -> list[str]:
    """Both GPUs; NCCL's transports as gpusnap asks for; and a network of its own for the ranks' sockets."""
    words = machine.options(minors=[gpu.minor for gpu in gpus])
    words[words.index("--network") + 1] = "none"
    variables = {**VARIABLES, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    variables["USE_LIBUV"] = (
        "0"  # the store of PyTorch's rendezvous would use io_uring, which CRIU does not dump
    )
    named = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    return [*words, *named, "--shm-size", "1g"]


def same_on_all_ranks(program: Program) -> None:
    """After each tick all ranks have the same model, to the bit."""
    sums: dict[int, set[str]] = {}
    for tick, total, _ in program.stamps():
        sums.setdefault(tick, set()).add(total)
    assert {tick: found for tick, found in sums.items() if len(found) > 1} == {}


# One runtime each: they have no part in the lock, and this takes a minute.
@pytest.mark.parametrize(
    ("load", "runtime"),
    [(IDLE, "crun"), (NEVER_IDLE, "runc")],
    ids=["idle", "never-idle"],
    indirect=["runtime"],
)
def test_ranks(
    machine: Machine, runtime: None, two: tuple[Gpu, Gpu], tmp_path: Path, archive: Path, load: Workload
) -> None:
    """As often as one likes while they run; then ended, and restored with the GPUs swapped."""
    needs(load)
    needs_network_lock()
    program = Program.begin("w", load, options(machine, two), workers=2)
    for _ in range(TIMES):
        good(run(*program.line(tmp_path, "--leave-running", "--tcp-established")))
        program.goes_on(more=1)
    shutil.rmtree(tmp_path / "image")
    good(program.checkpoint(archive, "--tcp-established", "--compress", "none"))
    program.remove()
    gpu_map = ",".join(f"{old.uuid}={new.uuid}" for old, new in (two, two[::-1]))
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "GPUSNAP_GPU_MAP": gpu_map}
    words = ("podman", "--runtime", "gpusnap-runtime", "container", "restore", "--tcp-established")
    good(run(*words, "--import", archive, env=env))
    program.goes_on(more=5)
    assert len(program.ticks()) == 2
    same_on_all_ranks(program)
