"""Finds GPU memory that processes share: the driver suspends it without an error, and then cannot restore it.

Seen on two H200s with driver 580 and NCCL 2.28 (docs/benchmarks.md; tests/gpu/test_nccl.py repeats it): two
ranks can be restored if NCCL moves their data through host memory that it shares by files, or through
sockets. They cannot be restored if NCCL has mapped one rank's memory, or host memory of CUDA (cuMem), into
the other.

    NCCL_P2P_DISABLE   NCCL_CUMEM_ENABLE   NCCL_CUMEM_HOST_ENABLE   NCCL_SHM_DISABLE   both come back
           -                   -                      -                     -              no
           1                   -                      -                     -              no
           -                   -                      -                     1              no
           -                   0                      0                     -              no
           1                   0                      -                     -              yes
           1                   -                      0                     -              yes
           1                   0                      0                   - or 1           yes
           1                   -                      -                     1              yes

All of these with NCCL_NVLS_ENABLE=0. Without it (and without TORCH_SYMM_MEM_DISABLE_MULTICAST=1), the
driver's checkpoint of two ranks in a container did not end on two H100s, in five of five attempts; with it,
it does. GPUs share memory in this way (NVLink multicast) from compute capability 9.0 on.

What gpusnap can see from outside, before it changes anything:

- A communicator has a Unix socket, @tmp/nccl-socket-<rank>-<hash>, for as long as it exists (NCCL 2.19 and
  later). A program that only loaded NCCL has no such socket, nor has torchrun's launcher, nor a program that
  has destroyed its communicator. NCCL before 2.19 is recognized by two signs together: a mapped file
  libnccl.so* that does not contain the name of that socket, and a variable of the launcher that says that
  there are several ranks. It is not recognized if the program is statically linked with NCCL, or if nobody
  set such a variable.
- A process that holds only rank 0, or all ranks up to its highest, shares nothing with another process: it is
  one rank, or several GPUs of one process, which can be restored with every setting. This is certain only if
  no other process holds a rank, or if all of them hold only rank 0: two communicators of the same two
  processes, in opposite order, look like two jobs of two GPUs each. If a rank 0 has its other ranks in
  another container, only the variables of its launcher show it.
- NCCL's variables as getenv(3) finds them now: programs and NCCL's configuration files set them too.
- /dev/shm/nccl-*: host memory that is shared by files. If CUDA's host memory replaces it, there is none.
- /dev/shm/cuda.shm.<uid>.<PID in hex>.<n>: CUDA IPC, with the PID of the exporter. A process that has mapped
  such a file of another process has opened its memory (torch.multiprocessing does), and its restore failed.

A bare cudaIpcOpenMemHandle, without events, cannot be seen (vLLM's own all-reduce uses it): descriptors,
mappings, Unix sockets and shared open files are the same before, during and after it (bench/ipc_signs.py, on
an H100 with driver 580.159.04). The restore of the process that had opened the memory failed with 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.gpu.api.driver import Gpu, Host
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.environ import live_environment

IPC_DRIVER = 610
"""The first driver that can restore CUDA IPC, according to NVIDIA's notes on cuda-checkpoint. Not tested."""
VARIABLES: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""With these, the driver can restore a job."""
_MULTICAST = "NCCL_NVLS_ENABLE"
_FIRST_MULTICAST = (9, 0)

_SOCKET = compile_later(r"@tmp/nccl-socket-(\d{1,9})-[0-9a-f]+")
_SEGMENT = "/dev/shm/nccl-"
_IPC = compile_later(r"/dev/shm/cuda\.shm\.\d+\.([0-9a-f]+)\.\d+")
# How launchers tell a rank the number of ranks: torchrun, Open MPI, MPICH; else Slurm for the step, or else
# for the whole job. A program in a batch script has the last one too, although it may be alone.
_SIZES = (
    ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    ("SLURM_STEP_NUM_TASKS",),
    ("SLURM_NTASKS",),
)
_NAME = b"/tmp/nccl-socket-"
# The part of libnccl that contains its constants: the whole of the largest one seen, 330 MiB.
_LONGEST = 1 << 30
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Sharing:
    """A process that the driver could not restore."""

    process: proc.Process
    why: str
    """The end of a sentence that begins with the process."""
    todo: str
    code: str
    """The code of the refusal, such as GPS-214."""


def find_sharing(users: Sequence[proc.Process], host: Host) -> Sharing | None:
    """Return the first of these GPU processes that shares memory which the driver could not restore; or None.

    `users`: all GPU processes of a container. `host`: the host that they run on.
    """
    multicast = any(_capability(gpu) >= _FIRST_MULTICAST for gpu in host.gpus)
    wanted = {name: value for name, value in VARIABLES.items() if multicast or name != _MULTICAST}
    return _find_nccl_sharing(users, wanted) or (
        None if _major(host.driver_version) >= IPC_DRIVER else _find_ipc_sharing(users)
    )


def is_job(users: Sequence[proc.Process]) -> bool:
    """Return whether some of these GPU processes have ranks whose kernels wait for other ranks."""
    ranks = _find_ranks(users)
    return (
        _has_several(ranks)
        or any(len(held) > 1 for held in ranks.values())
        or any(_is_old_rank(process.pid) for process in users if process not in ranks)
    )


def _find_ranks(users: Sequence[proc.Process]) -> dict[proc.Process, frozenset[int]]:
    """Return the processes that have ranks, with these."""
    return {process: held for process in users if (held := _ranks(process.pid))}


def _capability(gpu: Gpu) -> tuple[int, ...]:
    return tuple(int(part) for part in gpu.compute_capability.split(".") if part.isdecimal())


def _find_nccl_sharing(users: Sequence[proc.Process], wanted: Mapping[str, str]) -> Sharing | None:
    ranks = _find_ranks(users)
    old = [process for process in users if process not in ranks and _is_old_rank(process.pid)]
    suspects = [*(ranks if _has_several(ranks) else ()), *old]
    for process in suspects:
        before = proc.environment(process.pid)
        now = live_environment(process.pid) or before
        if not _can_be_restored(now, wanted):
            missing = [f"{name}={value}" for name, value in wanted.items() if not _is(now, name, value)]
            return Sharing(
                process,
                "is a rank of a job whose NCCL shares GPU memory between processes; the driver would not "
                "suspend it, or would suspend it but fail to restore it",
                f"run it with {' '.join(missing)}",
                code="GPS-214",
            )
        if (
            process not in old
            and not _can_be_restored(before, wanted)
            and _SEGMENT not in proc.maps(process.pid)
        ):
            return Sharing(
                process,
                "has set NCCL's variables itself, and gpusnap cannot verify that NCCL read them in time",
                f"run it with {' '.join(map('='.join, wanted.items()))} from its start",
                code="GPS-214",
            )
    return None


def _can_be_restored(environment: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether NCCL shares no CUDA memory with these settings."""
    if not _is(environment, "NCCL_P2P_DISABLE", "1"):
        return False
    if _MULTICAST in wanted and not _is(environment, _MULTICAST, "0"):
        return False
    return (
        _is(environment, "NCCL_SHM_DISABLE", "1")
        or _is(environment, "NCCL_CUMEM_ENABLE", "0")
        or _is(environment, "NCCL_CUMEM_HOST_ENABLE", "0")
    )


def _is(environment: Mapping[str, str], name: str, wanted: str) -> bool:
    """Whether a switch is on ("1") or off ("0"). For NCCL, every number except zero is on."""
    try:
        value = int(environment.get(name, ""), 0)
    except ValueError:
        return False
    return (value != 0) == (wanted == "1")


def _ranks(pid: int) -> frozenset[int]:
    """Return the ranks of the process's communicators."""
    found = (_SOCKET.fullmatch(name) for name in proc.unix_sockets(pid))
    return frozenset(int(match[1]) for match in found if match)


def _has_several(ranks: Mapping[proc.Process, frozenset[int]]) -> bool:
    """Whether a communicator of these processes has ranks in more than one process."""
    if any(len(held) <= max(held) for held in ranks.values()):
        return True  # a lower rank is somewhere else
    if len(ranks) > 1 and any(max(held) > 0 for held in ranks.values()):
        return True
    return any(_size(process.pid) > 1 for process in ranks)


def _size(pid: int) -> int:
    """Return the number of processes of the job, if its launcher has set it for this one; else 1."""
    environment = live_environment(pid) or proc.environment(pid)
    for names in _SIZES:
        told = (environment.get(name, "") for name in names)
        numbers = [int(text) for text in told if text.isascii() and text.isdigit() and len(text) < 9]
        if numbers:
            return max(numbers)
    return 1


def _is_old_rank(pid: int) -> bool:
    """Whether the process is one of several ranks, by its launcher, with an NCCL that has no such socket."""
    if _size(pid) <= 1:
        return False
    for fields in proc.named_mappings(pid):
        if "/libnccl.so" in fields[5]:
            return not question_process.ask(pid, "its libnccl", _mentions_socket, pid, fields[0])
    return False


def _mentions_socket(pid: int, addresses: str) -> bool:
    start, end = (int(each, 16) for each in addresses.split("-"))
    try:
        with open(f"{proc.PROC}/{pid}/map_files/{start:x}-{end:x}", "rb", buffering=0) as file:
            return _mentions(file.fileno(), _NAME)
    except (OSError, ValueError):
        return True  # gone or unreadable: no sign of an old NCCL


def _mentions(file: int, word: bytes) -> bool:
    """Whether the start of a file contains a word. Not mapped: a shortened file would cause SIGBUS."""
    at, last = 0, b""
    while at < _LONGEST and (data := os.pread(file, _PIECE, at)):
        if word in last + data:
            return True
        last = (last + data)[-len(word) + 1 :]
        at += len(data)
    return False


def _find_ipc_sharing(users: Sequence[proc.Process]) -> Sharing | None:
    for process in users:
        exporters = {int(found[1], 16) for found in _IPC.finditer(proc.maps(process.pid))}
        if exporters - {process.ns_pids[-1]}:
            return Sharing(
                process,
                "has GPU memory of another process open (CUDA IPC); the driver would suspend it but fail "
                "to restore it",
                f"share through host memory instead, or use NVIDIA driver {IPC_DRIVER} or later",
                code="GPS-215",
            )
    return None


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() else 0
