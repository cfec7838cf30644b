"""System calls inside another process, made by one of its threads while we hold it.

The thread stands, is given other registers and led through one system call; then its own registers are put
back, the one that says which call it was waiting in (orig_rax) included. So a thread that was interrupted in
a restartable call (futex, nanosleep, poll, read) goes on in it, as after any signal without a handler: the
kernel keeps what it needs for that in the thread (restart_block), where our calls do not touch it. A seccomp
filter is suspended for our call where the kernel lets us (CAP_SYS_ADMIN); else it may refuse it, and a filter
that kills ends the process.

Between a call's begin and its end the thread has registers that are not its own. Who fears to be killed just
then writes down `Remote.saved` before, and has it put back by `put_back`.
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
from gpusnap.runtime_shim import question_process
from gpusnap.runtime_shim.errors import GpusnapError
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
    """A thread as it was before we used it."""

    tid: int
    registers: bytes
    mask: int


class Remote:
    """A thread that makes system calls for us. Each raises OSError with the errno that it met there.

    ProcessLookupError (ESRCH) where the process has ended. Only for the thread that holds the tracee.
    """

    def __init__(self, tracee: Tracee, machine: Machine | None = None) -> None:
        """Raises GpusnapError for a program or an architecture that is none of ours."""
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
        """What `put_back` takes."""
        self._at = _instruction(tracee.pid, self.machine, self.machine.value(registers, self.machine.counter))

    def call(self, name: str, *arguments: int) -> int:
        """Make one of the machine's calls; its result. Raises GpusnapError where it came upon another one."""
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
        """See that the thread enters the call that it was led to; any other one is not made.

        Its filters may be suspended, and another thread may have put other code where our instruction was.
        Raises GpusnapError.
        """
        found = self._tracee.registers()
        behind = self._at + len(self.machine.instruction)
        if (self.machine.value(found, self.machine.counter), self.machine.get_call(found)[0]) == (
            behind,
            number,
        ):
            return
        # The kernel skips a call whose number the tracer makes -1 (ptrace(2), seccomp(2)).
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
        """mmap(2); the address."""
        return self.call("mmap", address, size, protection, flags, fd, offset)

    def munmap(self, address: int, size: int) -> None:
        """munmap(2)."""
        self.call("munmap", address, size)

    def madvise(self, address: int, size: int, advice: int) -> None:
        """madvise(2)."""
        self.call("madvise", address, size, advice)

    def dup3(self, old: int, new: int, flags: int) -> None:
        """dup3(2): `new` becomes what `old` is."""
        self.call("dup3", old, new, flags)

    def close(self, fd: int) -> None:
        """close(2)."""
        self.call("close", fd)

    def openat(self, path: str, flags: int) -> int:
        """openat(2), as the process itself sees files; the descriptor."""
        text = os.fsencode(path) + b"\0"
        with self._page(len(text)) as page:
            copies.write(self._tracee.pid, page, text, threads=1)
            return self.call("openat", _AT_FDCWD, page, flags, 0)

    def receive(self, descriptor: int) -> int:
        """Give the process a descriptor of ours; its number there, closed by exec.

        By SCM_RIGHTS (unix(7)), over a pair of sockets that the process makes and we take one of.
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
            # A security module took it out on the way (unix(7), MSG_CTRUNC).
            raise OSError(
                errno.EACCES, f"process {pid} may not open gpusnap's file: {os.strerror(errno.EACCES)}"
            )
        return int(number)

    def userfaultfd(self) -> int:
        """A userfaultfd of the process, see process/memory/userfault.py; the descriptor is ours alone."""
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
        """Map a file of ours in the place of what the process has there, for reading and writing.

        `address` and `offset` are multiples of a page. Where it is not `shared`, what the process writes does
        not get into the file.
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
        """Some memory in the process, for arguments."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        page = self.mmap(0, size, mmap.PROT_READ | mmap.PROT_WRITE, flags)
        try:
            yield page
        finally:
            with suppress(ProcessLookupError):
                self.munmap(page, size)


@contextmanager
def enter_thread(pid: int, tid: int | None = None) -> Iterator[Remote]:
    """Hold one thread of a process, stopped or not, and have it make system calls for us.

    The caller's thread is the tracer. A process that was stopped is so at the end, and none of its threads
    has run an instruction of its own. Without `tid` a thread is taken that sits in a system call. Raises
    OSError where it cannot be traced, GpusnapError as `Remote`.
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
    """Give a thread of a stopped process its registers and its signals back, after its tracer was killed.

    Raises OSError, and GpusnapError where what was saved is not of this architecture.
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
    """The threads of a process, those first that wait in the kernel: they are in the middle of nothing."""
    waiting: dict[int, bool] = {}
    for tid in map(int, os.listdir(f"/proc/{pid}/task")):
        try:
            with open(f"/proc/{pid}/task/{tid}/syscall", encoding="ascii") as file:
                waiting[tid] = file.read().split()[0].isdigit()
        except OSError:
            waiting[tid] = False
    return sorted(waiting, key=lambda tid: (not waiting[tid], tid != pid, tid))


def _in_critical_section(tracee: Tracee, machine: Machine) -> bool:
    """Whether a thread stands within a restartable sequence (rseq(2)), which our call would cut in two.

    The kernel restarts one that was interrupted by where its program counter is, and forgets it where it
    finds another one (kernel/rseq.c, rseq_ip_fixup).
    """
    try:
        registered = tracee.critical_section()
    except ProcessLookupError:
        raise
    except OSError:  # a kernel that does not tell
        return False
    pointer = _peek(tracee.pid, registered + _RSEQ_CS, 8) if registered else b""
    section = _peek(tracee.pid, int.from_bytes(pointer, "little"), _CRITICAL.size)
    if len(section) < _CRITICAL.size:
        return False
    start, length = _CRITICAL.unpack(section)
    return bool(0 <= machine.value(tracee.registers(), machine.counter) - start < length)


def _instruction(pid: int, machine: Machine, counter: int) -> int:
    """The address of an instruction in the process that makes a system call.

    A thread that waits in one stands right behind it; else the vdso has some, and every C library. No more
    than _MOST_SEARCHED is searched: a process may have as much memory with execute permission as it likes.
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
    """The first address of these bytes; -1 where they are not there."""
    left = _MOST_SEARCHED
    for begin, end in spans:
        for start in range(begin, min(end, begin + left), _WINDOW):
            at = copies.peek(pid, start, min(_WINDOW, end - start)).find(wanted)
            if at >= 0:
                return start + at
        left -= min(left, end - begin)
    return -1


def _take(pid: int, getfd: int, number: int) -> int:
    """A descriptor of ours for what a process has by that number."""
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
    """Send a descriptor of ours into a socket that the process has by that number."""
    ours = _take(pid, getfd, number)
    try:
        end = socket.socket(fileno=ours)
    except OSError:  # which of its descriptors this is stands in its memory, and may be any
        os.close(ours)
        raise
    with end:
        # Not waited for, should it be full. socket.send_fds forgets the flags (Python 3.11).
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", descriptor))
        end.sendmsg([b"\0"], [rights], socket.MSG_DONTWAIT)


def _peek(pid: int, address: int, size: int) -> bytes:
    """Bytes of the process' memory; fewer where they cannot be read. Raises Unanswered."""
    return question_process.ask(pid, f"memory at {address:#x}", copies.peek, pid, address, size)
