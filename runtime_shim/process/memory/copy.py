"""Copies memory between a process and gpusnap in many threads: process_vm_readv(2), process_vm_writev(2).

The slow parts run in the C library without the interpreter's lock (ctypes releases it), so Python's threads
use every core. All callers share the threads. A caller that has threads of its own asks for one, and copies
in its own.

There is no deadline. What is copied is private anonymous memory that the driver has made while all processes
of the container are stopped, so none of them can register it with a userfaultfd (ioctl_userfaultfd(2),
UFFDIO_REGISTER needs a running process). A process outside that was given one could; SIGKILL ends such a
wait.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import Barrier, Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Bytes = bytes | bytearray | memoryview | mmap.mmap
"""A buffer that is contiguous in memory."""

PIECE = 16 << 20
"""Bytes that one thread copies at a time: several pieces for every core, and few system calls."""
HUGE = 2 << 20
"""Bytes of a huge page."""
_VECTOR = 1024  # pieces of memory that one call may name (linux/uio.h, UIO_MAXIOV)
_TURN = 64  # pages in one call of `touch`: 128 MiB of huge pages

Job = Callable[[], None]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _View(ctypes.Structure):
    """Py_buffer of Python's stable ABI (Include/pybuffer.h)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE, _WRITABLE = 0, 1  # PyBUF_SIMPLE, PyBUF_WRITABLE

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
_python = ctypes.pythonapi
_python.PyObject_GetBuffer.argtypes = [ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int]
_python.PyBuffer_Release.argtypes = [ctypes.POINTER(_View)]
_python.PyBuffer_Release.restype = None


@cache
def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _Pool:
    """The threads, shared by all callers."""

    lock = Lock()
    threads: ThreadPoolExecutor | None = None


def _pool() -> ThreadPoolExecutor:
    """Return the threads, all of them started.

    A new thread needs a stack, and its mmap(2) waits for every page fault in progress in this process's
    memory. If threads started one by one during work that consists of such faults (memory.stage), it would
    take three times as long.
    """
    from concurrent.futures import ThreadPoolExecutor, wait  # takes 6 ms, and a single read needs no threads

    with _Pool.lock:
        if _Pool.threads is None:
            pool, together = ThreadPoolExecutor(cores(), "copies"), Barrier(cores())
            try:
                wait([pool.submit(together.wait) for _ in range(cores())])
            except RuntimeError as error:  # no more threads can be started
                together.abort()
                pool.shutdown()
                raise OSError(errno.EAGAIN, f"no thread for copies: {error}") from error
            _Pool.threads = pool
        return _Pool.threads


def _forget() -> None:
    """Forget the threads in a child by fork, which has none of them."""
    _Pool.lock, _Pool.threads = Lock(), None


os.register_at_fork(after_in_child=_forget)


def read(pid: int, address: int, into: Bytes, *, threads: int = 0, piece: int = PIECE) -> None:
    """Fill a buffer with the process's memory from `address` on.

    `threads`: 0 for one per core, 1 for the calling thread. Raises OSError that names the process and the
    address; ProcessLookupError if the process has ended.
    """
    with _memory(into, _WRITABLE) as (ours, size):
        _copy(_libc.process_vm_readv, pid, address, ours, size, threads=threads, piece=piece)


def peek(pid: int, address: int, size: int) -> bytes:
    """Read bytes of the process's memory; fewer if it cannot be read to the end.

    To be called by question_process.ask, and never with /proc/PID/mem: a reader that waits there for a file's
    page holds the mm->mmap_lock, and blocks the process, until the file's server answers.
    """
    if not 0 < address < 1 << 63 or size <= 0:
        return b""
    data = bytearray(size)
    done = 0
    with _memory(data, _WRITABLE) as (ours, _):
        while done < size:
            mine, its = _Iovec(ours + done, size - done), _Iovec(address + done, size - done)
            moved = _libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(its), 1, 0)
            if moved <= 0:
                break
            done += moved
    return bytes(data[:done])


def write(pid: int, address: int, data: Bytes, *, threads: int = 0, piece: int = PIECE) -> None:
    """Copy a buffer to the process's memory at `address`, which must be writable; otherwise as `read`."""
    with _memory(data, _SIMPLE) as (ours, size):
        _copy(_libc.process_vm_writev, pid, address, ours, size, threads=threads, piece=piece)


def touch(pid: int, start: int, size: int, *, threads: int = 0, step: int = HUGE) -> None:
    """Make the kernel allocate a page for every `step` bytes of fresh memory, by writing a zero there.

    Only for memory that nobody has written to. Threads and errors as `read`.
    """
    first = -(-start // step) * step
    heads = [start] if first > start else []
    starts: list[Sequence[int]] = [heads] if heads else []
    # Small pages: as many as fit into one call, because each takes little time.
    turn = _TURN if step >= HUGE else _VECTOR
    starts += [
        range(at, min(at + turn * step, start + size), step) for at in range(first, start + size, turn * step)
    ]
    run_jobs([partial(_touch, pid, each) for each in starts], threads)


def _touch(pid: int, addresses: Sequence[int]) -> None:
    vector = array("Q", bytes(16 * len(addresses)))
    vector[::2] = array("Q", addresses)
    vector[1::2] = array("Q", (1,)) * len(addresses)
    theirs, count = vector.buffer_info()
    nothing = ctypes.create_string_buffer(len(addresses))
    ours = _Iovec(ctypes.addressof(nothing), len(addresses))
    done = _libc.process_vm_writev(pid, ctypes.byref(ours), 1, theirs, count // 2, 0)
    if done != len(addresses):
        # If the call was cut short, only the next byte says why.
        _transfer(_libc.process_vm_writev, pid, addresses[max(done, 0)], ctypes.addressof(nothing), 1)


def _copy(
    call: Callable[..., int], pid: int, address: int, ours: int, size: int, *, threads: int, piece: int
) -> None:
    jobs = [
        partial(_transfer, call, pid, address + at, ours + at, min(piece, size - at))
        for at in range(0, size, piece)
    ]
    run_jobs(jobs, threads)


def _transfer(call: Callable[..., int], pid: int, address: int, ours: int, size: int) -> None:
    """Copy everything, however little one call copies."""
    done = 0
    while done < size:
        mine, its = _Iovec(ours + done, size - done), _Iovec(address + done, size - done)
        moved = call(pid, ctypes.byref(mine), 1, ctypes.byref(its), 1, 0)
        if moved <= 0:
            number = ctypes.get_errno()
            raise OSError(
                number, f"{call.__name__} of process {pid} at {address + done:#x}: {os.strerror(number)}"
            )
        done += moved


def run_jobs(jobs: Sequence[Job], threads: int) -> None:
    """Run all jobs in `threads` threads, one per core for 0.

    After a failure no more are started, and the error is raised when all have ended.
    """
    waiting = deque(jobs)
    hands = min(threads or cores(), len(jobs))
    if hands <= 1:
        _drain(waiting)
        return
    from concurrent.futures import wait

    hired = [_pool().submit(_drain, waiting) for _ in range(hands)]
    try:
        wait(hired)
    except BaseException:  # from a signal: the buffer must exist until nobody copies into it
        waiting.clear()
        wait(hired)
        raise
    for each in hired:
        each.result()


def _drain(waiting: deque[Job]) -> None:
    try:
        while True:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            job()
    except BaseException:
        waiting.clear()
        raise


@contextmanager
def _memory(data: Bytes, how: int) -> Iterator[tuple[int, int]]:
    """Yield address and size of a buffer's bytes, which are not moved meanwhile. Raises BufferError."""
    view = _View()
    _python.PyObject_GetBuffer(data, ctypes.byref(view), how)
    try:
        yield view.buf or 0, view.len
    finally:
        _python.PyBuffer_Release(ctypes.byref(view))
