"""A thread of another process in our hands, by ptrace(2): how it is taken, watched, and let go as it was.

While a thread is held it gets no signal, because nobody would take it on: all are blocked but those that the
kernel raises for what the thread itself does, and its own mask is put back at the end. SIGSTOP cannot be
blocked, so one that was still on its way makes the thread report itself; where the process stands anyway, it
is dropped. A thread that is let go stands again if its process does (kernel/ptrace.c, __ptrace_unlink). Where
its tracer is killed, the mask is in a file (signal_masks.py).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace import signal_masks
from gpusnap.runtime_shim.process.ptrace.calls import Stop

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""What the kernel raises for an instruction that cannot be run."""
# The kernel itself raises these in a thread: SIGTRAP for its tracer, SIGSYS for a seccomp filter, and faults.
# Where one is blocked it takes the process' handler away (kernel/signal.c, force_sig_info_to_task).
_UNBLOCKED = (signal.SIGTRAP, signal.SIGSYS, *FAULTS)
_NEVER_BLOCKED = (signal.SIGKILL, signal.SIGSTOP)
_EVERY = (1 << 64) - 1 & ~sum(1 << number - 1 for number in (*_UNBLOCKED, *_NEVER_BLOCKED))
# Seconds for a thread to stand again; reached only where somebody else sent a SIGCONT, and then there is
# nothing to wait for.
_SETTLING = 1.0
# Stops that are not the one we wait for: a process that is stopped, continued, signalled. Never so many.
_STRAY = 64


class Tracee:
    """A thread that stands, seized by the thread that makes this object; no other may use it.

    Every method raises OSError, ProcessLookupError where the thread has ended.
    """

    def __init__(self, pid: int, tid: int) -> None:
        self.pid, self.tid = pid, tid
        self.stood = False
        """Whether its process was stopped, as by SIGSTOP."""
        self.mask: int | None = None
        """Its own signal mask."""
        self._tracer = threading.get_native_id()
        self._late: list[int] = []
        self._note: signal_masks.Note | None = None
        ptrace.seize(tid)
        try:
            # A thread that stands with its process reports itself at once, and an interrupt on top would stop
            # it a second time.
            stop = ptrace.stopped(tid)
            if stop is None:
                ptrace.interrupt(tid)
                stop = ptrace.wait(tid)
            self.stood = stop.with_process
            self.keep(stop)
            self.mask = ptrace.signal_mask(tid)
            if self.mask != _EVERY:
                self._note = signal_masks.note(pid, tid, self.mask)
            ptrace.set_signal_mask(tid, _EVERY)
        except BaseException:  # it was killed, or a signal to us cut the wait short
            with suppress(OSError):
                self.let_go()
            raise

    def registers(self) -> bytes:
        """Its general registers."""
        self.check()
        return ptrace.registers(self.tid)

    def set_registers(self, values: bytes) -> None:
        """Set them."""
        self.check()
        ptrace.set_registers(self.tid, values)

    def go(self) -> None:
        """Let it run."""
        self.check()
        ptrace.go(self.tid)

    def to_call(self) -> None:
        """Let it run to the next entry or exit of a system call, and wait for that."""
        self._until(ptrace.go_to_call, lambda stop: stop.at_call)

    def to_rest(self) -> None:
        """Bring it, wherever it is, to where signals are handled, on the way back from a system call.

        No instruction of the program is run. Only there does the kernel restart an interrupted call.
        """

        def go(tid: int) -> None:
            stands = state(self.pid, tid) == "t"
            ptrace.interrupt(tid)  # each time: any other stop uses it up (kernel/signal.c, ptrace_stop)
            if stands:
                ptrace.go(tid)

        self._until(go, lambda stop: stop.by_tracer)

    def back(self, registers: bytes) -> None:
        """Bring it to rest with its own registers, unless it has ended.

        Also where a signal to us (KeyboardInterrupt) cut a wait short: the program's life hangs on it.
        """
        try:
            self.to_rest()
        except ProcessLookupError:
            return
        except BaseException:
            self.to_rest()
            ptrace.set_registers(self.tid, registers)
            raise
        with suppress(ProcessLookupError):
            ptrace.set_registers(self.tid, registers)

    def to_signal(self, number: int) -> bool:
        """Have it stop for a signal that is pending for it and drop that; whether there was one."""
        if not _pending(self.pid, self.tid) >> number - 1 & 1:
            return False
        self._until(ptrace.go, lambda stop: stop.signal == number and not stop.by_tracer)
        return True

    def on(self) -> None:
        """Let it run on if it has stopped meanwhile."""
        self.check()
        stop = ptrace.stopped(self.tid)
        if stop is not None:
            self.keep(stop)
            ptrace.go(self.tid)

    def keep(self, stop: Stop) -> None:
        """Note the signal that a stop was for, if any: it is sent again when the thread is let go."""
        # A fault comes again, when the thread runs the instruction again.
        if stop.at_call or stop.by_tracer or stop.signal in (signal.SIGTRAP, *FAULTS):
            return
        if not (stop.signal == signal.SIGSTOP and self.stood):
            self._late.append(stop.signal)

    def let_go(self) -> None:
        """Put its mask back, be its tracer no longer, and wait until it stands if its process does.

        One that has ended is waited for: until then the whole process is a zombie.
        """
        self.check()
        try:
            self._let_go()
        except ProcessLookupError:  # it was killed, or does not stand
            with suppress(ProcessLookupError, ChildProcessError):
                ptrace.interrupt(self.tid)
            with suppress(ProcessLookupError, ChildProcessError):
                ptrace.wait(self.tid)
                self._let_go()
        self.forget()
        if self.stood:
            _settle(self.pid, self.tid)

    def forget(self) -> None:
        """It needs its mask no more: it has it, or has ended."""
        if self._note is not None:
            self._note.drop()
            self._note = None

    def _let_go(self) -> None:
        if self.mask is not None:
            ptrace.set_signal_mask(self.tid, self.mask)
        ptrace.let_go(self.tid)
        for number in self._late:
            ptrace.send(self.pid, self.tid, number)

    def check(self) -> None:
        """See that the tracer asks: any other thread would be told that there is no such process."""
        if threading.get_native_id() != self._tracer:
            raise RuntimeError(f"thread {self.tid} of process {self.pid} is another thread's tracee")

    def _until(self, resume: Callable[[int], None], there: Callable[[Stop], bool]) -> None:
        self.check()
        for _ in range(_STRAY):
            resume(self.tid)
            stop = ptrace.wait(self.tid)
            if there(stop):
                return
            self.keep(stop)
        raise OSError(f"thread {self.tid} of process {self.pid} does not stop where it should")


@contextmanager
def held(pid: int, tid: int) -> Iterator[Tracee]:
    """Seize a thread and have it stand; at the end, where it must stand again, let it go.

    Raises OSError where it cannot be traced.
    """
    tracee = Tracee(pid, tid)
    try:
        yield tracee
    finally:
        tracee.let_go()


def put_masks_back(path: str) -> int:
    """Give threads back the masks that a killed gpusnap left in a file; how many there were.

    A thread that has another mask by now is let alone. Raises OSError where one cannot be traced, and
    GpusnapError as signal_masks.read; what has not been given back stays in the file then.
    """
    done = 0
    for mask in signal_masks.read(path):
        with suppress(ProcessLookupError):
            if mask.there:
                with held(mask.pid, mask.tid) as tracee:
                    if tracee.mask == _EVERY:
                        tracee.mask = mask.blocked
                        done += 1
        signal_masks.clear(path, [mask])
    return done


def _settle(pid: int, tid: int) -> None:
    """Wait until the thread stands again: the kernel only wakes it to stop by itself."""
    deadline = time.monotonic() + _SETTLING
    while state(pid, tid) not in "TtZX" and time.monotonic() < deadline:
        time.sleep(0.0002)


def state(pid: int, tid: int) -> str:
    """The thread's state (proc_pid_stat(5), field 3); X where it is gone, ? where nobody can tell."""
    try:
        with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:
        return "?"


def _pending(pid: int, tid: int) -> int:
    """The signals that are pending for the thread or its process, as `ptrace.signal_mask` has them."""
    try:
        with open(f"/proc/{pid}/task/{tid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    except OSError:
        return 0
    return int(lines.get(b"SigPnd", b"0"), 16) | int(lines.get(b"ShdPnd", b"0"), 16)
