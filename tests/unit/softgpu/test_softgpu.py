"""softgpu's checkpoint API: states, refusals, faults, and how a checkpointed process looks from outside."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from softgpu_box import (
    CHECKPOINTED,
    DEADLINE,
    FAILED,
    GPUWORK,
    LIB,
    LOCKED,
    MIB,
    OK,
    OLD,
    RUNNING,
    Agent,
    Box,
    read_line,
    wait_until,
)


@pytest.fixture
def box(boxes: Callable[..., Box]) -> Box:
    return boxes(1)


@pytest.fixture
def caller(box: Box) -> Agent:
    return box.agent().start()


@pytest.fixture
def target(box: Box) -> Agent:
    return box.agent().start(0)


def to_state(caller: Agent, pid: int, state: int) -> None:
    if state >= LOCKED:
        assert caller.lock(pid) == OK
    if state == CHECKPOINTED:
        assert caller.checkpoint(pid) == OK
    assert caller.state(pid) == state


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def anonymous(pid: int) -> list[tuple[int, int]]:
    """Where anonymous private writable memory begins and ends. Neighbours are one mapping for the kernel."""
    found = []
    for line in maps(pid).splitlines():
        fields = line.split()
        if fields[1] == "rw-p" and len(fields) == 5:
            start, end = (int(x, 16) for x in fields[0].split("-"))
            found.append((start, end))
    return found


def without(mappings: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of mappings where others are not."""
    for low, high in others:
        parts = [((start, min(end, low)), (max(start, high), end)) for start, end in mappings]
        mappings = [part for pair in parts for part in pair if part[0] < part[1]]
    return mappings


def large(mappings: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of 2 MiB and more; the interpreter's own are smaller."""
    return [each for each in mappings if each[1] - each[0] >= 2 * MIB]


def test_round_trip_keeps_every_byte_and_address(box: Box, caller: Agent, target: Agent) -> None:
    """Memory moves into one new anonymous mapping, no GPU stays open, and all comes back."""
    first, second = target.alloc(3 * MIB + 5), target.alloc(MIB)
    assert target.write(first, 1, 3 * MIB + 5) == OK
    assert target.write(second, 2, MIB) == OK
    digests = [target.read(first, 3 * MIB + 5), target.read(second, MIB)]
    assert target.gpu_descriptors() == ["/dev/nvidia0", "/dev/nvidiactl"]
    before = anonymous(target.pid)
    assert [caller.lock(target.pid), caller.checkpoint(target.pid)] == [OK, OK]
    assert target.gpu_descriptors() == []
    assert str(box.state) not in maps(target.pid)
    assert box.client_files() == []
    (region,) = large(without(anonymous(target.pid), before))
    assert region[1] - region[0] >= 5 * MIB
    assert (region[1] - region[0]) % (2 * MIB) == 4096
    assert [caller.restore(target.pid), caller.state(target.pid), caller.unlock(target.pid)] == [
        OK,
        LOCKED,
        OK,
    ]
    assert large(without(anonymous(target.pid), before)) == []
    assert large(without(before, anonymous(target.pid))) == []
    assert target.gpu_descriptors() == ["/dev/nvidia0", "/dev/nvidiactl"]
    assert [target.read(first, 3 * MIB + 5), target.read(second, MIB)] == digests
    assert target.write(first, 3, MIB) == OK


@pytest.mark.parametrize(
    ("state", "wrong"),
    [
        (RUNNING, ["checkpoint", "restore", "unlock"]),
        (LOCKED, ["lock", "restore"]),
        (CHECKPOINTED, ["lock", "checkpoint", "unlock"]),
    ],
)
def test_wrong_state_changes_nothing(caller: Agent, target: Agent, state: int, wrong: list[str]) -> None:
    to_state(caller, target.pid, state)
    for operation in wrong:
        assert caller.call(operation, target.pid) == "ILLEGAL_STATE"
        assert caller.state(target.pid) == state


def test_a_process_can_ask_for_itself(target: Agent) -> None:
    assert [target.lock(target.pid), target.checkpoint(target.pid)] == [OK, OK]
    assert [target.restore(target.pid), target.unlock(target.pid), target.state(target.pid)] == [
        OK,
        OK,
        RUNNING,
    ]


def test_managed_memory_is_refused_and_unharmed(caller: Agent, target: Agent) -> None:
    address = target.managed(MIB)
    assert caller.lock(target.pid) == OK
    assert caller.checkpoint(target.pid) == "NOT_SUPPORTED"
    assert [caller.state(target.pid), caller.unlock(target.pid)] == [LOCKED, OK]
    assert target.write(address, 1, MIB) == OK
    assert target.free(address) == OK
    assert [caller.lock(target.pid), caller.checkpoint(target.pid)] == [OK, OK]


def test_processes_without_cuda(box: Box, caller: Agent) -> None:
    """No such process, no CUDA, not yet cuInit, a zombie, and a caller that did not call cuInit itself."""
    idle = box.agent()
    assert idle.symbol("cuInit")
    assert caller.state(idle.pid) == "NOT_INITIALIZED"
    assert caller.state(os.getpid()) == "NOT_INITIALIZED"
    assert idle.state(caller.pid) == "NOT_INITIALIZED"
    assert [caller.lock(0x3FFFFFFF), caller.state(0), caller.state(-1)] == ["OPERATING_SYSTEM"] * 3
    os.kill(idle.pid, signal.SIGKILL)
    wait_until(lambda: "\nState:\tZ" in Path(f"/proc/{idle.pid}/status").read_text(), "a zombie")
    assert caller.lock(idle.pid) == "NOT_INITIALIZED"


def links_of(pid: int) -> list[str]:
    """What a process has open; it may close some meanwhile."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(entry))
    return found


def test_child_by_fork_is_not_a_cuda_process(box: Box, caller: Agent, target: Agent) -> None:
    """It keeps the parent's nodes open, which is the trap, but no memory file, and may not use CUDA."""
    target.alloc(MIB)
    child = target.fork()
    assert caller.state(child) == "NOT_INITIALIZED"
    assert caller.lock(child) == "NOT_INITIALIZED"
    assert target.forked_init() == 3
    # The child closes it in its atfork handler, for which its parent does not wait.
    wait_until(
        lambda: not [link for link in links_of(child) if link.startswith(str(box.state))],
        "a child without its parent's memory file",
    )
    assert "/dev/nvidia0" in links_of(child)
    assert [caller.lock(target.pid), caller.checkpoint(target.pid)] == [OK, OK]


def test_restore_thread_is_a_thread_of_the_target(caller: Agent, target: Agent) -> None:
    tid = caller.restore_thread(target.pid)
    assert tid != target.pid
    assert Path(f"/proc/{target.pid}/task/{tid}/comm").read_text() == "cuda-restore\n"


def test_gate_blocks_calls_until_unlock(caller: Agent, target: Agent) -> None:
    address = target.alloc(MIB)
    to_state(caller, target.pid, CHECKPOINTED)
    target.begin("w", 0, "write", address, 7, MIB)
    assert caller.restore(target.pid) == OK
    assert not target.ended("w")
    assert caller.unlock(target.pid) == OK
    assert target.end("w") == OK


def test_lock_waits_for_a_running_kernel(caller: Agent, target: Agent) -> None:
    """A deadline during a kernel answers NOT_READY and the process runs on; without one, Lock waits."""
    assert target.kernel("busy") == OK
    target.begin("k", 0, "launch", "busy", 1, 1500)
    began = time.monotonic()
    wait_until(
        lambda: caller.lock(target.pid, 20) == "NOT_READY" or caller.unlock(target.pid) != OK,
        "a kernel in flight",
    )
    assert caller.state(target.pid) == RUNNING
    assert not target.ended("k")
    assert caller.lock(target.pid, 0) == OK
    assert time.monotonic() - began > 1.0
    assert [caller.unlock(target.pid), target.end("k")] == [OK, OK]


@pytest.mark.parametrize("operation", ["lock", "checkpoint", "restore", "unlock"])
def test_fault_result_for_the_first_uses(box: Box, caller: Agent, target: Agent, operation: str) -> None:
    """It answers the result as often as asked for, changes nothing, and works after; other lines stay."""
    box.faults(
        "# a comment",
        f"{operation} comm=other result=CUDA_ERROR_UNKNOWN",
        f"{operation} result=CUDA_ERROR_OUT_OF_MEMORY count=2",
    )
    address = target.alloc(MIB)
    target.write(address, 1, MIB)
    digest = target.read(address, MIB)
    for step in ("lock", "checkpoint", "restore", "unlock"):
        if step == operation:
            state = caller.state(target.pid)
            assert [caller.call(step, target.pid) for _ in range(2)] == ["OUT_OF_MEMORY"] * 2
            assert caller.state(target.pid) == state
        assert caller.call(step, target.pid) == OK
    assert target.read(address, MIB) == digest
    assert (
        box.state / "faults"
    ).read_text() == f"# a comment\n{operation} comm=other result=CUDA_ERROR_UNKNOWN\n"


def test_fault_lock_hang_exceeds_the_deadline(box: Box, caller: Agent, target: Agent) -> None:
    box.faults("lock hang=60000 count=1")
    assert caller.lock(target.pid, 50) == "NOT_READY"
    assert [caller.state(target.pid), caller.lock(target.pid, 50)] == [RUNNING, OK]


def test_fault_hang_ends_with_the_file(box: Box, caller: Agent, target: Agent) -> None:
    """As a test takes its faults back: what hangs goes on."""
    box.faults("checkpoint hang=600000")
    to_state(caller, target.pid, LOCKED)
    caller.send("checkpoint", target.pid)
    wait_until(lambda: _hangs(target.pid), "the fault")
    (box.state / "faults").unlink()
    assert caller.receive() == OK


@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_fault_hang_with_the_lock_of_a_gpu(box: Box, caller: Agent, target: Agent, operation: str) -> None:
    """Whoever sums up that GPU's memory waits until it is over."""
    box.faults(f"{operation} hang=600000 keeps-gpu")
    to_state(caller, target.pid, LOCKED if operation == "checkpoint" else CHECKPOINTED)
    caller.send(operation, target.pid)
    memory = next((box.state / "mem").iterdir())
    wait_until(lambda: not _is_free(memory), "the lock")
    (box.state / "faults").unlink()
    assert caller.receive() == OK
    assert _is_free(memory)


def _is_free(folder: Path) -> bool:
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def _hangs(pid: int) -> bool:
    return any("nanosleep" in path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/wchan"))


def test_fault_by_process_name(box: Box, caller: Agent, target: Agent) -> None:
    comm = Path(f"/proc/{target.pid}/comm").read_text().strip()
    box.faults(f"checkpoint comm={comm} result=CUDA_ERROR_UNKNOWN")
    to_state(caller, target.pid, LOCKED)
    assert caller.checkpoint(target.pid) == "UNKNOWN"


@pytest.mark.parametrize("operation", ["checkpoint", "restore"])
def test_fault_failed_state_is_final(box: Box, caller: Agent, target: Agent, operation: str) -> None:
    box.faults(f"{operation} state=failed")
    to_state(caller, target.pid, LOCKED if operation == "checkpoint" else CHECKPOINTED)
    assert caller.call(operation, target.pid) == "UNKNOWN"
    assert caller.state(target.pid) == FAILED
    assert {caller.call(step, target.pid) for step in ("lock", "checkpoint", "restore", "unlock")} == {
        "ILLEGAL_STATE"
    }
    assert target.alloc(MIB) == "UNKNOWN"


@pytest.mark.parametrize("operation", ["lock", "checkpoint", "restore", "unlock"])
def test_fault_die_never_hangs_the_caller(box: Box, caller: Agent, target: Agent, operation: str) -> None:
    box.faults(f"{operation} hang=100 die")
    target.alloc(MIB)
    steps = ["lock", "checkpoint", "restore", "unlock"]
    for step in steps[: steps.index(operation)]:
        assert caller.call(step, target.pid) == OK
    assert caller.call(operation, target.pid) == "OPERATING_SYSTEM"
    assert target.process.wait(DEADLINE) == -signal.SIGKILL


def test_fault_that_is_not_understood_does_nothing(box: Box, caller: Agent, target: Agent) -> None:
    box.faults("lock result=CUDA_ERROR_NO_SUCH_THING", "lock nonsense")
    assert caller.lock(target.pid) == OK


def test_a_stopped_process_answers_when_it_runs_again(caller: Agent, target: Agent) -> None:
    """As NVIDIA's driver does: Lock and GetState wait, whatever the deadline, GetRestoreThreadId does not."""
    os.kill(target.pid, signal.SIGSTOP)
    assert caller.restore_thread(target.pid) > 0
    caller.send("lock", target.pid, 50)
    assert not caller.answers_within(0.3)
    os.kill(target.pid, signal.SIGCONT)
    assert caller.receive() == OK
    os.kill(target.pid, signal.SIGSTOP)
    caller.send("state", target.pid)
    assert not caller.answers_within(0.3)
    os.kill(target.pid, signal.SIGCONT)
    assert caller.receive() == LOCKED


def test_a_request_dies_with_its_caller(box: Box, caller: Agent, target: Agent) -> None:
    """A process that was stopped when it was asked is not locked later for someone who no longer lives."""
    os.kill(target.pid, signal.SIGSTOP)
    gone = box.agent().start()
    gone.send("lock", target.pid)
    assert not gone.answers_within(0.3)
    gone.kill()
    os.kill(target.pid, signal.SIGCONT)
    assert target.alloc(MIB) > 0
    assert caller.state(target.pid) == RUNNING
    assert [caller.lock(target.pid), caller.unlock(target.pid)] == [OK, OK]


def test_state_can_be_asked_during_an_operation(box: Box, caller: Agent, target: Agent) -> None:
    box.faults("checkpoint hang=1000")
    other = box.agent().start()
    assert caller.lock(target.pid) == OK
    caller.send("checkpoint", target.pid)
    wait_until(lambda: other.state(target.pid) in (LOCKED, CHECKPOINTED), "a state during the checkpoint")
    assert caller.receive() == OK
    assert other.state(target.pid) == CHECKPOINTED


def test_many_callers_at_once(box: Box, target: Agent) -> None:
    """Of several Locks exactly one succeeds, round after round, and none is lost or done twice."""
    callers = [box.agent().start() for _ in range(3)]
    for _ in range(20):
        for one in callers:
            one.send("lock", target.pid)
        assert sorted(str(one.receive()) for one in callers) == [OK, "ILLEGAL_STATE", "ILLEGAL_STATE"]
        for one in callers:
            one.send("unlock", target.pid)
        assert sorted(str(one.receive()) for one in callers) == [OK, "ILLEGAL_STATE", "ILLEGAL_STATE"]


@pytest.mark.parametrize("stage", [LOCKED, CHECKPOINTED])
def test_target_in_a_pid_namespace(box: Box, caller: Agent, stage: int) -> None:
    """The caller uses the PID that it sees; the target believes that it is PID 1."""
    target = box.agent(own_pids=True).start(0)
    address = target.alloc(MIB)
    target.write(address, 4, MIB)
    digest = target.read(address, MIB)
    to_state(caller, target.pid, stage)
    assert Path(f"/proc/{target.pid}/task/{caller.restore_thread(target.pid)}").is_dir()
    if stage == CHECKPOINTED:
        assert caller.restore(target.pid) == OK
    assert caller.unlock(target.pid) == OK
    assert target.read(address, MIB) == digest


def test_library_under_its_versioned_name(box: Box, caller: Agent, tmp_path: Path) -> None:
    """Drivers are installed as libcuda.so.<version>; /proc/PID/maps shows that name."""
    (tmp_path / "lib").mkdir()
    versioned = tmp_path / "lib" / "libcuda.so.560.35.03"
    versioned.write_bytes((LIB / "libcuda.so.1").read_bytes())
    (tmp_path / "lib" / "libcuda.so.1").symlink_to(versioned.name)
    target = box.agent(lib=tmp_path / "lib").start(0)
    assert "libcuda.so.560.35.03" in maps(target.pid)
    assert [caller.lock(target.pid), caller.unlock(target.pid)] == [OK, OK]


def test_driver_without_the_api(box: Box, caller: Agent) -> None:
    """The same driver before 570: CUDA works, the six functions are absent, nobody can lock the process."""
    old = box.agent(lib=OLD).start(0)
    assert old.alloc(MIB) > 0
    family = ["GetState", "GetRestoreThreadId", "Lock", "Checkpoint", "Restore", "Unlock"]
    assert not [name for name in family if old.symbol(f"cuCheckpointProcess{name}")]
    assert [name for name in family if caller.symbol(f"cuCheckpointProcess{name}")] == family
    assert caller.lock(old.pid) == "NOT_INITIALIZED"


def follow(process: subprocess.Popen[str], seen: list[str]) -> None:
    assert process.stdout
    for line in process.stdout:
        seen.append(line)


def test_gpuwork_goes_on_after_a_checkpoint(box: Box, caller: Agent) -> None:
    """Every word is right before and after, no tick is skipped, and SIGTERM ends it in good order."""
    seen: list[str] = []
    with box.popen([str(GPUWORK), "--mib", "4", "--tick", "5", "--inherit", "--children", "1"]) as work:
        reader = threading.Thread(target=follow, args=(work, seen))
        reader.start()
        try:
            wait_until(lambda: len(seen) > 3, "first ticks")
            to_state(caller, work.pid, CHECKPOINTED)
            held = len(seen)
            assert [caller.restore(work.pid), caller.unlock(work.pid)] == [OK, OK]
            wait_until(lambda: len(seen) > held + 3, "ticks after the restore")
        finally:
            work.terminate()
            assert work.wait(DEADLINE) == 0
            reader.join(DEADLINE)
    assert [line.split()[1:3] for line in seen] == [[f"tick={i + 1}", "ok"] for i in range(len(seen))]


@pytest.mark.parametrize("extra", [["--procs", "2"], ["--late", "1", "--tcp"], ["--managed", "--busy", "1"]])
def test_gpuwork_in_its_other_forms(box: Box, extra: list[str]) -> None:
    """Launcher with workers, late starter, managed memory: right words, and an end in good order."""
    with box.popen([str(GPUWORK), "--mib", "2", "--tick", "1", "--ticks", "0", *extra]) as work:
        pids: set[str] = set()
        end = time.monotonic() + DEADLINE
        try:
            while len(pids) < (1 if "--managed" in extra else 2):
                assert time.monotonic() < end, f"only {pids} tick"
                fields = read_line(work).split()
                assert fields[2] == "ok"
                pids.add(fields[0])
        finally:
            work.terminate()
            work.communicate(timeout=DEADLINE)
        assert work.returncode == 0
