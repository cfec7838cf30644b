"""System calls inside another process, and that it does not notice."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import wait_for
from holders import be_killed
from memory_target import MIB, Target, smaps

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory.maps import mappings
from gpusnap.runtime_shim.process.ptrace import arch as machine
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace import remote_syscall as remote
from gpusnap.runtime_shim.process.ptrace.arch import X86_64
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote, Saved, enter_thread, put_back
from gpusnap.runtime_shim.process.ptrace.tracee import hold

ROOT = Path(__file__).parents[5]
MADVISE = X86_64.calls["madvise"]
PAUSE = 34
TRAP, REFUSE, KILL = 0x30000, 0x50000 | errno.EACCES, 0x80000000  # linux/seccomp.h
NO_OPTION = 1 << 30

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="of x86-64 alone")


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as found:
        yield found


def test_memory_is_freed(target: Target) -> None:
    """Pages of a stopped process are given back; it stands, then reads zeros and is well."""
    found = target.number(f"new({8 * MIB})")
    target.ask(f"ctypes.memset({found}, 1, {8 * MIB})")
    target.stop()
    with enter_thread(target.pid) as there:
        there.madvise(found, 8 * MIB, mmap.MADV_DONTNEED)
    assert smaps(target.pid, found)["Rss"] == ["0", "kB"]
    assert target.well()
    assert target.ask(f"ctypes.string_at({found}, 9)") == str(bytes(9))


def test_every_call(target: Target) -> None:
    """Each does what its manual page says, many of them in turn, and errors are those met there."""
    target.stop()
    before = mappings(target.pid)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with enter_thread(target.pid, target.tid) as there:
        for _ in range(50):
            at = there.mmap(0, 4 * MIB, mmap.PROT_READ | mmap.PROT_WRITE, flags)
            there.munmap(at, 4 * MIB)
        fd = there.openat("/proc/self/status", os.O_RDONLY)
        assert os.readlink(f"/proc/{target.pid}/fd/{fd}").endswith(f"/{target.pid}/status")
        there.dup3(fd, 77, os.O_CLOEXEC)
        assert os.path.samefile(f"/proc/{target.pid}/fd/77", f"/proc/{target.pid}/fd/{fd}")
        there.close(fd)
        with pytest.raises(OSError, match=f"close inside process {target.pid}") as caught:
            there.close(fd)
        assert caught.value.errno == errno.EBADF
        with pytest.raises(FileNotFoundError):
            there.openat("/nowhere/" + "x" * 200, os.O_RDONLY)
        at = there.mmap(0, 4096, mmap.PROT_READ | mmap.PROT_WRITE, flags)
        assert there.call("mremap", at, 4096, 8192, 1) > 0  # MREMAP_MAYMOVE
    assert sum(each.size for each in mappings(target.pid)) == sum(each.size for each in before) + 8192
    assert target.well()
    assert target.ask("os.get_inheritable(77)") == "False"


def test_registers_and_signals_are_its_own_again(target: Target) -> None:
    """All registers after a call are those before it, and the signals that are blocked too."""
    target.ask("signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR2, signal.SIGTRAP})")
    masks = {tid: target.blocks(tid) for tid in target.threads()}
    target.stop()
    for tid in target.threads():
        with hold(target.pid, tid) as tracee:
            before = tracee.registers()
            there = Remote(tracee)
            for _ in range(3):
                there.madvise(0, 0, 0)
                assert tracee.registers() == before
            assert X86_64.get_call(before)[0] >= 0
            assert there.saved == Saved(tid, before, masks[tid])
    assert {tid: target.blocks(tid) for tid in target.threads()} == masks
    assert target.well()


TIMEOUT_NS = 300_000_000
WAITS = {
    # A time to wait for, kept by the kernel from one attempt to the next (restart_block).
    "nanosleep": (35, "ctypes.addressof(struct_time), 0", (0, "")),
    "poll": (7, "0, 0, 300", (0, "")),
    "futex with a timeout": (
        202,
        "ctypes.addressof(word), 128, 7, ctypes.addressof(struct_time)",
        (-1, "ETIMEDOUT"),
    ),
    "clock_nanosleep": (230, "1, 0, ctypes.addressof(struct_time), 0", (0, "")),
    # A signal mask of its own while it waits.
    "ppoll": (271, "0, 0, ctypes.addressof(struct_time), ctypes.addressof(mask), 8", (0, "")),
}
WOKEN = {
    "futex": (202, "ctypes.addressof(word), 128, 7, 0", "raw(202, ctypes.addressof(word), 129, 1)", (0, "")),
    "read": (0, "pipe[0], ctypes.addressof(struct_time), 16", "os.write(pipe[1], b'abc')", (3, "")),
}
PREPARE = """
globals().update(pipe=os.pipe(), struct_time=ctypes.create_string_buffer(struct.pack("qq", 0, {ns})),
mask=ctypes.create_string_buffer((1 << 9).to_bytes(8, "little"), 8))
"""


def prepare(target: Target) -> None:
    target.ask(" ".join(PREPARE.format(ns=TIMEOUT_NS).split()))


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "running"])
@pytest.mark.parametrize("name", WAITS)
def test_a_thread_that_waits_for_a_time(target: Target, name: str, stopped: bool) -> None:
    """It is used while it waits, and then waits on, no shorter, without an error."""
    number, arguments, outcome = WAITS[name]
    prepare(target)
    tid = target.number(f"thread('it', {number}, {arguments})")
    wait_for(lambda: target.waits(tid, number), "it waits")
    if stopped:
        target.stop()
    with enter_thread(target.pid, tid) as there:
        for _ in range(3):
            there.madvise(0, 0, 0)
    if stopped:
        assert proc.is_still(target.pid)
        target.go_on()
    wait_for(lambda: target.ask("'it' in answers") == "True", "it has waited")
    assert target.ask("answers['it'][:2]") == str(outcome)
    assert float(target.ask("answers['it'][2]")) >= TIMEOUT_NS / 1e9


def test_a_thread_that_is_let_run_in_our_hands(target: Target) -> None:
    """It waits on as well where it runs before it is let go."""
    number, arguments, outcome = WAITS["nanosleep"]
    prepare(target)
    tid = target.number(f"thread('it', {number}, {arguments})")
    wait_for(lambda: target.waits(tid, number), "it waits")
    with hold(target.pid, tid) as tracee:
        Remote(tracee).madvise(0, 0, 0)
        tracee.go()
        wait_for(lambda: target.ask("'it' in answers") == "True", "it has waited")
        assert target.ask("answers['it'][:2]") == str(outcome)
        with suppress(ProcessLookupError):  # it may have ended, as its work has
            tracee.to_rest()


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "running"])
@pytest.mark.parametrize("name", WOKEN)
def test_a_thread_that_waits_for_another(target: Target, name: str, stopped: bool) -> None:
    """It is used while it waits, waits again, and is woken as it should be."""
    number, arguments, waking, outcome = WOKEN[name]
    prepare(target)
    tid = target.number(f"thread('it', {number}, {arguments})")
    wait_for(lambda: target.waits(tid, number), "it waits")
    if stopped:
        target.stop()
    with enter_thread(target.pid, tid) as there:
        there.madvise(0, 0, 0)
    if stopped:
        assert proc.is_still(target.pid)
        target.go_on()
    wait_for(lambda: target.waits(tid, number), "it waits again")
    target.ask(waking)
    wait_for(lambda: target.ask("'it' in answers") == "True", "it was woken")
    assert target.ask("answers['it'][:2]") == str(outcome)


def test_a_thread_in_the_middle_of_work(target: Target) -> None:
    """One that is in no system call computes on, and computes right."""
    target.tell("sum(i * i % 7 for i in range(3_000_000))")
    for _ in range(40):
        with enter_thread(target.pid, target.tid) as there:
            there.madvise(0, 0, 0)
    assert target._line() == str(sum(i * i % 7 for i in range(3_000_000)))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGSYS])
def test_signals_come_afterwards(target: Target, number: signal.Signals) -> None:
    """Its handler runs once, when the process does; also of one that we cannot have blocked."""
    target.stop()
    with enter_thread(target.pid, target.tid) as there:
        target.send(target.tid, number)
        there.madvise(0, 0, 0)
        there.madvise(0, 0, 0)
    assert target.well()
    assert target.ask("os.read(awake, 9)") == str(bytes([number]))


def test_a_stop_that_comes_meanwhile(target: Target) -> None:
    """A running process that somebody stops while we work in it is stopped afterwards."""
    with enter_thread(target.pid, target.tid) as there:
        there.madvise(0, 0, 0)
        os.kill(target.pid, signal.SIGSTOP)
        there.madvise(0, 0, 0)
    wait_for(lambda: proc.is_still(target.pid), "it stands")
    assert target.well()


def test_a_go_on_that_comes_meanwhile(target: Target) -> None:
    """A stopped process that somebody lets go on while we work in it is well."""
    target.stop()
    with enter_thread(target.pid, target.tid) as there:
        there.madvise(0, 0, 0)
        os.kill(target.pid, signal.SIGCONT)
        there.madvise(0, 0, 0)
    assert target.ask("6 * 7") == "42"
    assert target.untraced()


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "running"])
@pytest.mark.parametrize("late", [False, True], ids=["while it runs", "when it has stopped"])
@pytest.mark.parametrize("at", range(6))
def test_a_signal_to_us(target: Target, at: int, late: bool, stopped: bool) -> None:
    """Wherever an exception cuts our waiting short, the thread ends up as it was."""
    before = target.blocks(target.tid)
    if stopped:
        target.stop()
    wait, left = ptrace.wait, [at]

    def cut(tid: int) -> ptrace.Stop:
        left[0] -= 1
        if left[0] == -1:
            if late:
                wait(tid)
            raise KeyboardInterrupt
        return wait(tid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptrace, "wait", cut)
        try:
            with enter_thread(target.pid, target.tid) as there:
                for _ in range(3):
                    there.madvise(0, 0, 0)
        except KeyboardInterrupt:
            pass
        assert left[0] < 0
    assert target.untraced()
    assert target.blocks(target.tid) == before
    if stopped:
        assert target.well()
    assert target.ask("6 * 7") == "42"


def test_killed_between_calls(target: Target) -> None:
    """The next call says that the process ended, and nothing of it is left."""
    target.stop()
    with enter_thread(target.pid, target.tid) as there:
        there.madvise(0, 0, 0)
        target.process.kill()
        with pytest.raises(ProcessLookupError):
            there.madvise(0, 0, 0)
        with pytest.raises(ProcessLookupError):
            there.openat("/", 0)
    wait_for(lambda: not proc.is_running(target.pid), "it is gone")


def test_killed_in_a_call(target: Target) -> None:
    """So does a call that it is killed in."""
    target.stop()
    slow = replace(X86_64, calls={**X86_64.calls, "pause": PAUSE})

    def kill() -> None:
        wait_for(lambda: target.waits(target.tid, PAUSE), "it is in the call")
        target.process.kill()

    killer = threading.Thread(target=kill)
    with hold(target.pid, target.tid) as tracee:
        killer.start()
        with pytest.raises(ProcessLookupError):
            Remote(tracee, slow).call("pause")
    killer.join()
    wait_for(lambda: not proc.is_running(target.pid), "it is gone")


def test_what_cannot_be_traced(target: Target) -> None:
    """OSError that names the call: a process that is gone, or that another one traces already."""
    with Target() as gone:
        pass
    with pytest.raises(FileNotFoundError), enter_thread(gone.pid):
        pass
    with (
        pytest.raises(ProcessLookupError, match=f"PTRACE_SEIZE, {gone.pid}"),
        enter_thread(gone.pid, gone.pid),
    ):
        pass
    with (
        enter_thread(target.pid, target.tid),
        pytest.raises(PermissionError, match="PTRACE_SEIZE"),
        enter_thread(target.pid, target.tid),
    ):
        pass
    assert target.ask("6 * 7") == "42"


def test_only_the_tracer_may_call(target: Target) -> None:
    """Another thread is told so."""
    caught: list[BaseException] = []

    def call() -> None:
        try:
            there.madvise(0, 0, 0)
        except RuntimeError as error:
            caught.append(error)

    with enter_thread(target.pid, target.tid) as there:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert [str(target.tid) in str(error) for error in caught] == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may suspend a filter")
def test_a_filter_is_suspended(target: Target) -> None:
    """A seccomp filter that kills does not hold for us, and holds for the process afterwards."""
    assert target.number(f"filter_calls({MADVISE}, {KILL})") == 0
    target.stop()
    with enter_thread(target.pid, target.tid) as there:
        there.madvise(0, 0, 0)
    assert target.well()
    target.tell(f"raw({MADVISE}, 0, 0, 0)")
    target.process.wait(60)
    assert target.process.returncode == -signal.SIGSYS


EXIT_GROUP, GETPID = 231, 39


@pytest.mark.parametrize("number", [EXIT_GROUP, GETPID])
def test_other_code_in_the_place_of_our_instruction(target: Target, number: int) -> None:
    """While filters are suspended no other call is made than ours: not by code that was put there since."""
    target.stop()
    with enter_thread(target.pid, target.tid) as there:
        protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        page = there.mmap(0, 4096, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        code = b"\xb8" + number.to_bytes(4, "little") + b"\x0f\x05"  # mov eax, number; syscall
        copies.write(target.pid, page, code, threads=1)
        right, there._at = there._at, page
        with pytest.raises(GpusnapError, match="entered another system call than madvise"):
            there.madvise(0, 0, 0)
        there._at = right
        there.madvise(0, 0, 0)
    assert target.well()


def test_another_number(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number at the entry counts, too."""
    target.stop()
    with enter_thread(target.pid, target.tid) as there:
        call = type(there.machine).call
        monkeypatch.setattr(
            type(there.machine),
            "call",
            lambda self, found, at, _, given: call(self, found, at, GETPID, given),
        )
        with pytest.raises(GpusnapError, match="entered another system call than madvise"):
            there.madvise(0, 0, 0)
        monkeypatch.undo()
        there.madvise(0, 0, 0)
    assert target.well()


@pytest.mark.parametrize(("action", "error"), [(TRAP, errno.EPERM), (REFUSE, errno.EACCES)])
def test_a_filter_that_refuses(
    target: Target, monkeypatch: pytest.MonkeyPatch, action: int, error: int
) -> None:
    """The call fails; the process does not notice, and keeps its handler of SIGSYS."""
    monkeypatch.setattr(ptrace, "SUSPEND_SECCOMP", NO_OPTION)
    assert target.number(f"filter_calls({MADVISE}, {action})") == 0
    handled = target.status(target.pid, "SigCgt")
    target.stop()
    with enter_thread(target.pid, target.tid) as there:
        for _ in range(2):
            with pytest.raises(PermissionError) as caught:
                there.madvise(0, 0, 0)
            assert caught.value.errno == error
        fd = there.openat("/", os.O_RDONLY)
        there.close(fd)
    assert target.status(target.pid, "SigCgt") == handled
    assert target.well()


def test_a_filter_that_kills(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be done for the process, but the error says what became of it."""
    monkeypatch.setattr(ptrace, "SUSPEND_SECCOMP", NO_OPTION)
    assert target.number(f"filter_calls({MADVISE}, {KILL})") == 0
    target.stop()
    with enter_thread(target.pid, target.tid) as there, pytest.raises(ProcessLookupError, match="ended"):
        there.madvise(0, 0, 0)
    target.process.wait(60)


def test_where_the_instruction_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a thread that waits, else in the vdso or a library; a process that has none is refused."""
    target.stop()
    with hold(target.pid, target.tid) as tracee:
        counter = X86_64.value(tracee.registers(), "rip")
        at = remote._instruction(target.pid, X86_64, counter)
        assert at == counter - 2
        elsewhere = remote._instruction(target.pid, X86_64, 0)
        assert elsewhere != at
        holder = next(each for each in mappings(target.pid) if each.start <= elsewhere < each.end)
        assert "x" in holder.permissions
        there = Remote(tracee)
        there._at = elsewhere
        there.madvise(0, 0, 0)
    assert target.well()
    with pytest.raises(GpusnapError, match=f"process {target.pid} has no"):
        remote._instruction(target.pid, replace(X86_64, instruction=os.urandom(16)), 0)


def test_no_end_of_memory_to_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have as much memory to execute as it likes, and nothing in it."""
    looked: list[int] = []

    def peek(pid: int, address: int, size: int) -> bytes:
        looked.append(address)
        assert len(looked) < 1 << 12
        return b""

    monkeypatch.setattr(copies, "peek", peek)
    spans = [(1 << 20, 2 << 20), (1 << 40, 1 << 44), (1 << 45, 1 << 46)]
    assert remote._search(os.getpid(), spans, b"none") == -1
    assert looked[:2] == [1 << 20, 1 << 40]
    assert len(looked) == 1 << 10


def test_a_descriptor_for_another_socket(target: Target) -> None:
    """The numbers of the pair stand in the program's memory: one that takes nothing is not waited for."""
    target.ask("globals().update(a_pair=__import__('socket').socketpair())")
    target.ask("a_pair[0].setblocking(False)")
    full = "[a_pair[0].send(bytes(4096)) for _ in range(1 << 12)]"
    assert "BlockingIOError" in target.ask(full)
    target.ask("a_pair[0].setblocking(True)")
    number = target.number("a_pair[0].fileno()")
    getfd = X86_64.calls["pidfd_getfd"]
    before = sorted(os.listdir("/proc/self/fd"))
    with open("/dev/null", "rb") as file, pytest.raises(BlockingIOError):
        remote._send(target.pid, getfd, number, file.fileno())
    null = target.number("os.open('/dev/null', os.O_RDWR)")
    with open("/dev/null", "rb") as file, pytest.raises(OSError, match=r"not a socket|non-socket"):
        remote._send(target.pid, getfd, null, file.fileno())
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_another_architecture(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with other registers is refused and runs on; so is a machine that is not known."""
    small = replace(X86_64, registers=X86_64.registers[:17])
    monkeypatch.setattr(machine, "_MACHINES", {"x86_64": small})
    with (
        pytest.raises(GpusnapError, match=f"process {target.pid} is not a program for x86_64"),
        enter_thread(target.pid),
    ):
        pass
    monkeypatch.setattr(machine, "_MACHINES", {})
    with pytest.raises(GpusnapError, match="on x86_64"), enter_thread(target.pid):
        pass
    assert target.ask("6 * 7") == "42"


KILLED = """
import sys
from dataclasses import replace
from gpusnap.runtime_shim.process.ptrace.arch import X86_64
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote
from gpusnap.runtime_shim.process.ptrace.tracee import hold
with hold(int(sys.argv[1]), int(sys.argv[2])) as tracee:
    there = Remote(tracee, replace(X86_64, calls={**X86_64.calls, "pause": 34}))
    print(there.saved.registers.hex(), there.saved.mask, flush=True)
    there.call("pause")
"""


def test_a_tracer_that_was_killed(target: Target) -> None:
    """What it had saved puts the thread right, which goes on in the call that it waited in."""
    target.stop()
    tracer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target.pid), str(target.tid)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tracer.stdout is not None
    registers, mask = tracer.stdout.readline().split()
    wait_for(lambda: target.waits(target.tid, PAUSE), "it is in the call")
    tracer.kill()
    tracer.communicate()
    wait_for(lambda: proc.is_still(target.pid), "it stands")
    assert target.untraced()
    with hold(target.pid, target.tid) as tracee:
        assert tracee.registers().hex() != registers
    put_back(target.pid, Saved(target.tid, bytes.fromhex(registers), int(mask)))
    assert target.well()
    assert target.blocks(target.tid) == int(mask)


def test_options_outlast_a_call(target: Target) -> None:
    """A thread that shall not outlive its tracer still does not once it has made a system call for it."""

    @contextmanager
    def holding() -> Iterator[None]:
        with hold(target.pid, target.tid) as tracee:
            tracee.set_options(ptrace.EXITKILL)
            Remote(tracee).madvise(0, 0, 0)
            yield

    be_killed(holding())
    wait_for(lambda: not proc.is_running(target.pid), "its end")


def test_what_was_saved_elsewhere(target: Target) -> None:
    """Registers of another architecture are not put anywhere."""
    target.stop()
    with pytest.raises(GpusnapError, match=f"registers of process {target.pid} are from another"):
        put_back(target.pid, Saved(target.tid, bytes(17 * 4), 0))
    assert target.well()


def test_a_restartable_sequence(target: Target) -> None:
    """A thread that stands within one makes no call for us; where all do, that is said."""
    target.stop()
    with hold(target.pid, target.pid) as tracee:
        registered = ptrace.critical_section(target.pid)
        if not registered:
            pytest.skip("this C library registers no restartable sequences")
        counter = X86_64.value(tracee.registers(), X86_64.counter)
    threads = sorted(map(int, os.listdir(f"/proc/{target.pid}/task")))
    section = bytearray(struct.pack("=IIQQQ", 0, 0, counter - 1, 2, 0))
    # Anywhere in its memory: below the area itself, on the same thread's stack or in its TLS.
    with enter_thread(target.pid) as remote:
        page = remote.mmap(0, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, 0x22)
    copies.write(target.pid, page, section, threads=1)
    copies.write(target.pid, registered + 8, bytearray(page.to_bytes(8, "little")), threads=1)
    try:
        if len(threads) > 1:
            with enter_thread(target.pid) as remote:
                assert remote.saved.tid != target.pid
        else:
            with pytest.raises(OSError, match="restartable sequence"), enter_thread(target.pid):
                pass
    finally:
        copies.write(target.pid, registered + 8, bytearray(8), threads=1)
    with enter_thread(target.pid) as remote:
        assert remote.saved.tid == target.pid
    assert target.well()
