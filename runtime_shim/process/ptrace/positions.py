"""Where the threads of a process are, and whether they may hold a lock of the C library there.

The driver's thread lives in the process and uses its C library. A thread that is stopped while it holds one
of that library's locks blocks it: fork(2) takes the locks of malloc and of stdio, malloc its arena's, dlopen
the loader's. What can be seen from outside, without running an instruction:

- the system call that a thread is in, and its program counter (proc_pid_syscall(5));
- the code that this counter is in: the loader is a file of its own, and the functions of malloc, stdio and
  fork are found by the names that libc exports (its dynamic symbols, read from the process's memory). The
  functions of malloc are adjacent, with functions without a name between them.

Such a list is never complete: a thread within write(2) may have come from fwrite, and a library that dlopen
initialises may do anything. So it is only used to let a thread run a little further.
"""

from __future__ import annotations

import bisect
import os
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import maps as regions
from gpusnap.runtime_shim.process.ptrace.arch import Machine, this_machine

_LIBC = compile_later(r"/libc(\.so\.6|-2\.\d+\.so)$")
_LOADER = compile_later(r"/ld(-linux[^/]*\.so\.\d+|-2\.\d+\.so|64\.so\.\d+)$")
# The names in malloc/malloc.c of glibc: the code of malloc is from the first to the last of these.
_MALLOC = frozenset(
    (
        *("malloc", "free", "calloc", "realloc", "memalign", "aligned_alloc", "posix_memalign"),
        *("valloc", "pvalloc", "malloc_trim", "malloc_usable_size", "malloc_stats", "malloc_info"),
        *("mallinfo", "mallinfo2", "mallopt"),
    )
)
_FORK = frozenset(("fork", "_Fork", "__fork", "vfork", "__vfork", "clone", "__clone", "pthread_create"))
_LOADING = frozenset(("dlopen", "dlclose", "dlsym", "dlvsym", "dladdr", "dlinfo", "dl_iterate_phdr"))
_STDIO = compile_later(
    r"_IO_|(__)?v?f?w?printf(_chk)?$|(__)?f(write|read)(_unlocked|_chk)?$|(__)?f?(get|put)[cs](_unlocked|_chk)?$"
    r"|putchar$|f(open|dopen|close|flush|seek|tell|reopen)(64|o|o64)?$|get(line|delim)$|setv?buf$"
)
_CREATING = ("clone", "clone3", "fork", "vfork")
_OF_MALLOC = ("brk", "mmap", "munmap", "mprotect", "mremap", "madvise")
_FUTEX_FLAGS = 128 | 256  # linux/futex.h, FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME; FUTEX_WAIT is 0
# More than any libc has: symbols, bytes of a name, program headers. The file belongs to the container, and
# may claim any number of names that are all as long as its table.
_SYMBOLS, _LONGEST, _HEADERS = 1 << 16, 256, 64
# elf(5)
_PT_DYNAMIC, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _STT_FUNC = 2, 5, 6, 10, 2
_PROGRAM_HEADER, _SYMBOL = struct.Struct("=IIQQQQQQ"), struct.Struct("=IBBHQQ")


@dataclass(frozen=True, slots=True)
class Position:
    """Where a thread is."""

    tid: int
    call: int
    """The number of the system call that it is in, -1 for none."""
    arguments: tuple[int, ...]
    counter: int
    """The program counter: behind the call's instruction, if it is in one."""


@dataclass(frozen=True, slots=True)
class Text:
    """The code of a process in which a thread may hold a lock; address ranges."""

    libc: tuple[tuple[int, int], ...] = ()
    """All of libc's code."""
    locking: tuple[tuple[int, int], ...] = ()
    """The loader's code, and the parts of libc's that take locks."""


def positions(pid: int) -> Iterator[Position]:
    """Yield the positions of the threads of a process that are not running."""
    try:
        tids = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return
    for tid in tids:
        if (found := position(pid, tid)) is not None:
            yield found


def position(pid: int, tid: int) -> Position | None:
    """Return where a thread is; None if it runs, has ended, or access is denied."""
    try:
        with open(f"/proc/{pid}/task/{tid}/syscall", encoding="ascii") as file:
            words = file.read().split()
        numbers = [int(word, 0) for word in words]
    except (OSError, ValueError):  # "running"
        return None
    if len(numbers) < 3:
        return None
    return Position(tid, numbers[0], tuple(numbers[1:-2]), numbers[-1])


def list_unsafe(pid: int) -> list[int]:
    """Return the TIDs of threads of a stopped process that may hold a lock of the C library."""
    try:
        machine = this_machine()
    except GpusnapError:
        return []
    text = read_text(pid)
    return [each.tid for each in positions(pid) if is_unsafe(each, text, machine)]


def is_unsafe(each: Position, text: Text, machine: Machine) -> bool:
    """Whether a thread at that position may hold a lock of the C library."""
    name = _name(machine, each.call)
    if name in _CREATING:
        return True
    return _is_within(each.counter, text.locking) or (
        name in _OF_MALLOC and _is_within(each.counter, text.libc)
    )


def list_waiting(pid: int) -> list[int]:
    """Return the TIDs of threads that wait for a lock or a mutex: each may hold another one.

    glibc's locks are words of 0, 1 and 2, and threads wait while it is 2 (sysdeps/nptl/lowlevellock.h).
    """
    try:
        number = this_machine().calls["futex"]
    except GpusnapError:
        return []
    return [
        each.tid
        for each in positions(pid)
        if each.call == number and each.arguments[1] & ~_FUTEX_FLAGS == 0 and each.arguments[2] == 2
    ]


def is_within_libc(each: Position, text: Text) -> bool:
    """Whether a thread is in the C library or the loader, including in a system call."""
    return _is_within(each.counter, text.libc) or _is_within(each.counter, text.locking)


def _name(machine: Machine, number: int) -> str:
    return next((name for name, known in machine.calls.items() if known == number), "") if number >= 0 else ""


def _is_within(address: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(start <= address < end for start, end in ranges)


def read_text(pid: int) -> Text:
    """Find the code of a process that takes locks; empty for a program without glibc."""
    libc: list[tuple[int, int]] = []
    locking: list[tuple[int, int]] = []
    try:
        mapped = regions.mappings(pid)
    except OSError:
        return Text()
    lowest: dict[tuple[str, int], int] = {}
    for each in mapped:
        key = (each.device, each.inode)
        lowest[key] = min(lowest.get(key, each.start), each.start)
    for each in mapped:
        if "x" not in each.permissions:
            continue
        if _LOADER.search(each.name):
            locking.append((each.start, each.end))
        elif _LIBC.search(each.name):
            libc.append((each.start, each.end))
            base = lowest[each.device, each.inode]
            found = _find_locking_code(pid, each.device, each.inode, base)
            locking += [(base + start, base + end) for start, end in found]
    return Text(tuple(libc), tuple(locking))


@lru_cache(maxsize=64)
def _find_locking_code(pid: int, device: str, inode: int, base: int) -> tuple[tuple[int, int], ...]:
    """Return the parts of the libc at `base` that take locks, as offsets from there."""
    try:
        return question_process.ask(pid, "its C library", _read_locking_code, pid, base)
    except (OSError, struct.error, ValueError, LookupError, ArithmeticError):  # not a library made by glibc
        return ()


def _read_locking_code(pid: int, base: int) -> tuple[tuple[int, int], ...]:
    """The same, run in the process that reads: of about a thousand functions, few are needed."""
    symbols = _functions(pid, base)
    found = [
        (start, start + size)
        for name, (start, size) in symbols.items()
        if name in _FORK or name in _LOADING or _STDIO.match(name)
    ]
    return (*found, *_malloc(symbols))


def _malloc(symbols: Mapping[str, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the code of malloc: from the end of the function before it to the end of its last function."""
    own = [symbols[name] for name in _MALLOC if name in symbols]
    if not own:
        return
    first = min(start for start, _ in own)
    ends = sorted(start + size for start, size in symbols.values())
    at = bisect.bisect_right(ends, first)
    yield (ends[at - 1] if at else first, max(start + size for start, size in own))


def _functions(pid: int, base: int) -> dict[str, tuple[int, int]]:
    """Return the functions that a library exports: offset from its base and size in bytes, by name (elf(5)).

    Raises struct.error, ValueError, LookupError, ArithmeticError if it is not a library made by glibc.
    """
    header = copies.peek(pid, base, 64)
    if header[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (offset,) = struct.unpack_from("=Q", header, 32)
    size, count = struct.unpack_from("=HH", header, 54)
    dynamic: dict[int, int] = {}
    if count > _HEADERS:
        raise ValueError(f"an ELF file with {count} program headers")
    for at in range(count):
        fields = _PROGRAM_HEADER.unpack(copies.peek(pid, base + offset + at * size, _PROGRAM_HEADER.size))
        if fields[0] == _PT_DYNAMIC:
            table = copies.peek(pid, base + fields[3], min(fields[6], 1 << 16))
            dynamic = dict(struct.iter_unpack("=QQ", table[: len(table) // 16 * 16]))
    # The loader has put addresses there. In glibc's link order, the names come directly after the symbols.
    symbols, names = dynamic[_DT_SYMTAB], dynamic[_DT_STRTAB]
    if symbols < base:
        symbols, names = symbols + base, names + base
    length = min(names - symbols, _SYMBOLS * _SYMBOL.size)
    table = copies.peek(pid, symbols, length // _SYMBOL.size * _SYMBOL.size)
    text = copies.peek(pid, names, min(dynamic[_DT_STRSZ], 16 << 20))
    found = {}
    for at, info, _, section, value, extent in _SYMBOL.iter_unpack(table):
        if info & 15 == _STT_FUNC and section and extent:
            end = text.find(b"\0", at, at + _LONGEST)
            if end >= 0:
                found[text[at:end].decode("ascii", "replace")] = (value, extent)
    return found
