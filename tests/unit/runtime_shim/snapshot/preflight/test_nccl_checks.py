"""GPU memory that processes share: what is refused, and what must not be. The processes are real."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.gpu.api.driver import Gpu, Host
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.preflight import nccl
from gpusnap.runtime_shim.snapshot.preflight.nccl import VARIABLES

DRIVER = "580.159.04"
SAFE = dict(VARIABLES)
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}

# argv: the names of sockets, and of files in /dev/shm to map, and variables to set, each a list with commas
PROGRAM = """
import mmap, os, socket, sys
held = []
for name in filter(None, sys.argv[1].split(",")):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].bind("\\0" + name + "\\0" * (90 - len(name)))
for name in filter(None, sys.argv[2].split(",")):
    name = name.replace("OWN", format(os.getpid(), "x"))
    with open("/dev/shm/" + name, "w+b") as file:
        file.truncate(4096)
        held.append(mmap.mmap(file.fileno(), 4096))
    os.unlink("/dev/shm/" + name)
os.environ.update(each.split("=") for each in filter(None, sys.argv[3].split(",")))
print(flush=True)
sys.stdin.read()
"""


class Ranks:
    """Processes that look like a job's."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.found: list[proc.Process] = []

    def add(self, *ranks: int, files: str = "", late: str = "", **environment: str) -> Ranks:
        """One that holds these ranks, has these files of /dev/shm mapped, and set these variables `late`."""
        names = ",".join(f"tmp/nccl-socket-{rank}-{uuid.uuid4().hex[:15]}" for rank in ranks)
        running = subprocess.Popen(
            [sys.executable, "-S", "-c", PROGRAM, names, files, late],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._stack.enter_context(running)
        assert running.stdin
        assert running.stdout
        self._stack.callback(running.stdin.close)
        assert running.stdout.readline()
        found = proc.process(running.pid)
        assert found is not None
        self.found.append(found)
        return self

    def judged(self, driver: str = DRIVER, capability: str = "9.0") -> nccl.Sharing | None:
        return nccl.find_sharing(self.found, host(driver, capability))


def host(driver: str = DRIVER, capability: str = "9.0") -> Host:
    gpu = Gpu("GPU-0", 0, 0, "Any", capability, 80 << 30, 0, False, "default")
    return Host("nvidia", driver, "13.0", (gpu,))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NCCL_P2P_DISABLE": "1"},
        {"NCCL_SHM_DISABLE": "1"},
        {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"},
        {**SAFE, "NCCL_P2P_DISABLE": "0"},
        {**SAFE, "NCCL_P2P_DISABLE": "yes"},
        {**SAFE, "NCCL_NVLS_ENABLE": "2"},
    ],
)
def test_ranks_that_do_not_come_back(ranks: Ranks, environment: dict[str, str]) -> None:
    """The settings under which both ranks were lost; the hint names what is missing, and nothing else."""
    found = ranks.add(0, **environment).add(1, **environment).judged()
    assert found is not None
    assert found.process == ranks.found[0]
    assert "NCCL shares GPU memory" in found.why
    wanted = [f"{name}={value}" for name, value in SAFE.items() if environment.get(name) != value]
    assert found.todo == f"run it with {' '.join(wanted)}"


@pytest.mark.parametrize(
    "environment",
    [
        SAFE,
        {**SAFE, "NCCL_SHM_DISABLE": "1"},
        {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", **NO_MULTICAST},
        {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0", **NO_MULTICAST},
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", **NO_MULTICAST},
        {**SAFE, "NCCL_P2P_DISABLE": "0x1"},
    ],
)
def test_ranks_that_come_back(ranks: Ranks, environment: dict[str, str]) -> None:
    """The settings that were seen to work raise no alarm, with or without connections so far."""
    assert ranks.add(0, **environment).add(1, files="nccl-a", **environment).judged() is None


@pytest.mark.parametrize(
    ("capability", "good"), [("8.9", True), ("9.0", False), ("10.0", False), ("gfx942", True)]
)
def test_multicast(ranks: Ranks, capability: str, good: bool) -> None:
    """GPUs that can share memory by NVLink's multicast do so unless NCCL is told not to."""
    environment = {name: value for name, value in SAFE.items() if name not in NO_MULTICAST}
    found = ranks.add(0, **environment).add(1, **environment).judged(capability=capability)
    assert (found is None) is good
    assert found is None or found.todo == "run it with NCCL_NVLS_ENABLE=0"


def test_one_bad_rank_is_enough(ranks: Ranks) -> None:
    """A job comes back as a whole."""
    found = ranks.add(0, **SAFE).add(1, NCCL_P2P_DISABLE="1").judged()
    assert found is not None
    assert found.process == ranks.found[1]


def test_processes_by_themselves(ranks: Ranks) -> None:
    """Single ranks that are no job, one without NCCL, a launcher; and all GPUs in one process."""
    assert ranks.add(0).add(0, 0, WORLD_SIZE="1").add().add(WORLD_SIZE="8").judged() is None
    ranks.found.clear()
    assert ranks.add(0, 1, 2, 3).add(WORLD_SIZE="8").judged() is None


def test_two_communicators_in_opposite_order(ranks: Ranks) -> None:
    """Rank 0 of one and rank 1 of the other, and the other way round: each process has both numbers."""
    assert ranks.add(0, 1).judged() is None
    assert ranks.add(1, 0).judged() is not None


def test_a_rank_beyond_all_measure(ranks: Ranks) -> None:
    """A container names its sockets as it likes."""
    assert ranks.add(0, 999_999_999).judged() is not None


@pytest.mark.parametrize(
    ("environment", "alone"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, True),
        ({"SLURM_NTASKS": "8", "WORLD_SIZE": "1"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "2"}, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "2"}, False),
    ],
)
def test_what_is_nearest_to_the_rank_counts(ranks: Ranks, environment: dict[str, str], alone: bool) -> None:
    """torchrun within a step of Slurm's, a step within a job."""
    assert (ranks.add(0, **environment).judged() is None) is alone


@pytest.mark.parametrize(
    "name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
)
def test_a_rank_whose_others_are_elsewhere(ranks: Ranks, name: str) -> None:
    """In another container, as its launcher says; or rank 3, of which the lower ones are not here."""
    assert ranks.add(0, **{name: "2"}).judged() is not None
    ranks.found.clear()
    assert ranks.add(3).judged() is not None


def test_variables_that_the_program_sets(ranks: Ranks) -> None:
    """Set before NCCL began, which its files in /dev/shm show; else NCCL may have begun without them."""
    late = ",".join(f"{name}={value}" for name, value in SAFE.items())
    assert ranks.add(0, late=late, files="nccl-a").add(1, late=late, files="nccl-b").judged() is None
    found = ranks.add(2, late=late).judged()
    assert found is not None
    assert found.process == ranks.found[2]
    assert "from its start" in found.todo


def test_variables_that_the_program_takes_away(ranks: Ranks) -> None:
    """What it was started with does not count where it has changed it."""
    assert ranks.add(1, late="NCCL_P2P_DISABLE=0", files="nccl-a", **SAFE).judged() is not None


def test_an_ipc_importer(ranks: Ranks) -> None:
    """Memory of another process by CUDA IPC; the exporter's own is no sign, and later drivers can do it."""
    assert ranks.add(files="cuda.shm.0.OWN.1").judged() is None
    ranks.add(files=f"cuda.shm.0.{os.getpid():x}.1")
    found = ranks.judged()
    assert found is not None
    assert found.process == ranks.found[1]
    assert "CUDA IPC" in found.why
    assert ranks.judged("610.43.02") is None


def test_nccl_without_the_socket(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.19: one of several ranks, by its launcher, with a library that knows no such socket."""
    library = f"{ranks.add(WORLD_SIZE='2').found[0].pid}"
    maps = proc.maps
    python = next(line for line in maps(int(library)).splitlines() if " 00000000 " in line and "/" in line)
    path = python.split(None, 5)[5]
    monkeypatch.setattr(proc, "maps", lambda pid: maps(pid).replace(path, "/opt/libnccl.so.2"))
    assert ranks.judged() is not None
    question_process.end()  # the next child has what is put in place now
    monkeypatch.setattr(nccl, "_NAME", b"\x7fELF")  # which this library does have
    assert ranks.judged() is None


@pytest.mark.parametrize("name", ["a\x0cb", "a\u2028b", "a\x1cb\x85", "a\rb"])
def test_names_that_end_lines(ranks: Ranks, name: str) -> None:
    """A mapping may be called anything: what Python takes for the end of a line is none."""
    assert ranks.add(files=name, WORLD_SIZE="2").add(0, files=name).judged() is None


def test_a_word_at_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is read in pieces, and the word may lie across two of them."""
    monkeypatch.setattr(nccl, "_PIECE", 7)
    path = tmp_path / "lib"
    path.write_bytes(b"x" * 11 + b"nccl-socket" + b"y" * 9)
    with path.open("rb") as file:
        assert nccl._mentions(file.fileno(), b"nccl-socket")
        assert not nccl._mentions(file.fileno(), b"nccl-sockets")


def test_one_that_is_gone() -> None:
    """A process that ended meanwhile shares nothing."""
    assert nccl.find_sharing([proc.Process(1 << 22, (1 << 22,), "gone", (), 1)], host()) is None


@pytest.mark.parametrize(
    ("held", "job"),
    [([(0,), (1,)], True), ([(0, 1)], True), ([(0,)], False), ([(0,), (0,)], False), ([()], False)],
)
def test_a_job(ranks: Ranks, held: list[tuple[int, ...]], job: bool) -> None:
    """Several ranks, in one process or in several, and with every setting of NCCL."""
    for each in held:
        ranks.add(*each, **SAFE)
    assert nccl.is_job(ranks.found) == job
