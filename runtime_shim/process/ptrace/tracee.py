"""A thread of another process in our hands, by ptrace(2): how it is taken, watched, and let go as it was.

Nothing else seizes a thread, and nothing else lets one go.

While a thread is held it gets no signal, because nobody would take it on: all are blocked but those that the
kernel raises for what the thread itself does, and its own mask is put back at the end. SIGSTOP cannot be
blocked, so one that was still on its way makes the thread report itself; where the process stands anyway, it
is dropped. A thread that is let go stands again if its process does (kernel/ptrace.c, __ptrace_unlink). Where
its tracer is killed, the mask is in a file (signal_masks.py).

A thread that works on for itself, as a child of vfork(2) does, changes its mask and waits for its signals: it
is held with `own_signals`, and gets each as it comes.
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

    With `own_signals` its mask stays, and it gets its signals. Every method raises OSError,
    ProcessLookupError where the thread has ended.
    """

    def __init__(self, pid: int, tid: int, *, own_signals: bool = False) -> None:
        self.pid, self.tid = pid, tid
        self.stood = False
        """Whether its process was stopped, as by SIGSTOP."""
        self.mask: int | None = None
        """Its own signal mask, None with its own signals."""
        self._own_signals = own_signals
        self._tracer = threading.get_native_id()
        self._options = 0
        self._due = 0  # the signal that it stands for and is to get, with its own signals
        self._late: list[int] = []
        self._note: signal_masks.Note | None = None
        ptrace.seize(tid)
        try:
            # A thread that stands with its process reports itself at once, and an interrupt on top would stop
            # it a second time.
            stop = ptrace.poll_stop(tid)
            if stop is None:
                ptrace.interrupt(tid)
                stop = ptrace.wait(tid)
            self.stood = stop.with_process
            self.keep(stop)
            self.set_options(ptrace.TRACESYSGOOD)
            if not own_signals:
                self._block_signals()
        except BaseException:  # it was killed, or a signal to us cut the wait short
            with suppress(OSError):
                self.let_go()
            raise

    def _block_signals(self) -> None:
        self.mask = ptrace.signal_mask(self.tid)
        if self.mask != _EVERY:
            self._note = signal_masks.note_mask(self.pid, self.tid, self.mask)
        ptrace.set_signal_mask(self.tid, _EVERY)

    def set_options(self, more: int) -> None:
        """Set options of ptrace(2) besides those that are set, until it is let go."""
        self.check()
        ptrace.set_options(self.tid, self._options | more)
        self._options |= more

    @contextmanager
    def without_seccomp(self) -> Iterator[None]:
        """Suspend its seccomp filters while the block runs, where the kernel lets us (CAP_SYS_ADMIN)."""
        self.check()
        try:
            ptrace.set_options(self.tid, self._options | ptrace.SUSPEND_SECCOMP)
        except ProcessLookupError:
            raise
        except OSError:  # they hold
            pass
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                ptrace.set_options(self.tid, self._options)

    def registers(self) -> bytes:
        """Its general registers."""
        self.check()
        return ptrace.registers(self.tid)

    def set_registers(self, values: bytes) -> None:
        """Set them."""
        self.check()
        ptrace.set_registers(self.tid, values)

    def critical_section(self) -> int:
        """See `calls.critical_section`."""
        self.check()
        return ptrace.critical_section(self.tid)

    def go(self, deliver: int = 0, *, to_call: bool = False) -> None:
        """Let it run; with `to_call`, to the next entry or exit of a system call.

        A signal that it stands for is delivered if it is given as `deliver`.
        """
        self.check()
        (ptrace.go_to_call if to_call else ptrace.go)(self.tid, deliver)
        self._due = 0

    def to_exec(self, deadline: float) -> None:
        """Let it run, with its own signals, until it has begun another program; none of that is run.

        Raises TimeoutError at `deadline`, of time.monotonic.
        """
        self.set_options(ptrace.TRACEEXEC)
        while True:
            self.go(self._due)
            stop = ptrace.wait(self.tid, within=deadline - time.monotonic())
            self.keep(stop)
            if stop.is_at_exec:
                return

    def to_call(self) -> None:
        """Let it run to the next entry or exit of a system call, and wait for that."""
        self._wait_until(ptrace.go_to_call, lambda stop: stop.is_at_call)

    def to_rest(self) -> None:
        """Bring it, wherever it is, to where signals are handled, on the way back from a system call.

        No instruction of the program is run. Only there does the kernel restart an interrupted call.
        """

        def go(tid: int) -> None:
            stands = state(self.pid, tid) == "t"
            ptrace.interrupt(tid)  # each time: any other stop uses it up (kernel/signal.c, ptrace_stop)
            if stands:
                ptrace.go(tid)

        self._wait_until(go, lambda stop: stop.is_by_tracer)

    def bring_back(self, registers: bytes) -> None:
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
        if not _read_pending(self.pid, self.tid) >> number - 1 & 1:
            return False
        self._wait_until(ptrace.go, lambda stop: stop.signal == number and not stop.is_by_tracer)
        return True

    def answer(self, stop: Stop, *, to_call: bool = False) -> None:
        """Let it run on after a stop, as `go`.

        A SIGSTOP is delivered, since it is the process' and stops that, and so is a fault, which is the
        thread's own. Any other signal is kept.
        """
        deliver = stop.delivers if stop.delivers in (signal.SIGSTOP, *FAULTS) else 0
        if not deliver:
            self.keep(stop)
        self.go(deliver, to_call=to_call)

    def keep(self, stop: Stop) -> None:
        """Note the signal that a stop was for, if any: it is sent again when the thread is let go."""
        self._due = stop.delivers if self._own_signals else 0
        # A fault comes again, when the thread runs the instruction again.
        if self._own_signals or stop.delivers in (0, signal.SIGTRAP, *FAULTS):
            return
        if not (stop.signal == signal.SIGSTOP and self.stood):
            self._late.append(stop.signal)

    def let_go(self) -> None:
        """Put its mask back, be its tracer no longer, and wait until it stands if its process does.

        One that has ended is waited for: until then the whole process is a zombie.
        """
        self.check()
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended
            runs = state(self.pid, self.tid) in "RSD"
            if (stop := ptrace.poll_stop(self.tid)) is not None:  # what it stands for, else it would be lost
                self.keep(stop)
            if (runs and stop is None) or not self._try_detach():
                with suppress(ProcessLookupError):
                    ptrace.interrupt(self.tid)
                self.keep(ptrace.wait(self.tid))
                self._try_detach()
        self.forget()
        if self.stood:
            _settle(self.pid, self.tid)

    def forget(self) -> None:
        """It needs its mask no more: it has it, or has ended."""
        if self._note is not None:
            self._note.drop()
            self._note = None

    def _try_detach(self) -> bool:
        """Whether it could be let go: one that runs, or was killed, cannot."""
        try:
            if self.mask is not None:
                ptrace.set_signal_mask(self.tid, self.mask)
            ptrace.let_go(self.tid, self._due)
            for number in self._late:
                ptrace.send(self.pid, self.tid, number)
        except ProcessLookupError:
            return False
        return True

    def check(self) -> None:
        """See that the tracer asks: any other thread would be told that there is no such process."""
        if threading.get_native_id() != self._tracer:
            raise RuntimeError(f"thread {self.tid} of process {self.pid} is already traced by another thread")

    def _wait_until(self, resume: Callable[[int], None], there: Callable[[Stop], bool]) -> None:
        self.check()
        for _ in range(_STRAY):
            resume(self.tid)
            stop = ptrace.wait(self.tid)
            if there(stop):
                return
            self.keep(stop)
        raise OSError(f"thread {self.tid} of process {self.pid} did not stop where expected")


@contextmanager
def hold(pid: int, tid: int, *, own_signals: bool = False) -> Iterator[Tracee]:
    """Seize a thread and have it stand; at the end, where it must stand again, let it go.

    `own_signals` as for Tracee. Raises OSError where it cannot be traced.
    """
    tracee = Tracee(pid, tid, own_signals=own_signals)
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
            if mask.is_there:
                with hold(mask.pid, mask.tid) as tracee:
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


def _read_pending(pid: int, tid: int) -> int:
    """The signals that are pending for the thread or its process, as `ptrace.signal_mask` has them."""
    try:
        with open(f"/proc/{pid}/task/{tid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    except OSError:
        return 0
    return int(lines.get(b"SigPnd", b"0"), 16) | int(lines.get(b"ShdPnd", b"0"), 16)
