"""Processes that stand still while their GPU state is away, all but the thread that does the driver's work.

The driver's checkpoint takes away host memory that it had mapped into the process (pinned memory). A thread
that runs on and reads it dies of SIGSEGV: on an H100, three of three JAX processes did within 3 s, and twelve
of twelve came through when only the driver's own thread ran. So a locked process is stopped by SIGSTOP before
the driver's checkpoint and goes on by SIGCONT after its restore. CRIU dumps a stopped process as such and
restores it stopped, so no thread runs in between either. For the driver's calls its thread alone is let run,
by ptrace(2): CRIU's own CUDA plugin does the same.

A process that is stopped as a whole answers no call of NVIDIA's driver but
cuCheckpointProcessGetRestoreThreadId.

`only` has ptrace calls of its own, beside those of memory/tracee.py: NVIDIA's driver has been seen to restore
under these, and to checkpoint under either.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime_shim import proc
from runtime_shim.errors import GpusnapError, reason
from runtime_shim.gpu.errors import PermissionRefused

if TYPE_CHECKING:
    from runtime_shim.memory.populate import Backing, Populated

__all__ = ["go_on", "only", "populated", "several", "stand", "stop", "untraceable"]

# linux/ptrace.h
_CONT, _DETACH, _SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 7, 17, 0x4206, 0x4207, 0x420A, 0x420B
_WALL = 0x40000000  # linux/wait.h: also for threads
_LOOKS, _LOOK = 4, 0.001
# Seconds; reached only where somebody else sent a SIGCONT, and then there is nothing to wait for.
_SETTLING = 1.0
_SIGSET = 8  # bytes of the kernel's sigset_t

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def stop(pids: Iterable[int], *, timeout: float) -> None:
    """Stop processes, and wait until every thread of each stands still; one that ended is left out.

    Raises GpusnapError after `timeout` seconds; they are stopped all the same, until `go_on`.
    """
    pids = tuple(pids)
    # Not to those that stand already: a second SIGSTOP would wait for the first thread that `only` lets run.
    for pid in [pid for pid in pids if not proc.still(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    stand(pids, timeout=timeout)


def stand(pids: Iterable[int], *, timeout: float) -> None:
    """Wait until every thread of processes that were sent a SIGSTOP stands still, as `stop` does.

    Raises GpusnapError after `timeout` seconds.
    """
    pids = tuple(pids)
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while moving := [pid for pid in pids if not proc.still(pid)]:
        if time.monotonic() > deadline:
            raise GpusnapError(
                f"process {moving[0]} ({proc.comm(moving[0])}) did not stand still within {timeout:g} s",
                hint="one of its threads waits in the kernel, e.g. for a file system; try again after that",
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def go_on(pids: Iterable[int]) -> None:
    """Let stopped processes run again; one that ended is left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def only(pid: int, tid: int) -> Iterator[None]:
    """Let one thread of a stopped process run while the block does, and stop it again.

    All of it in the calling thread, which is the tracer. The thread gets no signal meanwhile, because with
    the tracer inside a call of the driver nobody would take it on. Raises PermissionRefused where it cannot
    be traced.
    """
    with several(pid, [tid]):
        yield


@contextmanager
def several(pid: int, tids: Iterable[int]) -> Iterator[None]:
    """As `only`, for more than one thread of a stopped process."""
    masks: dict[int, ctypes.Array[ctypes.c_char]] = {}
    try:
        for tid in tids:
            try:
                masks[tid] = _seize(tid)
            except OSError as error:
                raise untraceable(pid, tid, error) from error
        yield
    finally:
        for tid, mask in masks.items():
            # Whatever ended meanwhile still has to be waited for: until then the whole process is a zombie.
            with contextlib.suppress(ProcessLookupError):
                _ptrace(_INTERRUPT, tid)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.waitpid(tid, _WALL)
                _ptrace(_SETSIGMASK, tid, _SIGSET, ctypes.addressof(mask))
                _ptrace(_DETACH, tid)
        if masks:
            _settle(pid)


@contextmanager
def populated(pid: int, tid: int, *, threads: int = 0, backing: Backing | None = None) -> Iterator[Populated]:
    """As `only`, for the driver's checkpoint: the large mapping that the thread makes is populated for it.

    With `backing`, files take the mappings' place.

    What was done is complete when the block has ended; where nothing was, it says why, and the driver's own
    way was taken. In so many threads, all cores' for 0.
    """
    # Imported here: it takes 12 ms, and a container without a GPU must not pay for it.
    from runtime_shim.memory import populate

    with contextlib.ExitStack() as stack:
        try:
            done = stack.enter_context(populate.populated(pid, tid, threads=threads, backing=backing))
        except OSError as error:
            raise untraceable(pid, tid, error) from error
        yield done


def untraceable(pid: int, tid: int, error: OSError) -> PermissionRefused:
    """What to say where a thread cannot be traced."""
    return PermissionRefused(
        f"thread {tid} of process {pid} ({proc.comm(pid)}) cannot be traced: {reason(error)}",
        hint="end the debugger that has it, or see that gpusnap may use ptrace",
        pid=pid,
    )


def _settle(pid: int) -> None:
    """Wait until the thread that was let go stands again.

    The kernel only wakes it to stop by itself (ptrace(2), PTRACE_DETACH; kernel/ptrace.c, __ptrace_unlink),
    which a busy machine may take a while to do; who looks before that sees a process that runs.
    """
    deadline = time.monotonic() + _SETTLING
    while not proc.still(pid) and time.monotonic() < deadline:
        time.sleep(0.0005)


def _seize(tid: int) -> ctypes.Array[ctypes.c_char]:
    """Take the thread, block its signals and let it run; its signal mask."""
    mask = ctypes.create_string_buffer(_SIGSET)
    # All but SIGTRAP, which ptrace itself may need.
    every = ctypes.create_string_buffer((~(1 << signal.SIGTRAP - 1) & (1 << 64) - 1).to_bytes(8, "little"), 8)
    _ptrace(_SEIZE, tid)
    # A stopped thread reports itself at once; an interrupt on top of it would stop it a second time.
    os.waitpid(tid, _WALL)
    _ptrace(_GETSIGMASK, tid, _SIGSET, ctypes.addressof(mask))
    _ptrace(_SETSIGMASK, tid, _SIGSET, ctypes.addressof(every))
    _ptrace(_CONT, tid)
    # A SIGSTOP that was still on its way cannot be blocked, and would stop the thread in the middle of its
    # work.
    for _ in range(_LOOKS):
        time.sleep(_LOOK)
        ended, status = os.waitpid(tid, _WALL | os.WNOHANG)
        if ended and os.WIFSTOPPED(status):
            _ptrace(_CONT, tid)
    return mask


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, tid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
