"""A thread of another process that gpusnap holds by ptrace(2): how it is seized, watched and released.

Nothing else seizes a thread, and nothing else releases one.

While a thread is held, it gets no signal, because nobody would handle it. All signals are blocked except
those that the kernel raises for the thread's own instructions, and its own mask is restored at the end.
SIGSTOP cannot be blocked, so a pending one makes the thread stop; if the process is stopped in any case, it
is dropped. A released thread stops again if its process is stopped (kernel/ptrace.c, __ptrace_unlink). If its
tracer is killed, the mask is in a file (signal_masks.py).

A thread that continues its own work, such as a child of vfork(2), changes its mask and waits for its signals:
it is held with `own_signals`, and gets each signal as it comes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from gpusnap.runtime_shim.base.stop_signals import put_off_signals
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace import signal_masks
from gpusnap.runtime_shim.process.ptrace.calls import Stop

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that the kernel raises for an instruction that cannot be executed."""
# The kernel itself raises these in a thread: SIGTRAP for its tracer, SIGSYS for a seccomp filter, and faults.
# If one is blocked, the kernel removes the process's handler (kernel/signal.c, force_sig_info_to_task).
_UNBLOCKED = (signal.SIGTRAP, signal.SIGSYS, *FAULTS)
_NEVER_BLOCKED = (signal.SIGKILL, signal.SIGSTOP)
_EVERY = (1 << 64) - 1 & ~sum(1 << number - 1 for number in (*_UNBLOCKED, *_NEVER_BLOCKED))
# Seconds for a thread to stop again. This is reached only if somebody else sent a SIGCONT, and then there is
# nothing to wait for.
_SETTLING = 1.0
# Other stops than the expected one: the process is stopped, continued, signalled. There are never so many.
_STRAY = 64
# How often to try to restore a mask, and to stop tracing. If none of the tries succeeds, the mask is in a
# file, and the kernel stops the tracing when the tracer ends.
_TRIES = 3


class Tracee:
    """A stopped thread, seized by the thread that creates this object; no other thread may use it.

    With `own_signals` its mask stays, and it gets its signals. Every method raises OSError,
    ProcessLookupError if the thread has ended.
    """

    def __init__(self, pid: int, tid: int, *, own_signals: bool = False) -> None:
        self.pid, self.tid = pid, tid
        self.stood = False
        """Whether its process was stopped, for example by SIGSTOP."""
        self.mask: int | None = None
        """Its own signal mask; None with `own_signals`."""
        self._own_signals = own_signals
        self._tracer = threading.get_native_id()
        self._options = 0
        self._due = 0  # the signal that it stopped for and is to get, with its own signals
        self._late: list[int] = []
        self._note: signal_masks.Note | None = None
        self._failure: OSError | None = None
        ptrace.seize(tid)
        try:
            # A thread that is stopped with its process stops for the tracer at once, and an interrupt in
            # addition would stop it a second time.
            stop = ptrace.poll_stop(tid)
            if stop is None:
                ptrace.interrupt(tid)
                stop = ptrace.wait(tid)
            self.stood = stop.with_process
            self.keep(stop)
            self.set_options(ptrace.TRACESYSGOOD)
            if not own_signals:
                self._block_signals()
        except BaseException:  # it was killed, or a signal interrupted the wait
            with suppress(OSError):
                self.let_go()
            raise

    def _block_signals(self) -> None:
        self.mask = ptrace.signal_mask(self.tid)
        if self.mask != _EVERY:
            self._note = signal_masks.note_mask(self.pid, self.tid, self.mask)
        ptrace.set_signal_mask(self.tid, _EVERY)

    def set_options(self, more: int) -> None:
        """Set more options of ptrace(2), until it is released."""
        self.check()
        ptrace.set_options(self.tid, self._options | more)
        self._options |= more

    @contextmanager
    def without_seccomp(self) -> Iterator[None]:
        """Suspend its seccomp filters while the block runs, if the kernel permits it (CAP_SYS_ADMIN)."""
        self.check()
        try:
            ptrace.set_options(self.tid, self._options | ptrace.SUSPEND_SECCOMP)
        except ProcessLookupError:
            raise
        except OSError:  # they stay in force
            pass
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                ptrace.set_options(self.tid, self._options)

    def registers(self) -> bytes:
        """Return its general registers."""
        self.check()
        return ptrace.registers(self.tid)

    def set_registers(self, values: bytes) -> None:
        """Set its general registers."""
        self.check()
        ptrace.set_registers(self.tid, values)

    def critical_section(self) -> int:
        """See `calls.critical_section`."""
        self.check()
        return ptrace.critical_section(self.tid)

    def go(self, deliver: int = 0, *, to_call: bool = False) -> None:
        """Continue it; with `to_call`, to the next entry or exit of a system call.

        A signal that it stopped for is delivered if it is given as `deliver`.
        """
        self.check()
        (ptrace.go_to_call if to_call else ptrace.go)(self.tid, deliver)
        self._due = 0

    def to_exec(self, deadline: float) -> None:
        """Let it run, with its own signals, until it has begun another program, before that runs.

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
        """Bring it from anywhere to the point where signals are handled, on the way back from a system call.

        It runs no instruction of the program. Only there the kernel restarts an interrupted call.
        """

        def go(tid: int) -> None:
            stands = state(self.pid, tid) == "t"
            ptrace.interrupt(tid)  # each time: another stop cancels it (kernel/signal.c, ptrace_stop)
            if stands:
                ptrace.go(tid)

        self._wait_until(go, lambda stop: stop.is_by_tracer)

    def bring_back(self, registers: bytes) -> None:
        """Bring it to rest with its own registers, unless it has ended.

        Also after a signal (KeyboardInterrupt) has interrupted a wait, because the program depends on it.
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
        """Make it stop for a signal that is pending for it and drop that; return whether there was one."""
        if not _read_pending(self.pid, self.tid) >> number - 1 & 1:
            return False
        self._wait_until(ptrace.go, lambda stop: stop.signal == number and not stop.is_by_tracer)
        return True

    def answer(self, stop: Stop, *, to_call: bool = False) -> None:
        """Continue it after a stop, as `go`.

        A SIGSTOP is delivered, because it stops the process, and so is a fault, which belongs to the thread.
        Any other signal is kept.
        """
        deliver = stop.delivers if stop.delivers in (signal.SIGSTOP, *FAULTS) else 0
        if not deliver:
            self.keep(stop)
        self.go(deliver, to_call=to_call)

    def keep(self, stop: Stop) -> None:
        """Remember the signal of a stop, if any: it is sent again when the thread is released."""
        self._due = stop.delivers if self._own_signals else 0
        # A fault occurs again when the thread repeats the instruction.
        if self._own_signals or stop.delivers in (0, signal.SIGTRAP, *FAULTS):
            return
        if not (stop.signal == signal.SIGSTOP and self.stood):
            self._late.append(stop.signal)

    def let_go(self) -> None:
        """Restore its mask, stop tracing it, and wait until it is stopped if its process is.

        An ended one is reaped: until then the whole process is a zombie. If the mask cannot be restored, it
        is released too; its mask stays in the file, and this raises the error.
        """
        self.check()
        with suppress(ProcessLookupError, ChildProcessError):  # it has ended
            runs = state(self.pid, self.tid) in "RSD"
            if (stop := ptrace.poll_stop(self.tid)) is not None:  # its stop would be lost otherwise
                self.keep(stop)
            if (runs and stop is None) or not self._try_detach():
                with suppress(ProcessLookupError):
                    ptrace.interrupt(self.tid)
                self.keep(ptrace.wait(self.tid))
                self._try_detach()
        if self._failure is None:  # also for one that has ended
            self.forget()
        if self.stood:
            _settle(self.pid, self.tid)
        if self._failure is not None:
            raise self._failure

    def forget(self) -> None:
        """Drop the recorded mask: the thread has it again, or has ended."""
        if self._note is not None:
            self._note.drop()
            self._note = None

    def _try_detach(self) -> bool:
        """Return whether it could be released: one that runs, or was killed, cannot."""
        try:
            if self.mask is not None:
                self._failure = _try(partial(ptrace.set_signal_mask, self.tid, self.mask))
            if self._failure is None:
                self.forget()
            failure = _try(partial(ptrace.let_go, self.tid, self._due))
            if failure is not None:
                raise failure
            for number in self._late:
                ptrace.send(self.pid, self.tid, number)
        except ProcessLookupError:
            return False
        return True

    def check(self) -> None:
        """Check that the tracer calls: any other thread would get the error that there is no such process."""
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
    """Seize a thread and stop it; at the end release it, where it must stop again.

    `own_signals` as for Tracee. A signal for gpusnap waits while it is seized or released: otherwise it could
    be left without its mask. Raises OSError if it cannot be traced.
    """
    tracee: Tracee | None = None
    try:
        with put_off_signals():
            tracee = Tracee(pid, tid, own_signals=own_signals)
        yield tracee
    finally:
        if tracee is not None:
            with put_off_signals():
                tracee.let_go()


def put_masks_back(path: str) -> int:
    """Restore the masks that a killed gpusnap left in a file; return how many there were.

    A thread that has another mask now is not changed. Raises OSError if one cannot be traced, and
    GpusnapError as signal_masks.read; masks that were not restored stay in the file then.
    """
    done, failures = 0, []
    for mask in signal_masks.read(path):
        try:
            with suppress(ProcessLookupError):
                if mask.is_there:
                    with hold(mask.pid, mask.tid) as tracee:
                        lacks = tracee.mask == _EVERY
                        if lacks:
                            tracee.mask = mask.blocked
                    done += lacks
        except OSError as error:  # the others get theirs
            failures.append(error)
        else:
            signal_masks.clear(path, [mask])
    for failure in failures:
        raise failure
    return done


def _try(call: Callable[[], object]) -> OSError | None:
    """Return the error if no try succeeds. Raises ProcessLookupError: the thread runs, or has ended."""
    failure = None
    for _ in range(_TRIES):
        try:
            call()
        except ProcessLookupError:
            raise
        except OSError as error:
            failure = error
        else:
            return None
    return failure


def _settle(pid: int, tid: int) -> None:
    """Wait until the thread is stopped again: the kernel only wakes it, and it stops by itself."""
    deadline = time.monotonic() + _SETTLING
    while state(pid, tid) not in "TtZX" and time.monotonic() < deadline:
        time.sleep(0.0002)


def state(pid: int, tid: int) -> str:
    """Return the thread's state (proc_pid_stat(5), field 3); X if it is gone, ? if this is not known."""
    try:
        with open(f"/proc/{pid}/task/{tid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:
        return "?"


def _read_pending(pid: int, tid: int) -> int:
    """Return the signals pending for the thread or its process, in the format of `ptrace.signal_mask`."""
    try:
        with open(f"/proc/{pid}/task/{tid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    except OSError:
        return 0
    return int(lines.get(b"SigPnd", b"0"), 16) | int(lines.get(b"ShdPnd", b"0"), 16)
