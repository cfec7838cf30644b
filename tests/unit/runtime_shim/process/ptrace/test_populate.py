"""A large mapping populated for the thread that makes it."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fakes import wait_for
from memory_target import MIB, Target, smaps

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.ptrace import arch as machine
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace import populate
from gpusnap.runtime_shim.process.ptrace.arch import X86_64
from gpusnap.runtime_shim.process.ptrace.populate import PopulateResult, populate_mappings
from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

SIZE = 64 * MIB
LARGE = "PRIVATE | mmap.MAP_POPULATE"
MADVISE = X86_64.calls["madvise"]
ERRNO = 0x50000  # linux/seccomp.h, SECCOMP_RET_ERRNO

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="of x86-64 alone")


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as found:
        found.stop()
        yield found


@dataclass(frozen=True, slots=True)
class Touch:
    """A call of copies.touch, and how much of the mapping was there before."""

    address: int
    size: int
    step: int
    resident: int
    huge: bool
    state: str


@pytest.fixture
def touches(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[Touch]:
    real, seen = copies.touch, []

    def touch(pid: int, start: int, size: int, *, threads: int = 0, step: int = copies.HUGE) -> None:
        there = smaps(pid, start)
        with open(f"/proc/{pid}/task/{target.tid}/stat") as file:
            state = file.read().rpartition(") ")[2][0]
        seen.append(Touch(start, size, step, resident(target, start), "hg" in there["VmFlags"], state))
        real(pid, start, size, threads=threads, step=step)

    monkeypatch.setattr(copies, "touch", touch)
    return seen


def resident(target: Target, address: int) -> int:
    """Bytes of the mapping that holds an address which are there."""
    return int(smaps(target.pid, address)["Rss"][0]) << 10


def check(target: Target, done: PopulateResult, count: int) -> None:
    """What was done, and that the process stands and is well afterwards."""
    assert (done.mappings, done.size) == (count, count * SIZE)
    assert proc.is_still(target.pid)
    assert target.well()


def test_a_large_mapping(target: Target, touches: list[Touch]) -> None:
    """It is made without pages, advised, touched while its thread stands, and there when mmap returns."""
    mask = target.blocks(target.tid)
    with populate_mappings(target.pid, target.tid) as done:
        address = target.number(f"new({SIZE}, {LARGE})")
        assert resident(target, address) >= SIZE
        assert target.blocks(target.tid) != mask
    first = touches[0]
    assert (first.address, first.size, first.step, first.huge) == (address, SIZE, copies.HUGE, True)
    assert first.resident < SIZE // 2
    assert first.state == "t"
    assert done.why_not == ""
    assert 0 < done.seconds < 20
    check(target, done, 1)
    assert target.blocks(target.tid) == mask
    assert target.ask(f"ctypes.string_at({address}, {SIZE}) == bytes({SIZE})") == "True"


def test_two_of_them(target: Target, touches: list[Touch]) -> None:
    """Each is populated, and the sums are of both."""
    with populate_mappings(target.pid, target.tid, threads=1) as done:
        addresses = [target.number(f"new({SIZE}, {LARGE})") for _ in range(2)]
    assert [each.address for each in touches if each.step == copies.HUGE] == addresses
    check(target, done, 2)


@pytest.mark.parametrize(
    "made",
    [
        f"new({SIZE})",
        f"new({MIB}, {LARGE})",
        f"new({SIZE}, {LARGE} ^ mmap.MAP_PRIVATE ^ mmap.MAP_SHARED)",
        f"mmap.mmap(os.memfd_create('x'), 0, flags={LARGE} ^ mmap.MAP_ANONYMOUS)",
        f"new({SIZE}, {LARGE} | 0x10, address=4097)",
        "sorted(os.listdir('/proc/self/fd'))",
    ],
    ids=["not populated", "small", "shared", "of a file", "refused", "others"],
)
def test_other_calls(target: Target, touches: list[Touch], made: str) -> None:
    """They do what they do without us, and the result says that there was nothing to do."""
    with populate_mappings(target.pid, target.tid) as done:
        answer = target.ask(made)
    assert not touches
    assert done.why_not == "the driver made no large mapping that it populates"
    check(target, done, 0)
    if not made.startswith(f"new({SIZE})"):
        return
    assert resident(target, int(answer)) == 0


def test_registers_are_as_without_us(target: Target) -> None:
    """After the call the thread finds its own flags where it had put them, and its result."""
    seen: list[bytes] = []
    real = populate._Watch._populate

    def look(self: populate._Watch, address: int, size: int) -> None:
        real(self, address, size)
        seen.append(self.tracee.registers())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(populate._Watch, "_populate", look)
        with populate_mappings(target.pid, target.tid):
            address = target.number(f"new({SIZE}, {LARGE})")
    (registers,) = seen
    assert X86_64.value(registers, "rax") == address
    number, arguments = X86_64.get_call(registers)
    assert number == X86_64.calls["mmap"]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    assert arguments[:4] == (0, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags)
    assert target.well()


def test_no_huge_pages(target: Target, touches: list[Touch]) -> None:
    """Where the process may have none, small ones are touched."""
    target.go_on()
    assert target.number("libc.prctl(41, 1, 0, 0, 0)") == 0  # PR_SET_THP_DISABLE
    target.stop()
    with populate_mappings(target.pid, target.tid) as done:
        address = target.number(f"new({SIZE}, {LARGE})")
    assert [each.step for each in touches][-1] == mmap.PAGESIZE
    assert resident(target, address) >= SIZE
    check(target, done, 1)


def test_an_advice_that_is_refused(
    target: Target, touches: list[Touch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So too where a filter, which we may not suspend, forbids madvise."""
    monkeypatch.setattr(ptrace, "SUSPEND_SECCOMP", 1 << 30)
    target.go_on()
    assert target.number(f"filter_calls({MADVISE}, {ERRNO | 1})") == 0
    target.stop()
    with populate_mappings(target.pid, target.tid) as done:
        address = target.number(f"new({SIZE}, {LARGE})")
    assert [each.step for each in touches] == [mmap.PAGESIZE]
    assert resident(target, address) >= SIZE
    check(target, done, 1)


def test_a_failure_of_ours(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's work goes on, with no more stops, and the result says why."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no")

    monkeypatch.setattr(copies, "touch", fail)
    with populate_mappings(target.pid, target.tid) as done:
        address = target.number(f"new({SIZE}, {LARGE})")
        monkeypatch.undo()
        second = target.number(f"new({SIZE}, {LARGE})")
        assert resident(target, second) >= SIZE
    assert done.why_not == "MemoryError: no"
    check(target, done, 0)
    assert target.ask(f"ctypes.string_at({address}, 9)") == str(bytes(9))


def test_another_machine(target: Target, touches: list[Touch], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one that we do not know the driver's own way is taken."""
    monkeypatch.setattr(machine, "_MACHINES", {})
    with populate_mappings(target.pid, target.tid) as done:
        address = target.number(f"new({SIZE}, {LARGE})")
        assert resident(target, address) >= SIZE
    assert not touches
    assert "on x86_64" in done.why_not
    check(target, done, 0)


def test_signals_come_afterwards(target: Target) -> None:
    """A signal sent meanwhile is handled when the process runs, once."""
    with populate_mappings(target.pid, target.tid):
        target.send(target.tid, signal.SIGUSR1)
        target.number(f"new({SIZE}, {LARGE})")
        assert "BlockingIOError" in target.ask("os.read(awake, 9)")
    assert target.well()
    assert target.ask("os.read(awake, 9)") == str(bytes([signal.SIGUSR1]))


def test_a_stop_of_somebody_else(target: Target) -> None:
    """A SIGSTOP on its way does not stop the thread in the middle of its work."""
    with populate_mappings(target.pid, target.tid) as done:
        for _ in range(10):
            target.send(target.tid, signal.SIGSTOP)
            assert target.ask("6 * 7") == "42"
        address = target.number(f"new({SIZE}, {LARGE})")
    assert address > 0
    check(target, done, 1)


def test_a_go_on_of_somebody_else(target: Target) -> None:
    """With the process running the end comes all the same, and nothing of ours is left in it."""
    with populate_mappings(target.pid, target.tid) as done:
        target.number(f"new({SIZE}, {LARGE})")
        os.kill(target.pid, signal.SIGCONT)
        assert target.ask("6 * 7") == "42"
    assert done.mappings == 1
    assert target.untraced()
    target.go_on()
    assert target.ask("6 * 7") == "42"


def test_nothing_is_left_pending(target: Target) -> None:
    """Whenever the end comes, it stands at once, and no SIGSTOP of ours waits for it to run."""
    for at in range(60):
        with populate_mappings(target.pid, target.tid):
            if at % 3:
                target.tell("os.getppid()")
            if at % 3 == 2:
                target._line()
        assert proc.is_still(target.pid)
        assert target.status(target.tid, "SigPnd") == 0
        if at % 3 == 1:
            target.go_on()
            target._line()
            target.stop()
    assert target.well()


def test_the_end_while_pages_are_touched(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's call that gives up is not kept waiting for more than that, and its end is not missed."""
    real, begun, ending = copies.touch, threading.Event(), threading.Event()

    def touch(pid: int, start: int, size: int, *, threads: int = 0, step: int = copies.HUGE) -> None:
        begun.set()
        assert ending.wait(60)
        real(pid, start, size, threads=threads, step=step)

    end = Tracer.stop_threads

    def ended(tracer: Tracer) -> None:
        ending.set()
        end(tracer)

    monkeypatch.setattr(copies, "touch", touch)
    monkeypatch.setattr(Tracer, "stop_threads", ended)
    with populate_mappings(target.pid, target.tid) as done:
        target.tell(f"new({SIZE}, {LARGE})")
        assert begun.wait(60)
    assert done.mappings == 1
    assert target.status(target.tid, "SigPnd") == 0
    assert proc.is_still(target.pid)
    target.go_on()
    assert int(target._line()) > 0
    assert target.ask("6 * 7") == "42"


@pytest.mark.parametrize("when", ["before", "while it runs", "while pages are touched"])
def test_killed(target: Target, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The block ends, and nothing of the process is left."""
    if when == "while pages are touched":
        real = copies.touch

        def touch(pid: int, start: int, size: int, *, threads: int = 0, step: int = copies.HUGE) -> None:
            target.process.kill()
            wait_for(lambda: not proc.is_running(pid), "it is gone")
            real(pid, start, size, threads=threads, step=step)

        monkeypatch.setattr(copies, "touch", touch)
    with populate_mappings(target.pid, target.tid) as done:
        if when == "while it runs":
            assert target.ask("6 * 7") == "42"
        if when == "while pages are touched":
            assert target.ask(f"new({SIZE}, {LARGE})") == ""
        else:
            target.process.kill()
    assert done.mappings == 0
    assert done.why_not == "the process ended"
    wait_for(lambda: not proc.is_running(target.pid), "it is gone")


def test_what_cannot_be_traced(target: Target) -> None:
    """OSError, before the block begins."""
    with Target() as gone:
        pass
    with pytest.raises(OSError, match="PTRACE_SEIZE"), populate_mappings(gone.pid, gone.tid):
        raise AssertionError("the block ran")
    with populate_mappings(target.pid, target.tid):
        with pytest.raises(PermissionError), populate_mappings(target.pid, target.tid):
            raise AssertionError("the block ran")
        assert target.ask("6 * 7") == "42"
    assert target.well()


def test_an_error_in_the_block(target: Target) -> None:
    """It comes out, and the process stands."""
    with pytest.raises(ZeroDivisionError), populate_mappings(target.pid, target.tid):
        raise ZeroDivisionError
    assert target.well()
