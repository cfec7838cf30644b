"""Populates large mappings for the thread that makes them, in huge pages and with many threads.

A GPU's driver copies device memory into one large mapping that it makes with MAP_POPULATE: the kernel then
fills it with pages of 4 KiB in a single thread, which takes most of the driver's time. So gpusnap traces the
thread. It removes MAP_POPULATE from a large mmap(2) at its entry; at its exit, the thread asks for huge pages
(madvise(2)); and while it is stopped there, all threads of gpusnap touch the pages from outside. On an H100's
host of 16 cores, 12.6 GiB take 0.3 s instead of 4 to 5 s. The host's settings are not changed.

If the caller has a file for the mapping, the file replaces it before the thread continues: gpusnap populates
its pages, and the driver copies into them, so nothing must be copied out of the process.

The thread stops about 80 times during a checkpoint. No error here ends the driver's work: the thread then
continues without stops.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory.tmpfs import Area
from gpusnap.runtime_shim.process.ptrace.arch import this_machine
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote, Saved
from gpusnap.runtime_shim.process.ptrace.tracee import Tracee
from gpusnap.runtime_shim.process.ptrace.tracer import Tracer

LARGE = 32 << 20
"""Bytes; for smaller mappings the driver's own method is as good."""

_WANTED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
_HUGEPAGE = 14  # asm-generic/mman-common.h, MADV_HUGEPAGE
# Below this share of a mapping, the kernel had no huge pages for it.
_ENOUGH = 0.9


class PopulateResult:
    """The result for a thread; complete once the block has ended."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        """The tracer that lets the thread run, while the block does."""
        self.mappings = 0
        """The number of populated mappings."""
        self.size = 0
        """Their bytes."""
        self.seconds = 0.0
        """The time that it took."""
        self.areas: list[Area] = []
        """The files that replace mappings, each at its address."""
        self.why_not = ""
        """Why nothing, or not everything, was done; empty if all succeeded."""


@dataclass(frozen=True, slots=True)
class Backing:
    """Files that replace mappings."""

    area: Callable[[int, int], Area]
    """Makes a file for an address and a size in bytes; raises OSError if there is to be none."""
    lent: Callable[[Saved], AbstractContextManager[None]]
    """Held while the thread makes system calls for gpusnap."""


@contextmanager
def populate_mappings(
    pid: int, tid: int, *, threads: int = 0, backing: Backing | None = None
) -> Iterator[PopulateResult]:
    """Let one thread of a stopped process run while the block does, and populate its large mappings.

    `threads`: 0 for one per core. Raises OSError if the thread cannot be traced, or does not stop at the end.
    """
    done = PopulateResult()
    with Tracer(pid, [tid], watch=_Watch(done, threads, backing)) as tracer:
        done.tracer = tracer
        yield done
    if not done.mappings and not done.why_not:
        ended = tid not in tracer.traced
        done.why_not = "the process ended" if ended else "the driver made no large mapping that it populates"


class _Watch:
    """`tracer.CallWatch`: watches the thread's system calls, which stop at an entry and an exit in turn."""

    def __init__(self, done: PopulateResult, threads: int, backing: Backing | None) -> None:
        self.done, self.threads, self.backing = done, threads, backing
        self._inside = False
        self._flags: int | None = None  # of the large mmap that it is in

    def begin(self, tracee: Tracee) -> None:
        """Remember the thread. Raises GpusnapError."""
        self.tracee, self.machine = tracee, this_machine()

    def note_failure(self, error: Exception) -> None:
        """Record why it stops watching."""
        self.done.why_not = (
            str(error) if isinstance(error, OSError | GpusnapError) else (f"{type(error).__name__}: {error}")
        )

    def see_call(self) -> None:
        """Handle a stop at an entry or an exit."""
        self._inside = not self._inside
        registers = self.tracee.registers()
        number, arguments = self.machine.get_call(registers)
        if number != self.machine.calls["mmap"]:
            return
        _, size, _, flags, *_ = arguments
        if self._inside:
            if size >= LARGE and flags & _WANTED == _WANTED:
                self.tracee.set_registers(self._with_flags(registers, flags & ~mmap.MAP_POPULATE))
                self._flags = flags
        elif self._flags is not None:
            self.tracee.set_registers(self._with_flags(registers, self._flags))
            self._flags = None
            if (address := self.machine.outcome(registers)) > 0:
                self._populate(address, size)

    def _with_flags(self, registers: bytes, flags: int) -> bytes:
        return self.machine.replace_values(registers, {self.machine.arguments[3]: flags})

    def _populate(self, address: int, size: int) -> None:
        begin = time.monotonic()
        remote = Remote(self.tracee, self.machine)
        if self.backing is None or not self._back_with_file(remote, self.backing, address, size):
            self._touch(remote, address, size)
        self.done.mappings += 1
        self.done.size += size
        self.done.seconds += time.monotonic() - begin

    def _back_with_file(self, remote: Remote, backing: Backing, address: int, size: int) -> bool:
        """Replace the mapping by a file; return whether that succeeded."""
        try:
            area = backing.area(address, size)
        except OSError as error:
            self.done.why_not = f"no file for it: {error.strerror or error}"
            return False
        try:
            area.populate(threads=self.threads)
            with backing.lent(remote.saved):
                remote.map_file(area.descriptor, address, size, area.lead, shared=True)
        except ProcessLookupError:
            raise
        except (OSError, GpusnapError) as error:
            area.discard()
            self.done.why_not = f"no file in its place: {error}"
            return False
        self.done.areas.append(area)
        return True

    def _touch(self, remote: Remote, address: int, size: int) -> None:
        pid = self.tracee.pid
        before, huge = _measure_resident(pid), True
        try:
            remote.madvise(address, size, _HUGEPAGE)
        except ProcessLookupError:
            raise
        except OSError:  # a kernel without huge pages, a filter that forbids the call
            huge = False
        if huge:
            copies.touch(pid, address, size, threads=self.threads)
        if _measure_resident(pid) - before < _ENOUGH * size:
            copies.touch(pid, address, size, threads=self.threads, step=mmap.PAGESIZE)


def _measure_resident(pid: int) -> int:
    """Return the resident memory of the process in bytes (proc_pid_statm(5))."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
