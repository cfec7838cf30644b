"""Large mappings populated for the thread that makes them, in huge pages and by many threads.

A GPU's driver copies device memory into one large mapping that it makes with MAP_POPULATE: the kernel then
fills it with pages of 4 KiB in a single thread, which takes most of the driver's time. So the thread is
traced; MAP_POPULATE is taken out of a large mmap(2) at its entry, at its exit the thread asks for huge pages
(madvise(2)), and while it stands there the pages are touched from outside by all of our threads. On an H100's
host of 16 cores, 12.6 GiB take 0.3 s so, instead of 4 to 5 s; the host's settings stay as they are.

Where the caller has a file for it, that takes the mapping's place before the thread goes on: its pages are
populated by us, and the driver copies into them, which leaves nothing to be copied out of the process.

The thread stops some 80 times during a checkpoint. Nothing that goes wrong here ends the driver's work: the
thread then runs on untouched, without stops.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from signal import SIGSTOP

from runtime_shim.errors import GpusnapError
from runtime_shim.memory import copies, ptrace
from runtime_shim.memory.machine import Machine, this_machine
from runtime_shim.memory.remote import Remote, Saved
from runtime_shim.memory.stage import Area
from runtime_shim.memory.tracee import Tracee

__all__ = ["Backing", "Populated", "populated"]

LARGE = 32 << 20
"""Bytes; below it the driver's own way is as good."""

_WANTED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
_HUGEPAGE = 14  # asm-generic/mman-common.h, MADV_HUGEPAGE
# Below this share of a mapping, its huge pages were not to be had.
_ENOUGH = 0.9


class Populated:
    """What was done for a thread; complete once the block has ended."""

    def __init__(self) -> None:
        self.mappings = 0
        """How many were populated."""
        self.size = 0
        """Bytes of them."""
        self.seconds = 0.0
        """That it took."""
        self.areas: list[Area] = []
        """The files that stand in for mappings, each at its address."""
        self.why_not = ""
        """Why nothing was done, or not all of it; empty where all went as it should."""


@dataclass(frozen=True, slots=True)
class Backing:
    """Files to take the place of mappings."""

    area: Callable[[int, int], Area]
    """For an address and a size in bytes; raises OSError where there shall be none."""
    lent: Callable[[Saved], AbstractContextManager[None]]
    """Held while the thread makes system calls for us."""


@contextmanager
def populated(
    pid: int, tid: int, *, threads: int = 0, large: int = LARGE, backing: Backing | None = None
) -> Iterator[Populated]:
    """Let one thread of a stopped process run while the block does, its large mappings populated for it.

    The tracer is a thread of our own, because the caller is in the driver's call meanwhile. The pages are
    touched in so many threads, all cores' for 0. Raises OSError where the thread cannot be traced.
    """
    work = _Work(pid, tid, threads, large, backing)
    work.start()
    try:
        yield work.done
    finally:
        work.end()


class _Watch:
    """The stops of a thread at its system calls, which are an entry and an exit in turn."""

    def __init__(self, machine: Machine, tracee: Tracee, work: _Work) -> None:
        self.machine, self.tracee, self.work = machine, tracee, work
        self._inside = False
        self._flags: int | None = None  # of the large mmap that it is in

    def at_call(self) -> None:
        """The thread stands at an entry or an exit."""
        self._inside = not self._inside
        registers = self.tracee.registers()
        number, arguments = self.machine.under_way(registers)
        if number != self.machine.calls["mmap"]:
            return
        _, size, _, flags, *_ = arguments
        if self._inside:
            if size >= self.work.large and flags & _WANTED == _WANTED:
                self.tracee.set_registers(self._with_flags(registers, flags & ~mmap.MAP_POPULATE))
                self._flags = flags
        elif self._flags is not None:
            self.tracee.set_registers(self._with_flags(registers, self._flags))
            self._flags = None
            if (address := self.machine.outcome(registers)) > 0:
                self._populate(address, size)

    def _with_flags(self, registers: bytes, flags: int) -> bytes:
        return self.machine.changed(registers, {self.machine.arguments[3]: flags})

    def _populate(self, address: int, size: int) -> None:
        begin, done = time.monotonic(), self.work.done
        remote = Remote(self.tracee, self.machine)
        if self.work.backing is None or not self._backed(remote, self.work.backing, address, size):
            self._touch(remote, address, size)
        done.mappings += 1
        done.size += size
        done.seconds += time.monotonic() - begin

    def _backed(self, remote: Remote, backing: Backing, address: int, size: int) -> bool:
        """Put a file in the mapping's place; whether that could be done."""
        try:
            area = backing.area(address, size)
        except OSError as error:
            self.work.done.why_not = f"no file for it: {error.strerror or error}"
            return False
        try:
            area.populate(threads=self.work.threads)
            with backing.lent(remote.saved):
                remote.map_file(area.descriptor, address, size, area.lead, shared=True)
        except ProcessLookupError:
            raise
        except (OSError, GpusnapError) as error:
            area.discard()
            self.work.done.why_not = f"no file in its place: {error}"
            return False
        self.work.done.areas.append(area)
        return True

    def _touch(self, remote: Remote, address: int, size: int) -> None:
        pid = self.tracee.pid
        before, huge = _resident(pid), True
        try:
            remote.madvise(address, size, _HUGEPAGE)
        except ProcessLookupError:
            raise
        except OSError:  # a kernel without huge pages, a filter that forbids the call
            huge = False
        if huge:
            copies.touch(pid, address, size, threads=self.work.threads)
        if _resident(pid) - before < _ENOUGH * size:
            copies.touch(pid, address, size, threads=self.work.threads, step=mmap.PAGESIZE)


def _resident(pid: int) -> int:
    """Bytes of memory that the process has (proc_pid_statm(5))."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class _Work:
    """The tracer. It waits in waitpid(2) for the traced thread alone, so that is what wakes it at the end."""

    def __init__(self, pid: int, tid: int, threads: int, large: int, backing: Backing | None) -> None:
        self.pid, self.tid, self.threads, self.large = pid, tid, threads, large
        self.backing = backing
        self.done = Populated()
        self._thread = threading.Thread(target=self._run, name=f"populate-{pid}", daemon=True)
        self._seized = threading.Event()
        self._refusal: OSError | None = None
        self._ending = threading.Lock()
        self._over = False
        self._gone = False

    def start(self) -> None:
        """Return when the thread runs. Raises OSError where it cannot be traced."""
        self._thread.start()
        self._seized.wait()
        if self._refusal is not None:
            raise self._refusal

    def end(self) -> None:
        """Have the thread stand, and return when it does."""
        with self._ending:
            self._over = True
            if not self._gone:
                # It reports this to its tracer, who drops it.
                with suppress(ProcessLookupError):
                    ptrace.send(self.pid, self.tid, SIGSTOP)
        try:
            self._thread.join()
        except BaseException:  # a signal's; the thread must stand all the same
            self._thread.join()
            raise
        if not self.done.mappings and not self.done.why_not:
            self.done.why_not = "the driver made no large mapping that it populates"

    def _run(self) -> None:
        try:
            tracee = Tracee(self.pid, self.tid)
        except OSError as error:
            self._refusal, self._gone = error, True
            self._seized.set()
            return
        try:
            try:
                self._follow(tracee)
            finally:
                with self._ending:
                    self._gone = True
                tracee.let_go()
        except ProcessLookupError:
            self.done.why_not = "the process ended"
        except OSError as error:
            self.done.why_not = str(error)
        finally:
            self._seized.set()

    def _follow(self, tracee: Tracee) -> None:
        """Let the thread run from stop to stop, until the work is over."""
        try:
            machine = this_machine()
            ptrace.set_options(self.tid, ptrace.TRACESYSGOOD)
            watch: _Watch | None = _Watch(machine, tracee, self)
        except (OSError, GpusnapError) as error:
            watch, self.done.why_not = None, str(error)
        while not self._is_over():
            (ptrace.go_to_call if watch else ptrace.go)(self.tid)
            self._seized.set()
            stop = ptrace.wait(self.tid)
            tracee.keep(stop)
            if stop.at_call and watch:
                try:
                    watch.at_call()
                except ProcessLookupError:
                    raise
                except Exception as error:  # whatever it is, the driver's work goes on
                    watch, self.done.why_not = None, f"{type(error).__name__}: {error}"
        # No SIGSTOP of ours may stay behind: it would stop the thread in the middle of something else.
        tracee.to_signal(SIGSTOP)
        tracee.to_rest()

    def _is_over(self) -> bool:
        with self._ending:
            return self._over
