"""Makes handles of a process harmless in place: descriptors lead to /dev/null, mappings to nothing.

A child by fork inherits its parent's device files, open and mapped, and may never use them (the workers of
PyTorch's DataLoader). Nobody closes them for it, and CRIU does not dump devices that it does not know. The
numbers and addresses stay in use, as the program expects.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import Refused, reason
from gpusnap.runtime_shim.process.memory.maps import Mapping, mappings
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote, Saved, enter_thread

_NULL = os.makedev(1, 3)  # Documentation/admin-guide/devices.txt
_FIXED = 0x10  # asm-generic/mman-common.h, MAP_FIXED


@dataclass(frozen=True, slots=True)
class NeutraliseResult:
    """What was replaced in a process."""

    descriptors: tuple[tuple[int, str], ...]
    """Number, and the path of its old target."""
    mappings: tuple[Mapping, ...]
    """The old mappings."""


def neutralise(
    pid: int,
    fds: Iterable[int],
    ranges: Iterable[tuple[int, int]],
    *,
    lent: Callable[[Saved], AbstractContextManager[None]],
) -> NeutraliseResult:
    """Replace descriptors of a stopped process by /dev/null, and its mappings of files by nothing.

    `ranges` of (start, end), each a whole mapping. The close-on-exec flag of a descriptor stays as it was.
    `lent` gets a thread's own registers, for `remote_syscall.put_back`, and is held while the thread makes
    system calls for gpusnap. A kill at that moment leaves at most one descriptor of the null device, or one
    page of arguments, too many. Raises Refused, before anything is replaced, if the process has no null
    device or a mapping does not exist; OSError if a descriptor does not exist, the process cannot be traced
    or a call in it fails.
    """
    numbers = tuple(sorted(set(fds)))
    wanted = sorted(set(ranges))
    with enter_thread(pid) as remote, lent(remote.saved):
        gone = _find_whole_mappings(pid, wanted)
        closing = {number: _is_closed_by_exec(pid, number) for number in numbers}
        led = tuple((number, os.readlink(f"/proc/{pid}/fd/{number}")) for number in numbers)
        if numbers:
            _descriptors(remote, pid, closing)
        for mapping in gone:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
            remote.mmap(mapping.start, mapping.size, 0, flags)  # PROT_NONE
    return NeutraliseResult(led, gone)


def _descriptors(remote: Remote, pid: int, closing: dict[int, bool]) -> None:
    hint = "add the device 1:3 to its container as /dev/null"
    try:
        # Whatever the path leads to: O_NONBLOCK does not wait for the other end of a FIFO.
        null = remote.openat("/dev/null", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise Refused(f"process {pid} cannot open the null device: {reason(error)}", hint=hint) from error
    try:
        link = f"/proc/{pid}/fd/{null}"
        found = question_process.ask(pid, link, os.stat, link)
        if not stat.S_ISCHR(found.st_mode) or found.st_rdev != _NULL:
            raise Refused(f"the /dev/null of process {pid} is not the null device", hint=hint)
        for number, close in closing.items():
            remote.dup3(null, number, os.O_CLOEXEC if close else 0)
    finally:
        remote.close(null)


def _is_closed_by_exec(pid: int, number: int) -> bool:
    """Whether exec closes a descriptor (proc_pid_fdinfo(5), flags). Raises OSError if it is not open."""
    with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as file:
        flags = next(line.split()[1] for line in file if line.startswith("flags:"))
    return bool(int(flags, 8) & os.O_CLOEXEC)


def _find_whole_mappings(pid: int, wanted: Sequence[tuple[int, int]]) -> tuple[Mapping, ...]:
    """Return the mappings that consist of exactly these ranges."""
    by_range = {(each.start, each.end): each for each in mappings(pid)}
    missing = [each for each in wanted if each not in by_range]
    if missing:
        raise Refused(
            f"process {pid} has no mapping at {missing[0][0]:#x}-{missing[0][1]:#x}",
            hint="stop the process before reading its mappings",
        )
    return tuple(by_range[each] for each in wanted)
