"""System calls inside another process, made by one of its threads while gpusnap holds it.

The thread is stopped, gets other registers, and makes one system call. Then its own registers are restored,
including orig_rax, which says which call it was waiting in. So a thread that was interrupted in a restartable
call (futex, nanosleep, poll, read) continues in it, as after any signal without a handler: the kernel keeps
what it needs for that in the thread (restart_block), where gpusnap's calls do not touch it. A seccomp filter
is suspended for gpusnap's call if the kernel permits it (CAP_SYS_ADMIN). Otherwise it may refuse the call,
and a filter that kills ends the process.

Between the begin and the end of a call, the thread has registers that are not its own. A caller that may be
killed at that moment records `Remote.saved` before, so that `put_back` can restore it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from signal import SIGSYS

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import userfault
from gpusnap.runtime_shim.process.memory.maps import mappings
from gpusnap.runtime_shim.process.ptrace.arch import Machine, this_machine
from gpusnap.runtime_shim.process.ptrace.tracee import Tracee, hold

_AT_FDCWD = -100  # linux/fcntl.h
_WINDOW = 1 << 20
_MOST_SEARCHED = 1 << 30
_FIXED = 0x10  # asm-generic/mman-common.h, MAP_FIXED
_RSEQ_CS = 8  # linux/rseq.h: offset of rseq_cs in struct rseq
_CRITICAL = struct.Struct("=8xQQ8x")  # linux/rseq.h, struct rseq_cs: start_ip and post_commit_offset
_CONTROL = 24  # bytes of a control message with one descriptor (cmsg(3), CMSG_SPACE)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_uint]
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class Saved:
    """A thread before gpusnap used it."""

    tid: int
    registers: bytes
    mask: int


class Remote:
    """A thread that makes system calls for gpusnap. Each raises OSError with the errno of the call.

    ProcessLookupError (ESRCH) if the process has ended. Only for the thread that holds the tracee.
    """

    def __init__(self, tracee: Tracee, machine: Machine | None = None) -> None:
        """Raises GpusnapError for a program or an architecture that is not supported."""
        self.machine = machine or this_machine()
        self._tracee = tracee
        registers = tracee.registers()
        if len(registers) != self.machine.size:
            raise GpusnapError(
                f"process {tracee.pid} is not a program for {self.machine.name}, so gpusnap cannot make "
                "system calls in it",
                hint="checkpoint 32-bit programs without gpusnap",
            )
        self.saved = Saved(tracee.tid, registers, tracee.mask or 0)
        """The argument for `put_back`."""
        self._at = _instruction(tracee.pid, self.machine, self.machine.value(registers, self.machine.counter))

    def call(self, name: str, *arguments: int) -> int:
        """Make one of the machine's calls; return its result. Raises GpusnapError if another was made."""
        registers = self._tracee.registers()
        number = self.machine.calls[name]
        with self._tracee.without_seccomp():
            try:
                self._tracee.set_registers(self.machine.call(registers, self._at, number, arguments))
                self._tracee.to_call()
                self._check(name, number)
                self._tracee.to_call()
                result = self.machine.outcome(self._tracee.registers())
            finally:
                self._tracee.bring_back(registers)
            # A filter that sends SIGSYS undoes the call, whose result is then its own number.
            if self._tracee.to_signal(SIGSYS) and result == number:
                result = -errno.EPERM
        if result < 0:
            raise OSError(-result, f"{name} inside process {self._tracee.pid}: {os.strerror(-result)}")
        return result

    def _check(self, name: str, number: int) -> None:
        """Check that the thread enters the intended call; any other one is not made.

        Its filters may be suspended, and another thread may have put other code at the instruction. Raises
        GpusnapError.
        """
        found = self._tracee.registers()
        behind = self._at + len(self.machine.instruction)
        if (self.machine.value(found, self.machine.counter), self.machine.get_call(found)[0]) == (
            behind,
            number,
        ):
            return
        # The kernel skips a call if the tracer sets its number to -1 (ptrace(2), seccomp(2)).
        self._tracee.set_registers(self.machine.replace_values(found, {self.machine.number: -1}))
        raise GpusnapError(
            f"thread {self._tracee.tid} of process {self._tracee.pid} entered another system call than "
            f"{name}, and was prevented from making it",
            hint="its program modifies its own code: do not trust it",
            code="GPS-229",
        )

    def mmap(
        self, address: int, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0
    ) -> int:
        """mmap(2); returns the address."""
        return self.call("mmap", address, size, protection, flags, fd, offset)

    def munmap(self, address: int, size: int) -> None:
        """munmap(2)."""
        self.call("munmap", address, size)

    def madvise(self, address: int, size: int, advice: int) -> None:
        """madvise(2)."""
        self.call("madvise", address, size, advice)

    def dup3(self, old: int, new: int, flags: int) -> None:
        """dup3(2): `new` becomes a copy of `old`."""
        self.call("dup3", old, new, flags)

    def close(self, fd: int) -> None:
        """close(2)."""
        self.call("close", fd)

    def openat(self, path: str, flags: int) -> int:
        """openat(2), with the files that the process sees; returns the descriptor."""
        text = os.fsencode(path) + b"\0"
        with self._page(len(text)) as page:
            copies.write(self._tracee.pid, page, text, threads=1)
            return self.call("openat", _AT_FDCWD, page, flags, 0)

    def receive(self, descriptor: int) -> int:
        """Give the process a descriptor of gpusnap's; return its number there, which exec closes.

        By SCM_RIGHTS (unix(7)), over a pair of sockets that the process makes, one of which gpusnap takes.
        """
        pid = self._tracee.pid
        with self._page(mmap.PAGESIZE) as page:
            self.call("socketpair", socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0, page)
            pair = bytearray(8)
            copies.read(pid, page, pair, threads=1)
            theirs, other = struct.unpack("=ii", pair)
            try:
                _send(pid, self.machine.calls["pidfd_getfd"], other, descriptor)
                data, message, control = page + 64, page + 128, page + 256
                vector = struct.pack("=QQ", data, 1)
                header = struct.pack("=QQQQQQQ", 0, 0, data + 16, 1, control, _CONTROL, 0)
                copies.write(pid, data + 16, vector, threads=1)
                copies.write(pid, message, header, threads=1)
                self.call("recvmsg", theirs, message, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
                answer = bytearray(_CONTROL)
                copies.read(pid, control, answer, threads=1)
            finally:
                with suppress(ProcessLookupError):
                    self.close(other)
                    self.close(theirs)
        size, level, kind, number = struct.unpack_from("=Qiii", answer)
        if (size, level, kind) != (20, socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # A security module removed it on the way (unix(7), MSG_CTRUNC).
            raise OSError(
                errno.EACCES, f"process {pid} may not open gpusnap's file: {os.strerror(errno.EACCES)}"
            )
        return int(number)

    def userfaultfd(self) -> int:
        """Make a userfaultfd of the process (process/memory/userfault.py); only gpusnap keeps it open."""
        device = os.open(userfault.DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            theirs = self.receive(device)
        finally:
            os.close(device)
        try:
            number = self.call("ioctl", theirs, userfault.NEW, userfault.FLAGS)
        finally:
            with suppress(ProcessLookupError):
                self.close(theirs)
        try:
            return _take(self._tracee.pid, self.machine.calls["pidfd_getfd"], number)
        finally:
            with suppress(ProcessLookupError):
                self.close(number)

    def map_file(self, descriptor: int, address: int, size: int, offset: int, *, shared: bool) -> None:
        """Map a file of gpusnap's over a mapping of the process, for reading and writing.

        `address` and `offset` are multiples of a page. Unless it is `shared`, what the process writes does
        not reach the file.
        """
        number = self.receive(descriptor)
        try:
            flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | _FIXED
            self.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, number, offset)
        finally:
            with suppress(ProcessLookupError):
                self.close(number)

    @contextmanager
    def _page(self, size: int) -> Iterator[int]:
        """Allocate memory in the process, for arguments."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        page = self.mmap(0, size, mmap.PROT_READ | mmap.PROT_WRITE, flags)
        try:
            yield page
        finally:
            with suppress(ProcessLookupError):
                self.munmap(page, size)


@contextmanager
def enter_thread(pid: int, tid: int | None = None) -> Iterator[Remote]:
    """Hold one thread of a process, stopped or not, and let it make system calls for gpusnap.

    The caller's thread is the tracer. A process that was stopped is stopped at the end, and none of its
    threads has run an instruction of its own. Without `tid`, a thread inside a system call is chosen. Raises
    OSError if it cannot be traced, GpusnapError like `Remote`.
    """
    machine = this_machine()
    for candidate in _sort_idle_first(pid) if tid is None else [tid]:
        with hold(pid, candidate) as tracee:
            if tid is None and _in_critical_section(tracee, machine):
                continue
            yield Remote(tracee, machine)
            return
    raise OSError(errno.EBUSY, f"every thread of process {pid} is within a restartable sequence")


def put_back(pid: int, saved: Saved) -> None:
    """Restore the registers and signals of a thread of a stopped process, after its tracer was killed.

    Raises OSError, and GpusnapError if the saved registers are not of this architecture.
    """
    if len(saved.registers) != this_machine().size:
        raise GpusnapError(
            f"the saved registers of process {pid} are from another architecture than this host's",
            hint="kill the process, and restore its container from a checkpoint",
            code="GPS-026",
        )
    with hold(pid, saved.tid) as tracee:
        tracee.set_registers(saved.registers)
        tracee.mask = saved.mask


def _sort_idle_first(pid: int) -> list[int]:
    """Return the threads of a process, first those that wait in the kernel: they can be interrupted."""
    waiting: dict[int, bool] = {}
    for tid in map(int, os.listdir(f"/proc/{pid}/task")):
        try:
            with open(f"/proc/{pid}/task/{tid}/syscall", encoding="ascii") as file:
                waiting[tid] = file.read().split()[0].isdigit()
        except OSError:
            waiting[tid] = False
    return sorted(waiting, key=lambda tid: (not waiting[tid], tid != pid, tid))


def _in_critical_section(tracee: Tracee, machine: Machine) -> bool:
    """Whether a thread is within a restartable sequence (rseq(2)), which a call would cut in two.

    The kernel restarts an interrupted sequence depending on the program counter, and forgets it if the
    counter has changed (kernel/rseq.c, rseq_ip_fixup).
    """
    try:
        registered = tracee.critical_section()
    except ProcessLookupError:
        raise
    except OSError:  # a kernel that does not report it
        return False
    pointer = _peek(tracee.pid, registered + _RSEQ_CS, 8) if registered else b""
    section = _peek(tracee.pid, int.from_bytes(pointer, "little"), _CRITICAL.size)
    if len(section) < _CRITICAL.size:
        return False
    start, length = _CRITICAL.unpack(section)
    return bool(0 <= machine.value(tracee.registers(), machine.counter) - start < length)


def _instruction(pid: int, machine: Machine, counter: int) -> int:
    """Return the address of an instruction in the process that makes a system call.

    A thread that waits in one is directly behind it; otherwise the vdso has some, and every C library. At
    most _MOST_SEARCHED bytes are searched, because a process may have any amount of executable memory.
    """
    wanted = machine.instruction
    if _peek(pid, counter - len(wanted), len(wanted)) == wanted:
        return counter - len(wanted)
    found = [each for each in mappings(pid) if "x" in each.permissions and each.name != "[vsyscall]"]
    found.sort(key=lambda each: (each.name != "[vdso]", not each.inode))
    spans = [(each.start, each.end) for each in found]
    address = question_process.ask(pid, "its code", _search, pid, spans, wanted)
    if address >= 0:
        return address
    raise GpusnapError(
        f"process {pid} has no system call instruction in its memory",
        hint="check that it is an ordinary program for this architecture",
    )


def _search(pid: int, spans: Sequence[tuple[int, int]], wanted: bytes) -> int:
    """Return the first address of these bytes; -1 if they are not found."""
    left = _MOST_SEARCHED
    for begin, end in spans:
        for start in range(begin, min(end, begin + left), _WINDOW):
            at = copies.peek(pid, start, min(_WINDOW, end - start)).find(wanted)
            if at >= 0:
                return start + at
        left -= min(left, end - begin)
    return -1


def _take(pid: int, getfd: int, number: int) -> int:
    """Return a descriptor of this process for one of another process."""
    process = os.pidfd_open(pid)
    try:
        ours = _libc.syscall(getfd, process, number, 0)
        if ours < 0:
            raise OSError(
                ctypes.get_errno(), f"pidfd_getfd of process {pid}: {os.strerror(ctypes.get_errno())}"
            )
    finally:
        os.close(process)
    return int(ours)


def _send(pid: int, getfd: int, number: int, descriptor: int) -> None:
    """Send a descriptor of this process into a socket that the other process has by that number."""
    ours = _take(pid, getfd, number)
    try:
        end = socket.socket(fileno=ours)
    except OSError:  # its number came from the process's memory, and may be any
        os.close(ours)
        raise
    with end:
        # Do not wait if it is full. socket.send_fds ignores the flags (Python 3.11).
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", descriptor))
        end.sendmsg([b"\0"], [rights], socket.MSG_DONTWAIT)


def _peek(pid: int, address: int, size: int) -> bytes:
    """Read bytes of the process's memory; fewer if they cannot be read. Raises Unanswered."""
    return question_process.ask(pid, f"memory at {address:#x}", copies.peek, pid, address, size)
