"""The parts of ptrace that depend on the architecture: registers, and how a system call is made.

Only x86-64 so far. Another architecture is another `Machine`, but first check how its kernel restarts an
interrupted system call. On x86-64, a thread that stops at a signal has orig_rax and -ERESTART* in rax, and
both are restored (arch/x86/kernel/signal.c, arch_do_signal_or_restart); on arm64 the program counter is
already rewound.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from types import MappingProxyType

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError

_WORD = (1 << 64) - 1
_ERRORS = 4095  # include/linux/err.h, MAX_ERRNO: results from -4095 to -1 are errors


@dataclass(frozen=True, slots=True)
class Machine:
    """A 64-bit architecture. A set of registers is the bytes that PTRACE_GETREGSET returns."""

    name: str
    """Its name in uname(2)."""
    registers: tuple[str, ...]
    """The words of NT_PRSTATUS' register set, in order."""
    number: str
    """The register with the number of the system call in progress (and which says that there is one)."""
    entry: str
    """The register that takes the number."""
    arguments: tuple[str, ...]
    result: str
    counter: str
    """The program counter; after a system call it points behind the instruction."""
    instruction: bytes
    """The instruction that makes a system call."""
    calls: Mapping[str, int]
    """Numbers of the system calls that gpusnap makes, or looks for."""

    @property
    def size(self) -> int:
        """Bytes of a set of registers."""
        return 8 * len(self.registers)

    def value(self, registers: bytes, name: str) -> int:
        """Return one register, unsigned."""
        found: int = struct.unpack_from("=Q", registers, 8 * self.registers.index(name))[0]
        return found

    def replace_values(self, registers: bytes, values: Mapping[str, int]) -> bytes:
        """Return the registers with some of them set; a negative number becomes its two's complement."""
        words = bytearray(registers)
        for name, value in values.items():
            struct.pack_into("=Q", words, 8 * self.registers.index(name), value & _WORD)
        return bytes(words)

    def call(self, registers: bytes, at: int, number: int, arguments: tuple[int, ...]) -> bytes:
        """Return registers with which the thread makes a system call, by an instruction `at` an address.

        No call is in progress in them, so the kernel has nothing to restart before it.
        """
        values = {self.counter: at, self.number: -1, self.entry: number}
        values |= dict(zip(self.arguments, arguments + (0,) * len(self.arguments), strict=False))
        return self.replace_values(registers, values)

    def outcome(self, registers: bytes) -> int:
        """Return the result of a system call that has just ended, or minus its errno."""
        value = self.value(registers, self.result)
        return value - (1 << 64) if value >= (1 << 64) - _ERRORS else value

    def get_call(self, registers: bytes) -> tuple[int, tuple[int, ...]]:
        """Return number and arguments of the system call that the thread enters or leaves; -1 for none."""
        number = self.value(registers, self.number)
        return (
            number - (1 << 64) if number >> 63 else number,
            tuple(self.value(registers, name) for name in self.arguments),
        )


# struct user_regs_struct (arch/x86/include/asm/user_64.h); the calling convention of syscall(2); the
# numbers of arch/x86/entry/syscalls/syscall_64.tbl.
X86_64 = Machine(
    name="x86_64",
    registers=(
        *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8"),
        *("rax", "rcx", "rdx", "rsi", "rdi", "orig_rax", "rip", "cs", "eflags"),
        *("rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
    ),
    number="orig_rax",
    entry="rax",
    arguments=("rdi", "rsi", "rdx", "r10", "r8", "r9"),
    result="rax",
    counter="rip",
    instruction=b"\x0f\x05",
    calls=MappingProxyType(
        {
            "close": 3,
            "mmap": 9,
            "mprotect": 10,
            "munmap": 11,
            "brk": 12,
            "ioctl": 16,
            "mremap": 25,
            "madvise": 28,
            "recvmsg": 47,
            "socketpair": 53,
            "clone": 56,
            "fork": 57,
            "vfork": 58,
            "sched_yield": 24,
            "futex": 202,
            "tgkill": 234,
            "openat": 257,
            "dup3": 292,
            "kcmp": 312,
            "clone3": 435,
            "pidfd_getfd": 438,
        }
    ),
)

_MACHINES = {machine.name: machine for machine in (X86_64,)}


def this_machine() -> Machine:
    """Return the architecture of this host. Raises GpusnapError if it is not supported."""
    name = os.uname().machine
    if name not in _MACHINES:
        raise GpusnapError(
            f"gpusnap cannot make system calls inside another process on {name}",
            hint=f"it can on {', '.join(_MACHINES)}",
        )
    return _MACHINES[name]
