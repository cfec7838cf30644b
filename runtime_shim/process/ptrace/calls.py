"""The calls of ptrace(2), and the results of a wait for a traced thread.

A tracer is one thread: the one that seized. For any other thread, the kernel returns ESRCH. Every function
raises OSError with the errno, the name of the request and the thread; ESRCH (ProcessLookupError) can also
mean that the thread has ended or was killed. No function waits without a deadline.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.process.ptrace.arch import this_machine

# linux/ptrace.h
_CONT, _DETACH, _SYSCALL = 7, 17, 24
_SETOPTIONS, _GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 0x4200, 0x4204, 0x4205, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK, _GET_RSEQ_CONFIGURATION = 0x420A, 0x420B, 0x420F
_EVENT_EXEC, _EVENT_STOP = 4, 128
_NAMES = {
    _CONT: "CONT",
    _DETACH: "DETACH",
    _SYSCALL: "SYSCALL",
    _SETOPTIONS: "SETOPTIONS",
    _GETREGSET: "GETREGSET",
    _SETREGSET: "SETREGSET",
    _SEIZE: "SEIZE",
    _INTERRUPT: "INTERRUPT",
    _GETSIGMASK: "GETSIGMASK",
    _SETSIGMASK: "SETSIGMASK",
    _GET_RSEQ_CONFIGURATION: "GET_RSEQ_CONFIGURATION",
}
PATIENCE = 10.0
"""Seconds for a thread to stop; beyond that it waits in the kernel itself."""
# A thread reaches its next system call within microseconds; sleeping would take longer.
_SPINS, _FIRST, _LONGEST = 40, 0.00005, 0.002
TRACESYSGOOD = 1
"""Stops at system calls can be distinguished from SIGTRAP."""
TRACEEXEC = 1 << 4
"""A thread stops after it has begun another program, before that program's first instruction."""
EXITKILL = 1 << 20
"""The thread's process is killed (SIGKILL) when the tracer ends while it traces the thread."""
SUSPEND_SECCOMP = 1 << 21
"""The thread's seccomp filters are suspended while this is set; needs CAP_SYS_ADMIN."""
_NT_PRSTATUS = 1  # linux/elf.h
_WALL = 0x40000000  # linux/wait.h: also for threads
_SIGSET = 8  # bytes of the kernel's sigset_t
_LARGEST = 4096  # more than any architecture's register set

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.syscall.restype = ctypes.c_long


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _RseqConfiguration(ctypes.Structure):
    """struct ptrace_rseq_configuration of linux/ptrace.h (Linux 5.13)."""

    _fields_ = (
        ("pointer", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("signature", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a traced thread stopped."""

    signal: int
    event: int

    @property
    def is_at_call(self) -> bool:
        """Whether it is at the entry or the exit of a system call."""
        return self.signal == signal.SIGTRAP | 0x80

    @property
    def is_at_exec(self) -> bool:
        """Whether it has begun another program, see TRACEEXEC."""
        return self.event == _EVENT_EXEC

    @property
    def delivers(self) -> int:
        """The signal that it stopped for, which it gets unless its tracer drops it; 0 for another reason."""
        return 0 if self.event or self.is_at_call else self.signal

    @property
    def is_by_tracer(self) -> bool:
        """Whether the tracer requested it, or the process stopped: no signal waits to be delivered."""
        return self.event == _EVENT_STOP

    @property
    def with_process(self) -> bool:
        """Whether it stopped with its process, which a signal has stopped (ptrace(2), group-stop)."""
        return self.is_by_tracer and self.signal != signal.SIGTRAP


def seize(tid: int) -> None:
    """Become a thread's tracer, without stopping it."""
    _ptrace(_SEIZE, tid)


def interrupt(tid: int) -> None:
    """Make a thread stop soon."""
    _ptrace(_INTERRUPT, tid)


def go(tid: int, which: int = 0) -> None:
    """Continue a thread; a signal that it stopped for is delivered if it is given as `which`."""
    _ptrace(_CONT, tid, 0, which)


def go_to_call(tid: int, which: int = 0) -> None:
    """Like `go`, to the next entry or exit of a system call."""
    _ptrace(_SYSCALL, tid, 0, which)


def let_go(tid: int, which: int = 0) -> None:
    """Stop tracing it: it continues, or stops if its process is stopped. `which` as for `go`."""
    _ptrace(_DETACH, tid, 0, which)


def set_options(tid: int, options: int) -> None:
    """Set TRACESYSGOOD, TRACEEXEC, EXITKILL, SUSPEND_SECCOMP; those not given are cleared."""
    _ptrace(_SETOPTIONS, tid, 0, options)


def registers(tid: int) -> bytes:
    """Return the general registers of a stopped thread."""
    room = ctypes.create_string_buffer(_LARGEST)
    vector = _Iovec(ctypes.addressof(room), _LARGEST)
    _ptrace(_GETREGSET, tid, _NT_PRSTATUS, ctypes.addressof(vector))
    return room.raw[: vector.length]


def set_registers(tid: int, values: bytes) -> None:
    """Set all general registers."""
    room = ctypes.create_string_buffer(values, len(values))
    vector = _Iovec(ctypes.addressof(room), len(values))
    _ptrace(_SETREGSET, tid, _NT_PRSTATUS, ctypes.addressof(vector))


def signal_mask(tid: int) -> int:
    """Return the blocked signals of a stopped thread, the lowest bit being signal 1."""
    room = ctypes.create_string_buffer(_SIGSET)
    _ptrace(_GETSIGMASK, tid, _SIGSET, ctypes.addressof(room))
    return int.from_bytes(room.raw, "little")


def set_signal_mask(tid: int, mask: int) -> None:
    """Set the blocked signals; the kernel ignores SIGKILL and SIGSTOP."""
    room = ctypes.create_string_buffer(mask.to_bytes(_SIGSET, "little"), _SIGSET)
    _ptrace(_SETSIGMASK, tid, _SIGSET, ctypes.addressof(room))


def critical_section(tid: int) -> int:
    """Return the address at which a stopped thread keeps its restartable sequence (rseq(2)), 0 for none.

    Eight bytes after it is the address of a struct rseq_cs (linux/rseq.h). A kernel before 5.13 returns EIO.
    """
    found = _RseqConfiguration()
    _ptrace(_GET_RSEQ_CONFIGURATION, tid, ctypes.sizeof(found), ctypes.addressof(found))
    return int(found.pointer)


def wait(tid: int, *, within: float = PATIENCE) -> Stop:
    """Wait until a traced thread stops. Raises ProcessLookupError if it ends instead, and reaps it.

    TimeoutError after `within` seconds: the thread waits in the kernel, and is still traced.
    """
    for _ in range(_SPINS):
        if (stop := poll_stop(tid)) is not None:
            return stop
    deadline, pause = time.monotonic() + within, _FIRST
    while (stop := poll_stop(tid)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"thread {tid} did not stop within {within:g} s")
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST)
    return stop


def poll_stop(tid: int) -> Stop | None:
    """Return why a traced thread has stopped, None if it runs. Raises ProcessLookupError as `wait`."""
    ended, status = os.waitpid(tid, _WALL | os.WNOHANG)
    if not ended:
        return None
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(errno.ESRCH, f"thread {tid} ended while it was traced")
    return Stop(os.WSTOPSIG(status), status >> 16)


def send(pid: int, tid: int, which: int) -> None:
    """Send a signal to one thread."""
    if hasattr(_libc, "tgkill"):
        result = _libc.tgkill(pid, tid, which)
    else:  # glibc before 2.30
        result = _libc.syscall(*map(ctypes.c_long, (this_machine().calls["tgkill"], pid, tid, which)))
    if result < 0:
        _fail(f"tgkill({pid}, {tid}, {which})")


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, tid, address, data) < 0:
        _fail(f"ptrace(PTRACE_{_NAMES[request]}, {tid})")


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")
